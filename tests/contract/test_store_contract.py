"""One suite over every store: what the protocol promises holds on each of them, on real servers."""

from __future__ import annotations

import functools
import http.server
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from storage.errors import AccessDenied, ObjectChanged, ObjectNotFound, RangeMismatch, StoreError, StoreUnavailable
from storage.store_ref import Credentials, parse_uri
from storage.stores.embedded_s3 import EmbeddedS3
from storage.stores.fsspec_store import FsspecStore, StreamedStore
from storage.stores.local import LocalStore
from storage.stores.object_store import PIECE_BYTES, ByteRange, MemoryStore, ObjectStore, read_bytes, read_pieces
from storage.stores.s3.store import S3Store
from tests.contract.ceph_server import CephServer
from tests.support.emulators import AzureServer, GoogleServer
from tests.support.s3_servers import make_bucket, server_ref

# aiohttp's advice to gcsfs and adlfs
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly with raw bytes:ResourceWarning")

S3Server = EmbeddedS3 | CephServer

_numbers = itertools.count()
ODD_KEYS = [
    "plain.txt",
    "deep/er/and/deeper.bin",
    "with space and + plus.bin",
    "percent%20not-decoded.bin",
    "hash#and?query=1&b.bin",
    "a~b!c'd(e)f*g.bin",
    "ünïcode/重み-🦙.safetensors",
    "semi;colon=equals@at:colon,comma.bin",
]


@dataclass
class Case:
    """A store under test, with a way to change its objects from outside."""

    name: str
    store: ObjectStore
    write: Callable[[str, bytes], None]  # puts an object there
    multipart_bytes: int  # enough for more than two parts

    @property
    def is_read_only(self) -> bool:
        return self.name == "http"


class _RangeHandler(http.server.SimpleHTTPRequestHandler):
    """Static files with single ranges and ETags, as nginx has them; folders as lists of links."""

    protocol_version = "HTTP/1.1"

    def send_head(self) -> object:  # type: ignore[override]
        path = Path(self.translate_path(self.path))
        if path.is_dir():
            return super().send_head()
        if not path.is_file():
            self.send_error(404)
            return None
        data = path.read_bytes()
        start, end = 0, len(data)
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, len(data)) if last else len(data)
            if start >= len(data):
                self.send_error(416)
                return None
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns:x}-{len(data):x}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[start:end])
        return None

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="session")
def http_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("http")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_RangeHandler, directory=str(folder)))
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def _s3_case(name: str, server: S3Server) -> Case:
    bucket = f"contract-{next(_numbers)}"
    make_bucket(server, bucket)
    store = S3Store(server_ref(server, f"{bucket}/models/one"), server.credentials(), page_size=3, part_bytes=5 << 20)
    return Case(name, store, lambda key, data: store.put(key, data) and None, 12 << 20)


CASES = [
    "twin",
    "local",
    "fsspec-memory",
    "http",
    pytest.param("rclone", marks=pytest.mark.slow),
    pytest.param("ceph", marks=pytest.mark.slow),
    pytest.param("google", marks=pytest.mark.slow),
    pytest.param("azure", marks=pytest.mark.slow),
]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    name = request.param
    if name == "twin":
        store: ObjectStore = MemoryStore()
    elif name == "local":
        store = LocalStore(tmp_path / "root")
    elif name == "fsspec-memory":
        store = FsspecStore(parse_uri(f"memory://contract/{next(_numbers)}"), recheck_s=0)
    elif name == "http":
        folder, url = request.getfixturevalue("http_folder")
        below = f"m{next(_numbers)}"
        (folder / below).mkdir()
        files = LocalStore(folder / below)
        http_store = FsspecStore(parse_uri(f"{url}/{below}"), recheck_s=0)
        yield Case(name, http_store, lambda key, data: files.put(key, data) and None, 1 << 20)
        http_store.close()
        return
    elif name in ("google", "azure"):
        cloud: GoogleServer | AzureServer = request.getfixturevalue(name)
        for variable, value in cloud.variables().items():
            monkeypatch.setenv(variable, value)
        uri = cloud.make_bucket(f"contract-{next(_numbers)}")
        store = StreamedStore(parse_uri(f"{uri}/models/one"), cloud.credentials(), recheck_s=0)
    else:
        server: S3Server = request.getfixturevalue(name)
        found = _s3_case(name, server)
        yield found
        found.store.close()
        return
    yield Case(name, store, lambda key, data: store.put(key, data) and None, 1 << 20)
    store.close()


