"""Clients load, share, keep, release and cancel a model; nothing is left when no client holds it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import cluster
from tests.support.gated_proxy import GatedProxy
from tests.support.ray_clusters import Longshore, eventually, marked_settings
from tests.support.stored_models import StoredModel

pytestmark = pytest.mark.slow

TTL_S = 8  # a client that lives says so every quarter of it, and may be late on a slow machine
WAIT_S = 120


def states(longshore: Longshore) -> list[str]:
    """Return the states of the models that are not over."""
    return [model.progress.state for model in longshore.models()]


def last_state(longshore: Longshore) -> str:
    """Return the state of the model that was requested last, over or not."""
    status = longshore.status()
    return (status.models or status.ended)[-1].progress.state


@pytest.fixture
def gate(longshore: Longshore, llama: StoredModel, request: pytest.FixtureRequest) -> Iterator[GatedProxy]:
    """The store, through a gate that lets five ranges pass; the arenas are empty."""
    longshore.configure(empty=True, **marked_settings(request.node))
    with GatedProxy(llama.server.endpoint_url, ranges=5) as proxy:
        yield proxy


def gated_options(llama: StoredModel, gate: GatedProxy) -> dict[str, Any]:
    return {**llama.options, "endpoint_url": gate.endpoint_url, "device": "cpu"}


def test_a_second_load_gets_the_resident_model(longshore: Longshore, llama: StoredModel) -> None:
    first = cluster.load(llama.uri, device="cpu", **llama.options)
    second = cluster.load(llama.uri, device="cpu", **llama.options)
    assert (first.report.resident, second.report.resident) == (False, True)
    assert second.model_id == first.model_id
    assert len(longshore.actor_names("worker-")) == 1
    first.release()
    first.release()  # again: changes nothing
    assert second.call(len) == [len(second.state_dict(0))]
    second.release()
    longshore.assert_nothing_left()
    with pytest.raises(cluster.LoadCancelled, match="released"):
        second.call(len)


def test_progress_is_shown_or_not(longshore: Longshore, llama: StoredModel, capfd: pytest.CaptureFixture[str]) -> None:
    said = {}
    for progress in (True, False, None):
        cluster.load(llama.uri, device="cpu", progress=progress, **llama.options).release()
        said[progress] = capfd.readouterr().err
    assert "ready" in said[True]
    assert "ready" not in said[False] + said[None]  # no terminal here
    with pytest.raises(cluster.ConfigError, match="load: progress must be True or False, a function or None, not str"):
        cluster.load(llama.uri, device="cpu", progress="yes", **llama.options)  # type: ignore[arg-type]
    longshore.assert_nothing_left()


OTHER_CLIENT = """
import sys, cluster
from storage.store_ref import Credentials
uri, endpoint, key, secret, keep = sys.argv[1:]
model = cluster.load(uri, device="cpu", endpoint_url=endpoint, region="us-east-1", keep=keep == "keep",
                     credentials=Credentials(access_key_id=key, secret_access_key=secret))
