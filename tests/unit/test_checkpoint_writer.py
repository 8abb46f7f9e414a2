"""The layout of a save, and the writer: parts in any order, a commit that replaces a revision, a continued save."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from actors.saving.writer import Begun, CheckpointWriter, PartsDiffer, begin_save, claim_state
from cluster.errors import SaveConflict, SaveError, SaveRefused
from cluster.saving.shards import ShardLayout, TensorSpec, lay_out, part_bounds, revision_of_file
from storage.checkpoints import replaced_files
from storage.checkpoints.checkpoint import open_model, read_other_file
from storage.checkpoints.checkpoint_files import INDEX_KEY, SAVE_JOURNAL_KEY, parse_weight_map
from storage.checkpoints.manifest import MANIFEST_KEY
from storage.checkpoints.model_index import chunk_bounds
from storage.checkpoints.replaced_files import BEFORE_KEY, ReplacedFiles, put_back, read_replaced
from storage.checkpoints.safetensors_header import parse_header
from storage.errors import AccessDenied, IntegrityError, ObjectChanged, ObjectNotFound, PublishError, StoreUnavailable
from storage.publishing import saves
from storage.publishing.publish import publish
from storage.publishing.save_history import interrupted_saves, remember_save
from storage.publishing.saves import COPY_PROBE_KEY, list_saves, parse_journal, put_if, remove_leftovers, writes_parts
from storage.publishing.verify import verify
from storage.stores import local
from storage.stores.embedded_s3 import EmbeddedS3
from storage.stores.local import LocalStore
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore
from storage.stores.open_store import open_store
from storage.stores.parts import MAX_PARTS, MIN_PART_BYTES
from storage.stores.requests import RetryPolicy
from tests.support.s3_servers import make_bucket, server_ref

CHUNK = 1 << 20
POLICY = RetryPolicy(attempts=1)


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "local":
        yield LocalStore(tmp_path / "model")
        return
    server: EmbeddedS3 = request.getfixturevalue("rclone")
    name = f"save-{random.randrange(1 << 60):x}"
    make_bucket(server, name)
    with closing(open_store(server_ref(server, f"{name}/model"), server.credentials())) as opened:
        yield opened


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "b.wide": random.integers(0, 255, (700, 9000), dtype=np.uint8),
        "a.matrix": random.standard_normal((1024, 3000)).astype(np.float32),
        "none": np.zeros((0, 4), np.float16),
        "scalar": np.array(3, np.int64),
        "Zoë": random.standard_normal(7).astype(np.float32),
    }


def specs_of(model: dict[str, np.ndarray]) -> list[TensorSpec]:
    names = {"uint8": "U8", "float32": "F32", "float16": "F16", "int64": "I64"}
    return [TensorSpec(name, names[str(array.dtype)], array.shape) for name, array in model.items()]


def begin(store: ObjectStore, model: dict[str, np.ndarray], **more: Any) -> tuple[tuple[ShardLayout, ...], Begun]:
    layouts = lay_out(specs_of(model), revision="0", max_shard_bytes=8_000_000, chunk_bytes=CHUNK)
    return begin_save(store, layouts, chunk_bytes=CHUNK, policy=POLICY, **more)


def ranges(layouts: tuple[ShardLayout, ...], model: dict[str, np.ndarray], piece_bytes: int) -> list:
    found = []
    for shard, layout in enumerate(layouts):
        for tensor in layout.tensors:
            data = memoryview(model[tensor.name].tobytes())
            for at in range(0, len(data), piece_bytes):
                found.append((shard, tensor.start + at, data[at : at + piece_bytes]))
    random.Random(1).shuffle(found)
    return found


def write_all(writer: CheckpointWriter, layouts: tuple[ShardLayout, ...], model: dict[str, np.ndarray]) -> None:
    for shard, start, data in ranges(layouts, model, 300_001):
        writer.write(shard, start, data)


def save(store: ObjectStore, model: dict[str, np.ndarray]) -> str:
    layouts, begun = begin(store, model)
    writer = CheckpointWriter(store, layouts, begun, policy=POLICY)
    write_all(writer, layouts, model)
    return writer.commit(extra_files={"config.json": b"{}"}).revision


def stored(store: ObjectStore, key: str) -> bytes:
    data = bytearray(store.stat(key).size_bytes)
    store.read_into(key, ByteRange(0, len(data)), memoryview(data))
    return bytes(data)


def test_files_are_those_of_save_file(store: ObjectStore, tmp_path: Path) -> None:
    model = arrays()
    revision = save(store, model)
    index = open_model(store)
    assert (index.revision, index.source) == (revision, "manifest")
    for shard in index.shards:
        part = {t.name: model[t.name] for t in index.tensors if index.shards[t.shard] is shard}
        safetensors.numpy.save_file(part, tmp_path / "expected", {"format": "pt"})
        assert stored(store, shard.key) == (tmp_path / "expected").read_bytes()
    weight_map = json.loads(stored(store, "model.safetensors.index.json"))["weight_map"]
    assert weight_map == {t.name: index.shards[t.shard].key for t in index.tensors}
    report = verify(store)
    assert report.ok, report
    assert list_saves(store, revision_of_file, POLICY).leftovers == ()
    assert publish(store, chunk_bytes=CHUNK).unchanged


def test_all_files_are_on_disk_before_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut there is no manifest whose files, or their names, were only in the page cache."""
    folder, calls = tmp_path / "model", []
    sync, rename = os.fsync, os.rename

    def fsync(file: int) -> None:
        sync(file)
        calls.append(("fsync", os.fstat(file).st_ino))

    def move(old: str, new: str) -> None:
        inode = os.stat(old).st_ino
        rename(old, new)
        calls.append((os.path.basename(new), inode))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", move)
    save(LocalStore(folder), arrays())
    moved = {name: place for place, (name, _) in enumerate(calls) if (folder / name).exists()}
    published = [*moved][: [*moved].index(MANIFEST_KEY) + 1]
    assert {"config.json", INDEX_KEY, MANIFEST_KEY} < set(published)
    assert sum(name.endswith(".safetensors") for name in published) > 1
    for name in published:
        place = moved[name]
        assert ("fsync", calls[place][1]) in calls[:place], name
        end = len(calls) if name == MANIFEST_KEY else moved[MANIFEST_KEY]
        assert ("fsync", folder.stat().st_ino) in calls[place:end], name


