"""Models that several clients hold, each with its own credentials; stores and coordinators that do not answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import cluster
from actors.links import COORDINATOR
from cluster import client
from cluster.joining import connection
from storage.store_ref import Credentials
from tests.support.gated_proxy import GatedProxy
from tests.support.ray_clusters import Longshore, eventually
from tests.support.stored_models import StoredModel
from tests.support.token_s3 import TokenS3

pytestmark = pytest.mark.slow

TTL_S = 4
LOST_S = 60.0  # after which a client takes a coordinator for lost: nothing here may wait so long

OTHER_CLIENT = """
import sys, cluster
from storage.store_ref import Credentials
uri, endpoint, key, secret, token = sys.argv[1:]
try:
    model = cluster.load(uri, device="cpu", placement="direct", endpoint_url=endpoint, region="us-east-1",
                         credentials=Credentials(key, secret, token))
    print(model.model_id, flush=True)
except cluster.LongshoreError as error:
    print(type(error).__name__, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def tokens(longshore: Longshore, llama: StoredModel) -> Iterator[TokenS3]:
    """The model on a server with keys that expire. Loads go past the arena, so each rank needs the store."""
    longshore.configure(empty=True)
    objects = {f"models/llama/{path.name}": path.read_bytes() for path in llama.in_bucket.iterdir()}
    with TokenS3(objects) as server:
        yield server


Client = Callable[[Any], "contextlib.AbstractContextManager[str]"]


@pytest.fixture
def client_with(longshore: Longshore, tokens: TokenS3) -> Client:
    """Another process that loads the model with the given keys and holds it inside the block: what it got."""

    @contextlib.contextmanager
    def client(keys: Any) -> Iterator[str]:
        process: subprocess.Popen[str] = longshore.run_client(
            OTHER_CLIENT, "s3://models/llama", tokens.endpoint_url, keys.access_key, keys.secret_key, keys.token
        )
        with process:
            assert process.stdout is not None
            yield process.stdout.readline().strip()

    return client


def load_with(tokens: TokenS3, keys: Any, **options: Any) -> cluster.LoadedModel:
    credentials = Credentials(keys.access_key, keys.secret_key, keys.token)
    return cluster.load(
        "s3://models/llama",
        device="cpu",
        placement="direct",
        endpoint_url=tokens.endpoint_url,
        region="us-east-1",
        credentials=credentials,
        **options,
    )


def replace_worker(longshore: Longshore) -> None:
    """Kill the only worker; return when another one holds the rank."""
    (name,) = longshore.actor_names("worker-")
    longshore.kill(name)
    eventually(
        lambda: (
            longshore.actor_names("worker-") not in ([], [name]) and longshore.models()[0].progress.state == "ready"
        ),
        lambda: f"the rank was not replaced: {longshore.status().models}",
    )


def test_expired_credentials_of_one_client_stop_no_other(
    longshore: Longshore, tokens: TokenS3, client_with: Client
) -> None:
    first, second = tokens.new_keys(), tokens.new_keys()
    with client_with(first) as model_id:
        tokens.expire(first.access_key)
        with load_with(tokens, second) as model:
            assert model.model_id == model_id
            replace_worker(longshore)
            assert model.call(len) == [len(model.state_dict(0))]


def test_wrong_credentials_are_refused_and_replace_no_good_ones(
    longshore: Longshore, tokens: TokenS3, client_with: Client
) -> None:
    good, bad = tokens.new_keys(), tokens.new_keys()
    tokens.expire(bad.access_key)
    with load_with(tokens, good) as model:
        with client_with(bad) as got:
            assert got in ("AccessDenied", "CredentialsExpired")
            replace_worker(longshore)
        assert model.call(len) == [len(model.state_dict(0))]


def test_a_model_with_expired_credentials_outlives_coordinator(longshore: Longshore, tokens: TokenS3) -> None:
    keys = tokens.new_keys()
    with load_with(tokens, keys) as model:
        tokens.expire(keys.access_key)
        longshore.wait_restarted(COORDINATOR, longshore.kill(COORDINATOR))
        eventually(lambda: [m.progress.state for m in longshore.models()] == ["ready"], "the model is gone")
        assert model.call(len) == [len(model.state_dict(0))]


@pytest.fixture
def gate(longshore: Longshore, llama: StoredModel) -> Iterator[GatedProxy]:
    longshore.configure(empty=True)
    with GatedProxy(llama.server.endpoint_url, ranges=10**6) as proxy:
        yield proxy


def test_resident_model_is_attached_while_its_store_is_silent(
    longshore: Longshore, llama: StoredModel, gate: GatedProxy
) -> None:
    """Access that worked recently is enough. Callers with other access wait for the store until their deadline."""
    options = {**llama.options, "endpoint_url": gate.endpoint_url, "device": "cpu"}
    with cluster.load(llama.uri, **options) as model:
        gate.hold_all()
        with cluster.load(llama.uri, timeout_s=LOST_S, **options) as again:
            assert again.model_id == model.model_id
        others = {**options, "credentials": Credentials("somebody", "else")}
        with pytest.raises(cluster.LoadTimeout):
            cluster.load(llama.uri, timeout_s=1.0, **others)
        assert longshore.status().models[0].progress.state == "ready"


def test_a_silent_store_does_not_block_other_resident_models(
    longshore: Longshore, llama: StoredModel, gate: GatedProxy
) -> None:
    options = {**llama.options, "device": "cpu"}
    slow = {**options, "endpoint_url": gate.endpoint_url}
    with cluster.load(llama.uri, **options) as model, ThreadPoolExecutor(6) as pool, contextlib.ExitStack() as stack:
        gate.hold_all()
        stack.callback(gate.open)
        slow_loads = [
            pool.submit(cluster.load, llama.uri, vocabulary_multiple=number + 1, timeout_s=LOST_S, **slow)
            for number in range(6)  # more than are planned at once
        ]
        gate.wait_until_held(4)
        with cluster.load(llama.uri, timeout_s=LOST_S, **options) as again:
            assert again.model_id == model.model_id
            assert not any(load.done() for load in slow_loads)  # no plan had to give way


@pytest.fixture
def stopped_coordinator(longshore: Longshore) -> Iterator[Callable[[], None]]:
    pids: list[int] = []
    yield lambda: pids.append(longshore.kill(COORDINATOR, signal.SIGSTOP))
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
def test_callers_keep_their_deadline_with_a_silent_coordinator(
    longshore: Longshore, llama: StoredModel, stopped_coordinator: Callable[[], None], how: str
) -> None:
    cluster.status()  # this process has joined
    stopped_coordinator()
    began_s = time.monotonic()
    if how == "deadline":
        with pytest.raises(cluster.LoadTimeout):
            cluster.load(llama.uri, device="cpu", timeout_s=2.0, **llama.options)
    else:

        async def cancelled() -> None:
            task = asyncio.create_task(cluster.aload(llama.uri, device="cpu", **llama.options))
            await asyncio.sleep(1.0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancelled())
    assert time.monotonic() - began_s < LOST_S / 2


def held_after_its_ttl(longshore: Longshore) -> bool:
    time.sleep(3 * TTL_S)
    return [model.progress.state for model in longshore.models()] == ["ready"]


def test_a_process_can_load_and_hold_again_after_shutdown(longshore: Longshore, llama: StoredModel) -> None:
    options = {**llama.options, "device": "cpu"}
    longshore.configure(holder_ttl_s=TTL_S)
    before = cluster.load(llama.uri, **options)
    client.shutdown()
    with pytest.raises(cluster.NoCoordinator):
        before.call(len)
    longshore.start(holder_ttl_s=TTL_S)
    with cluster.load(llama.uri, **options) as model:
        before.release()  # nothing of it is left to release
        assert held_after_its_ttl(longshore)
        assert model.call(len) == [len(model.state_dict(0))]


@pytest.mark.cluster_settings(holder_ttl_s=TTL_S)
def test_a_version_mismatch_does_not_end_what_a_process_holds(
    longshore: Longshore, llama: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster.load(llama.uri, device="cpu", **llama.options) as model:
        with monkeypatch.context() as patched:
            patched.setattr(connection, "PROTOCOL_VERSION", -1)
            with pytest.raises(cluster.VersionMismatch):
                cluster.status()
            with pytest.raises(cluster.VersionMismatch):
                model.call(len)
        cluster.status()
        assert held_after_its_ttl(longshore)
        assert model.call(len) == [len(model.state_dict(0))]
