"""Bad input is refused with one typed error that says why, through the whole stack; nothing is left."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import cluster
from actors.hosting import host_rank
from cluster import LoadedModel
from cluster.config import Config
from cluster.joining import connection
from cluster.joining import connection as connection_module
from storage.checkpoints.manifest import MANIFEST_KEY
from storage.checkpoints.safetensors_header import encode_header
from storage.store_ref import Credentials
from tests.support.checkpoints import raw_header, safetensors_bytes, write_objects
from tests.support.ray_clusters import GPUS_PER_NODE, TEST_SETTINGS, Longshore, eventually
from tests.support.stored_models import StoredModel

WRONG_KEYS = Credentials(access_key_id="NOBODY", secret_access_key="not-the-secret-of-anybody")


pytestmark = pytest.mark.slow

WAIT_S = 180.0  # for what others give back, on however slow a machine


@pytest.fixture
def checked(longshore: Longshore) -> Iterator[Longshore]:
    """Check that nothing is left right after the error, not only after cleaning up."""
    yield longshore
    longshore.assert_nothing_left()


# -- the store ---------------------------------------------------------------------------------------------------


def closed_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def test_missing_objects_are_typed_errors(checked: Longshore, llama: StoredModel, tmp_path: Path) -> None:
    for uri in ("s3://no-such-bucket/llama", "s3://models/no-such-model"):
        with pytest.raises((cluster.ObjectNotFound, cluster.NotACheckpoint)) as caught:
            cluster.load(uri, device="cpu", **llama.options)
        assert uri.split("/")[2 if "bucket" in uri else 3] in str(caught.value)
    with pytest.raises(cluster.NotACheckpoint, match="no such file"):
        cluster.load("s3://models/llama/model-00009-of-00003.safetensors", device="cpu", **llama.options)
    with pytest.raises((cluster.ObjectNotFound, cluster.NotACheckpoint), match="no-such-folder"):
        cluster.load(str(tmp_path / "no-such-folder"), device="cpu")


def test_wrong_credentials(checked: Longshore, llama: StoredModel) -> None:
    with pytest.raises(cluster.AccessDenied) as caught:
        cluster.load(llama.uri, device="cpu", **{**llama.options, "credentials": WRONG_KEYS})
    assert "not-the-secret" not in repr(caught.value) + str(caught.value)
    # The store's next answer is not held against the next caller.
    cluster.load(llama.uri, device="cpu", **llama.options).release()


def test_a_closed_endpoint_is_a_typed_error(checked: Longshore, llama: StoredModel) -> None:
    options = {**llama.options, "endpoint_url": f"http://127.0.0.1:{closed_port()}"}
    begun_s = time.monotonic()
    with pytest.raises(cluster.StoreUnavailable):
        cluster.load(llama.uri, device="cpu", **options)
    assert time.monotonic() - begun_s < 60


# -- the checkpoint ----------------------------------------------------------------------------------------------

WEIGHT = [("weight", "F32", (4, 4))]
GOOD = safetensors_bytes(WEIGHT)
BAD_CHECKPOINTS: dict[str, tuple[dict[str, bytes], type[Exception], str]] = {
    "no weights at all": ({"readme.md": b"hello"}, cluster.NotACheckpoint, "safetensors"),
    "pickle only": ({"pytorch_model.bin": b"\x80\x02."}, cluster.PickleRefused, "pytorch_model.bin"),
    "cut short": ({"model.safetensors": GOOD[:40]}, cluster.InvalidHeader, "model.safetensors"),
    "not JSON": ({"model.safetensors": b"\x10" + bytes(7) + b"{not json at all"}, cluster.InvalidHeader, "JSON"),
    "header too large": ({"model.safetensors": b"\xff" * 64}, cluster.InvalidHeader, "model.safetensors"),
    "out of the file": ({"model.safetensors": encode_header(WEIGHT) + bytes(8)}, cluster.InvalidHeader, "model"),
    "wrong size": (
        {"model.safetensors": raw_header({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4))},
        cluster.InvalidHeader,
        "w",
    ),
    "hostile index": (
        {"model.safetensors.index.json": json.dumps({"weight_map": {"w": "../../etc/passwd"}}).encode()},
        cluster.InvalidIndex,
        "passwd",
    ),
    "manifest of nobody": ({"model.safetensors": GOOD, MANIFEST_KEY: b"{}"}, cluster.InvalidManifest, "manifest"),
}


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_bad_checkpoints(checked: Longshore, tmp_path: Path, name: str) -> None:
    objects, kind, said = BAD_CHECKPOINTS[name]
    write_objects(tmp_path / "model", objects)
    with pytest.raises(kind, match=said) as caught:
        cluster.load(str(tmp_path / "model"), device="cpu")
    assert type(caught.value) is kind


def test_a_manifest_for_other_bytes(
    checked: Longshore, llama: StoredModel, copy_of: Callable[[StoredModel], StoredModel]
) -> None:
    replaced = copy_of(llama)
    with (replaced.in_bucket / "model-00001-of-00003.safetensors").open("ab") as file:
        file.write(b"more")
    replaced.server.refresh()
    with pytest.raises((cluster.ManifestMismatch, cluster.ObjectChanged)):
        cluster.load(replaced.uri, device="cpu", **replaced.options)


def test_impossible_splits_are_refused(checked: Longshore, llama: StoredModel, odd: StoredModel) -> None:
    with pytest.raises(cluster.LayoutError, match="tensor_parallel_size=3"):
        cluster.load(llama.uri, tensor_parallel_size=3, device="cpu", **llama.options)
    with pytest.raises(cluster.LayoutError, match="named by no rule"):
        cluster.load(odd.uri, tensor_parallel_size=2, device="cpu", **odd.options)


# -- the cluster's resources -------------------------------------------------------------------------------------


@pytest.mark.cluster_settings(cpu_ranks_per_node=2)
def test_more_ranks_than_places(checked: Longshore, llama: StoredModel) -> None:
    with cluster.load(llama.uri, fsdp_size=3, device="cpu", **llama.options) as holder:
        with pytest.raises(cluster.NotEnoughResources) as caught:
            cluster.load(llama.uri, fsdp_size=2, device="cpu", **llama.options)
        assert holder.model_id in str(caught.value)
        assert (caught.value.details["need"], caught.value.details["have"]) == (2, 1)


def test_more_ranks_than_gpus_are_refused_without_asking_ray(checked: Longshore, llama: StoredModel) -> None:
    ranks = 2 * GPUS_PER_NODE + 1
    with pytest.raises(cluster.NotEnoughResources, match="GPUs") as caught:
        cluster.load(llama.uri, fsdp_size=ranks, device="cuda", **llama.options)
    found = caught.value.details  # counted; who has waited for Ray in vain cannot say how many there are
    assert (found["need"], found["total"]) == (ranks, 2 * GPUS_PER_NODE)


def load_that_waits(pool: ThreadPoolExecutor, stored: StoredModel, text: str, **options: Any) -> Future[LoadedModel]:
    """Start a load that waits for resources; return when its status has this text."""
    messages: list[str] = []
    loading = pool.submit(
        cluster.load,
        stored.uri,
        wait_for_resources_s=WAIT_S,
        progress=lambda now: messages.append(now.message),
        **{**stored.options, **options},
    )
    eventually(lambda: any(text in message for message in messages), lambda: f"not said: {messages}")
    return loading


def test_a_load_waits_for_gpus_held_by_others(checked: Longshore, llama: StoredModel) -> None:
    """Other actors hold them. The load reports the free ones, and can wait until there are enough, also when
    they are on other nodes than it has asked Ray for.
    """
    import ray

    @ray.remote(num_gpus=1, num_cpus=0)
    class Hog:
        def node(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    hogs = [Hog.remote() for _ in range(2 * GPUS_PER_NODE)]
    try:
        where = ray.get([hog.node.remote() for hog in hogs])
        with pytest.raises(cluster.NotEnoughResources, match="0 of 4 are free"):
            cluster.load(llama.uri, device="cuda", **llama.options)
        with ThreadPoolExecutor(1) as pool:
            waiting = load_that_waits(pool, llama, "waiting for resources", device="cuda", tensor_parallel_size=2)
            group = checked.placement_groups()[0]
            assert "{0: {'GPU': 2.0}} PENDING" in group, "a node autoscaler would not hear of it"
            for node in set(where):
                ray.kill(hogs[where.index(node)])
            apart = "{0: {'GPU': 1.0}, 1: {'GPU': 1.0}} CREATED"
            eventually(lambda: any(apart in group for group in checked.placement_groups()), "it does not take them")
            # It got its GPUs; that there is none behind the number is found by the workers.
            with pytest.raises(cluster.DeviceUnavailable):
                waiting.result(WAIT_S)
    finally:
        for hog in hogs:
            ray.kill(hog)


@pytest.mark.cluster_settings(cpu_ranks_per_node=1)
def test_waiting_for_places_that_a_model_holds(checked: Longshore, llama: StoredModel, odd: StoredModel) -> None:
    holder = cluster.load(odd.uri, fsdp_size=2, device="cpu", **odd.options)
    with ThreadPoolExecutor(1) as pool:
        waiting = load_that_waits(pool, llama, holder.model_id, device="cpu")
        holder.release()
        waiting.result(WAIT_S).release()


def test_a_gpu_that_torch_cannot_use(checked: Longshore, llama: StoredModel) -> None:
    for _ in range(3):  # each finds all GPUs free, which the one before gave back
        with pytest.raises(cluster.DeviceUnavailable):
            cluster.load(llama.uri, tensor_parallel_size=4, device="cuda", **llama.options)


@pytest.mark.cluster_settings(arena_bytes=1 << 50, window_bytes=1 << 50)
def test_an_arena_that_shared_memory_cannot_hold(checked: Longshore, llama: StoredModel) -> None:
    for _ in range(2):  # each load tries anew: somebody may have enlarged it
        with pytest.raises(cluster.ArenaTooLarge, match="room"):
            cluster.load(llama.uri, device="cpu", **llama.options)
        eventually(lambda: not checked.actor_names("agent-"), "an agent that has no arena is left")


@pytest.mark.cluster_settings(arena_bytes=2 << 20)
def test_an_arena_too_small_to_go_on(checked: Longshore, llama: StoredModel) -> None:
    with pytest.raises(cluster.DoesNotFit, match="arena slots"):
        cluster.load(llama.uri, device="cpu", **llama.options)


@pytest.mark.cluster_settings(host_reserve_bytes=1 << 50)
def test_a_model_larger_than_host_memory(checked: Longshore, llama: StoredModel) -> None:
    with pytest.raises(cluster.DoesNotFit, match="host memory"):
        cluster.load(llama.uri, device="cpu", **llama.options)


# -- placement groups --------------------------------------------------------------------------------------------


def test_ranks_in_the_callers_placement_group(longshore: Longshore, llama: StoredModel) -> None:
    import ray
    from ray.util import placement_group, remove_placement_group

    group = placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_SPREAD")
    assert group.wait(30)
    try:
        with pytest.raises(cluster.NotEnoughResources, match="room for 2 ranks"):
            cluster.load(llama.uri, fsdp_size=3, device="cpu", placement_group=group, **llama.options)
        with cluster.load(llama.uri, fsdp_size=2, device="cpu", placement_group=group, **llama.options) as model:
            assert len({rank.node for rank in model.report.ranks}) == 2
        assert ray.util.placement_group_table(group)["state"] == "CREATED"  # it is the caller's to remove
    finally:
        remove_placement_group(group)
    eventually(lambda: ray.util.placement_group_table(group)["state"] == "REMOVED", "the group is not removed")
    with pytest.raises(cluster.ClusterError, match="does not exist"):
        cluster.load(llama.uri, device="cpu", placement_group=group, **llama.options)


# -- versions and addresses --------------------------------------------------------------------------------------


def test_a_client_of_another_version(longshore: Longshore, monkeypatch: pytest.MonkeyPatch, llama: StoredModel) -> None:
    before = longshore.status().models
    monkeypatch.setattr(connection, "__version__", "0.0.9")
    connection_module.disconnect()
    with pytest.raises(cluster.VersionMismatch, match=r"0\.0\.9"):
        cluster.load(llama.uri, device="cpu", **llama.options)
    monkeypatch.undo()
    assert len(longshore.status().models) == len(before)


@pytest.mark.cluster_settings(empty=True)
def test_an_agent_of_another_version(longshore: Longshore, llama: StoredModel) -> None:
    import ray

    for node in ray.nodes():
        longshore.start_other_agent(node["NodeID"])
    options = {"fsdp_size": 2, "device": "cpu", **llama.options}
    with pytest.raises(cluster.VersionMismatch, match=r"the agent on .* 9\.9\.9 \(protocol 6\)") as refused:
        cluster.load(llama.uri, **options)
    assert "longshore release --shutdown" in refused.value.hint
    longshore.assert_nothing_left()
    with (
        pytest.raises(cluster.VersionMismatch),
        host_rank(llama.uri, 0, config=Config(**TEST_SETTINGS), **llama.options),
    ):
        raise AssertionError("a rank was hosted beside an agent of another version")
    assert longshore.status().nodes == ()  # nothing that such an agent says is taken for known
    longshore.end_longshore()
    longshore.configure()
    cluster.load(llama.uri, **options).release()


def test_no_coordinator(longshore: Longshore) -> None:
    longshore.end_longshore()
    with pytest.raises(cluster.ClusterLost, match="no Longshore coordinator"):
        cluster.status()
    with pytest.raises(cluster.ClusterLost):
        cluster.release("llama-1")
    assert longshore.actor_names() == []  # asking started nothing


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"tensor_parallel_size": 0}, cluster.ConfigError),
        ({"device": "tpu"}, cluster.ConfigError),
        ({"wait_for_resources_s": -1}, cluster.ConfigError),
    ],
)
def test_invalid_arguments_are_refused(
    longshore: Longshore, llama: StoredModel, arguments: dict[str, Any], kind: type[Exception]
) -> None:
    before = longshore.status().models
    with pytest.raises(kind):
        cluster.load(llama.uri, **{"device": "cpu", **arguments}, **llama.options)
    assert len(longshore.status().models) == len(before)