def test_the_next_revision_has_files_of_its_own(store: ObjectStore) -> None:
    first = save(store, arrays())
    files = {shard.key for shard in open_model(store).shards}
    second = save(store, arrays(1))
    index = open_model(store)
    assert index.revision == second != first
    assert files.isdisjoint(shard.key for shard in index.shards)
    assert verify(store).ok
    report = list_saves(store, revision_of_file, POLICY)
    assert {item.key for item in report.leftovers} == files
    remove_leftovers(store, report.leftovers, POLICY)
    assert verify(store).ok
    assert list_saves(store, revision_of_file, POLICY).leftovers == ()


def test_an_interrupted_save_is_continued(store: ObjectStore) -> None:
    before = save(store, arrays())
    model = arrays(2)
    layouts, begun = begin(store, model)
    writer = CheckpointWriter(store, layouts, begun, policy=POLICY)
    for shard, start, data in ranges(layouts, model, 300_001)[:-5]:
        writer.write(shard, start, data)
    done = writer.written_bytes
    writer.note([], now=True)
    assert 0 < done < sum(layout.size_bytes for layout in layouts)
    with pytest.raises(SaveError, match="parts were not written"):
        writer.commit()
    assert open_model(store).revision == before
    layouts, again = begin(store, model)
    assert again.revision == begun.revision
    writer = CheckpointWriter(store, layouts, again, policy=POLICY)
    write_all(writer, layouts, model)
    assert writer.reused_bytes == done
    assert writer.written_bytes == sum(layout.size_bytes for layout in layouts) - done
    assert writer.commit().revision == open_model(store).revision
    assert verify(store).ok


@pytest.mark.parametrize("recorded", [True, False])
def test_parts_with_other_bytes_are_sent_again(store: ObjectStore, recorded: bool) -> None:
    layouts, begun = begin(store, arrays(3))
    writer = CheckpointWriter(store, layouts, begun, policy=POLICY)
    write_all(writer, layouts, arrays(3))
    if recorded:
        writer.note([], now=True)
    layouts, begun = begin(store, arrays(4))
    writer = CheckpointWriter(store, layouts, begun, policy=POLICY)
    try:
        write_all(writer, layouts, arrays(4))
    except PartsDiffer:  # rclone cannot replace a part
        layouts, begun = begin(store, arrays(4), anew=True)
        writer = CheckpointWriter(store, layouts, begun, policy=POLICY)
        write_all(writer, layouts, arrays(4))
    writer.commit()
    assert verify(store).ok
    assert list_saves(store, revision_of_file, POLICY).leftovers == ()


