"""Loads without a manifest against checksums that the store keeps: ranks in threads over a real agent and arena."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from actors.node.object_checks import NO_MD5, NOT_KNOWN
from cluster.layouts.mesh import Layout
from cluster.planning.make_plan import build_load_plan
from cluster.planning.plan import LoadPlan
from cluster.telemetry.report import RankReport
from cluster.telemetry.stats import ONLY_PART, ObjectCheck, join_checks, unchecked_counts, verified_by
from storage.checkpoints.checkpoint import open_model
from storage.checksum import NO_CHECKSUM, NOT_COMBINABLE, digest_of
from storage.disk.files import SUBFOLDER
from storage.errors import IntegrityError
from storage.stores.object_store import ByteRange, MemoryStore, ObjectInfo
from tests.support.checkpoints import flat_objects, sharded_objects
from tests.support.disk_chunks import chunks_in
from tests.support.faulty_stores import WrappedStore
from tests.support.local_node import Belongings, local_node, run_all
from tests.support.ray_clusters import eventually
from tests.support.reference_slices import check_exact


class SummedStore(WrappedStore):
    """A store that keeps checksums of its objects, or of the parts that they were uploaded in.

    `damage`, while it is set: (key, byte) whose lowest bit is flipped in every read that has it.
    """

    def __init__(
        self,
        objects: Mapping[str, bytes],
        hash_name: str,
        part_bytes: int = 0,
        *,
        without: frozenset[str] = frozenset(),
    ) -> None:
        """`part_bytes` 0: checksums of whole objects. Objects in `without` have none."""
        super().__init__(MemoryStore(dict(objects)))
        self.damage: tuple[str, int] | None = None
        self._objects = dict(objects)
        self._hash_name = hash_name
        self._part_bytes = part_bytes
        self._without = without

    def stat(self, key: str) -> ObjectInfo:
        info = super().stat(key)
        if key in self._without:
            return info
        data, name = self._objects[key], self._hash_name
        if not self._part_bytes:
            return replace(info, checksums={name: digest_of(name.removeprefix("etag_"), data).hex()})
        parts = [digest_of(name, data[start:end]) for start, end in pairwise((0, *self._ends(key)))]
        return replace(info, composites={name: digest_of(name, b"".join(parts)).hex()})

    def part_ends(self, key: str, etag: str | None) -> tuple[int, ...]:
        return tuple(self._ends(key))

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        found = super().read_into(key, byte_range, buffer, etag=etag)
        if self.damage is not None and self.damage[0] == key and byte_range.start <= self.damage[1] < byte_range.end:
            buffer[self.damage[1] - byte_range.start] ^= 1
        return found

    def _ends(self, key: str) -> list[int]:
        size_bytes = len(self._objects[key])
        return [*range(self._part_bytes, size_bytes, self._part_bytes), size_bytes]


CHUNK_BYTES = 4096
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
OBJECTS = sharded_objects(
    [
        [(f"first.{number}", "F32", (64, 4 + number)) for number in range(12)],
        [(f"second.{number}", "F32", (48, 4 + number)) for number in range(12)],
    ]
)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = Belongings()
    yield
    before.check()


def _plan(store: SummedStore, fsdp: int = 1, chunk_bytes: int = CHUNK_BYTES) -> LoadPlan:
    return build_load_plan(open_model(store, chunk_bytes=chunk_bytes), Layout(1, fsdp, 1))


def _outcomes(objects: tuple[ObjectCheck, ...]) -> dict[str, str]:
    return {check.key: check.checked_by or check.reason for check in objects}


@pytest.mark.parametrize("placement", ["via_arena", "direct"])
@pytest.mark.parametrize("part_bytes", [0, 5000], ids=["whole", "composite"])
@pytest.mark.parametrize("hash_name", ["crc64nvme", "crc32c", "crc32"])
def test_every_object_is_checked(shm_dir: Path, hash_name: str, part_bytes: int, placement: str) -> None:
    store = SummedStore(OBJECTS, hash_name, part_bytes)
    with local_node(shm_dir, slots=8, placement=placement) as node:
        ranks, report = node.load(_plan(store, fsdp=2), store)
        check_exact(ranks, OBJECTS, fsdp=2)
        assert _outcomes(report.objects) == {FIRST: hash_name, SECOND: hash_name}
        assert verified_by(report.objects) == f"store:{hash_name}"


@pytest.mark.parametrize("placement", ["via_arena", "direct"])
@pytest.mark.parametrize("part_bytes", [0, 5000], ids=["whole", "composite"])
@pytest.mark.parametrize("fsdp", [1, 2])
def test_a_flipped_bit_fails_one_load_and_not_the_next(
    shm_dir: Path, fsdp: int, part_bytes: int, placement: str
) -> None:
    store = SummedStore(OBJECTS, "crc64nvme", part_bytes)
    plan = _plan(store, fsdp)
    store.damage = (SECOND, len(OBJECTS[SECOND]) - 4001)
    with local_node(shm_dir, slots=60, placement=placement, fetch_threads=1) as node:
        load_id = node.begin(plan)
        ranks = node.ranks(plan, store, load_id)
        run_all(ranks)
        errors = [rank.outcome for rank in ranks if isinstance(rank.outcome, IntegrityError)]
        assert errors, "somebody must be told, or the load would be READY"
        for error in errors:
            assert error.details["shard"] == SECOND
            assert error.details["expected"] != error.details["found"]
            assert error.details["expected"].startswith("crc64nvme:")
        node.agent.end(load_id)
        # What was wrong is not in the arena any more; what was right is.
        store.damage = None
        store.reads.clear()
        again, report = node.load(plan, store)
        check_exact(again, OBJECTS, fsdp=fsdp)
        assert verified_by(report.objects) == "store:crc64nvme"
        if placement == "via_arena":
            read_again = [key for key, _ in store.reads]
            assert SECOND in read_again
            assert read_again.count(FIRST) <= fsdp  # the chunk that another rank was fetching when the load failed


def test_chunks_in_the_arena_count_as_checked(shm_dir: Path) -> None:
    store = SummedStore(OBJECTS, "crc32c")
    with local_node(shm_dir, slots=60) as node:
        node.load(_plan(store, fsdp=2), store)
        _, report = node.load(_plan(store), store)
        assert report.store_chunks == 0
        assert verified_by(report.objects) == "store:crc32c"


def test_a_restarted_agent_reports_unknown_checks(shm_dir: Path) -> None:
    store = SummedStore(OBJECTS, "crc32c")
    with local_node(shm_dir, slots=60) as node:
        node.load(_plan(store), store)
        node.crash()
        node.agent = node.start_agent()
        ranks, report = node.load(_plan(store), store)
        check_exact(ranks, OBJECTS)
        assert report.store_chunks == 0
        assert _outcomes(report.objects) == {FIRST: NOT_KNOWN, SECOND: NOT_KNOWN}
        assert verified_by(report.objects) == "transport"


def test_chunks_from_disk_are_checked_and_damaged_ones_removed(shm_dir: Path, tmp_path: Path) -> None:
    store = SummedStore(OBJECTS, "crc64nvme")
    plan = _plan(store)
    disk = {"disk_cache_dir": str(tmp_path), "disk_cache_bytes": 1 << 24}
    needed = plan.ranks[0].chunk_ids
    of_first = sum(plan.shards[plan.chunks.shard[chunk]].key == FIRST for chunk in needed)

    def on_disk() -> int:
        return len(chunks_in(str(tmp_path / SUBFOLDER)))

    store.damage = (SECOND, len(OBJECTS[SECOND]) - 4001)
    with local_node(shm_dir, slots=60, **disk) as node:
        load_id = node.begin(plan)
        (rank,) = node.ranks(plan, store, load_id)
        run_all([rank])
        assert isinstance(rank.outcome, IntegrityError)
        node.agent.end(load_id)
        eventually(lambda: on_disk() == of_first, lambda: f"{on_disk()} chunks on disk, not {of_first}")
        store.damage = None
        ranks, _ = node.load(plan, store)
        check_exact(ranks, OBJECTS)
        eventually(lambda: on_disk() == len(needed), lambda: f"{on_disk()} chunks on disk, not {len(needed)}")
    store.reads.clear()
    with local_node(shm_dir, slots=60, **disk) as node:
        ranks, report = node.load(plan, store)
        check_exact(ranks, OBJECTS)
        assert not store.reads
        assert report.disk_chunks == len(needed)
        assert verified_by(report.objects) == "store:crc64nvme"


def test_a_node_that_reads_part_of_an_object_reports_it(shm_dir: Path) -> None:
    objects = flat_objects(tensors=3, rows=2048)  # 32 KiB each: a rank's half is whole chunks
    store = SummedStore(objects, "crc64nvme")
    plan = _plan(store, fsdp=2)
    with local_node(shm_dir, slots=60) as node:
        load_id = node.begin(plan, ranks=[1])
        rank = node.rank(plan, store, load_id, 1)
        run_all([rank])
        assert isinstance(rank.outcome, RankReport)
        assert _outcomes(node.agent.report(load_id).objects) == {"model.safetensors": ONLY_PART}


def test_objects_without_a_usable_checksum(shm_dir: Path) -> None:
    with local_node(shm_dir, slots=60) as node:
        store = SummedStore(OBJECTS, "crc32c", without=frozenset({FIRST}))
        _, report = node.load(_plan(store), store)
        assert _outcomes(report.objects) == {FIRST: NO_CHECKSUM, SECOND: "crc32c"}
        assert verified_by(report.objects) == "transport"
        store = SummedStore(OBJECTS, "sha256")
        _, report = node.load(_plan(store), store)
        assert _outcomes(report.objects) == {FIRST: NOT_COMBINABLE, SECOND: NOT_COMBINABLE}


@pytest.mark.parametrize("hash_name", ["sha256", "md5", "etag_md5"])
def test_a_small_object_is_one_chunk_for_any_checksum(shm_dir: Path, hash_name: str) -> None:
    objects = flat_objects(tensors=5)
    store = SummedStore(objects, hash_name)
    plan = _plan(store, chunk_bytes=1 << 16)
    assert len(plan.chunks) == 1
    with local_node(shm_dir, slots=60) as node:
        ranks, report = node.load(plan, store)
        check_exact(ranks, objects)
        assert _outcomes(report.objects) == {"model.safetensors": hash_name.removeprefix("etag_")}


def test_another_checksum_is_an_error_and_another_etag_is_not(shm_dir: Path) -> None:
    objects = flat_objects(tensors=5)
    for hash_name in ("etag_md5", "sha256"):
        store = SummedStore(objects, hash_name)
        plan = _plan(store, chunk_bytes=1 << 16)
        store.damage = ("model.safetensors", len(objects["model.safetensors"]) - 1)
        with local_node(shm_dir, slots=60) as node:
            if hash_name == "sha256":
                with pytest.raises(IntegrityError):
                    node.load(plan, store)
            else:
                _, report = node.load(plan, store)
                assert _outcomes(report.objects) == {"model.safetensors": NO_MD5}


def test_nodes_together() -> None:
    here = (ObjectCheck("a", "crc32c"), ObjectCheck("b", "crc64nvme"), ObjectCheck("c", reason=ONLY_PART))
    there = (ObjectCheck("a", "crc32c"), ObjectCheck("b", reason=NOT_KNOWN), ObjectCheck("c", "crc32c"))
    joined = join_checks((*here, *there))
    assert _outcomes(joined) == {"a": "crc32c", "b": NOT_KNOWN, "c": ONLY_PART}
    assert unchecked_counts(joined) == {NOT_KNOWN: 1, ONLY_PART: 1}
    assert verified_by(joined) == "transport"
    assert verified_by(()) == "transport"
    assert verified_by(here[:2]) == "store:crc32c+crc64nvme"
