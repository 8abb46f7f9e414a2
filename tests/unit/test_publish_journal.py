"""The journal of a publish: how often it is written, and what it keeps."""

from __future__ import annotations

from storage.checkpoints.checkpoint_files import JOURNAL_KEY
from storage.checkpoints.manifest import ManifestFile
from storage.publishing.publish import Journal
from storage.stores.object_store import MemoryStore
from storage.stores.requests import RetryPolicy
from tests.support.faulty_stores import WrappedStore

POLICY = RetryPolicy(attempts=1)


class Clock:
    """A clock that advances on request, and while something is written."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def entry(number: int) -> ManifestFile:
    return ManifestFile(
        path=f"{number}.json", size_bytes=1, etag="e", source_etag="e", checked_by="read-twice", digest="00"
    )


def journal_of(store: MemoryStore | WrappedStore, clock: Clock) -> Journal:
    return Journal(store, "blake3", 1 << 20, POLICY, clock)


def saved(store: MemoryStore) -> list[str]:
    journal = journal_of(store, Clock())
    journal.load(store.stat(JOURNAL_KEY))
    return [path for path in (f"{number}.json" for number in range(2000)) if journal.get(path)]


def test_many_objects_in_one_second_are_one_save() -> None:
    inner, clock = MemoryStore(), Clock()
    store = WrappedStore(inner)
    journal = journal_of(store, clock)
    journal.start()
    for number in range(1950):
        clock.now_s += 0.01
        journal.add(entry(number))
    assert 18 <= store.requests.count("put") <= 21  # 19.5 seconds
    assert len(saved(inner)) < 1950
    journal.flush()
    assert len(saved(inner)) == 1950
    puts = store.requests.count("put")
    journal.flush()
    assert store.requests.count("put") == puts


def test_a_slow_store_is_written_less_often() -> None:
    clock = Clock()

    class Slow(WrappedStore):
        def put(self, key: str, data: bytes):  # type: ignore[no-untyped-def]
            clock.now_s += 3
            return super().put(key, data)

    store = Slow(MemoryStore())
    journal = journal_of(store, clock)
    journal.start()
    for number in range(29):
        clock.now_s += 1
        journal.add(entry(number))
    assert store.requests.count("put") == 1
    clock.now_s += 1
    journal.add(entry(29))
    assert store.requests.count("put") == 2
