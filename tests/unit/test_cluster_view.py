"""A plan on the nodes of a cluster: placements of ranks, nodes that do not answer, and resident models."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from actors.coordination import nodes
from actors.coordination.model_record import ModelRecord
from cluster import messages
from cluster.command_line.cli import main
from cluster.config import Config
from cluster.errors import ClusterLost
from cluster.layouts.mesh import Layout
from cluster.messages import pack_message, unpack_message
from cluster.options import LoadOptions
from cluster.planning import preview
from cluster.planning.chunk_keys import NO_KEY, HeldChunks, Holdings
from cluster.planning.plan_summary import PlanSummary
from cluster.planning.preview import AskedCluster, find_cluster, node_names, place_ranks, plan
from cluster.request import make_request
from cluster.scheduling.holders import Holders
from cluster.scheduling.load_state import Life
from cluster.scheduling.topology import NodeInfo
from cluster.telemetry.report import ModelStatus
from longshore.installation import VERSION
from storage.errors import ArenaError
from storage.host.memory import GpuMemory
from tests.support.checkpoints import safetensors_bytes

CPU_RANKS = 4
GPUS = [NodeInfo(f"{at:08d}", f"host-{at}", gpus_free=free, gpus_total=2) for at, free in enumerate((0, 2, 1))]
CPUS = [NodeInfo(f"{at:08d}", f"host-{at}", cpu_ranks_free=CPU_RANKS) for at in range(2)]


@pytest.mark.parametrize(
    ("infos", "layout", "per_node", "placements"),
    [
        (CPUS, Layout(), None, (0,)),
        (CPUS, Layout(2, 3), None, (0, 0, 0, 0, 1, 1)),
        (GPUS, Layout(2), None, (1, 1)),
        (GPUS, Layout(1, 3), None, (1, 1, 2)),
        (GPUS, Layout(2, 2), None, (0, 0, 1, 1)),  # as if all were free: 3 are
        (GPUS, Layout(2, 4), None, (0, 0, 1, 1, 2, 2, 3, 3)),  # the cluster has no fourth node
        (GPUS, Layout(4), 1, (0, 1, 2, 3)),
        ((), Layout(4), None, (0, 0, 0, 0)),
    ],
)
def test_ranks_are_placed_on_nodes(
    infos: list[NodeInfo], layout: Layout, per_node: int | None, placements: tuple[int, ...]
) -> None:
    device = "cuda" if infos is GPUS else "cpu"
    request = make_request(LoadOptions("/model", **asdict(layout), device=device))
    assert place_ranks(infos, request, per_node, CPU_RANKS) == placements


def test_nodes_of_one_host_are_distinguished() -> None:
    assert node_names(CPUS) == ("host-0", "host-1")
    assert node_names([replace(info, host="here") for info in CPUS]) == ("here 00000000", "here 00000001")


# -- what agents say, and do not say --------------------------------------------------------------------------------


def test_agents_that_do_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    here = HeldChunks.of([(True, False)])

    def agent(answer: Any) -> SimpleNamespace:
        async def packed(call: str, arguments: bytes) -> bytes:
            assert (call, unpack_message(arguments, "the coordinator", "a test")) == ("holds", (NO_KEY,))
            if answer == "silent":
                await asyncio.sleep(60)
            if isinstance(answer, Exception):
                raise answer
            with monkeypatch.context() as patched:
                patched.setattr(messages, "VERSION", answer or VERSION)
                return pack_message(here)

        return SimpleNamespace(packed=SimpleNamespace(remote=packed))

    agents = {"well": agent(""), "dead": agent(RayActorError()), "slow": agent("silent"), "ill": agent(ArenaError("x"))}
    agents |= {"older": SimpleNamespace(), "other": agent((6, "9.9.9"))}
    monkeypatch.setattr(nodes.spawn, "find_agent", agents.get)
    monkeypatch.setattr(nodes, "FACTS_S", 0.1)
    found = asyncio.run(nodes.held_on([*agents, "new"], NO_KEY))
    assert found == {
        "well": here,
        "dead": "its agent does not answer (RayActorError)",
        "slow": "its agent does not answer within 0 s",
        "ill": "its agent does not answer (ArenaError)",
        "new": "no agent runs there yet",
        "older": "its agent does not answer (VersionMismatch)",
        "other": "its agent does not answer (VersionMismatch)",
    }


# -- a whole plan ---------------------------------------------------------------------------------------------------


class Asked:
    """A connection to a coordinator that would answer in this way."""

    address = "10.0.0.1:6379"

    def __init__(self, infos: list[NodeInfo], said: dict[str, Any], resident: ModelStatus | None = None) -> None:
        self.infos = infos
        self.said = said
        self.resident = resident
        self.calls: list[tuple[Any, ...]] = []

    def call(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))
        if method == "rooms":
            return self.infos
        _, _, node_ids, keys = args
        chunks = len(keys) // len(NO_KEY)
        answers = {node_id: self.said.get(node_id, "no agent runs there yet") for node_id in node_ids}
        every = {
            name: HeldChunks.of([bits] * chunks) for name, bits in (("arena", (True, True)), ("disk", (False, True)))
        }
        return Holdings({node_id: every.get(answer, answer) for node_id, answer in answers.items()}, self.resident)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = [(f"layers.{at}.weight", "F32", (64, 64)) for at in range(6)]
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


def asked(monkeypatch: pytest.MonkeyPatch, line: Asked) -> Asked:
    """Make plans find that cluster, named or not."""
    there = AskedCluster(line, tuple(line.call("rooms")))  # type: ignore[arg-type]
    monkeypatch.setattr(preview, "find_cluster", lambda address, config: there)
    return line


def test_a_plan_has_bytes_by_source_and_their_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = plan(model, fsdp_size=12, ranks_per_node=4, store_rate="1MB/s", disk_rate="4MB/s")
    assert alone.expected is not None
    infos = [*CPUS, replace(CPUS[0], node_id="2" * 8, host="host-2", arena_bytes=12 << 20)]
    asked(monkeypatch, Asked(infos, {infos[0].node_id: "disk", infos[2].node_id: "arena"}))
    found = plan(model, fsdp_size=12, store_rate="1MB/s", disk_rate="4MB/s")
    assert [node.node for node in found.nodes] == ["host-0", "host-1", "host-2"]
    disk, store, arena = found.nodes
    assert (disk.disk_bytes, store.store_bytes, arena.cached_bytes) == tuple(n.needed_bytes for n in found.nodes)
    assert found.bytes_by_source == {
        "store": store.needed_bytes,
        "arena": arena.needed_bytes,
        "disk": disk.needed_bytes,
    }
    assert sum(found.bytes_by_source.values()) == found.needed_bytes == alone.bytes_by_source["store"]
    assert found.cluster == Asked.address
    assert found.notes[-1] == "counted as having nothing of the model: host-1 (no agent runs there yet)"
    assert "goes into its memory: the kernel's page cache keeps local files" in found.notes[-2]
    assert (store.arena_bytes, arena.arena_bytes) == (Config().arena_bytes, 12 << 20)
    assert found.expected is not None
    assert found.expected.total_s < alone.expected.total_s
    assert found.expected.stages_s == {
        "store": pytest.approx(store.needed_bytes / 1e6),
        "disk": pytest.approx(disk.needed_bytes / 4e6),
    }


def test_a_plan_reports_ranks_without_a_node(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = asked(monkeypatch, Asked(list(CPUS), {info.node_id: "arena" for info in CPUS}))
    found = plan(model, fsdp_size=12)
    assert [node.node for node in found.nodes] == ["host-0", "host-1", "node 2"]
    assert [node.cached_bytes == 0 for node in found.nodes] == [False, False, True]
    assert "1 nodes (the cluster has not got them yet)" in found.notes[-1]
    assert line.calls[-1][3] == [info.node_id for info in CPUS]


def resident_status(request_of: Path) -> ModelStatus:
    request = make_request(LoadOptions(str(request_of)))
    return ModelRecord("llama-1", request, Life.new(1), Holders()).status()


def test_a_resident_model_needs_no_bytes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tight = [replace(CPUS[0], gpus_total=1, gpus_free=1, gpus=(GpuMemory(10**6, 1),))]
    line = asked(monkeypatch, Asked(tight, {}))
    refused = plan(model, address="auto", store_rate="1MB/s")
    assert refused.fit is not None
    assert refused.fit.fits is False
    line.resident = resident_status(model)
    found = plan(model, address="auto", store_rate="1MB/s")
    assert (found.resident, found.expected) == ("llama-1", None)
    assert found.bytes_by_source == {"store": 0, "arena": 0, "disk": 0}
    assert found.needed_bytes == refused.needed_bytes
    assert found.fit is not None
    assert found.fit.fits is True
    assert "resident as llama-1" in found.fit.sentence
    identity = line.calls[-1][1]
    assert "'cuda'" in identity  # as the coordinator would have it, instead of "auto"


def test_the_command_prints_the_plan(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = asked(monkeypatch, Asked(list(CPUS), {CPUS[0].node_id: "disk"}))
    assert main(["plan", str(model), "--address", "auto", "--disk-rate", "1GB/s"]) == 0
    said = capsys.readouterr().out
    assert "would leave the store" in said
    assert "would come from the cache" in said
    assert "would come from disk" in said
    assert "limit: disk" in said
    assert main(["plan", str(model), "--address", "auto", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cluster"] == Asked.address
    assert document["bytes_by_source"] == {"store": 0, "arena": 0, "disk": document["needed_bytes"]}
    assert document["nodes"][0]["disk_bytes"] == document["needed_bytes"]
    line.resident = resident_status(model)
    assert main(["plan", str(model), "--address", "auto"]) == 0
    assert "llama-1: a load would be given it at once" in capsys.readouterr().out


def test_an_estimate_contacts_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
    config = {"model_type": "llama", **sizes, "num_hidden_layers": 1, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = asked(monkeypatch, Asked(list(CPUS), {}))
    found = plan(tmp_path)
    assert found.estimated
    assert found.cluster == ""
    assert [call[0] for call in line.calls] == ["rooms"]


# -- which cluster --------------------------------------------------------------------------------------------------


def test_only_a_named_cluster_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: object, **options: object) -> None:
        raise ClusterLost("gone")

    monkeypatch.setattr(preview, "connect", lambda address, config, start: None)
    with pytest.raises(ClusterLost, match="no Longshore coordinator"):
        find_cluster("auto", Config())
    monkeypatch.setattr(preview, "joined", lambda config: None)
    assert find_cluster(None, Config()) is None
    monkeypatch.setattr(preview, "joined", lost)
    assert find_cluster(None, Config()) is None
    line = Asked(list(CPUS), {})
    monkeypatch.setattr(preview, "joined", lambda config: line)
    there = find_cluster(None, Config())
    assert there is not None
    assert there.infos == tuple(CPUS)


def test_a_process_without_a_cluster_joins_none(model: Path) -> None:
    found: PlanSummary = plan(model)
    assert found.cluster == ""