def test_complete_files_are_not_changed(store: ObjectStore) -> None:
    """A save that was killed between its files and its manifest."""
    model = arrays(5)

    def stop(step: str) -> None:
        if step == "files":
            raise KeyboardInterrupt

    layouts, begun = begin(store, model)
    writer = CheckpointWriter(store, layouts, begun, policy=POLICY)
    write_all(writer, layouts, model)
    with pytest.raises(KeyboardInterrupt):
        writer.commit(on_step=stop)
    other = arrays(6)
    layouts, begun = begin(store, other)
    assert set(begun.uploads) == {""}
    with pytest.raises(PartsDiffer):
        write_all(CheckpointWriter(store, layouts, begun, policy=POLICY), layouts, other)
    layouts, begun = begin(store, model)
    writer = CheckpointWriter(store, layouts, begun, policy=POLICY)
    write_all(writer, layouts, model)
    writer.commit()
    assert writer.written_bytes == 0
    assert verify(store).ok


def test_another_layout_removes_what_was_left(store: ObjectStore) -> None:
    layouts, begun = begin(store, arrays())
    write_all(CheckpointWriter(store, layouts, begun, policy=POLICY), layouts, arrays())
    save(store, {"w": np.arange(10, dtype=np.float32)})
    assert list_saves(store, revision_of_file, POLICY).leftovers == ()
    assert verify(store).ok


def test_of_two_saves_the_later_one_wins(store: ObjectStore) -> None:
    model = {"w": np.arange(10, dtype=np.float32)}
    layouts, begun = begin(store, model)
    first = CheckpointWriter(store, layouts, begun, policy=POLICY)
    write_all(first, layouts, model)
    revision = save(store, model)
    with pytest.raises(SaveConflict):
        first.commit()
    assert open_model(store).revision == revision


def test_of_two_saves_with_one_training_state_the_later_one_wins(store: ObjectStore) -> None:
    """The earlier one must not name a state that the later one replaces, whatever it has begun."""
    model, number = {"w": np.arange(10, dtype=np.float32)}, "0123456789abcdef"
    early = claim_state(store, number, POLICY)
    layouts, begun = begin(store, model, state=early)
    first = CheckpointWriter(store, layouts, begun, policy=POLICY)
    write_all(first, layouts, model)
    late = claim_state(store, "f" * 16, POLICY)
    assert late.partition(".")[0] == number
    with pytest.raises(SaveConflict):
        begin(store, model, state=early)
    begin(store, model, state=late)
    with pytest.raises(SaveConflict):
        first.commit()


def interrupted(store: ObjectStore, model: dict[str, np.ndarray]) -> Callable[[], object]:
    """Write all of a save but its last part. Return a call by which another rank than 0 writes that."""
    layouts, begun = begin(store, model)
    first = CheckpointWriter(store, layouts, begun, policy=POLICY)
    late = layouts[-1].parts[-1]
    for shard, start, data in ranges(layouts, model, 300_001):
        if shard < len(layouts) - 1 or start + len(data) <= late.start:
            first.write(shard, start, data)
    first.note([], now=True)
    other, place = (
        CheckpointWriter(store, layouts, begun, policy=POLICY),
        (len(layouts) - 1, len(layouts[-1].parts) - 1),
    )
    return lambda: other.write_part(*place, memoryview(bytes(late.size_bytes)))


def test_ranks_of_an_earlier_save_that_still_run_change_nothing(tmp_path: Path) -> None:
    """Rank 0 alone reads the journal, so the other ranks of the earlier save go on."""
    store = LocalStore(tmp_path)
    write_late = interrupted(store, arrays(1))
    layouts, begun = begin(store, arrays(2))
    later = CheckpointWriter(store, layouts, begun, policy=POLICY)
    write_all(later, layouts, arrays(2))
    with pytest.raises(ObjectNotFound, match="ended"):
        write_late()
    revision = later.commit().revision
    assert verify(store).ok
    assert open_model(store).revision == revision
    assert list_saves(store, revision_of_file, POLICY).leftovers == ()


