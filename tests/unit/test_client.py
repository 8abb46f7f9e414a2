"""Arguments of the functions that need no cluster, and cancellation of their async twins."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import client, publishing
from cluster.client import load_on
from cluster.errors import ConfigError
from cluster.joining.patience import UNLIMITED
from cluster.model import load_in_thread
from cluster.options import LoadOptions
from cluster.planning import preview
from cluster.request import make_request
from storage.checkpoints.manifest import MANIFEST_KEY
from tests.support.checkpoints import write_tiny_llama


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path / "llama")
    return tmp_path / "llama"


def test_a_path_is_accepted_like_a_string(model: Path, tmp_path: Path) -> None:
    report = publishing.publish(model, tmp_path / "copy")
    assert preview.plan(tmp_path / "copy").revision == report.revision
    assert publishing.verify(tmp_path / "copy").ok


@pytest.mark.parametrize("uri", [None, 5, b"x", ["x"]])
@pytest.mark.parametrize("verb", [client.load, preview.plan, publishing.publish, publishing.verify])
def test_values_that_are_not_uris_are_refused(verb: Any, uri: object) -> None:
    with pytest.raises(ConfigError, match=r": (model_uri|uri|uri_or_path) must be a str or a path, not"):
        verb(uri)


class FakeModel:
    """The result of `load`, as far as `async with` uses it."""

    def __init__(self) -> None:
        self.released = 0

    async def __aenter__(self) -> FakeModel:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.released += 1


def test_async_with_takes_a_load_with_await_and_without() -> None:
    model: Any = FakeModel()

    def load(uri: str) -> Any:
        return model

    aload = load_in_thread(load)

    async def use() -> None:
        async with aload("s3://b/m") as first:
            assert (first, model.released) == (model, 0)
        async with await aload("s3://b/m") as second:
            assert (second, model.released) == (model, 1)
        assert await asyncio.create_task(aload("s3://b/m")) is model
        assert await asyncio.wait_for(aload("s3://b/m"), 60) is model
        with pytest.raises(ValueError, match="of the block"):
            async with aload("s3://b/m"):
                raise ValueError("of the block")

    asyncio.run(use())
    assert model.released == 3
    assert asyncio.run(aload("s3://b/m")) is model


def test_async_with_raises_the_error_of_the_load() -> None:
    async def use() -> None:
        async with client.aload(5):  # type: ignore[arg-type]
            pytest.fail("it has a model")

    with pytest.raises(ConfigError, match="model_uri must be a str or a path"):
        asyncio.run(use())


def connection_that(answers: dict[str, Any], local: bool = False) -> Any:
    """A connection whose `call` returns or raises the scripted outcome of each method."""

    def call(method: str, *_: Any, **__: Any) -> Any:
        if isinstance(answers[method], BaseException):
            raise answers[method]
        return answers[method]

    return SimpleNamespace(client_id="c", local=local, call=call, hold=lambda *_: None, drop=lambda _: True)


LOOK = "`longshore status` shows it, `longshore release"


@pytest.mark.parametrize(
    ("keep", "asked", "local", "says"),
    [
        (True, False, False, f"a load that the cluster has begun goes on there: {LOOK} MODEL_ID` ends it"),
        (True, True, False, f"the load goes on in the cluster: {LOOK} m-1` ends it"),
        (
            False,
            False,
            False,
            f"a load that the cluster has begun ends there within a minute: {LOOK} MODEL_ID` ends it at once",
        ),
        (False, True, False, "the load ends in the cluster, unless another process wants it"),
        (
            True,
            True,
            True,
            "the local cluster that was started for the load ends with this process, and the load with it",
        ),
    ],
)
def test_an_interrupt_names_the_load_that_continues(keep: bool, asked: bool, local: bool, says: str) -> None:
    interrupt = KeyboardInterrupt()
    answers = {"load": ("m-1", False) if asked else interrupt, "wait": interrupt, "release": True}
    request = make_request(LoadOptions("s3://bucket/m", keep=keep))
    with pytest.raises(KeyboardInterrupt) as caught:
        load_on(connection_that(answers, local), request, None, UNLIMITED, called_s=0.0)
    assert caught.value.__notes__ == [says]


def test_a_cancelled_publish_stops_early(model: Path) -> None:
    began, cancelled = threading.Event(), threading.Event()

    def progress(moment: object) -> None:
        began.set()
        cancelled.wait(60)

    async def cancel_publish() -> None:
        task = asyncio.create_task(publishing.apublish(model, progress=progress))
        await asyncio.to_thread(began.wait, 60)
        task.cancel()
        await asyncio.sleep(0)  # the twin learns of it now
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_publish())
    assert not (model / MANIFEST_KEY).exists()
