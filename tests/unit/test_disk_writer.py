"""A node with a disk tier in this process: ranks of a later agent read the chunks that an earlier one wrote."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.fit.needs import min_slots
from storage.disk.files import SUBFOLDER, chunk_name
from storage.disk.tier import DiskTier
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import flat_objects
from tests.support.disk_chunks import chunks_in
from tests.support.faulty_stores import WrappedStore
from tests.support.local_node import Belongings, LocalNode, local_node, plan_of
from tests.support.ray_clusters import eventually
from tests.support.reference_slices import check_exact

CHUNK_BYTES = 1024


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = Belongings()
    yield
    before.check()


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    return flat_objects(tensors=24, rows=64)


def node_with(shm_dir: Path, disk: Path, slots: int = 64, **settings: object) -> LocalNode:
    # Reads are counted, so hedging is off: a slow machine must not cause a second fetch.
    fixed = {"disk_cache_dir": str(disk), "disk_cache_bytes": 1 << 24, "hedge_factor": 0}
    return local_node(shm_dir, slots, **{**fixed, **settings})


def load_and_keep(shm_dir: Path, disk: Path, objects: Mapping[str, bytes], **plan_args: bool) -> set[bytes]:
    """Run a first load until all of its chunks are on disk and the arena is gone."""
    plan = plan_of(objects, (1, 2, 1), CHUNK_BYTES, **plan_args)
    with node_with(shm_dir, disk) as node:
        _, report = node.load(plan, MemoryStore(objects))
        assert (report.disk_chunks, report.disk_bytes) == (0, 0)
        assert report.store_chunks == report.needed_chunks
        wanted = report.needed_chunks
        eventually(
            lambda: len(chunks_in(str(disk / SUBFOLDER))) == wanted,
            lambda: f"{len(chunks_in(str(disk / SUBFOLDER)))} of {wanted} chunks came to disk",
        )
    return chunks_in(str(disk / SUBFOLDER))


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("placement", ["via_arena", "direct", "auto"])
def test_a_new_node_reads_verified_chunks_from_disk(
    shm_dir: Path, tmp_path: Path, objects: dict[str, bytes], digests: bool, placement: str
) -> None:
    load_and_keep(shm_dir, tmp_path, objects, digests=digests)
    store = WrappedStore(MemoryStore(objects))
    plan = plan_of(objects, (1, 2, 1), CHUNK_BYTES, digests=digests)
    with node_with(shm_dir, tmp_path, placement=placement) as node:
        ranks, report = node.load(plan, store)
        check_exact(ranks, objects, fsdp=2)
        assert not store.reads
        assert (report.store_chunks, report.store_bytes, report.direct_bytes) == (0, 0, 0)
        assert report.disk_chunks == report.needed_chunks > 20
        assert report.disk_bytes == report.needed_bytes
        # What is in the arena is not read from disk.
        again, second = node.load(plan_of(objects, (1, 1, 1), CHUNK_BYTES, digests=digests), store)
        check_exact(again, objects)
        if placement != "direct":
            assert (second.disk_chunks, second.cached_chunks) == (0, second.needed_chunks)
        assert not store.reads


def test_bad_files_are_replaced_by_chunks_from_the_store(
    shm_dir: Path, tmp_path: Path, objects: dict[str, bytes]
) -> None:
    keys = sorted(load_and_keep(shm_dir, tmp_path, objects))
    folder = tmp_path / SUBFOLDER
    bad = [folder / chunk_name(key) for key in keys[:5]]
    flipped = bytearray(bad[0].read_bytes())
    flipped[-1] ^= 1
    bad[0].write_bytes(flipped)
    os.truncate(bad[1], 300)
    bad[2].write_bytes(b"")
    bad[3].write_bytes((folder / chunk_name(keys[6])).read_bytes())  # a sound file of another chunk
    bad[4].unlink()
    bad[4].symlink_to(folder / chunk_name(keys[7]))  # not recognised as a chunk at all
    store = WrappedStore(MemoryStore(objects))
    plan = plan_of(objects, (1, 2, 1), CHUNK_BYTES)
    with node_with(shm_dir, tmp_path) as node:
        ranks, report = node.load(plan, store)
        check_exact(ranks, objects, fsdp=2)
        assert len(store.reads) == report.store_chunks == 5
        assert report.disk_chunks == report.needed_chunks - 5
        assert report.retries == {"disk_unusable": 4}
        assert report.corrupt_chunks == 0
        eventually(lambda: all(p.is_file() and not p.is_symlink() for p in bad), "not all were written again")
        eventually(lambda: bad[0].read_bytes() != flipped and bad[1].stat().st_size != 300, "the bad ones stayed")
    with node_with(shm_dir, tmp_path) as node:
        store = WrappedStore(MemoryStore(objects))
        node.load(plan, store)
        assert not store.reads


def test_files_that_disappear_are_fetched_from_the_store(
    shm_dir: Path, tmp_path: Path, objects: dict[str, bytes]
) -> None:
    load_and_keep(shm_dir, tmp_path, objects)
    store = WrappedStore(MemoryStore(objects))
    plan = plan_of(objects, (1, 2, 1), CHUNK_BYTES)
    with node_with(shm_dir, tmp_path) as node:
        for path in (tmp_path / SUBFOLDER).glob("*.chunk"):
            path.unlink()
        ranks, report = node.load(plan, store)
        check_exact(ranks, objects, fsdp=2)
        assert report.store_chunks == report.needed_chunks == report.retries["disk_unusable"]


def test_a_model_may_exceed_arena_and_disk_together(shm_dir: Path, tmp_path: Path) -> None:
    """No load waits for the disk, and the chunks that are on disk are used."""
    objects = flat_objects(tensors=100)
    plan = plan_of(objects, (1, 2, 1), CHUNK_BYTES)
    budget_bytes = 20 * (CHUNK_BYTES + 128)
    for _ in range(2):
        with node_with(shm_dir, tmp_path, min_slots(2), disk_cache_bytes=budget_bytes, placement="auto") as node:
            store = WrappedStore(MemoryStore(objects))
            ranks, report = node.load(plan, store)
            check_exact(ranks, objects, fsdp=2)
            assert report.direct_bytes == 0
            assert report.store_chunks + report.disk_chunks == report.needed_chunks
            assert len(store.reads) == report.store_chunks
        assert sum(path.stat().st_size for path in (tmp_path / SUBFOLDER).glob("*.chunk")) <= budget_bytes


def test_a_full_disk_fails_no_load_and_is_logged_once(
    shm_dir: Path,
    tmp_path: Path,
    objects: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real, refused = os.pwrite, []

    def full(file: int, data: memoryview, at: int) -> int:
        if len(data) <= 128:
            return real(file, data, at)
        refused.append(at)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    plan = plan_of(objects, (1, 2, 1), CHUNK_BYTES)
    with caplog.at_level(logging.WARNING, "longshore.disk"), node_with(shm_dir, tmp_path) as node:
        ranks, report = node.load(plan, MemoryStore(objects))
        check_exact(ranks, objects, fsdp=2)
        eventually(lambda: len(refused) == report.needed_chunks, lambda: f"{len(refused)} writes were tried")
        _, again = node.load(plan, MemoryStore(objects))
        assert again.disk_unkept_chunks >= report.needed_chunks - 1  # (the last one may be under way)
    assert [record.getMessage() for record in caplog.records if "No space left" in record.getMessage()]
    assert len(caplog.records) == 1
    assert not chunks_in(str(tmp_path / SUBFOLDER))


def test_an_error_of_one_chunk_leaves_the_others(
    shm_dir: Path, tmp_path: Path, objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = DiskTier.write, []

    def write(tier: DiskTier, *chunk: Any) -> Any:
        if not failed:
            failed.append(chunk)
            raise MemoryError
        return real(tier, *chunk)

    monkeypatch.setattr(DiskTier, "write", write)
    with node_with(shm_dir, tmp_path) as node:
        _, report = node.load(plan_of(objects, (1, 2, 1), CHUNK_BYTES), MemoryStore(objects))
        on_disk = report.needed_chunks - 1
        eventually(lambda: len(chunks_in(str(tmp_path / SUBFOLDER))) == on_disk, "the others did not come to disk")


def test_an_unusable_folder_is_logged_and_fails_no_load(
    shm_dir: Path, tmp_path: Path, objects: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("x")
    with caplog.at_level(logging.WARNING, "longshore.disk"), node_with(shm_dir, tmp_path / "file") as node:
        ranks, report = node.load(plan_of(objects, (1, 2, 1), CHUNK_BYTES), MemoryStore(objects))
        check_exact(ranks, objects, fsdp=2)
        assert report.disk_chunks == 0
    assert ["not kept on disk" in record.getMessage() for record in caplog.records] == [True]