@pytest.mark.parametrize("wait_s", [0.0, 60.0])
def test_a_part_being_written_keeps_an_upload_from_being_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    """An open descriptor follows a rename. The later save waits for it, or leaves the file alone."""
    monkeypatch.setattr(local, "TAKEOVER_S", wait_s)
    store, pwrite = LocalStore(tmp_path), os.pwrite
    write_late = interrupted(store, arrays(1))
    is_open, may_write = threading.Event(), threading.Event()

    def late(file: int, data: memoryview, start: int) -> int:
        if threading.current_thread() is thread:
            is_open.set()
            may_write.wait(60)
        return pwrite(file, data, start)

    thread = threading.Thread(target=write_late)
    monkeypatch.setattr(os, "pwrite", late)
    thread.start()
    assert is_open.wait(60)
    if wait_s:
        threading.Timer(0.3, may_write.set).start()
    layouts, begun = begin(store, arrays(2))
    assert may_write.is_set() == bool(wait_s)
    later = CheckpointWriter(store, layouts, begun, policy=POLICY)
    write_all(later, layouts, arrays(2))
    may_write.set()
    thread.join(60)
    later.commit()
    assert verify(store).ok
    assert list_saves(store, revision_of_file, POLICY).leftovers == ()


def test_a_part_counts_as_written_if_the_file_has_its_bytes(tmp_path: Path) -> None:
    """The second save is killed after it has replaced parts, and before it has written that to the journal."""
    store = LocalStore(tmp_path)
    for seed in (1, 2):
        layouts, begun = begin(store, arrays(seed))
        writer = CheckpointWriter(store, layouts, begun, policy=POLICY)
        write_all(writer, layouts, arrays(seed))
        if seed == 1:
            writer.note([], now=True)
    layouts, begun = begin(store, arrays(1))
    writer = CheckpointWriter(store, layouts, begun, policy=POLICY)
    write_all(writer, layouts, arrays(1))
    writer.commit()
    assert verify(store).ok


def test_a_save_that_is_abandoned_leaves_the_journal_of_another(store: ObjectStore) -> None:
    model = {"w": np.arange(10, dtype=np.float32)}
    layouts, begun = begin(store, model)
    first = CheckpointWriter(store, layouts, begun, policy=POLICY)
    layouts, begun = begin(store, {"other": np.zeros(3, np.uint8)})
    later = CheckpointWriter(store, layouts, begun, policy=POLICY)
    write_all(later, layouts, {"other": np.zeros(3, np.uint8)})
    first.abandon()
    later.commit()
    assert list_saves(store, revision_of_file, POLICY).leftovers == ()


FILES = {"config.json": b'{"a": 1}', "tokenizer.json": b"[1, 2, 3]", "1_Pooling/config.json": b"{}", "same.txt": b"x"}
NEWER = {**FILES, "config.json": b'{"a": 2}', "tokenizer.json": b"[1]", "1_Pooling/config.json": b"[]", "new.txt": b"y"}


def commit(
    store: ObjectStore, model: dict[str, np.ndarray], files: dict[str, bytes], *, stop_at: str = "", call: Any = None
) -> str:
    """Save, and call `call` at a step of the commit; by default it stops there."""

    def on_step(step: str) -> None:
        if step == stop_at:
            if call is None:
                raise KeyboardInterrupt
            call()

    layouts, begun = begin(store, model)
    writer = CheckpointWriter(store, layouts, begun, policy=POLICY)
    write_all(writer, layouts, model)
    if not stop_at or call is not None:
        return writer.commit(extra_files=files, on_step=on_step).revision
    with pytest.raises(KeyboardInterrupt):
        writer.commit(extra_files=files, on_step=on_step)
    return ""


def contents(store: ObjectStore) -> dict[str, bytes]:
    """Return what is published, and what a reader without Longshore finds by the index."""
    index = open_model(store)
    found = {file.key: read_other_file(store, file) for file in index.files}
    weight_map = parse_weight_map(stored(store, INDEX_KEY))
    assert set(weight_map) == {tensor.name for tensor in index.tensors}
    for key in set(weight_map.values()):
        assert parse_header(stored(store, key), store.stat(key).size_bytes).tensors
    report = verify(store)
    assert (report.ok, report.revision) == (True, index.revision), report
    return found


