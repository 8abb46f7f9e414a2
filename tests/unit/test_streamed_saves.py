"""Saves and conversions to stores of fsspec, which write an object by one stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import cluster
from actors.saving.conversion import units_of
from actors.saving.writer import Begun
from cluster.publishing import list_saves
from storage.errors import ObjectChanged, StoreError, UnsupportedStore
from storage.publishing import saves
from storage.store_ref import parse_uri
from storage.stores.fsspec_store import StreamedStore
from storage.stores.object_store import ByteRange, read_bytes
from storage.stores.open_store import open_store
from storage.stores.parts import KeepsNoTags, KeepsTags
from tests.support.emulators import AzureServer, GoogleServer
from tests.support.gloo_ranks import run_ranks
from tests.support.webhdfs_server import WebHdfsServer

pytest.importorskip("requests")  # of fsspec's WebHDFS; it comes with Ray
pytestmark = [
    pytest.mark.slow,
    # aiohttp's advice to gcsfs and adlfs
    pytest.mark.filterwarnings("ignore:Sending a large body directly with raw bytes:ResourceWarning"),
]

SMALL_FILES: dict[str, Any] = {"max_shard_bytes": 8 << 20, "chunk_bytes": 1 << 20, "since": None}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebHdfsServer]:
    monkeypatch.setenv("LONGSHORE_ALLOWED_SCHEMES", "file,memory,webhdfs,gs,az,http,https,hf")
    with WebHdfsServer(tmp_path / "hdfs") as running:
        yield running


@pytest.fixture(params=["memory", "webhdfs", "google", "azure"])
def uri(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, server: WebHdfsServer) -> str:
    place = uuid.uuid4().hex
    if request.param in ("memory", "webhdfs"):
        return f"memory://models/{place}" if request.param == "memory" else server.uri(f"models/{place}")
    cloud: GoogleServer | AzureServer = request.getfixturevalue(request.param)
    for variable, value in cloud.variables().items():
        monkeypatch.setenv(variable, value)
    return f"{cloud.make_bucket(place)}/models"


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return 24 MB, in three files of two parts each."""
    numbers = torch.Generator().manual_seed(seed)
    return {name: torch.rand(1_000_000, generator=numbers) for name in "abcdef"}


def assert_stored(uri: str, expected: dict[str, torch.Tensor]) -> None:
    """Check every digest and every byte."""
    assert cluster.verify(uri, progress=False).ok
    with cluster.safe_open(uri) as model:
        assert set(model.keys()) == set(expected)
        assert all(model.get_tensor(name).equal(tensor) for name, tensor in expected.items())


def test_a_save_streams_each_file_and_is_replaced(uri: str) -> None:
    first = cluster.save(tensors(0), uri, extra_files={"config.json": b"{}"}, **SMALL_FILES)
    assert (first.shards, first.written_bytes) == (3, first.size_bytes)
    assert_stored(uri, tensors(0))
    second = cluster.save(tensors(1), uri, keep_last=1, **SMALL_FILES)
    assert second.revision != first.revision
    assert_stored(uri, tensors(1))
    report = list_saves(uri)
    assert (report.published, report.leftovers) == ((second.save_id,), ())
    with closing(open_store(parse_uri(uri))) as store:
        assert first.save_id not in " ".join(info.key for info in store.list())