def _data(size: int, seed: int = 1) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[seed : size + seed] if size else b""


def test_ranges_are_exact(case: Case) -> None:
    data = _data(100_000)
    case.write("a/x.bin", data)
    etag = case.store.stat("a/x.bin").etag
    for start, end in [(0, 1), (0, 10), (50_000, 50_001), (4096, 70_001), (99_999, 100_000), (0, 100_000)]:
        memory = bytearray(b"\xff" * (end - start + 16))
        found = case.store.read_into("a/x.bin", ByteRange(start, end), memoryview(memory)[8:-8], etag=etag)
        assert memory[8:-8] == data[start:end]
        assert memory[:8] == memory[-8:] == b"\xff" * 8
        assert found == etag
    assert case.store.read_into("a/x.bin", ByteRange(5, 5), memoryview(bytearray()), etag=etag) == etag


def test_stat_returns_size_and_version(case: Case) -> None:
    case.write("one", b"12345")
    info = case.store.stat("one")
    assert (info.key, info.size_bytes) == ("one", 5)
    assert info.etag
    assert '"' not in info.etag
    assert case.store.stat("one").etag == info.etag


def test_a_buffer_of_another_size_is_refused(case: Case) -> None:
    case.write("one", b"12345")
    with pytest.raises(ValueError, match="buffer has 3 bytes"):
        case.store.read_into("one", ByteRange(0, 4), memoryview(bytearray(3)))


@pytest.mark.parametrize(("start", "end"), [(90, 101), (100, 110), (5000, 5001)])
def test_reads_past_the_end_are_range_errors(case: Case, start: int, end: int) -> None:
    case.write("one", _data(100))
    with pytest.raises(RangeMismatch):
        read_bytes(case.store, "one", ByteRange(start, end))
    with pytest.raises(RangeMismatch):
        read_bytes(case.store, "one", ByteRange(start, end), etag=case.store.stat("one").etag)


def test_another_version_is_refused(case: Case) -> None:
    case.write("one", _data(100))
    with pytest.raises(ObjectChanged):
        read_bytes(case.store, "one", ByteRange(0, 10), etag="0123456789abcdef0123456789abcdef")


@pytest.mark.parametrize("size", [20, 100, 300])
def test_an_object_replaced_between_reads_is_noticed(case: Case, size: int) -> None:
    case.write("one", _data(100))
    etag = case.store.stat("one").etag
    assert read_bytes(case.store, "one", ByteRange(40, 60), etag=etag) == _data(100)[40:60]
    case.write("one", _data(size, seed=7))
    with pytest.raises(ObjectChanged):
        read_bytes(case.store, "one", ByteRange(40, 60), etag=etag)
    assert read_bytes(case.store, "one", ByteRange(0, 20)) == _data(size, seed=7)[:20]


def test_a_missing_key_is_a_typed_error(case: Case) -> None:
    case.write("there", b"1")
    for ask in (
        lambda: case.store.stat("not-there"),
        lambda: read_bytes(case.store, "not-there", ByteRange(0, 4)),
        lambda: read_bytes(case.store, "not/there/either", ByteRange(0, 4), etag="x"),
    ):
        with pytest.raises(ObjectNotFound, match=r"not.there"):
            ask()


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../up", "a/../../up", "a//b", "./a", "a\\b", "a\0b"])
def test_hostile_keys(case: Case, key: str) -> None:
    for ask in (
        lambda: case.store.stat(key),
        lambda: read_bytes(case.store, key, ByteRange(0, 1)),
        lambda: case.store.put(key, b"x"),
    ):
        with pytest.raises(StoreError):
            ask()


