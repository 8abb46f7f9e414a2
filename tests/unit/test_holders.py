"""Holders keep a model wanted: laws over any order of holds, drops and lapses."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduling.holders import Holders

TTL_S = 10.0
clients = st.sampled_from("abc")
events = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), clients, st.booleans()),
        st.tuples(st.just("drop"), clients),
        st.tuples(st.just("pass"), st.floats(0.0, 20.0)),
    )
)


@given(events)
def test_a_model_is_wanted_while_held_recently_or_kept(history: list[tuple]) -> None:
    holders, now_s, heard, keep = Holders(), 0.0, {}, False
    for kind, *rest in history:
        if kind == "hold":
            before = holders
            holders = holders.hold(rest[0], now_s, keep=rest[1])
            heard[rest[0]] = now_s
            keep = keep or rest[1]
            assert before is not holders  # a new value: earlier values stay unchanged
        elif kind == "drop":
            holders = holders.drop(rest[0])
            heard.pop(rest[0], None)
        else:
            now_s += rest[0]
            holders = holders.without_lapsed(now_s, TTL_S)
            heard = {client: at_s for client, at_s in heard.items() if now_s - at_s <= TTL_S}
        assert dict(holders.heard_s) == heard
        assert len(holders) == len(heard)
        assert holders.keep == keep
        assert holders.wanted == (keep or bool(heard))


def test_holding_twice_equals_holding_once():
    holders = Holders().hold("a", 1.0).hold("a", 2.0)
    assert holders.heard_s == (("a", 2.0),)
    assert not holders.drop("a").wanted
    assert holders.drop("never") == holders