def test_an_interrupted_save_keeps_the_files_that_are_complete(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if uri.startswith("gs:"):
        pytest.skip("the emulator cannot cancel an upload, and gcsfs asks it to for half a minute")
    monkeypatch.setattr(saves, "MIN_PAUSE_S", 0.0)  # the journal is written whenever parts are
    monkeypatch.setattr(saves, "PAUSE_PER_WRITE", 0.0)
    cluster.save(tensors(0), uri, **SMALL_FILES)
    real, calls = StreamedStore.put_part, []

    def breaks(self: StreamedStore, key: str, upload: str, number: int, start: int, data: memoryview) -> str:
        calls.append(key)
        if len(set(calls)) == 3 and start:
            raise StoreError("the stream broke")
        return real(self, key, upload, number, start, data)

    monkeypatch.setattr(StreamedStore, "put_part", breaks)
    with pytest.raises(StoreError, match="the stream broke"):
        cluster.save(tensors(1), uri, slots=2, **SMALL_FILES)
    monkeypatch.setattr(StreamedStore, "put_part", real)
    assert_stored(uri, tensors(0))
    assert {item.kind for item in list_saves(uri).leftovers} == {"journal", "file"}
    report = cluster.save(tensors(1), uri, **SMALL_FILES)
    assert 0 < report.reused_bytes < report.size_bytes
    assert report.reused_bytes + report.written_bytes == report.size_bytes
    assert_stored(uri, tensors(1))
    left = list_saves(uri, clean=True).leftovers
    assert {item.kind for item in left} <= {"file"}, "what was visible of the broken stream"
    assert_stored(uri, tensors(1))


def test_a_server_that_fails_in_a_stream_ends_the_save(server: WebHdfsServer) -> None:
    uri = server.uri("models/fails")
    server.refuses = lambda path, appended: path.endswith(".safetensors") and appended == 1
    with pytest.raises(StoreError, match="the stream of an object broke") as raised:
        cluster.save(tensors(0), uri, **SMALL_FILES)
    assert "save again" in raised.value.hint
    server.refuses = lambda path, appended: False
    cluster.save(tensors(0), uri, **SMALL_FILES)
    assert_stored(uri, tensors(0))


def test_ranks_write_whole_files_over_sockets(server: WebHdfsServer) -> None:
    uri = server.uri("models/ranks")
    reports = run_ranks(3, "tests.support.saving_ranks:save_rows", uri, chunk_bytes=1 << 20, max_shard_bytes=8 << 20)
    assert {report["shards"] for report in reports} == {3}
    assert sum(report["writes"] for report in reports) == 3, "files that ranks have written"
    assert max(report["writes"] for report in reports) == 1, "each rank one of the three"
    assert_stored(
        uri, {name: torch.arange(1_998_000.0).reshape(999, 2000) + number for number, name in enumerate("abc")}
    )


def test_conversions_stream_whole_files_from_several_processes(server: WebHdfsServer, tmp_path: Path) -> None:
    torch.save(tensors(2), tmp_path / "model.pt")
    uri = server.uri("models/converted")
    options: dict[str, Any] = {"max_shard_bytes": 8 << 20, "chunk_bytes": 1 << 20, "progress": False}
    report = cluster.convert(tmp_path / "model.pt", uri, workers=2, **options)
    assert (report.shards, report.verified) == (3, True)
    assert_stored(uri, tensors(2))
    with pytest.raises(cluster.ConfigError, match="in this process only"):
        cluster.convert(tmp_path / "model.pt", "memory://m", workers=2, **options)


def test_parts_of_a_file_are_one_unit_where_they_go_in_order() -> None:
    parts = [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert units_of(parts, Begun.model_construct(in_order=True)) == [((0, 0), (0, 1)), ((2, 0), (2, 1))]
    assert units_of(parts, Begun.model_construct(in_order=False)) == [((0, 0),), ((0, 1),), ((2, 0),), ((2, 1),)]


def test_parts_out_of_order_are_refused(uri: str) -> None:
    with closing(open_store(parse_uri(uri))) as store:
        assert isinstance(store, StreamedStore)
        upload = store.begin_parts("x")
        with pytest.raises(StoreError, match="in order"):
            store.put_part("x", upload, 2, 4, memoryview(b"efgh"))
        store.put_part("x", upload, 1, 0, memoryview(b"never"))
        store.put_part("x", upload, 1, 0, memoryview(b"abcd"))
        store.put_part("x", upload, 2, 4, memoryview(b"efgh"))
        info = store.complete_parts("x", upload, [(1, ""), (2, "")], 8)
        assert read_bytes(store, "x", ByteRange(0, 8)) == b"abcdefgh"
        assert store.complete_parts("x", upload, [(1, ""), (2, info.etag or "")], 8) == info, "from another process"
        with pytest.raises(StoreError, match="another size"):
            store.complete_parts("x", upload, [], 9)
        assert not isinstance(store, KeepsTags | KeepsNoTags), "nobody continues another's stream"


def test_a_small_object_is_written_on_a_condition(uri: str) -> None:
    with closing(open_store(parse_uri(uri))) as store:
        assert isinstance(store, StreamedStore)
        first = store.put_if("m.json", b"1", None)
        second = store.put_if("m.json", b"22", first.etag)
        assert read_bytes(store, "m.json", ByteRange(0, 2)) == b"22"
        if second.etag is not None:  # WebHDFS names no versions
            for etag in (None, first.etag):
                with pytest.raises(ObjectChanged):
                    store.put_if("m.json", b"3", etag)
        with pytest.raises(ObjectChanged):
            store.put_if("other.json", b"3", "gone")


@pytest.mark.parametrize("place", ["http://127.0.0.1:1/m", "hf://org/model"])
def test_stores_that_cannot_be_saved_to_are_refused(server: WebHdfsServer, place: str) -> None:
    with pytest.raises(cluster.SaveRefused, match="save to an object store or a shared folder"):
        cluster.save({"a": torch.ones(3)}, place)
    with pytest.raises(UnsupportedStore, match="nothing can be saved"):
        list_saves("http://127.0.0.1:1/m")
