"""The access that a coordinator keeps and reads with when a store is slow, away or refuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from actors.coordination import planner
from actors.coordination.model_record import ModelRecord
from actors.coordination.planner import Attaching, use_working_access
from cluster.layouts.mesh import Layout
from cluster.request import LoadRequest, StoreAccess
from cluster.scheduling.holders import Holders
from cluster.scheduling.load_state import Life, LoadState
from storage.errors import AccessDenied, StoreUnavailable
from storage.store_ref import Credentials, StoreRef

REF = StoreRef("s3", "models", "llama")
KEYS = ("a", "b", "c")
ACCESS = {key: StoreAccess(REF, Credentials(key, "secret")) for key in KEYS}


class Store:
    """Stands in for the planner: the store's answer to each key, or how long it is silent."""

    def __init__(self, **answers: bool | Exception) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.silent = asyncio.Event()
        self.silent.set()

    async def is_current(self, request: LoadRequest, known: str, limit_s: float = 60.0) -> bool:
        key = str(request.store.credentials.access_key_id) if request.store.credentials else ""
        self.asked.append(key)
        try:
            await asyncio.wait_for(self.silent.wait(), limit_s)
        except TimeoutError as error:
            raise StoreUnavailable("the store does not answer") from error
        answer = self.answers[key]
        if isinstance(answer, Exception):
            raise answer
        return answer


def record(*holders: str) -> ModelRecord:
    request = LoadRequest("s3://models/llama", ACCESS["a"], None, Layout(), "cpu", None, False, "a", 0.0)
    held = Holders()
    for holder in holders:
        held = held.hold(holder, 0.0)
    made = ModelRecord("llama-1", request, replace(Life.new(1), state=LoadState.READY), held)
    made.revision = "r1"
    return made


def run(work: Callable[[], Any]) -> Any:
    return asyncio.run(work())


def test_a_renewal_does_not_wait_for_a_silent_store() -> None:
    async def work() -> None:
        store, model = Store(b=True), record("b")
        store.silent.clear()
        keeps = Attaching({}, store, 300.0)  # type: ignore[arg-type]
        for _ in range(3):  # a client renews again and again
            keeps.supply(model, "b", ACCESS["b"])
            await asyncio.sleep(0)
        assert store.asked == ["b"]
        assert not model.access.has("b")
        store.silent.set()
        await asyncio.sleep(0.01)
        assert model.access.has("b")

    run(work)


def test_a_refused_access_is_not_kept() -> None:
    async def work() -> None:
        model = record("b")
        Attaching({}, Store(b=AccessDenied("no")), 300.0).supply(model, "b", ACCESS["b"])  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        assert not model.access.has("b")

    run(work)


def test_a_revision_that_could_not_be_checked_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> ModelRecord | None:
        monkeypatch.setattr(planner, "CHECK_WITH_GRACE_S", 0.01)
        store, model = Store(a=False), record("a")
        model.proven("a", ACCESS["a"])
        store.silent.clear()
        return await Attaching({"llama-1": model}, store, 300.0).attach(model.request)  # type: ignore[arg-type]

    with caplog.at_level(logging.WARNING):
        assert run(work) is not None
    assert "given revision r1 of llama-1, which may be an old one" in caplog.text


@pytest.mark.parametrize(
    ("proofs", "answers", "chosen", "asked"),
    [
        ("a", {}, "a", []),  # the only one
        ("ab", {"b": True}, "b", ["b"]),  # the newest first
        ("ab", {"b": AccessDenied("no"), "a": True}, "a", ["b", "a"]),
        ("abc", {"c": False, "b": AccessDenied("no"), "a": True}, "a", ["c", "b", "a"]),  # one for this revision
        ("ab", {"b": False, "a": AccessDenied("no")}, "b", ["b", "a"]),
        ("ab", {"b": AccessDenied("no"), "a": StoreUnavailable("away")}, "c", ["b", "a"]),  # no better access is known
    ],
)
def test_a_replaced_rank_reads_with_access_that_works(
    proofs: str, answers: dict[str, Any], chosen: str, asked: list[str]
) -> None:
    async def work() -> None:
        store, model = Store(**answers), record(*proofs)
        for key in proofs:
            model.proven(key, ACCESS[key])
        model.read_with(ACCESS["c"])  # from a client that released the model, for example
        await use_working_access(model, store)  # type: ignore[arg-type]
        assert (model.request.store, store.asked) == (ACCESS[chosen], asked)

    run(work)
