"""What the verbs that need no cluster take, and how their async twins are given up."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from cluster import client
from cluster.errors import ConfigError
from cluster.preview import plan_ahead
from storage.checkpoints.manifest import MANIFEST_KEY
from tests.support.checkpoints import write_tiny_llama


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path / "llama")
    return tmp_path / "llama"


def test_a_path_is_as_good_as_a_string(model: Path, tmp_path: Path) -> None:
    report = client.publish(model, tmp_path / "copy")
    assert plan_ahead.plan(tmp_path / "copy").revision == report.revision
    assert client.verify(tmp_path / "copy").ok


@pytest.mark.parametrize("uri", [None, 5, b"x", ["x"]])
@pytest.mark.parametrize("verb", [client.load, plan_ahead.plan, client.publish, client.verify])
def test_what_is_no_uri_is_refused(verb: Any, uri: object) -> None:
    with pytest.raises(ConfigError, match="URI or a path"):
        verb(uri)


def test_a_cancelled_publish_ends_before_its_end(model: Path) -> None:
    began, cancelled = threading.Event(), threading.Event()

    def progress(moment: object) -> None:
        began.set()
        cancelled.wait(60)

    async def give_up() -> None:
        task = asyncio.create_task(client.apublish(model, progress=progress))
        await asyncio.to_thread(began.wait, 60)
        task.cancel()
        await asyncio.sleep(0)  # the twin is told now
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert not (model / MANIFEST_KEY).exists()