def test_list_finds_everything_in_order_over_pages(case: Case) -> None:
    names = [f"part-{i}" for i in range(7)] + ["sub/part-1", "sub/deeper/part-2", "sub.part", "sub-part"]
    for name in names:
        case.write(name, name.encode())
    found = list(case.store.list())
    assert [info.key for info in found] == sorted(names)
    assert [info.size_bytes for info in found] == [len(name) for name in sorted(names)]
    assert [info.key for info in case.store.list("sub/")] == ["sub/deeper/part-2", "sub/part-1"]
    assert [info.key for info in case.store.list("part-3")] == ["part-3"]
    assert list(case.store.list("nothing")) == []
    assert case.store.stat("part-0").etag == found[0].etag or case.name == "http"


@pytest.mark.parametrize("key", ODD_KEYS)
def test_odd_keys_round_trip(case: Case, key: str) -> None:
    if case.name == "google" and ";" in key:
        pytest.skip("the emulator takes a semicolon for the end of a path")
    case.write(key, key.encode())
    assert case.store.stat(key).size_bytes == len(key.encode())
    assert read_bytes(case.store, key, ByteRange(0, len(key.encode()))).decode() == key
    assert [info.key for info in case.store.list()] == [key]


def test_reads_from_many_threads(case: Case) -> None:
    data = os.urandom(1 << 20)
    case.write("big", data)
    etag = case.store.stat("big").etag
    pieces = list(ByteRange(0, len(data)).split(len(data) // 32))

    def read(piece: ByteRange) -> bool:
        return read_bytes(case.store, "big", piece, etag=etag) == data[piece.start : piece.end]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, pieces * 2))


@pytest.mark.parametrize("sizes", [(1,), (5, 1, 4000, 20_000), (1, 0, 1, 65_536, 3), (3_000_000, 1)])
def test_parts_are_filled_in_order_and_then_passed_on(case: Case, sizes: tuple[int, ...]) -> None:
    data = os.urandom(sum(sizes) + 17)
    case.write("big", data)
    parts = [memoryview(bytearray(size)) for size in sizes]
    seen = bytearray()

    def see(piece: memoryview) -> None:
        assert len(piece) <= PIECE_BYTES
        seen.extend(piece)

    etag = case.store.stat("big").etag
    assert read_pieces(case.store, "big", ByteRange(7, 7 + sum(sizes)), parts, see, etag=etag) == etag
    assert b"".join(parts) == data[7:-10]
    assert bytes(seen) == data[7:-10]
    with pytest.raises(ValueError, match="parts have"):
        read_pieces(case.store, "big", ByteRange(0, sum(sizes) + 1), parts)


def test_an_error_of_the_callback_is_raised(case: Case) -> None:
    """... and the next read is not answered by what was left on the connection."""
    data = os.urandom(100_000)
    case.write("big", data)

    def see(piece: memoryview) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        read_pieces(case.store, "big", ByteRange(0, 100_000), [memoryview(bytearray(100_000))], see)
    assert read_bytes(case.store, "big", ByteRange(5, 50_000)) == data[5:50_000]


def test_put_overwrites_and_delete_is_idempotent(case: Case) -> None:
    if case.is_read_only:
        with pytest.raises(StoreError, match="only be read"):
            case.store.put("one", b"x")
        with pytest.raises(StoreError, match="only be read"):
            case.store.delete("one")
        return
    first = case.store.put("one", b"first")
    second = case.store.put("one", b"second!")
    assert (first.size_bytes, second.size_bytes) == (5, 7)
    assert first.etag != second.etag
    assert second.etag == case.store.stat("one").etag
    assert read_bytes(case.store, "one", ByteRange(0, 7), etag=second.etag) == b"second!"
    case.store.put("empty", b"")
    assert case.store.stat("empty").size_bytes == 0
    case.store.delete("one")
    case.store.delete("one")
    with pytest.raises(ObjectNotFound):
        case.store.stat("one")
    assert [info.key for info in case.store.list()] == ["empty"]


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0], ids=["empty", "small", "parts"])
def test_upload(case: Case, share: float) -> None:
    if case.is_read_only:
        pytest.skip("read-only")
    data = memoryview(os.urandom(int(case.multipart_bytes * share)))
    with case.store.upload("shards/up.bin") as upload:
        for start in range(0, len(data), 3_000_001):
            upload.write(data[start : start + 3_000_001])
        assert list(case.store.list()) == []
        info = upload.complete()
    assert (info.key, info.size_bytes) == ("shards/up.bin", len(data))
    assert info.etag == case.store.stat("shards/up.bin").etag
    assert read_bytes(case.store, "shards/up.bin", ByteRange(0, len(data)), etag=info.etag) == data