print(model.model_id, model.report.resident, flush=True)
sys.stdin.readline()
"""


def other_client(longshore: Longshore, llama: StoredModel, endpoint_url: str, keep: str = "") -> Any:
    server = llama.server
    return longshore.run_client(
        OTHER_CLIENT, llama.uri, endpoint_url, server.access_key_id, server.secret_access_key, keep
    )


def test_two_clients_share_a_model_and_the_last_one_frees_it(longshore: Longshore, llama: StoredModel) -> None:
    mine = cluster.load(llama.uri, device="cpu", **llama.options)
    with other_client(longshore, llama, llama.server.endpoint_url) as other:
        assert other.stdout.readline().split() == [mine.model_id, "True"]
        assert longshore.models()[0].holders == 2
        mine.release()
        assert longshore.models()[0].holders == 1
        assert states(longshore) == ["ready"]
    assert other.wait(30) == 0  # a client that ends in order gives its holds back at once
    longshore.assert_nothing_left()


@pytest.mark.cluster_settings(holder_ttl_s=TTL_S)
def test_a_kept_model_outlives_its_client_until_released(longshore: Longshore, llama: StoredModel) -> None:
    with other_client(longshore, llama, llama.server.endpoint_url, "keep") as other:
        model_id, _ = other.stdout.readline().split()
    eventually(lambda: longshore.models()[0].holders == 0, "the client still holds it")
    (model,) = longshore.models()
    assert (model.progress.state, model.keep) == ("ready", True)
    released = cluster.release(model_id)
    assert (released.model_id, released.freed, released.holders) == (model_id, True, 0)
    longshore.assert_nothing_left()
    with pytest.raises(cluster.ModelNotFound):
        cluster.release("no-such-model")
    with pytest.raises(cluster.ConfigError, match="model must be a LoadedModel or a str, not int"):
        cluster.release(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("by_id", [False, True])
def test_release_frees_a_kept_model_that_this_process_holds(
    longshore: Longshore, llama: StoredModel, by_id: bool
) -> None:
    """Every handle of the process is released by it, and `with` blocks end as usual."""
    with (
        cluster.load(llama.uri, device="cpu", keep=True, **llama.options) as model,
        cluster.load(llama.uri, device="cpu", **llama.options) as other,
    ):
        released = cluster.release(model.model_id if by_id else model)
        assert (released.freed, released.holders) == (True, 0)
        assert "is freed" in str(released)
        longshore.assert_nothing_left()
        with pytest.raises(cluster.LoadCancelled, match="released"):
            other.call(len)


def test_release_names_other_holders_and_keeps_later_holds(longshore: Longshore, llama: StoredModel) -> None:
    with other_client(longshore, llama, llama.server.endpoint_url, "keep") as other:
        model_id, _ = other.stdout.readline().split()
        mine = cluster.load(llama.uri, device="cpu", **llama.options)
        released = cluster.release(mine)
        assert (released.model_id, released.freed, released.holders) == (model_id, False, 1)
        assert "another process holds it" in str(released)
        (model,) = longshore.models()
        assert (model.progress.state, model.keep, model.holders) == ("ready", False, 1)
        again = cluster.load(llama.uri, device="cpu", **llama.options)
        mine.release()  # it holds nothing any more
        assert (again.model_id, longshore.models()[0].holders) == (model_id, 2)
    eventually(lambda: longshore.models()[0].holders == 1, "the other process still holds it")
    assert asyncio.run(cluster.arelease(again)).freed
    longshore.assert_nothing_left()


@pytest.mark.cluster_settings(holder_ttl_s=TTL_S)
def test_the_hold_of_a_killed_client_lapses(longshore: Longshore, llama: StoredModel) -> None:
    with other_client(longshore, llama, llama.server.endpoint_url) as other:
        other.stdout.readline()
        assert states(longshore) == ["ready"]
        other.kill()
    eventually(lambda: last_state(longshore) == "released", "nobody holds it, and it is there")
    longshore.assert_nothing_left()


@pytest.mark.cluster_settings(holder_ttl_s=TTL_S)
def test_a_load_ends_when_its_client_is_killed_in_the_middle(
    longshore: Longshore, llama: StoredModel, gate: GatedProxy
) -> None:
    with other_client(longshore, llama, gate.endpoint_url) as other:
        gate.wait_until_held()
        other.kill()
    eventually(lambda: last_state(longshore) == "released", "nobody wants it, and it goes on")
    longshore.assert_nothing_left()


def test_timeout_ends_the_load_and_leaves_nothing(longshore: Longshore, llama: StoredModel, gate: GatedProxy) -> None:
    with pytest.raises(cluster.LoadTimeout) as caught:
        cluster.load(llama.uri, timeout_s=6, **gated_options(llama, gate))
    assert caught.value.details["model"] == longshore.status().ended[-1].progress.model_id
    assert last_state(longshore) == "released"
    longshore.assert_nothing_left()


def test_a_caller_that_cancels_does_not_end_a_shared_load(
    longshore: Longshore, llama: StoredModel, gate: GatedProxy
) -> None:
    """The same load twice at once, from one client: one transfer; a timeout ends only its caller's wait."""
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        stack.callback(gate.open)  # before the pool waits for who stands there
        patient = pool.submit(cluster.load, llama.uri, **gated_options(llama, gate))
        gate.wait_until_held()
        with pytest.raises(cluster.LoadTimeout):
            cluster.load(llama.uri, timeout_s=0.5, **gated_options(llama, gate))
        assert states(longshore) == ["loading"]
        gate.open()
        with patient.result(WAIT_S) as model:
            assert model.report.nodes[0].store_chunks == model.report.nodes[0].needed_chunks
            assert len(longshore.actor_names("worker-")) == 1


@pytest.mark.parametrize("force", [False, True])
def test_release_in_the_middle_ends_the_load(
    longshore: Longshore, llama: StoredModel, gate: GatedProxy, force: bool
) -> None:
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        stack.callback(gate.open)
        loading = pool.submit(cluster.load, llama.uri, **gated_options(llama, gate))
        gate.wait_until_held()
        (model,) = longshore.models()
        assert cluster.release(model.progress.model_id, force=force).freed
        with pytest.raises(cluster.LoadCancelled, match="released"):
            loading.result(WAIT_S)
    longshore.assert_nothing_left()


