"""Readers in threads over a real agent and arena: exact bytes or one typed error, each chunk read once."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from actors.devices import cpu_device
from actors.devices.cpu_device import copy_runs
from actors.links import AgentLink
from actors.rank.state import RankIdentity
from actors.reader import model_reader
from actors.reader.model_reader import ModelReader, ReadAhead
from cluster.errors import ChunkFailed, ReaderClosed
from cluster.messages import FetchSettings
from cluster.planning.packed_plan import SharedTables
from cluster.planning.plan import LoadPlan
from storage.checkpoints.checkpoint import open_model
from storage.checkpoints.model_index import Tensor
from storage.errors import IntegrityError, StoreUnavailable
from storage.host.processes import ProcessId
from storage.stores.object_store import ByteRange, MemoryStore, ObjectStore
from storage.stores.requests import ReadLimit
from tests.support.checkpoints import flat_objects, odd_objects
from tests.support.faulty_stores import FailingStore, FlipByteStore, WrappedStore
from tests.support.local_node import Belongings, LocalNode, SwitchedLink, local_node, plan_of


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = Belongings()
    yield
    before.check()


class Readers:
    """The readers of one model on one node, and what they should read."""

    def __init__(self, node: LocalNode, objects: dict[str, bytes], chunk_bytes: int, readers: int = 1) -> None:
        self.node, self.objects = node, objects
        self.plan: LoadPlan = plan_of(objects, (1, 1, readers), chunk_bytes)
        self.tensors = open_model(MemoryStore(objects), chunk_bytes=chunk_bytes).tensors
        self.readers = readers
        self.load_id = node.begin(self.plan, on_demand=True, group_patience_s=1.0)

    @contextmanager
    def open(self, store: ObjectStore, rank: int = 0, link: AgentLink | None = None) -> Iterator[ModelReader]:
        reader = ModelReader(
            link or self.node.agent,
            SharedTables(self.plan.shards, self.plan.chunks, self.plan.cut),
            self.plan.ranks[0].chunk_ids.tolist(),
            RankIdentity(self.load_id, 1, rank, 0, ProcessId.current()),
            store,
            FetchSettings(4, self.node.config.fetch_attempts, 5.0, 0.05),
            readers=self.readers,
        )
        try:
            yield reader
        finally:
            reader.close()

    def bytes_of(self, tensor: Tensor) -> bytes:
        return self.objects[self.plan.shards[tensor.shard].key][tensor.start : tensor.end]

    def check(self, reader: ModelReader, tensor: Tensor) -> None:
        found = reader.read(tensor, tensor.shape, (0,) * len(tensor.shape), tensor.shape)
        assert found.tobytes() == self.bytes_of(tensor), tensor.name

    def check_box(self, reader: ModelReader, tensor: Tensor, chance: random.Random) -> None:
        """Compare any box of a tensor of whole bytes."""
        elements = int(np.prod(tensor.shape))
        width = tensor.size_bytes // elements
        starts = [chance.randrange(size + 1) for size in tensor.shape]
        sizes = [chance.randrange(size - start + 1) for start, size in zip(starts, tensor.shape, strict=True)]
        whole = np.frombuffer(self.bytes_of(tensor), np.uint8).reshape(*tensor.shape, width)
        box = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        assert reader.read(tensor, tensor.shape, starts, sizes).tobytes() == whole[box].tobytes()


@pytest.mark.parametrize("chunk_bytes", [64, 4096])
def test_tensors_of_every_dtype_and_shape_are_exact(shm_dir: Path, chunk_bytes: int):
    objects = odd_objects()
    store = WrappedStore(MemoryStore(objects))
    with local_node(shm_dir, slots=9) as node:
        here = Readers(node, objects, chunk_bytes)
        with here.open(store) as reader:
            for tensor in here.tensors:
                here.check(reader, tensor)
        assert len(store.reads) == len(set(store.reads))


def test_boxes_are_exact_and_read_only_their_chunks(shm_dir: Path):
    objects = flat_objects(64, 64)
    store = WrappedStore(MemoryStore(objects))
    chance = random.Random(7)
    with local_node(shm_dir, slots=9) as node:
        here = Readers(node, objects, 1024)
        with here.open(store) as reader:
            (first, *_) = [tensor for tensor in here.tensors if len(tensor.shape) == 2]
            rows = reader.read(first, first.shape, (1, 0), (1, first.shape[1]))
            assert len(store.reads) <= 1 + -(-rows.nbytes // 1024)
            for _ in range(100):
                tensor = chance.choice(here.tensors)
                if tensor.size_bytes:
                    here.check_box(reader, tensor, chance)


def test_elements_in_row_major_order_are_read_as_a_range(shm_dir: Path):
    objects = flat_objects(16, 64)
    with local_node(shm_dir, slots=9) as node:
        here = Readers(node, objects, 1024)
        with here.open(MemoryStore(objects)) as reader:
            tensor = max(here.tensors, key=lambda each: each.size_bytes)
            elements = int(np.prod(tensor.shape))
            width = tensor.size_bytes // elements
            found = reader.read(tensor, (elements,), (5,), (elements - 9,))
            assert found.tobytes() == here.bytes_of(tensor)[5 * width : (elements - 4) * width]


@pytest.mark.parametrize(("threads", "slots"), [(1, 8), (4, 24)])
def test_readers_of_a_group_read_each_chunk_once(shm_dir: Path, threads: int, slots: int):
    objects = flat_objects(64, 256)
    store = WrappedStore(MemoryStore(objects))
    failed: list[BaseException] = []

    def read(reader: ModelReader, here: Readers, tensors: list[Tensor]) -> None:
        try:
            for tensor in tensors:
                here.check(reader, tensor)
        except BaseException as error:
            failed.append(error)

    with local_node(shm_dir, slots=slots) as node:
        here = Readers(node, objects, 4096, readers=2)
        with here.open(store, 0) as first, here.open(store, 1) as second:
            work = [
                threading.Thread(target=read, args=(reader, here, list(here.tensors[number::threads])))
                for reader in (first, second)
                for number in range(threads)
            ]
            for thread in work:
                thread.start()
            for thread in work:
                thread.join()
        assert failed == []
        assert len(store.reads) == len(set(store.reads)) == len(here.plan.chunks) - headers(here)


def headers(here: Readers) -> int:
    """Number of chunks without tensors."""
    return len(here.plan.chunks) - len(here.plan.ranks[0].chunk_ids)


def test_reading_in_file_order_fetches_ahead(shm_dir: Path):
    objects = flat_objects(64, 256)
    store = WrappedStore(MemoryStore(objects))
    with local_node(shm_dir, slots=30) as node:
        here = Readers(node, objects, 4096)
        with here.open(store) as reader:
            for tensor in here.tensors[: len(here.tensors) // 2]:
                here.check(reader, tensor)
            touched = max(chunk for chunk, _ in _chunks_of(here, here.tensors[: len(here.tensors) // 2]))
            wait_until(lambda: len(store.reads) > touched + 3)
            assert len(store.reads) <= touched + 1 + 10 + 4  # the limit is a third of the window


def _chunks_of(here: Readers, tensors: tuple[Tensor, ...] | list[Tensor]) -> list[tuple[int, Tensor]]:
    table = here.plan.chunks
    return [
        (chunk, tensor)
        for tensor in tensors
        for chunk in range(len(table))
        if table.shard[chunk] == tensor.shard and table.start[chunk] < tensor.end and table.end[chunk] > tensor.start
    ]


def test_prefetched_tensors_are_there_before_they_are_read(shm_dir: Path):
    objects = flat_objects(64, 256)
    store = WrappedStore(MemoryStore(objects))
    with local_node(shm_dir, slots=30) as node:
        here = Readers(node, objects, 4096)
        wanted = [here.tensors[-1], here.tensors[0]]
        chunks = {chunk for chunk, _ in _chunks_of(here, wanted)}
        with here.open(store) as reader:
            reader.prefetch([(tensor, (0,) * len(tensor.shape), tensor.shape) for tensor in wanted])
            wait_until(lambda: len(store.reads) >= len(chunks))
            for tensor in wanted:
                here.check(reader, tensor)
            assert len(store.reads) == len(chunks)


def test_the_first_chunks_are_there_before_anything_is_read(shm_dir: Path):
    objects = flat_objects(64, 256)
    store = WrappedStore(MemoryStore(objects))
    with local_node(shm_dir, slots=30) as node:
        here = Readers(node, objects, 4096)
        with here.open(store) as reader:
            reader.fetch_first()
            wait_until(lambda: len(store.reads) >= 4)
            for tensor in here.tensors:
                here.check(reader, tensor)
            assert len(store.reads) == len({chunk for chunk, _ in _chunks_of(here, here.tensors)})


def wait_until(true: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 20
    while not true():
        assert time.monotonic() < give_up_s, "it does not happen"
        time.sleep(0.005)


def test_damaged_bytes_are_an_error_and_are_never_returned(shm_dir: Path):
    objects = flat_objects(16, 64)
    with local_node(shm_dir, slots=9) as node:
        here = Readers(node, objects, 1024)
        tensor = here.tensors[3]
        key = here.plan.shards[tensor.shard].key
        store = FlipByteStore(MemoryStore(objects), key, tensor.start, lambda _: True)
        with here.open(store) as reader:
            with pytest.raises(IntegrityError, match="not the published"):
                here.check(reader, tensor)
            with pytest.raises(IntegrityError):  # and so is every later read
                here.check(reader, here.tensors[0])


def test_a_store_that_fails_is_one_typed_error_for_all_reads(shm_dir: Path):
    objects = flat_objects(16, 64)
    with local_node(shm_dir, slots=9, fetch_attempts=1, chunk_attempts=1) as node:
        here = Readers(node, objects, 1024)
        store = FailingStore(MemoryStore(objects), lambda *_: True, lambda: StoreUnavailable("gone"))
        with here.open(store) as reader, pytest.raises(ChunkFailed, match="gone"):
            here.check(reader, here.tensors[0])


def test_reads_after_close_are_an_error(shm_dir: Path):
    objects = flat_objects(16, 64)
    with local_node(shm_dir, slots=9) as node:
        here = Readers(node, objects, 1024)
        with here.open(MemoryStore(objects)) as reader:
            here.check(reader, here.tensors[0])
        with pytest.raises(ReaderClosed):
            here.check(reader, here.tensors[1])
        reader.close()


def test_close_ends_reads_that_wait(shm_dir: Path):
    objects = flat_objects(16, 64)

    class StuckStore(WrappedStore):
        """A store whose answers do not come. A read can be ended, like that of S3."""

        def read_pieces(self, *_: object, limit: ReadLimit, **__: object) -> None:
            ended = threading.Event()
            with limit.calling(ended.set):
                ended.wait(20)
            limit.check()

    with local_node(shm_dir, slots=9) as node:
        here = Readers(node, objects, 1024)
        raised: list[BaseException] = []

        def read(reader: ModelReader) -> None:
            try:
                here.check(reader, here.tensors[0])
            except BaseException as error:
                raised.append(error)

        begun_s = time.monotonic()
        with here.open(StuckStore(MemoryStore(objects))) as reader:
            thread = threading.Thread(target=read, args=(reader,))
            thread.start()
            time.sleep(0.2)
        thread.join()
        assert time.monotonic() - begun_s < 15
        assert isinstance(raised[0], ReaderClosed)


def test_a_restarted_agent_is_no_error(shm_dir: Path):
    objects = flat_objects(64, 64)
    with local_node(shm_dir, slots=9) as node:
        here = Readers(node, objects, 1024)
        link = SwitchedLink(node.agent)
        with here.open(MemoryStore(objects), link=link) as reader:
            here.check(reader, here.tensors[0])
            link.cut.set()
            node.crash()
            node.agent = link.agent = node.start_agent()
            node.begin(here.plan, here.load_id, on_demand=True)
            link.cut.clear()
            for tensor in here.tensors:
                here.check(reader, tensor)


def test_readers_in_the_process_of_the_next_agent_keep_their_slots(shm_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """A process with two open models becomes the host while one of them copies from its slots. The other asks first."""
    objects = flat_objects(64, 64)
    copying, goes_on, failed = threading.Event(), threading.Event(), []

    def slow_copy(*arguments: object) -> None:
        if threading.current_thread() is thread and not copying.is_set():
            copying.set()
            assert goes_on.wait(30)
        copy_runs(*arguments)

    def read() -> None:
        try:
            for tensor in here.tensors:
                here.check(slow, tensor)
        except BaseException as error:
            failed.append(error)

    monkeypatch.setattr(model_reader, "usable_cpus", lambda: 1)  # the thread that reads copies
    monkeypatch.setattr(cpu_device, "copy_runs", slow_copy)
    with local_node(shm_dir, slots=9) as node:
        here = Readers(node, objects, 1024, readers=2)
        links = [SwitchedLink(node.agent), SwitchedLink(node.agent)]
        with (
            here.open(MemoryStore(objects), 0, links[0]) as busy,
            here.open(MemoryStore(objects), 1, links[1]) as slow,
        ):
            thread = threading.Thread(target=read)
            thread.start()
            assert copying.wait(10)
            (slot,) = [slow.state.readable[chunk] for chunk in slow.state.copying]
            for link in links:
                link.cut.set()
            node.crash()
            node.agent = links[0].agent = links[1].agent = node.start_agent()
            node.begin(here.plan, here.load_id, on_demand=True, group_patience_s=0.5)
            arena = node.agent._arena
            assert arena is not None
            before = arena.view(slot, 1024).tobytes()
            links[0].cut.clear()
            for tensor in here.tensors:
                here.check(busy, tensor)
            assert ProcessId.current() in node.agent._survivors.left
            assert arena.view(slot, 1024).tobytes() == before
            links[1].cut.clear()
            goes_on.set()
            thread.join()
            wait_until(lambda: not node.agent._survivors.left)
    assert not failed


def test_a_reader_that_fails_leaves_when_its_slots_are_read(shm_dir: Path, monkeypatch: pytest.MonkeyPatch):
    objects = flat_objects(8, 64)
    copying, goes_on = threading.Event(), threading.Event()

    def slow_copy(*arguments: object) -> None:
        copying.set()
        assert goes_on.wait(10)
        copy_runs(*arguments)

    monkeypatch.setattr(model_reader, "usable_cpus", lambda: 1)  # the thread that reads copies
    monkeypatch.setattr(cpu_device, "copy_runs", slow_copy)
    with local_node(shm_dir, slots=9) as node:
        here = Readers(node, objects, 1024)
        with here.open(MemoryStore(objects)) as reader:
            thread = threading.Thread(target=here.check, args=(reader, here.tensors[0]))
            thread.start()
            assert copying.wait(10)
            reader.cancel(StoreUnavailable("gone"))
            time.sleep(0.2)
            assert node.agent._ledger._cache.stats().in_use_slots == 1
            goes_on.set()
            thread.join()
        assert node.agent._ledger._cache.stats().in_use_slots == 0


@pytest.mark.parametrize("fails", [False, True])
def test_chunks_of_one_tensor_are_copied_side_by_side(shm_dir: Path, monkeypatch: pytest.MonkeyPatch, fails: bool):
    """Two copies meet; when a later chunk is bad, the read ends after the copies that run."""
    objects = flat_objects(1, 512)
    monkeypatch.setattr(model_reader, "usable_cpus", lambda: 2)
    met, running = threading.Barrier(2), Counter[str]()

    def slow_copy(*arguments: object) -> None:
        running["begun"] += 1
        if running["begun"] <= 2:
            met.wait(10)  # the other copy, in another thread
            time.sleep(0.2)
        copy_runs(*arguments)
        running["ended"] += 1

    with local_node(shm_dir, slots=9) as node:
        here = Readers(node, objects, 1024)
        (tensor,) = here.tensors

        def fails_late(key: str, byte_range: ByteRange, number: int) -> bool:
            return fails and byte_range.start <= tensor.start + 5000 < byte_range.end

        store = FailingStore(MemoryStore(objects), fails_late)
        with here.open(store) as reader:
            reader.read(tensor, tensor.shape, (0, 0), (1, tensor.shape[1]))  # attached: it may want several chunks
            monkeypatch.setattr(cpu_device, "copy_runs", slow_copy)
            if not fails:
                here.check(reader, tensor)
                return
            with pytest.raises(ChunkFailed):
                here.check(reader, tensor)
            assert running["begun"] == running["ended"] >= 2


def test_all_slots_are_free_after_readers_have_left(shm_dir: Path):
    objects = flat_objects(64, 64)
    with local_node(shm_dir, slots=9) as node:
        here = Readers(node, objects, 1024)
        with here.open(MemoryStore(objects)) as reader:
            for tensor in here.tensors:
                here.check(reader, tensor)
        stats = node.agent._ledger._cache.stats()
        assert (stats.leased_slots, stats.quarantined_slots, stats.in_use_slots) == (0, 0, 0)


# --- reading ahead -------------------------------------------------------------------------------------------


def test_a_single_read_wants_nothing_ahead():
    ahead = ReadAhead(range(100), limit=8)
    assert ahead.wanted(50) == [50]
    assert ahead.wanted(7) == [7]


def test_a_run_wants_more_and_more_ahead():
    ahead = ReadAhead(range(100), limit=4)
    lengths = []
    for chunk in range(8):
        lengths.append(len(ahead.wanted(chunk)) - 1)
        ahead.read(chunk)
    assert lengths == [0, 1, 2, 3, 4, 4, 4, 4]


def test_a_run_that_begins_with_the_model_has_its_full_length_at_once():
    ahead = ReadAhead(range(100, 200), limit=3)
    assert ahead.before_read() == []
    ahead.begin()
    assert ahead.before_read() == [100, 101, 102]
    gone, wanted = [], []
    for chunk in range(101, 105):  # 100 was fetched for nothing, and counts until it is far behind
        wanted.append(ahead.wanted(chunk))
        gone += ahead.read(chunk)
    assert wanted == [[chunk, chunk + 1, chunk + 2] for chunk in range(101, 105)]
    assert gone == [101, 100]
    assert ahead.wanted(105) == [105, 106, 107, 108]
    assert ahead.before_read() == []


def test_the_rest_of_a_read_comes_before_a_guess():
    ahead = ReadAhead(range(100), limit=3)
    assert ahead.wanted(10, [11, 12, 13, 14]) == [10, 11, 12, 13]


def test_nothing_is_guessed_from_the_chunks_of_one_read():
    ahead = ReadAhead(range(100), limit=3)
    read = [10, 11, 12, 13, 14]
    for number, chunk in enumerate(read):
        following = read[number + 1 :]
        assert ahead.wanted(chunk, following) == [chunk, *following[:3]]
        ahead.read(chunk)
    assert ahead.wanted(15) == [15, 16]  # it continues the read, so it is a run


def test_planned_chunks_replace_the_guess():
    ahead = ReadAhead(range(100), limit=3)
    ahead.plan([9, 5, 70, 200])
    assert ahead.wanted(20) == [20, 9, 5, 70]
    assert ahead.wanted(9) == [9, 5, 70]


def test_planned_chunks_may_be_read_in_another_order():
    ahead = ReadAhead(range(100), limit=2)
    ahead.plan([50, 60, 70, 80, 90])
    for chunk in (60, 50, 70):
        ahead.wanted(chunk)
        ahead.read(chunk)
    assert ahead.wanted(5) == [5, 80, 90]


def test_planned_chunks_that_are_passed_over_are_forgotten_in_time():
    ahead = ReadAhead(range(100), limit=2)
    ahead.plan(range(10, 20))
    wanted = []
    for chunk in range(12, 17):  # 10 and 11 are never read
        wanted.append(ahead.wanted(chunk)[1:])
        gone = ahead.read(chunk)
    assert wanted == [[10, 11], [11], [15], [16, 17], [17, 18]]
    assert not {10, 11} & {*ahead.wanted(17), *gone}


def test_chunks_that_the_plan_reads_again_stay_for_that():
    ahead = ReadAhead(range(100), limit=5)
    ahead.plan([0, 1, *range(10, 20), 0, 1, *range(20, 30), 1])
    gone: list[int] = []

    def read(*chunks: int) -> None:
        for chunk in chunks:
            ahead.wanted(chunk)
            gone.extend(ahead.read(chunk))

    read(0, 1, *range(10, 20))
    assert not {0, 1} & {*gone}
    read(0, 1, *range(20, 30))
    assert 0 in gone
    assert 1 not in gone
    read(1, *range(30, 36))
    assert 1 in gone


def test_chunks_stay_for_the_plan_until_too_many_do():
    """Whoever plans a read and leaves it out costs nobody the room of later ones."""
    ahead = ReadAhead(range(100), limit=3)
    ahead.plan([*range(50), *range(50)])
    held: set[int] = set()
    for chunk in range(50):
        ahead.wanted(chunk)
        held = (held | {chunk}) - {*ahead.read(chunk)}
    assert held == {*range(44, 50)}


def test_reads_at_once_share_the_limit_and_keep_what_they_wait_for():
    ahead = ReadAhead(range(100), limit=4)
    first, second = [0, 1, 2, 3, 4, 5], [50, 51, 52, 53]
    ahead.read_begins(first)
    ahead.read_begins(second)
    assert ahead.wanted(0, first[1:]) == [0, 1, 2, 3, 4]
    assert ahead.wanted(50, second[1:]) == [50]
    assert ahead.read(50) == []  # chunks 1 to 4 are far from there, and somebody waits for them
    assert ahead.wanted(51, second[2:]) == [51]
    assert ahead.read(0) == []
    assert ahead.wanted(1, first[2:]) == [1, 2, 3, 4]  # 51 is the fifth
    assert ahead.read(1) == []
    ahead.read_ends(first)  # it failed
    assert ahead.wanted(51, second[2:]) == [51, 52, 53]
    assert ahead.read(51) == [2, 3, 4]


def test_what_a_read_needs_takes_the_room_of_the_plan():
    ahead = ReadAhead(range(100), limit=3)
    ahead.plan([10, 11, 12, 13])
    assert ahead.before_read() == [10, 11, 12]
    assert ahead.before_read() == []
    ahead.read_begins([50, 51, 52, 53, 54])
    assert ahead.wanted(50, [51, 52, 53, 54]) == [50, 51, 52, 53]


def test_read_chunks_and_those_of_an_ended_run_are_given_back():
    ahead = ReadAhead(range(100), limit=3)
    gone: Counter[int] = Counter()
    for chunk in range(6):
        ahead.wanted(chunk)
        gone.update(ahead.read(chunk))
    assert sorted(gone) == [0, 1, 2]
    ahead.wanted(50)
    assert ahead.read(50) == [3, 6, 7, 8]