@pytest.mark.parametrize("step", ["files", "index", "manifest", "cleanup"])
def test_small_files_stay_until_the_manifest(store: ObjectStore, step: str) -> None:
    model, newer = {"w": np.arange(10, dtype=np.float32)}, {"w": np.ones(10, np.float32)}
    first = commit(store, model, FILES)
    before = contents(store)
    assert FILES.items() <= before.items()
    listed = {info.key: stored(store, info.key) for info in store.list()}
    commit(store, newer, NEWER, stop_at=step)
    if step == "cleanup":  # the manifest is there
        assert NEWER.items() <= contents(store).items()
    else:
        assert (open_model(store).revision, contents(store)) == (first, before)
        # Another layout: the save is undone when the next one begins, before its files are removed.
        begin(store, {"other": np.zeros(3, np.uint8)})
        assert stored(store, INDEX_KEY) == before[INDEX_KEY]
        assert (open_model(store).revision, contents(store)) == (first, before)
        # A save that nobody continues is undone by `longshore saves --clean`.
        commit(store, newer, NEWER, stop_at=step)
        commit(store, newer, {**NEWER, "config.json": b"{}"}, stop_at=step)  # once more, with another file
        assert contents(store) == before
        if step != "files":  # publish would take files of two revisions for one
            with pytest.raises(PublishError, match="interrupted while it replaced"):
                publish(store)
        left = interrupted_saves(store, revision_of_file, POLICY).leftovers
        assert "replaced" in {item.kind for item in left} or step == "files"
        assert interrupted_saves(store, revision_of_file, POLICY, clean=True).leftovers == left
        assert {info.key: stored(store, info.key) for info in store.list()} == listed
        commit(store, newer, NEWER, stop_at=step)
    again = commit(store, newer, NEWER)
    assert (open_model(store).revision, NEWER.items() <= contents(store).items()) == (again, True)
    assert BEFORE_KEY not in {info.key for info in store.list()}


def test_small_files_of_a_revision_published_meanwhile_stay(store: ObjectStore) -> None:
    model, newer = {"w": np.arange(10, dtype=np.float32)}, {"w": np.ones(10, np.float32)}
    commit(store, model, FILES)
    with pytest.raises(SaveConflict):
        commit(store, newer, NEWER, stop_at="files", call=lambda: publish(store, hash_name="xxh3_128"))
    assert FILES.items() <= contents(store).items()
    interrupted_saves(store, revision_of_file, POLICY, clean=True)
    assert FILES.items() <= contents(store).items()


def test_a_later_save_that_begins_while_small_files_are_replaced_undoes_them(store: ObjectStore) -> None:
    model, newer = {"w": np.arange(10, dtype=np.float32)}, {"w": np.ones(10, np.float32)}
    commit(store, model, FILES)
    before = contents(store)
    with pytest.raises(SaveConflict):  # and does not replace more
        commit(store, newer, NEWER, stop_at="index", call=lambda: begin(store, {"other": np.zeros(3, np.uint8)}))
    assert contents(store) == before


def test_a_small_file_that_a_large_one_replaced_is_put_back(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaced_files, "MAX_FILE_BYTES", 64)
    model, newer = {"w": np.arange(10, dtype=np.float32)}, {"w": np.ones(10, np.float32)}
    commit(store, model, FILES)
    for size in (65, 100):
        commit(store, newer, {**FILES, "config.json": b"x" * size}, stop_at="index")
        assert FILES.items() <= contents(store).items()
    interrupted_saves(store, revision_of_file, POLICY, clean=True)
    assert stored(store, "config.json") == FILES["config.json"]
    assert FILES.items() <= contents(store).items()


def test_uploads_of_a_training_state_that_was_interrupted_go_with_it(store: ObjectStore) -> None:
    revision = commit(store, {"w": np.zeros(3, np.uint8)}, FILES)
    (shard,) = open_model(store).shards
    old, new = "training/00000000000000aa", "training/00000000000000bb"
    for state in (old, new):
        writes_parts(store).begin_parts(f"{state}/model-0-00001-of-00001.safetensors")
        store.put(f"{state}/{SAVE_JOURNAL_KEY}", b"{}")
    gone = remember_save(store, revision_of_file(shard.key) or "", new[-16:], 1, revision_of_file, POLICY)
    assert gone == (f"{old}/{SAVE_JOURNAL_KEY}",)
    assert [len(list(writes_parts(store).open_uploads(f"{state}/model-"))) for state in (old, new)] == [0, 1]
    assert open_model(store).revision == revision


