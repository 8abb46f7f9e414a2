"""A hostile S3 server over a socket: what boto3 lists and looks up with ends soon, small, and in an error of ours."""

from __future__ import annotations

import gc
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from urllib3 import HTTPConnectionPool

from storage.errors import AccessDenied, ObjectNotFound, StoreError, StoreUnavailable
from storage.store_ref import Credentials, StoreRef
from storage.stores.s3 import session as s3_session
from storage.stores.s3 import store as s3
from storage.stores.s3.answers import MAX_ERROR_BODY_BYTES
from storage.stores.s3.session import MAX_ANSWER_BYTES, MAX_MARKS, check_document
from storage.stores.s3.store import S3Store
from tests.support.certificates import make_certificates
from tests.support.scripted_server import Play, ScriptedServer, answer, connections_to

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

pytestmark = pytest.mark.slow
KEYS = Credentials("id", "secret")
READ_S = 30.0
MIB = 1 << 20


@contextmanager
def store_behind(play: Play, certificates: tuple[Path, Path] | None = None) -> Iterator[tuple[S3Store, ScriptedServer]]:
    """`certificates`: (CA, certificate with key) of a server that speaks TLS."""
    tls, ca_bundle = None, None
    if certificates is not None:
        tls, ca_bundle = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), str(certificates[0])
        tls.load_cert_chain(certificates[1])
    server = ScriptedServer(play, tls)
    endpoint_url = f"{'https' if tls else 'http'}://127.0.0.1:{server.port}"
    ref = StoreRef("s3", "bucket", "", endpoint_url=endpoint_url, region="us-east-1", ca_bundle=ca_bundle)
    with closing(server), closing(S3Store(ref, KEYS, read_timeout_s=READ_S)) as store:
        yield store, server


@contextmanager
def answers_end(after_s: float) -> Iterator[None]:
    """Far sooner than one read does: what ends an answer is not that this machine was slow to send the next piece."""

    bound_answers = s3_session.bound_answers

    def bound(client: S3Client, *, uri: str, answer_s: float) -> None:
        assert answer_s == 2 * READ_S
        bound_answers(client, uri=uri, answer_s=after_s)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(s3_session, "bound_answers", bound)
        yield


def refusal(ask: Callable[[], object], kind: type[StoreError] = StoreError) -> str:
    """Return the message of the refusal."""
    with pytest.raises(kind) as caught:
        ask()
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def listed(store: S3Store) -> Callable[[], object]:
    return lambda: list(store.list())


def whole(status: str, body: bytes, **headers: str) -> Play:
    """Every request is answered with this."""
    head = {"Content-Length": str(len(body))} | {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda sock, _: sock.sendall(answer(status, head, body))


def listing(entries: str, more: str = "") -> bytes:
    truncated = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{more}</NextContinuationToken>" if more else ""
    return f"<ListBucketResult>{truncated}{entries}</ListBucketResult>".encode()


def entry(key: str = "a", size: str = "5", etag: str = '"v"') -> str:
    return f"<Contents><Key>{key}</Key><Size>{size}</Size><ETag>{etag}</ETag></Contents>"


def endless(head: str, piece: bytes) -> Play:
    """Send far more than is allowed while the client reads, but not all that would fit into this machine's memory."""

    def play(sock: socket.socket, _: int) -> None:
        sock.sendall(head.encode())
        for _ in range(20 * MAX_ANSWER_BYTES // len(piece)):
            sock.sendall(piece)

    return play


LAUGHS = b"<!DOCTYPE a [<!ENTITY a 'ha'>" + b"".join(
    b"<!ENTITY %c '&%c;&%c;&%c;&%c;'>" % (i + 1, i, i, i, i) for i in range(97, 120)
)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"\xff\xfe<\0a\0>\0",
        b"<html><body>It works!</body></html>"[:20],
        LAUGHS + b"]><ListBucketResult>&x;</ListBucketResult>",
        b"<?xml version='1.0'?><!DOCTYPE a SYSTEM 'file:///etc/passwd'><a/>",
        b"<a>" * (MAX_MARKS + 1),
        b"<a " + b" ".join(b"b%d=''" % n for n in range(MAX_MARKS + 1)) + b"/>",
        listing(entry(size="many")),
        listing(entry(size="-5")),
        listing(entry(size="9" * 30)),
        listing(entry(size="9" * 5000)),
        listing("<Contents><Size>5</Size></Contents>"),
        listing("<Contents><Key>a</Key></Contents>"),
        listing(entry(etag="v&#13;&#10;X-Evil: 1")),
        listing(entry(etag="v" * 1000)),
        listing("<Contents><Key>a</Key><Size>5</Size><LastModified>yesterday</LastModified></Contents>"),
    ],
    ids=range(17),
)
def test_an_invalid_listing_is_an_error(body: bytes) -> None:
    with store_behind(whole("200 OK", body)) as (store, server):
        if body in (b"",):
            assert list(store.list()) == []  # botocore takes nothing for an empty listing
        else:
            assert refusal(listed(store))
    assert len(server.heads) <= 3  # botocore asks again for some