def test_release_while_workers_are_being_made(longshore: Longshore, llama: StoredModel) -> None:
    """The actors that Ray is just starting do not stay."""
    with ThreadPoolExecutor(1) as pool:
        for wanted in ("planning", "starting", "loading"):
            loading = pool.submit(cluster.load, llama.uri, fsdp_size=4, device="cpu", **llama.options)
            eventually(
                lambda state=wanted, load=loading: state in states(longshore) or load.done(),
                f"never {wanted}",
                every_s=0.005,
            )
            for model in longshore.models():
                cluster.release(model.progress.model_id, force=True)
            with contextlib.suppress(cluster.LoadCancelled):
                loading.result(WAIT_S).release()
            longshore.assert_nothing_left()


def test_two_different_loads_at_once(longshore: Longshore, llama: StoredModel, odd: StoredModel) -> None:
    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(cluster.load, m.uri, device="cpu", **m.options) for m in (llama, odd)]
        with loads[0].result(60) as first, loads[1].result(60) as second:
            assert first.model_id != second.model_id
            assert sorted(states(longshore)) == ["ready", "ready"]
            assert len(first.state_dict(0)) != len(second.state_dict(0))


def test_async_verbs_do_what_their_sync_twins_do(
    longshore: Longshore, llama: StoredModel, gate: GatedProxy, copy_of: Callable[[StoredModel], StoredModel]
) -> None:
    async def load_cancel_load() -> None:
        progress: list[str] = []
        task = asyncio.create_task(
            cluster.aload(llama.uri, progress=lambda now: progress.append(now.state), **gated_options(llama, gate))
        )
        await asyncio.to_thread(gate.wait_until_held)
        assert (await cluster.astatus()).models[-1].progress.state == "loading"
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert (await cluster.astatus()).ended[-1].progress.state == "released"
        gate.open()
        async with await cluster.aload(llama.uri, **gated_options(llama, gate)) as model:
            assert len(await model.astate_dict(0)) == (await model.acall(len))[0]
            kept = await cluster.aload(llama.uri, keep=True, **gated_options(llama, gate))
            await kept.arelease()
        await cluster.arelease(kept.model_id)
        assert (await cluster.aplan(llama.uri, **llama.options)).as_dict()
        assert (await cluster.averify(llama.uri, **llama.options)).ok
        twin = copy_of(llama)
        await cluster.apublish(twin.uri, **twin.options)
        assert (await cluster.apublish(twin.uri, **twin.options)).unchanged
        assert progress[0] == "planning"
        assert progress[-1] == "loading"

    asyncio.run(load_cancel_load())
    longshore.assert_nothing_left()


def _raise_what_cannot_be_unpickled(shard: object) -> None:
    class OfTwoArguments(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__("no way back")

    raise OfTwoArguments(1, 2)


def test_calls_reach_the_ranks_asked_for_and_errors_come_back(longshore: Longshore, llama: StoredModel) -> None:
    with cluster.load(llama.uri, fsdp_size=2, device="cpu", **llama.options) as model:
        assert model.call(lambda shard, add: shard.rank + add, 10) == [10, 11]
        assert model.call(lambda shard, add=0: shard.rank + add, ranks=[1], add=5) == [6]
        with pytest.raises(cluster.RemoteCallFailed, match="ZeroDivisionError") as caught:
            model.call(lambda shard: 1 / shard.rank)
        assert caught.value.details["rank"] == 0
        with pytest.raises(cluster.RemoteCallFailed, match="no way back"):
            model.call(_raise_what_cannot_be_unpickled)
        with pytest.raises(cluster.RemoteCallFailed, match=r"exit\(3\)"):
            model.call(lambda shard: sys.exit(3))
        for rank in (-1, 2):
            with pytest.raises(cluster.ConfigError, match="ranks 0 to 1"):
                model.call(lambda shard: shard.rank, ranks=[rank])
            with pytest.raises(cluster.ConfigError, match="ranks 0 to 1"):
                model.state_dict(rank)
        # what a call changes stays changed: these are the rank's own tensors
        model.call(lambda shard: shard["model.norm.weight"].zero_())
        assert float(model.state_dict(0)["model.norm.weight"].float().abs().sum()) == 0


def test_the_coordinator_never_imports_torch(longshore: Longshore, llama: StoredModel) -> None:
    """A worker imports it only when its tensors are used."""
    with cluster.load(llama.uri, device="cpu", **llama.options) as model:
        model.call(lambda shard: shard["model.norm.weight"])
        for name, expected in (("coordinator", False), *((n, True) for n in longshore.actor_names("worker-"))):
            with open(f"/proc/{longshore.pid(name)}/maps") as maps:
                assert any("libtorch" in line for line in maps) == expected, name


class NotForDrivers:
    """Pickles, and cannot be made again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


def test_an_unreadable_result_is_an_error_but_not_a_lost_cluster(longshore: Longshore, odd: StoredModel) -> None:
    with cluster.load(odd.uri, device="cpu", **odd.options) as model:
        with pytest.raises(cluster.RemoteCallFailed, match="result of rank 0 cannot be unpickled"):
            model.call(lambda shard: NotForDrivers())
        assert model.call(len)[0] > 0