@pytest.mark.parametrize("how", ["left", "raised"])
def test_abandoned_upload_leaves_nothing(case: Case, how: str) -> None:
    if case.is_read_only:
        pytest.skip("read-only")
    with pytest.raises(KeyError) if how == "raised" else nullcontext(), case.store.upload("up.bin") as upload:
        upload.write(memoryview(bytes(case.multipart_bytes)))
        if how == "raised":
            raise KeyError
    assert list(case.store.list()) == []
    with pytest.raises(ObjectNotFound):
        case.store.stat("up.bin")
    if isinstance(case.store, S3Store):
        client, bucket = case.store._client, case.store._ref.bucket
        assert not client.list_multipart_uploads(Bucket=bucket).get("Uploads")
    if isinstance(case.store, LocalStore):
        assert [p for p in Path(case.store._root).rglob("*") if p.is_file()] == []


@pytest.fixture(params=["rclone", "ceph"])
def s3_server(request: pytest.FixtureRequest) -> S3Server:
    server: S3Server = request.getfixturevalue(request.param)
    return server


@pytest.mark.slow
class TestS3Refusals:
    """Refusals that only a server with buckets and keys can give."""

    def _asks(self, store: ObjectStore) -> list[Callable[[], object]]:
        return [
            lambda: store.stat("one"),
            lambda: list(store.list()),
            lambda: read_bytes(store, "one", ByteRange(0, 1)),
            lambda: store.put("one", b"1"),
        ]

    def test_no_such_bucket(self, s3_server: S3Server) -> None:
        store = S3Store(server_ref(s3_server, "no-such-bucket/x"), s3_server.credentials())
        for ask in self._asks(store):
            with pytest.raises(ObjectNotFound, match="no such bucket"):
                ask()

    def test_a_wrong_secret_and_an_unknown_key_are_refused(self, s3_server: S3Server) -> None:
        case = _s3_case("denied", s3_server)
        for credentials in (
            Credentials(s3_server.access_key_id, "wrong-secret-key-0123"),
            Credentials("NOSUCHKEY123", "wrong-secret-key-0123"),
        ):
            store = S3Store(case.store._ref, credentials)  # type: ignore[attr-defined]
            for ask in self._asks(store):
                with pytest.raises(AccessDenied) as caught:
                    ask()
                assert "wrong-secret" not in str(caught.value)
                assert "Signature=" not in str(caught.value)
            store.close()

    def test_no_credentials(self, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        store = S3Store(server_ref(s3_server, "bucket/x"))
        for ask in self._asks(store):
            with pytest.raises(AccessDenied, match="no credentials"):
                ask()

    def test_credentials_from_the_environment(self, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        case = _s3_case("env", s3_server)
        case.write("one", b"12345")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key_id)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_access_key)
        monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
        with closing(S3Store(case.store._ref)) as store:  # type: ignore[attr-defined]
            assert read_bytes(store, "one", ByteRange(0, 5)) == b"12345"
        case.store.close()


def test_closed_port_is_unavailable() -> None:
    store = S3Store(
        parse_uri("s3://bucket/x", endpoint_url="http://127.0.0.1:1", environ={}), Credentials("KEY", "SECRET")
    )
    for ask in (lambda: store.stat("one"), lambda: read_bytes(store, "one", ByteRange(0, 1))):
        with pytest.raises(StoreUnavailable):
            ask()
    http_store = FsspecStore(parse_uri("http://127.0.0.1:1/x"))
    with pytest.raises(StoreUnavailable):
        read_bytes(http_store, "one", ByteRange(0, 1))