def test_training_states_that_were_interrupted_are_listed(store: ObjectStore) -> None:
    named, kept, cut, linked = (f"00000000000000{name}" for name in ("aa", "bb", "cc", "dd"))
    commit(store, {"w": np.zeros(3, np.uint8)}, {**FILES, f"training/{named}.json": b"{}"})
    remember_save(store, "0", kept, None, revision_of_file, POLICY)
    for state in (named, kept, cut):
        for name in ("state.json", MANIFEST_KEY, "model-0-00001-of-00001.safetensors"):
            store.put(f"training/{state}/{name}", b"{}")
    store.put(f"training/{cut}/{SAVE_JOURNAL_KEY}", b"{}")
    store.put(f"training/{linked}.json", b"{}")
    store.put("training/notes.txt", b"of the user")
    writes_parts(store).begin_parts(f"training/{cut}/model-0-00001-of-00001.safetensors")
    left = interrupted_saves(store, revision_of_file, POLICY).leftovers
    assert sorted((item.kind, item.revision) for item in left) == [
        *[("file", cut)] * 3,
        ("file", linked),
        ("journal", cut),
        ("upload", cut),
    ]
    assert interrupted_saves(store, revision_of_file, POLICY, clean=True).leftovers == left
    assert interrupted_saves(store, revision_of_file, POLICY).leftovers == ()
    assert len([info for info in store.list(f"training/{named}")]) == 4
    assert len([info for info in store.list(f"training/{kept}")]) == 3
    assert stored(store, "training/notes.txt") == b"of the user"


def test_clean_says_that_files_stay_when_the_manifest_cannot_be_read(store: ObjectStore) -> None:
    commit(store, {"w": np.zeros(3, np.uint8)}, FILES)
    commit(store, {"w": np.ones(3, np.uint8)}, NEWER, stop_at="manifest")
    store.put(MANIFEST_KEY, b"{")
    files = {info.key: stored(store, info.key) for info in store.list() if info.key != SAVE_JOURNAL_KEY}
    for clean in (False, True):
        report = interrupted_saves(store, revision_of_file, POLICY, clean=clean)
        assert [item.kind for item in report.leftovers] == ["journal"]
        assert report.problem.startswith(f"{MANIFEST_KEY} cannot be read")
    assert {info.key: stored(store, info.key) for info in store.list()} == files
    assert BEFORE_KEY in files
    commit(store, {"w": np.ones(3, np.uint8)}, NEWER)  # the way out
    report = interrupted_saves(store, revision_of_file, POLICY, clean=True)
    assert (report.problem, {item.kind for item in report.leftovers}) == ("", {"file"})


def test_a_file_that_becomes_shorter_while_it_is_read_is_read_as_it_was(tmp_path: Path) -> None:
    class Slow(LocalStore):
        def stat(self, key: str) -> ObjectInfo:
            return before.get(key) or super().stat(key)

    store, before = Slow(tmp_path), {}
    commit(store, {"w": np.zeros(3, np.uint8)}, FILES)
    file = next(file for file in open_model(store).files if file.key == "config.json")
    info = store.stat("config.json")
    commit(store, {"w": np.ones(3, np.uint8)}, {**FILES, "config.json": b"{}"}, stop_at="index")
    before["config.json"] = info
    assert read_other_file(store, file) == FILES["config.json"]


def test_a_first_save_that_is_undone_leaves_nothing(store: ObjectStore) -> None:
    store.put("config.json", b"mine")
    assert list_saves(store, revision_of_file, POLICY).leftovers == ()  # before there was any upload
    model = {"w": np.arange(10, dtype=np.float32)}
    commit(store, model, NEWER, stop_at="manifest")
    store.put("new.txt", b"written by somebody else since")
    interrupted_saves(store, revision_of_file, POLICY, clean=True)
    left = {"config.json": b"mine", "new.txt": b"written by somebody else since"}
    assert {info.key: stored(store, info.key) for info in store.list()} == left


def test_a_save_whose_files_were_removed_is_not_published(store: ObjectStore) -> None:
    model = {"w": np.arange(10, dtype=np.float32)}
    with pytest.raises(SaveConflict):
        commit(store, model, FILES, stop_at="manifest", call=lambda: begin(store, {"other": np.zeros(3, np.uint8)}))
    assert MANIFEST_KEY not in {info.key for info in store.list()}