def test_a_good_listing() -> None:
    with store_behind(whole("200 OK", listing(entry("a") + entry("b/c") + entry("..") + entry("d/")))) as (store, _):
        assert [info.key for info in store.list()] == ["a", "b/c"]
    with store_behind(whole("200 OK", listing(entry("a") + entry("b/c") + entry("..") + entry("d/")))) as (store, _):
        assert list(store.left_out()) == [".."]


@pytest.mark.parametrize("head", ["", "Content-Length: 9999999999999\r\n", "Content-Length: x\r\n"])
def test_gigabytes_of_a_listing(head: str) -> None:
    piece = entry().encode() * 1000
    with store_behind(endless(f"HTTP/1.1 200 OK\r\n{head}\r\n<ListBucketResult>", piece)) as (store, server):
        tracemalloc.start()
        try:
            assert "bytes" in refusal(listed(store), StoreError)
            assert tracemalloc.get_traced_memory()[1] < 3 * MAX_ANSWER_BYTES
        finally:
            tracemalloc.stop()
    assert server.connections == 1


def test_gigabytes_of_chunks() -> None:
    piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with store_behind(endless("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", piece)) as (store, _):
        assert "bytes" in refusal(listed(store), StoreError)


def test_an_answer_to_a_change_may_take_longer_than_one_to_a_read() -> None:
    """S3 assembles a large upload before it answers."""

    def play(sock: socket.socket, _: int) -> None:
        time.sleep(1.5)
        sock.sendall(answer("204 No Content", {}))

    with answers_end(0.5), store_behind(play) as (store, _):
        refusal(listed(store), StoreUnavailable)
        store.delete("a")


@pytest.mark.parametrize(("status", "kind"), [("403 F", AccessDenied), ("404 N", ObjectNotFound)])
def test_a_huge_error_body_is_not_read_and_its_status_counts(status: str, kind: type[StoreError]) -> None:
    sent: list[int] = []

    def play(sock: socket.socket, _: int) -> None:
        sock.sendall(f"HTTP/1.1 {status}\r\n\r\n<Error><Code>".encode())
        for _ in range(1000):
            sock.sendall(b"x" * MIB)
            sent.append(MIB)

    with store_behind(play) as (store, _):
        assert refusal(listed(store), kind)
    assert sum(sent) < 100 * MIB + MAX_ERROR_BODY_BYTES  # what stood in the socket's buffers


def test_an_html_error_page_is_an_error() -> None:
    page = b"<!DOCTYPE html><html><body>Bad gateway</body></html>"
    with store_behind(whole("502 Bad Gateway", page)) as (store, _):
        assert refusal(listed(store), StoreUnavailable)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 500 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: "\x1b[2J"\r\n\r\n',
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nLast-Modified: yesterday\r\n\r\n",
        b"HTTP/1.1 999 What\r\n\r\n",
        b"HTTP/3 \xff\r\n\r\n",
        b"\x16\x03\x01\0\0",
    ],
    ids=range(10),
)
def test_a_nonsense_head_answer_is_an_error(head: bytes) -> None:
    def play(sock: socket.socket, _: int) -> None:
        sock.sendall(head)
        sock.shutdown(socket.SHUT_WR)

    with store_behind(play) as (store, server):
        assert refusal(lambda: store.stat("key"))
    assert len(server.heads) <= 4


