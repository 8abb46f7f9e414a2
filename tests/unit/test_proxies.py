"""Proxies of the environment: reads, look-ups and writes go the same way, and no message shows a password."""

from __future__ import annotations

import base64
import contextlib
import gc
import pickle
import socket
import ssl
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from urllib3 import HTTPConnectionPool

from storage.errors import InvalidUri, ProxyRefused, StoreError, StoreUnavailable
from storage.store_ref import Credentials, StoreRef
from storage.stores.fsspec_store import FsspecStore
from storage.stores.object_store import ByteRange, read_bytes
from storage.stores.requests import Proxy, find_proxy
from storage.stores.s3.store import S3Store
from tests.support.certificates import make_certificates
from tests.support.http_servers import serving
from tests.support.scripted_server import ScriptedServer, answer, connections_to

pytestmark = pytest.mark.slow


class ForwardProxy:
    """An HTTP proxy for CONNECT and for whole URLs, maybe with a password. Passes everything on to one local port."""

    def __init__(self, port: int, authorization: str | None = None, connect_status: int = 200) -> None:
        self.asked: list[str] = []  # "CONNECT host:port", "GET http://host/path"
        self.authorizations: list[str | None] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_CONNECT(self) -> None:
                if not self.admitted():
                    return
                if connect_status != 200:
                    self.send_error(connect_status)
                    return
                with socket.create_connection(("127.0.0.1", port)) as upstream:
                    self.send_response(200, "Connection established")
                    self.end_headers()
                    back = threading.Thread(target=pump, args=(upstream, self.connection), daemon=True)
                    back.start()
                    pump(self.connection, upstream)
                    back.join(5)
                self.close_connection = True

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if not self.admitted():
                    return
                lines = [f"{self.command} {urlsplit(self.path).path} HTTP/1.1"]
                lines += [f"{name}: {value}" for name, value in self.headers.items() if not name.startswith("Proxy-")]
                with socket.create_connection(("127.0.0.1", port)) as upstream:
                    upstream.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1") + body)
                    upstream.shutdown(socket.SHUT_WR)
                    pump(upstream, self.connection)
                self.close_connection = True

            do_GET = do_HEAD = do_PUT = forward

            def admitted(self) -> bool:
                proxy.asked.append(f"{self.command} {self.path}")
                proxy.authorizations.append(self.headers.get("Proxy-Authorization"))
                if authorization is None or proxy.authorizations[-1] == authorization:
                    return True
                self.send_error(407)
                return False

            def log_message(self, *_: Any) -> None:
                pass

        self._serving = serving(Handler)
        self.address = f"127.0.0.1:{self._serving.__enter__().server_port}"

    def close(self) -> None:
        self._serving.__exit__(None, None, None)


def pump(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until `source` ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


BODY = b"0123456789"
WANTED = ByteRange(10, 20)
GOOD = {"Content-Length": "10", "Content-Range": "bytes 10-19/100", "ETag": '"v1"'}
HOST = "store.test"  # a name that only the proxy knows
USER = "http://me:p%40ss@"
AUTHORIZATION = "Basic " + base64.b64encode(b"me:p@ss").decode()
NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificates(tmp_path_factory.mktemp("tls"), HOST, f"*.{HOST}")


class Place:
    """A store behind a proxy: one server for each scheme."""

    def __init__(self, certificates: tuple[Path, Path]) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates[1])
        self._ca = certificates[0]
        self._opened: list[ScriptedServer | ForwardProxy | S3Store] = []
        self.servers = {"http": self._server(None), "https": self._server(context)}

    def _server(self, tls: ssl.SSLContext | None) -> ScriptedServer:
        def play(sock: socket.socket, _: int) -> None:
            method = server.head.split(" ")[0]
            if method == "GET":
                sock.sendall(answer("206 P", GOOD, BODY))
            else:
                sock.sendall(answer("200 OK", {"Content-Length": "10" if method == "HEAD" else "0", "ETag": '"v1"'}))

        server = ScriptedServer(play, tls)
        self._opened.append(server)
        return server

    def proxy(self, scheme: str, **options: object) -> ForwardProxy:
        proxy = ForwardProxy(self.servers[scheme].port, **options)  # type: ignore[arg-type]
        self._opened.append(proxy)
        return proxy

    def store(self, scheme: str, host: str = HOST, style: str = "path") -> S3Store:
        store = S3Store(
            StoreRef(
                *("s3", "bucket", "pre"),
                endpoint_url=f"{scheme}://{host}:{self.servers[scheme].port}",
                region="us-east-1",
                addressing_style=style,  # type: ignore[arg-type]
                ca_bundle=str(self._ca),
            ),
            Credentials("AKIDTEST", "very-secret-key"),
            read_timeout_s=5.0,
        )
        self._opened.append(store)
        return store

    def close(self) -> None:
        for thing in reversed(self._opened):
            thing.close()