class LosesAnswers(LocalStore):
    """A store that does what it is asked, and whose answers with these numbers are lost."""

    def __init__(self, root: Path, lost: set[int]) -> None:
        super().__init__(root)
        self._lost, self._asked = lost, 0

    def _answer(self, answer: Any) -> Any:
        self._asked += 1
        if self._asked in self._lost:
            raise StoreUnavailable("the answer was lost")
        return answer

    def stat(self, key: str) -> ObjectInfo:
        return self._answer(super().stat(key))

    def put_if(self, key: str, data: bytes, etag: str | None) -> ObjectInfo:
        return self._answer(super().put_if(key, data, etag))

    def begin_parts(self, key: str) -> str:
        return self._answer(super().begin_parts(key))


@pytest.mark.parametrize(
    "lost", [{2}, {2, 3}, {2, 3, 5}]
)  # 1, 4: `stat` before the put; 2: the put; 3, 5: `stat` after
def test_a_write_whose_answer_was_lost_is_done(tmp_path: Path, lost: set[int]) -> None:
    store = LosesAnswers(tmp_path, lost)
    policy = RetryPolicy(attempts=3, base_s=0)
    store.put("a", b"old")
    assert put_if(store, "a", b"new", LocalStore(tmp_path).stat("a").etag, policy).size_bytes == 3
    with pytest.raises(ObjectChanged):
        put_if(store, "a", b"other", None, policy)


def test_uploads_whose_beginning_was_lost_are_ended(tmp_path: Path) -> None:
    model = {"w": np.arange(10, dtype=np.float32)}
    store = LosesAnswers(tmp_path, set())
    layouts = lay_out(specs_of(model), revision="0", max_shard_bytes=8_000_000, chunk_bytes=CHUNK)
    layouts, begun = begin_save(store, layouts, chunk_bytes=CHUNK, policy=POLICY)
    for key in (layouts[0].file, COPY_PROBE_KEY):
        store.begin_parts(key)  # nobody has its answer
    writer = CheckpointWriter(store, layouts, begun, policy=POLICY)
    write_all(writer, layouts, model)
    writer.commit()
    assert list_saves(store, revision_of_file, POLICY).leftovers == ()


