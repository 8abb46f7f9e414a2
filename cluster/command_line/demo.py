"""`longshore demo`: the whole way on one machine. A checkpoint is written, uploaded to a real S3 server, published,
loaded into four ranks in CPU memory, compared byte by byte with what the safetensors library reads, and loaded again
from the cache. Nothing is left behind, also after Ctrl-C (`cluster.command_line.demo`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from cluster import client
from cluster.command_line.sample_checkpoint import write_demo_model
from cluster.config import Config
from cluster.joining.connection import disconnect
from cluster.joining.interrupts import sigterm_interrupts
from cluster.telemetry.rank_report import Jsonable
from cluster.telemetry.report import LoadProgress, LoadReport
from storage.errors import IntegrityError
from storage.stores.embedded_s3 import EmbeddedS3

if TYPE_CHECKING:
    from storage.publishing.publish import PublishReport


_PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
GRACE_S = 5.0


@contextlib.contextmanager
def sandbox() -> Iterator[None]:
    """Every process begun inside is ended with the block; Ctrl-C and SIGTERM end it in order.

    This process becomes the parent of orphans, so that a daemon whose own parent is gone is found too.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    mine = psutil.Process()
    before = {child.pid for child in mine.children(recursive=True)}
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        with sigterm_interrupts():
            yield
    finally:
        # From here on a second Ctrl-C or SIGTERM must not leave half of it.
        ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            _end_children(mine, before)
            importlib.import_module("storage.arena.arena_files").sweep()
        finally:
            signal.signal(signal.SIGINT, ignored)
            signal.signal(signal.SIGTERM, terminated)
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _end_children(mine: psutil.Process, before: set[int]) -> None:
    for attempt in range(20):
        left = [child for child in mine.children(recursive=True) if child.pid not in before]
        if not left:
            return
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate() if attempt == 0 else child.kill()
        psutil.wait_procs(left, timeout=GRACE_S if attempt == 0 else 1.0)
    os.write(2, b"longshore: some processes of the demo could not be ended\n")


RANKS = 4
# What a Llama cuts by rows or by columns over tensor-parallel ranks; everything else every rank holds whole. Written
# out here a second time on purpose: the demo must not check Longshore's layout by Longshore's layout.
CUT_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
CUT_BY_COLUMNS = ("o_proj", "down_proj")

Say = Callable[[str], None]
ShowLoad = Callable[[LoadProgress], None]
ShowBytes = Callable[..., None]


@dataclass(frozen=True, slots=True)
class DemoReport(Jsonable):
    """What the demo did."""

    model_bytes: int
    write_s: float
    publish_s: float
    publish: PublishReport
    first: LoadReport  # from the store
    again: LoadReport  # from the cache
    compared_tensors: int  # slices of all ranks, both loads
    compared_bytes: int


def run(
    size_bytes: int | None = None, *, say: Say, show_load: ShowLoad, show_publish: ShowBytes | None = None
) -> DemoReport:
    """Run the demo. Raises IntegrityError when one byte differs, any LongshoreError when a step fails."""
    with sandbox(), tempfile.TemporaryDirectory(prefix="longshore-demo-") as folder:
        checkpoint, buckets = Path(folder, "checkpoint"), Path(folder, "buckets")
        written = write_demo_model(checkpoint, size_bytes)
        model_bytes = written.size_bytes
        say(f"wrote a Llama-shaped bf16 checkpoint of {model_bytes / 1e9:.2f} GB in {written.shards} shards")
        buckets.mkdir()
        with EmbeddedS3(buckets) as server:
            server.make_bucket("models")
            uri = "s3://models/llama-demo"
            store: dict[str, Any] = {
                "endpoint_url": server.endpoint_url,
                "region": server.region,
                "credentials": server.credentials(),
            }
            begun_s = time.monotonic()
            published = client.publish(str(checkpoint), uri, progress=show_publish, **store)
            publish_s = time.monotonic() - begun_s
            say(f"uploaded and published {uri} on an S3 server of this machine ({server.endpoint_url})")
            try:
                options: dict[str, Any] = {
                    **store,
                    "tensor_parallel_size": RANKS,
                    "device": "cpu",
                    "address": "local",
                    "progress": show_load,
                    "config": _config(model_bytes),
                }
                say(f"starting a local Ray cluster; loading with tensor_parallel_size={RANKS}")
                first, compared = _load_and_compare(uri, options, checkpoint)
                say("every slice equals what the safetensors library reads; loading again")
                again, compared_again = _load_and_compare(uri, options, checkpoint)
            finally:
                disconnect()
    return DemoReport(
        model_bytes=model_bytes,
        write_s=written.write_s,
        publish_s=publish_s,
        publish=published,
        first=first,
        again=again,
        compared_tensors=compared[0] + compared_again[0],
        compared_bytes=compared[1] + compared_again[1],
    )


def _load_and_compare(uri: str, options: dict[str, Any], checkpoint: Path) -> tuple[LoadReport, tuple[int, int]]:
    with client.load(uri, **options) as model:
        results = model.call(compare_with_safetensors, str(checkpoint), RANKS)
        different = [name for _, _, names in results for name in names]
        if different:
            raise IntegrityError(f"{len(different)} slices differ from the checkpoint: {', '.join(different[:5])}")
        return model.report, (sum(r[0] for r in results), sum(r[1] for r in results))


def compare_with_safetensors(shard: Any, checkpoint: str, ranks: int) -> tuple[int, int, list[str]]:
    """Inside a worker: (tensors, bytes compared, names of slices that differ or are missing)."""
    import torch
    from safetensors import safe_open

    expected_names = set()
    compared_bytes = 0
    different = []
    for path in sorted(Path(checkpoint).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                expected_names.add(name)
                whole = file.get_slice(name)
                rows, columns = slice(None), slice(None)
                if any(part in name for part in CUT_BY_ROWS):
                    rows = _part(whole.get_shape()[0], shard.rank, ranks)
                elif any(part in name for part in CUT_BY_COLUMNS):
                    columns = _part(whole.get_shape()[1], shard.rank, ranks)
                expected = whole[rows, columns] if len(whole.get_shape()) == 2 else whole[rows]
                found = shard.get(name)
                # Compared as bytes: equal NaNs are equal, and so is nothing else.
                same = found is not None and found.shape == expected.shape and found.dtype == expected.dtype
                if not same or not torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8)):
                    different.append(f"rank {shard.rank}: {name}")
                compared_bytes += expected.numel() * expected.element_size()
    different += [f"rank {shard.rank}: {name} is not in the checkpoint" for name in set(shard) - expected_names]
    return len(expected_names), compared_bytes, different


def _part(length: int, rank: int, ranks: int) -> slice:
    return slice(length // ranks * rank, length // ranks * (rank + 1))


def _config(model_bytes: int) -> Config:
    """The user's settings; the arena holds the model, so that the second load can come from the cache."""
    config = Config.from_env()
    if config.arena_bytes:
        return config
    # Chunks end at tensors and rows, so slots are not all full; a few more are for what is in flight.
    return Config.from_env(arena_bytes=model_bytes * 5 // 4 + (256 << 20))