@pytest.fixture
def place(certificates: tuple[Path, Path]) -> Iterator[Place]:
    with closing(Place(certificates)) as place:
        yield place


REQUESTS: dict[str, Callable[[S3Store], object]] = {
    "read": lambda store: read_bytes(store, "key", WANTED, etag="v1"),
    "look up": lambda store: store.stat("key"),
    "write": lambda store: store.put("key", b"data"),
}


@pytest.mark.parametrize("variable", ["{}_PROXY", "{}_proxy"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_all_requests_go_through_the_proxy(
    place: Place, monkeypatch: pytest.MonkeyPatch, scheme: str, variable: str
) -> None:
    proxy = place.proxy(scheme, authorization=AUTHORIZATION)
    name = variable.format(scheme.upper() if variable.isupper() else scheme)
    monkeypatch.setenv(name, f"{USER}{proxy.address}")
    store = place.store(scheme)
    for ask in REQUESTS.values():
        ask(store)
    assert read_bytes(store, "key", WANTED, etag="v1") == BODY
    where = f"{HOST}:{place.servers[scheme].port}"
    if scheme == "https":
        assert set(proxy.asked) == {f"CONNECT {where}"}
        assert len(proxy.asked) == 2  # one tunnel for reads, one for all else
    else:
        assert {f"{verb} http://{where}/bucket/pre/key" for verb in ("GET", "HEAD", "PUT")} <= set(proxy.asked)
    for head in place.servers[scheme].heads:
        assert "Proxy-" not in head  # the store does not see the password
        assert "/bucket/pre/key HTTP/1.1" in head


def test_the_proxy_finds_buckets_that_are_hosts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = place.proxy("https")
    monkeypatch.setenv("HTTPS_PROXY", proxy.address)  # without a scheme, as many write it
    assert read_bytes(place.store("https", style="virtual"), "key", WANTED) == BODY
    assert proxy.asked == [f"CONNECT bucket.{HOST}:{place.servers['https'].port}"]


@pytest.mark.parametrize("listed", ["127.0.0.1", "other.test, 127.0.0.1", "*", "127.0.0.1:{port}"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_hosts_in_no_proxy_are_asked_directly(
    place: Place, monkeypatch: pytest.MonkeyPatch, scheme: str, listed: str
) -> None:
    proxy = place.proxy(scheme)
    monkeypatch.setenv(f"{scheme.upper()}_PROXY", f"http://{proxy.address}")
    monkeypatch.setenv("NO_PROXY", listed.format(port=place.servers[scheme].port))
    store = place.store(scheme, "127.0.0.1")
    for ask in REQUESTS.values():
        ask(store)
    assert proxy.asked == []


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_asks_for_a_password(
    place: Place, monkeypatch: pytest.MonkeyPatch, scheme: str, request_name: str
) -> None:
    proxy = place.proxy(scheme, authorization=AUTHORIZATION)
    monkeypatch.setenv(f"{scheme.upper()}_PROXY", f"http://me:wrong-secret@{proxy.address}")
    with pytest.raises(ProxyRefused, match="user and a password") as caught:
        REQUESTS[request_name](place.store(scheme))
    assert "http://user:password@host:port" in caught.value.hint
    assert "wrong-secret" not in "".join(traceback.format_exception(caught.value))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert place.servers[scheme].heads == []


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize(("status", "kind"), [(403, ProxyRefused), (503, StoreUnavailable)])
def test_a_proxy_that_makes_no_tunnel(
    place: Place, monkeypatch: pytest.MonkeyPatch, request_name: str, status: int, kind: type[StoreError]
) -> None:
    proxy = place.proxy("https", connect_status=status)
    monkeypatch.setenv("HTTPS_PROXY", f"{USER}{proxy.address}")
    with pytest.raises(kind, match=f"status={status}") as caught:
        REQUESTS[request_name](place.store("https"))
    assert "p@ss" not in str(caught.value)
    assert "p%40ss" not in str(caught.value)


@pytest.mark.parametrize("request_name", REQUESTS)
def test_a_proxy_that_is_not_there(place: Place, monkeypatch: pytest.MonkeyPatch, request_name: str) -> None:
    proxy = place.proxy("https")
    proxy.close()
    monkeypatch.setenv("HTTPS_PROXY", f"{USER}{proxy.address}")
    with pytest.raises(StoreUnavailable, match="the proxy") as caught:
        REQUESTS[request_name](place.store("https"))
    assert "p%40ss" not in str(caught.value)


def test_plain_http_stores_use_the_proxy(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    proxy = place.proxy("http", authorization=AUTHORIZATION)
    monkeypatch.setenv("HTTP_PROXY", f"{USER}{proxy.address}")
    with closing(FsspecStore(StoreRef("http", HOST, "models"))) as store:
        assert store.stat("key").size_bytes
    assert proxy.asked[0] == f"HEAD http://{HOST}/models/key"
    monkeypatch.setenv("HTTP_PROXY", f"http://me:wrong-secret@{proxy.address}")
    with closing(FsspecStore(StoreRef("http", HOST, "models"))) as store, pytest.raises(ProxyRefused) as caught:
        store.stat("key")
    assert "wrong-secret" not in "".join(traceback.format_exception(caught.value))


def test_a_closed_store_has_no_connection_to_the_proxy(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = place.proxy("http")
    monkeypatch.setenv("HTTP_PROXY", f"http://{proxy.address}")
    store = place.store("http")
    store.stat("key")
    pools = [found for found in gc.get_objects() if isinstance(found, HTTPConnectionPool)]  # an error may have one

    port = int(proxy.address.rpartition(":")[2])
    assert connections_to(port) == 1
    store.close()
    assert connections_to(port) == 0
    assert pools


@pytest.mark.parametrize("named", ["socks5://h:1080", "https://u:secret@h:1", "http://", "http://u:secret@h:port"])
def test_bad_proxy_urls_are_refused_without_showing_them(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv("HTTPS_PROXY", named)
    with pytest.raises(InvalidUri, match="HTTPS_PROXY is not the URL of a usable proxy") as caught:
        find_proxy("https://store.test")
    assert "secret" not in str(caught.value)


def test_lower_case_counts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://upper:1")
    monkeypatch.setenv("https_proxy", "http://lower:2")
    assert find_proxy("https://store.test") == Proxy("lower", 2)
    assert find_proxy("http://store.test") is None
    monkeypatch.setenv("no_proxy", ".test")
    assert find_proxy("https://store.test") is None


def test_a_proxy_is_printed_without_its_password() -> None:
    proxy = Proxy("h", 3128, "me", "secret")
    assert "secret" not in f"{proxy} {proxy!r}"
    assert str(Proxy("::1", 1)) == "http://[::1]:1"
