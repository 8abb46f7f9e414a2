"""Host memory beyond the tensors: the arena and little more, however large the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cluster
from cluster.command_line.demo import write_llama_checkpoint
from cluster.units import show_bytes
from storage.host.memory import own_bytes
from storage.stores.embedded_s3 import EmbeddedS3
from tests.support.ray_clusters import Longshore
from tests.support.stored_models import StoredModel, publish_to

pytestmark = [pytest.mark.slow, pytest.mark.long]

MIB = 1 << 20
ARENA_BYTES = 64 * MIB
WINDOW_BYTES = 16 * MIB
PER_PROCESS_BYTES = 100 * MIB


@pytest.fixture(scope="module")
def large(s3_server: EmbeddedS3, tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """A Llama of half a GB in four shards: four arenas for each of two ranks, nearly."""
    folder = tmp_path_factory.mktemp("large")
    write_llama_checkpoint(
        folder, hidden=1536, layers=6, intermediate=6144, heads=12, kv_heads=4, vocab=24000, shards=4, seed=5
    )
    return publish_to(s3_server, folder, "large")


def pss_bytes(pid: int) -> int:
    """Return private memory plus each shared page divided by its mappings, from a walk of the page tables."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@pytest.mark.parametrize(
    ("asked", "placement", "reason"),
    [
        ("via_arena", "via_arena", "as asked"),
        ("direct", "direct", "as asked"),
        ("auto", "direct", "a node cannot keep its share"),
        ("auto", "direct", "the kernel's page cache keeps local files"),
    ],
)
def test_a_large_model_takes_the_arena_and_a_little(
    longshore: Longshore, large: StoredModel, asked: str, placement: str, reason: str
) -> None:
    # rows: most chunks are wanted whole by one rank
    options: dict[str, Any] = {"fsdp_size": 2, "placement": asked}
    local = reason.endswith("local files")
    longshore.configure(arena_bytes=ARENA_BYTES, window_bytes=WINDOW_BYTES, empty=True)
    uri, options = (str(large.folder), options) if local else (large.uri, {**large.options, **options})
    with cluster.load(uri, device="cpu", **options) as model:
        report = model.report
        held = [own_bytes(rank.pid) for rank in report.ranks]
        proportional = [pss_bytes(rank.pid) for rank in report.ranks]
    (node,) = report.nodes
    assert (report.placement_mode, report.placement_reason) == (placement, reason)
    assert report.model_bytes >= 4 * ARENA_BYTES
    # The model is larger than what the arena may keep: it takes its window, and nothing else.
    assert (node.window_bytes, node.arena_limit_bytes) == (WINDOW_BYTES, ARENA_BYTES)
    assert WINDOW_BYTES <= node.arena_bytes <= WINDOW_BYTES + MIB
    assert node.store_bytes >= 4 * ARENA_BYTES
    assert all(rank.size_bytes >= 2 * PER_PROCESS_BYTES for rank in report.ranks)  # a second copy would be seen
    processes = report.processes
    assert sorted(process.role for process in processes) == ["agent", "coordinator", "planning", "rank 0", "rank 1"]
    for process in processes:
        said = f"{process.role}: {show_bytes(process.baseline_bytes)}, then {show_bytes(process.peak_bytes)}"
        assert 0 < process.baseline_bytes <= process.peak_bytes, said
        assert process.beyond_bytes <= PER_PROCESS_BYTES, said
    beyond = report.host_bytes_beyond_destination
    assert WINDOW_BYTES <= beyond <= WINDOW_BYTES + MIB + len(processes) * PER_PROCESS_BYTES
    # The peaks that were seen while bytes streamed are no lower than what is held when it is over.
    for rank, now_bytes in zip(report.ranks, held, strict=True):
        assert rank.size_bytes <= rank.peak_host_bytes
        assert rank.size_bytes <= now_bytes <= rank.peak_host_bytes + 16 * MIB
    # Nor does the proportional set size, with what is shared in it, know of more.
    for rank, now_bytes in zip(report.ranks, proportional, strict=True):
        assert now_bytes <= rank.peak_host_bytes + ARENA_BYTES + 16 * MIB