def test_a_published_save_that_may_not_delete_is_published(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class KeepsAll(LocalStore):
        def delete(self, key: str) -> None:
            raise AccessDenied("no right to delete", key=key)

    with caplog.at_level(logging.WARNING, "longshore.save"):
        revision = save(KeepsAll(tmp_path), arrays())
    assert "is published" in caplog.text
    assert open_model(LocalStore(tmp_path)).revision == revision
    assert save(LocalStore(tmp_path), arrays(1)) == open_model(LocalStore(tmp_path)).revision
    assert verify(LocalStore(tmp_path)).ok


def test_the_upload_that_tried_a_copy_is_listed(store: ObjectStore) -> None:
    writes_parts(store).begin_parts(COPY_PROBE_KEY)
    (left,) = interrupted_saves(store, revision_of_file, POLICY, clean=True).leftovers
    assert (left.key, left.kind) == (COPY_PROBE_KEY, "upload")
    assert interrupted_saves(store, revision_of_file, POLICY).leftovers == ()


def test_extra_files_are_sent_without_an_upload(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without the save's name could not be told from those of other programs, so no command would end it."""
    if isinstance(store, LocalStore):
        pytest.skip("a folder sweeps what killed writers left of one file")
    monkeypatch.setattr(type(store), "upload", lambda *given: pytest.fail("began an upload"))
    commit(store, {"w": np.zeros(3, np.uint8)}, {"tokenizer.json": bytes(9 << 20)})
    assert verify(store).ok


def test_a_journal_that_is_not_due_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, model = LocalStore(tmp_path), arrays()
    layouts, begun = begin(store, model)
    writer = CheckpointWriter(store, layouts, begun, policy=POLICY)
    write_all(writer, layouts, model)
    records = writer.take_records()
    monkeypatch.setattr(saves, "MIN_PAUSE_S", 3600.0)
    writer.note(records)
    built: list[Any] = []
    monkeypatch.setattr("actors.saving.writer._journal", lambda *given: built.append(given))
    for record in [records[0]] * 100:
        writer.note([record])
    assert not built


def test_damaged_notes_of_replaced_files_are_ignored(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    commit(store, {"w": np.zeros(3, np.uint8)}, FILES)
    revision = open_model(store).revision
    (tmp_path.parent / "outside").write_bytes(b"old")
    digest = hashlib.sha256(b"old").hexdigest()
    outside = ReplacedFiles(revision, {}, {"../outside": (digest,)}).encode()
    whole = ReplacedFiles(revision, {"config.json": b"an evil!"}, {"config.json": ("00",)}).encode()
    for damaged in (b"", b"{}", whole[:-1], outside):
        store.put(BEFORE_KEY, damaged)
        assert read_replaced(store, POLICY) is None
        put_back(store, revision, POLICY)
        assert (tmp_path.parent / "outside").read_bytes() == b"old"
    (tmp_path / "config.json").write_bytes(b"changed!")
    store.put(BEFORE_KEY, whole)
    with pytest.raises(IntegrityError, match="not the published one"):  # the digest of the manifest decides
        contents(store)
    assert verify(store).bad_files == ("config.json",)
    put_back(store, revision, POLICY)
    assert (tmp_path / "config.json").read_bytes() == b"changed!"


def test_wrong_ranges_are_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    model = {"w": np.arange(10, dtype=np.float32)}
    layouts, begun = begin(store, model)
    writer = CheckpointWriter(store, layouts, begun)
    with pytest.raises(SaveError, match="outside"):
        writer.write(0, 0, memoryview(b"x"))
    write_all(writer, layouts, model)
    with pytest.raises(SaveError, match="twice"):
        write_all(writer, layouts, model)


def test_damaged_journals_are_ignored(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    begin(store, arrays())
    journal = (tmp_path / SAVE_JOURNAL_KEY).read_bytes()
    assert parse_journal(journal) is not None
    for damaged in (b"", b"{}", journal[:-2], journal.replace(b"model-", b"../del-"), b"[" * 100_000):
        assert parse_journal(damaged) is None
        (tmp_path / SAVE_JOURNAL_KEY).write_bytes(damaged)
        save(store, arrays())
        assert not (tmp_path / SAVE_JOURNAL_KEY).exists()


def test_every_problem_of_the_tensors_is_listed() -> None:
    specs = [TensorSpec("a", "F32", (2,)), TensorSpec("a", "F32", (2,)), TensorSpec("", "X9", (2,))]
    with pytest.raises(SaveRefused, match=r"'a' twice; '' is no name.*; '' has a dtype"):
        lay_out(specs, revision="0")
    with pytest.raises(SaveRefused, match="no tensor"):
        lay_out([], revision="0")


@given(
    st.lists(st.tuples(st.sampled_from(["F32", "BF16", "U8", "F4"]), st.integers(0, 40_000_000)), min_size=1),
    st.integers(1 << 20, 100_000_000),
    st.sampled_from([1 << 20, 8 << 20]),
)
def test_layouts_keep_every_rule(sizes: list[tuple[str, int]], max_shard_bytes: int, chunk_bytes: int) -> None:
    specs = [TensorSpec(f"t{i}", dtype, (size, 2)) for i, (dtype, size) in enumerate(sizes)]
    layouts = lay_out(specs, revision="abc", max_shard_bytes=max_shard_bytes, chunk_bytes=chunk_bytes)
    assert sorted(t.name for layout in layouts for t in layout.tensors) == sorted(spec.name for spec in specs)
    for layout in layouts:
        header = parse_header(layout.header, layout.size_bytes)
        assert header.tensors == layout.tensors
        assert list(layout.chunk_ends) == chunk_bounds(header, layout.size_bytes, chunk_bytes)
        assert len(layout.tensors) == 1 or layout.size_bytes - len(layout.header) <= max_shard_bytes
        assert [c for part in layout.parts for c in layout.chunks_of(part)][-1].end == layout.size_bytes
        assert all(part.size_bytes >= MIN_PART_BYTES for part in layout.parts[:-1])
        assert all(part.size_bytes < MIN_PART_BYTES + 2 * chunk_bytes + len(layout.header) for part in layout.parts)
        assert layout.parts[0].end >= len(layout.header)


def test_a_huge_file_has_no_more_parts_than_s3_allows() -> None:
    chunks = range(8 << 20, (8 << 20) * 200_000, 8 << 20)
    ends = part_bounds(chunks, 1000)
    assert len(ends) <= MAX_PARTS
    assert ends[-1] == chunks[-1]
    assert set(ends) <= set(chunks)


def test_a_manifest_of_a_save_says_so(tmp_path: Path) -> None:
    save(LocalStore(tmp_path), arrays())
    entries = json.loads((tmp_path / MANIFEST_KEY).read_bytes())
    assert {entry["checked_by"] for entry in (*entries["shards"], *entries["files"])} == {"written"}
