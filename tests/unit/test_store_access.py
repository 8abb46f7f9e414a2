"""Laws of the access with which a model is read, over any order of proofs, releases and time."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from cluster.request import StoreAccess
from cluster.scheduling.holders import ProvenAccess
from storage.store_ref import Credentials, StoreRef

GRACE_S = 10.0
REF = StoreRef("s3", "models", "llama")
ACCESSES = [StoreAccess(REF), *(StoreAccess(REF, Credentials(key, "secret")) for key in ("one", "two"))]

clients = st.sampled_from("abc")
events = st.lists(
    st.one_of(
        st.tuples(st.just("proven"), clients, st.sampled_from(ACCESSES)),
        st.tuples(st.just("released"), clients),
        st.tuples(st.just("pass"), st.floats(0.1, 20.0)),
    )
)


@example(
    [
        ("proven", "b", ACCESSES[0]),
        ("proven", "a", ACCESSES[1]),
        ("released", "a"),
        ("pass", 10.0),
        ("released", "b"),
    ]
)
@given(events)
def test_newest_proven_access_comes_first_and_one_always_stays(history: list[tuple]) -> None:
    access, now_s, holders = ProvenAccess(), 0.0, {}  # client -> its last access, by time of proof
    last = None
    for kind, *rest in history:
        now_s += 0.001
        if kind == "proven":
            client, last = rest
            access = access.proven(client, last, now_s)
            holders.pop(client, None)
            holders[client] = last
            assert access.worked_at_s(last, now_s - GRACE_S) == now_s
        elif kind == "released":
            holders.pop(rest[0], None)
        else:
            now_s += rest[0]
        access = access.without_gone(holders.keys(), now_s - GRACE_S)
        assert all(access.has(client) for client in holders)
        candidates = access.candidates(holders.keys())
        newest_of_holders = list(dict.fromkeys(map(ACCESSES.index, reversed(holders.values()))))
        assert [ACCESSES.index(each) for each in candidates][: len(newest_of_holders)] == newest_of_holders
        assert (last is None) == (not candidates)
        if last is not None and not holders:
            assert candidates[0] == last  # a kept model is read as it was read last


def test_an_access_counts_as_recent_only_until_its_time_is_over() -> None:
    access = ProvenAccess().proven("a", ACCESSES[1], 100.0)
    assert access.worked_at_s(ACCESSES[1], 95.0) == 100.0
    assert access.worked_at_s(ACCESSES[1], 100.5) is None
    assert access.worked_at_s(ACCESSES[2], 0.0) is None
    assert access.worked_at_s(StoreAccess(REF, Credentials("one", "other secret")), 0.0) is None