def drip(first: bytes, piece: bytes) -> Play:
    """A piece every 50 ms: no read of it ever takes long."""

    def play(sock: socket.socket, _: int) -> None:
        sock.sendall(first)
        with suppress(OSError):
            while not over.wait(0.05):
                sock.sendall(piece)

    over = threading.Event()
    return play


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (b"", b"H"),
        (b"HTTP/1.1 200 OK\r\nx: ", b"y"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n<", b"a"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n<\r\n"),
    ],
    ids=["status", "head", "continue", "body", "chunks"],
)
@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_an_answer_that_trickles_ends(
    first: bytes, piece: bytes, tls: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    certificates = make_certificates(tmp_path_factory.mktemp("tls"), "localhost") if tls else None
    with answers_end(after_s=1.0), store_behind(drip(first, piece), certificates) as (store, server):
        before_s = time.monotonic()
        assert "in time" in refusal(listed(store), StoreUnavailable)
        assert time.monotonic() - before_s >= 0.9
    assert server.connections <= 1  # it was not asked again


def test_an_answer_that_was_cut_short_is_no_shorter_listing() -> None:
    body = listing(entry("a") + entry("b"))

    def play(sock: socket.socket, _: int) -> None:
        sock.sendall(answer("200 OK", {"Content-Length": str(len(body) + 1000)}, body))
        sock.shutdown(socket.SHUT_WR)

    with store_behind(play) as (store, _):
        assert "early" in refusal(listed(store), StoreUnavailable)


@pytest.mark.parametrize("entries", ["", entry("a") * 10], ids=["empty pages", "keys"])
def test_a_listing_that_never_ends(entries: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "MAX_LISTED_KEYS", 100)
    monkeypatch.setattr(s3, "MAX_EMPTY_PAGES", 20)
    pages: list[int] = []

    def play(sock: socket.socket, _: int) -> None:
        pages.append(1)
        body = listing(entries, more=f"token-{len(pages)}")
        sock.sendall(answer("200 OK", {"Content-Length": str(len(body))}, body))

    with store_behind(play) as (store, _):
        assert "does not end" in refusal(listed(store), StoreError)
    assert len(pages) <= 21


def test_listings_that_take_too_long_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "MAX_LISTING_S", 0.2)
    pages: list[int] = []

    def play(sock: socket.socket, _: int) -> None:
        pages.append(1)
        time.sleep(0.1)
        body = listing(entry("a"), more=f"token-{len(pages)}")
        sock.sendall(answer("200 OK", {"Content-Length": str(len(body))}, body))

    with store_behind(play) as (store, _):
        assert "does not end" in refusal(listed(store), StoreError)
    assert len(pages) <= 3


def test_uploads_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_session, "_CHANGES_TAKE", 1)
    with answers_end(after_s=0.5), store_behind(drip(b"HTTP/1.1 200 OK\r\nx: ", b"y")) as (store, _):
        assert "in time" in refusal(lambda: store.put("key", b"x"), StoreUnavailable)
    with store_behind(endless("HTTP/1.1 200 OK\r\n\r\n", b"x" * MIB)) as (store, _):
        assert "bytes" in refusal(lambda: store.put("key", b"x"), StoreError)


def test_a_closed_store_has_no_connection_whoever_refers_to_its_errors() -> None:
    with store_behind(whole("200 OK", listing(entry()))) as (store, server):
        list(store.list())
        assert connections_to(server.port) == 1
        pools = [found for found in gc.get_objects() if isinstance(found, HTTPConnectionPool)]  # an error may have one
        store.close()
        assert connections_to(server.port) == 0
    assert pools


def test_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    with store_behind(whole("200 OK", listing(entry()))) as (store, _):
        for _ in range(20):
            list(store.list())
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


def test_documents() -> None:
    for good in (b"", b"<a/>", b"<a b='c'>&amp;</a>"):
        check_document(good)
    for bad in (b"<" * (MAX_MARKS + 1), b"<!DOCTYPE a>", b"<a>\0</a>", b" " * (MAX_ANSWER_BYTES + 1)):
        with pytest.raises(ValueError, match=r"\w"):
            check_document(bad)
