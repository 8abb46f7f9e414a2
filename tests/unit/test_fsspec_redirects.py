"""A hostile HTTP server cannot redirect a load elsewhere, or make it read without a bound."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from storage.errors import ObjectNotFound, RangeMismatch, StoreError
from storage.store_ref import parse_uri
from storage.stores import fsspec_store
from storage.stores.fsspec_store import FsspecStore, most_bytes, stays_at_home
from storage.stores.object_store import ByteRange, read_bytes
from tests.support.http_servers import place, serving

DATA = bytes(range(256)) * 64


class Handler(BaseHTTPRequestHandler):
    """Answers by the last part of the path; counts the requests."""

    protocol_version = "HTTP/1.1"
    elsewhere = ""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server = self.server
        server.asked.append(self.path)  # type: ignore[attr-defined]
        name = self.path.rpartition("/")[2]
        if name in ("away", "away-https"):
            target = Handler.elsewhere if name == "away" else Handler.elsewhere.replace("http:", "https:")
            self.send_response(302)
            self.send_header("Location", f"{target}/m/plain")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif name == "home":
            self.send_response(307)
            self.send_header("Location", "/m/plain")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif name == "missing":
            self.answer(404, b"x" * (1 << 20), {})
        elif name == "endless" and "Range" in self.headers:
            self.answer(206, DATA * 64, {"Content-Range": f"bytes 0-9/{len(DATA)}"})
        elif name == "bomb" and "Range" in self.headers:
            packed = zlib.compress(bytes(64 << 20))
            self.answer(206, packed, {"Content-Range": f"bytes 0-9/{len(DATA)}", "Content-Encoding": "deflate"})
        elif name == "":
            self.answer(200, b"<a href='plain'>plain</a>" * 1000, {})
        else:
            start, end = 0, len(DATA)
            if asked := self.headers.get("Range"):
                start, last = map(int, asked.removeprefix("bytes=").split("-"))
                end = last + 1
            headers = {"Accept-Ranges": "bytes", "ETag": '"v1"'}
            if asked:
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(DATA)}"
            self.answer(206 if asked else 200, DATA[start:end], headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            try:
                self.wfile.write(body)
            except OSError:  # the reader stopped reading, which is what is tested
                self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FsspecStore, ThreadingHTTPServer]]:
    """Yield a store on one server, and the server that it may be redirected to."""
    pytest.importorskip("aiohttp")
    with serving(Handler) as home, serving(Handler) as other:
        monkeypatch.setattr(Handler, "elsewhere", place(other))
        uri = f"{place(home)}/m"
        with closing(FsspecStore(parse_uri(uri, environ={}))) as store:
            yield store, other


@pytest.mark.slow
def test_a_redirect_to_another_place_is_not_followed(servers: tuple[FsspecStore, ThreadingHTTPServer]) -> None:
    store, other = servers
    for key in ("away", "away-https"):
        with pytest.raises(StoreError, match="another place") as refused:
            store.stat(key)
        assert refused.value.hint
    assert not other.asked  # type: ignore[attr-defined]
    assert read_bytes(store, "home", ByteRange(3, 20)) == DATA[3:20]


@pytest.mark.slow
def test_no_answer_is_read_beyond_the_requested_range(
    servers: tuple[FsspecStore, ThreadingHTTPServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = servers
    assert read_bytes(store, "plain", ByteRange(5, 5000)) == DATA[5:5000]
    for key in ("endless", "bomb"):
        with pytest.raises(RangeMismatch):
            read_bytes(store, key, ByteRange(0, 10))
    with pytest.raises(ObjectNotFound):  # its page is longer than the range, and says so nowhere
        store.stat("missing")
    monkeypatch.setattr(fsspec_store, "MAX_PAGE_BYTES", 100)
    with pytest.raises(RangeMismatch):
        list(store.list())


@pytest.mark.parametrize(
    ("asked", "target", "fine"),
    [
        ("http://host/a", "http://host/b", True),
        ("http://host/a", "http://host:80/b", True),
        ("http://host/a", "https://host/b", True),
        ("https://host/a", "http://host/b", False),
        ("http://host/a", "https://host:8443/b", False),
        ("http://host:8080/a", "https://host/b", False),
        ("http://host/a", "http://host.evil/b", False),
        ("http://host/a", "http://user@host/b", False),
        ("http://host/a", "http://169.254.169.254/b", False),
        ("http://host/a", "file:///etc/passwd", False),
        ("http://host/a", "http://[bad", False),
        ("http://[::1]/a", "https://[::1]/b", True),
    ],
)
def test_only_redirects_on_the_same_host_stay(asked: str, target: str, fine: bool) -> None:
    assert stays_at_home(asked, target) == fine


def test_an_answer_is_limited_by_the_requested_range() -> None:
    assert most_bytes("bytes=10-19") == 10
    assert most_bytes(None) == most_bytes("bytes=-5") == most_bytes("lines=1-2") == fsspec_store.MAX_PAGE_BYTES
