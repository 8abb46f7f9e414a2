"""The hot path against a server that plays one scripted answer: the typed error for every way an answer can be bad."""

from __future__ import annotations

import pickle
import random
import re
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import (
    AccessDenied,
    LongshoreError,
    ObjectChanged,
    ObjectNotFound,
    RangeMismatch,
    ReadEnded,
    ShortRead,
    StoreError,
    StoreUnavailable,
    Throttled,
)
from storage.store_ref import Credentials, StoreRef
from storage.stores.object_store import ByteRange, read_bytes
from storage.stores.requests import ReadLimit
from storage.stores.s3.answers import check_answer, normal_etag
from storage.stores.s3.store import S3Store
from tests.support.certificates import make_certificates
from tests.support.scripted_server import Play, ScriptedServer, answer

pytestmark = pytest.mark.slow

BODY = b"0123456789"
WANTED = ByteRange(10, 20)
GOOD = {"Content-Length": "10", "Content-Range": "bytes 10-19/100", "ETag": '"v1"'}


def plays(data: bytes, *, then_close: bool = False) -> Play:
    def play(sock: socket.socket, _: int) -> None:
        sock.sendall(data)
        if then_close:
            raise OSError

    return play


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[ScriptedServer, S3Store]]]:
    opened: list[ScriptedServer | S3Store] = []

    def start(play: Play, **options: object) -> tuple[ScriptedServer, S3Store]:
        server = ScriptedServer(play)
        opened.append(server)
        store = S3Store(
            StoreRef("s3", "bucket", "pre", endpoint_url=f"http://127.0.0.1:{server.port}", region="us-east-1"),
            Credentials("AKIDTEST", "very-secret-key", "session-token-value"),
            read_timeout_s=float(str(options.get("read_timeout_s", 3.0))),
        )
        opened.append(store)
        return server, store

    yield start
    for thing in reversed(opened):
        thing.close()


Serve = Callable[..., tuple[ScriptedServer, S3Store]]


def test_good_answer_is_read_and_the_connection_kept(serve: Serve) -> None:
    server, store = serve(plays(answer("206 Partial Content", GOOD, BODY)))
    for _ in range(3):
        assert read_bytes(store, "key", WANTED, etag="v1") == BODY
    assert server.connections == 1
    head = server.heads[0]
    assert head.startswith("GET /bucket/pre/key HTTP/1.1\r\n")
    assert "Range: bytes=10-19\r\n" in head
    assert 'If-Match: "v1"\r\n' in head
    assert "Credential=AKIDTEST/" in head
    assert "/us-east-1/s3/aws4_request" in head
    assert "X-Amz-Security-Token: session-token-value\r\n" in head
    assert "very-secret-key" not in head


def test_200_with_a_right_content_range_is_taken(serve: Serve) -> None:
    _, store = serve(plays(answer("200 OK", GOOD, BODY)))
    assert read_bytes(store, "key", WANTED) == BODY


def test_200_for_the_whole_object(serve: Serve) -> None:
    _, store = serve(plays(answer("200 OK", {"Content-Length": "10", "ETag": 'W/"v1"'}, BODY)))
    assert read_bytes(store, "key", ByteRange(0, 10), etag="v1") == BODY


def test_unsigned_when_anonymous(serve: Serve) -> None:
    server, _ = serve(plays(answer("206 Partial Content", GOOD, BODY)))
    ref = StoreRef("s3", "bucket", "", endpoint_url=f"http://127.0.0.1:{server.port}", anonymous=True)
    with closing(S3Store(ref)) as store:
        assert read_bytes(store, "key", WANTED) == BODY
    assert "uthorization" not in server.heads[0]


XML = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>%s</Message></Error>"
BOMB = b'<!DOCTYPE x [<!ENTITY a "&b;&b;"><!ENTITY b "x">]><Error><Code>&a;</Code></Error>'


def refusal(status: str, code: bytes, message: bytes = b"said", **headers: str) -> bytes:
    body = XML % (code, message)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return answer(status, {"Content-Length": str(len(body)), **named}, body)


BAD: list[tuple[str, bytes, type[StoreError], str]] = [
    ("short body", answer("206 P", GOOD, BODY[:4]), ShortRead, "received_bytes=4"),
    ("no body", answer("206 P", GOOD), ShortRead, "received_bytes=0"),
    ("other range", answer("206 P", GOOD | {"Content-Range": "bytes 0-9/100"}, BODY), RangeMismatch, "another range"),
    ("cut range", answer("206 P", GOOD | {"Content-Range": "bytes 10-14/15"}, BODY), RangeMismatch, "past the"),
    ("strange range", answer("206 P", GOOD | {"Content-Range": "items 1-2/3"}, BODY), RangeMismatch, "be read"),
    ("longer", answer("206 P", GOOD | {"Content-Length": "11"}, BODY + b"x"), RangeMismatch, "another length"),
    ("shorter", answer("206 P", GOOD | {"Content-Length": "9"}, BODY[:9]), RangeMismatch, "another length"),
    (
        "no length",
        answer("206 P", {k: v for k, v in GOOD.items() if k != "Content-Length"}, BODY),
        RangeMismatch,
        "does not say its length",
    ),
    ("negative length", answer("206 P", GOOD | {"Content-Length": "-1"}, BODY), RangeMismatch, "its length"),
    ("chunked", answer("206 P", GOOD | {"Transfer-Encoding": "chunked"}), RangeMismatch, "its length"),
    ("gzip", answer("206 P", GOOD | {"Content-Encoding": "gzip"}, BODY), RangeMismatch, "encoded"),
    ("two lengths", answer("206 P", GOOD | {"content-length": "99"}, BODY), RangeMismatch, "two content-length"),
    ("whole object", answer("200 OK", {"Content-Length": "100", "ETag": "v1"}, BODY * 10), RangeMismatch, "the range"),
    ("206 without range", answer("206 P", {"Content-Length": "10", "ETag": "v1"}, BODY), RangeMismatch, "the range"),
    ("other etag", answer("206 P", GOOD | {"ETag": '"v2"'}, BODY), ObjectChanged, "found=v2"),
    ("no etag", answer("206 P", {k: v for k, v in GOOD.items() if k != "ETag"}, BODY), ObjectChanged, "expected=v1"),
    ("412", refusal("412 Precondition Failed", b"PreconditionFailed"), ObjectChanged, "pinned"),
    ("416 other etag", refusal("416 R", b"InvalidRange", ETag='"v2"'), ObjectChanged, "found=v2"),
    ("no key", refusal("404 Not Found", b"NoSuchKey"), ObjectNotFound, "no such object"),
    ("no bucket", refusal("404 Not Found", b"NoSuchBucket"), ObjectNotFound, "no such bucket"),
    ("404 html", answer("404 NF", {"Content-Length": "4"}, b"<p>!"), ObjectNotFound, "no such object"),
    ("403", refusal("403 Forbidden", b"AccessDenied", b"no &amp; never"), AccessDenied, "no & never"),
    ("401", refusal("401 Unauthorized", b""), AccessDenied, "credentials"),
    ("clock", refusal("403 Forbidden", b"RequestTimeTooSkewed"), AccessDenied, "clock"),
    ("slow down", refusal("503 Slow Down", b"SlowDown"), Throttled, "fewer"),
    ("bare 503", answer("503 X", {"Content-Length": "0"}), Throttled, "fewer"),
    ("429", refusal("429 Too Many", b"TooManyRequests"), Throttled, "fewer"),
    ("408", answer("408 Request Timeout", {"Content-Length": "0"}), StoreUnavailable, "status=408"),
    ("425", answer("425 Too Early", {"Content-Length": "0"}), StoreUnavailable, "status=425"),
    ("kms", refusal("400 Bad Request", b"KMS.ThrottlingException"), Throttled, "KMS.ThrottlingException"),
    ("request timeout", refusal("400 Bad Request", b"RequestTimeout", b"idle"), StoreUnavailable, "now: idle"),
    ("500", refusal("500 Internal", b"InternalError"), StoreUnavailable, "status=500"),
    ("502", answer("502 Bad Gateway", {"Content-Length": "0"}), StoreUnavailable, "status=502"),
    ("bomb", answer("500 X", {"Content-Length": str(len(BOMB))}, BOMB), StoreUnavailable, "status=500"),
    ("301", refusal("301 M", b"PermanentRedirect", x_amz_bucket_region="eu-west-3"), StoreError, "region eu-west-3"),
    ("400 region", refusal("400 B", b"AuthorizationHeaderMalformed", x_amz_bucket_region="ap-1"), StoreError, "ap-1"),
    ("307", answer("307 T", {"Content-Length": "0", "Location": "http://evil/"}), StoreError, "another place"),
    ("400", refusal("400 Bad Request", b"InvalidRequest", b"because"), StoreError, "because"),
    ("not http", b"SSH-2.0-OpenSSH_9.2\r\n", StoreUnavailable, "BadStatusLine"),
    ("endless header", b"HTTP/1.1 206 P\r\nX: " + b"a" * 70_000, StoreUnavailable, "LineTooLong"),
    ("many headers", answer("206 P", {f"h{i}": "x" for i in range(200)}), StoreUnavailable, "HTTPException"),
    ("nothing", b"", StoreUnavailable, "connection"),
    ("half a head", b"HTTP/1.1 206 Par\r\nContent-Length: 10\r\nETa", StoreUnavailable, "in its head"),
]


@pytest.mark.parametrize(("data", "kind", "says"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_answers(serve: Serve, data: bytes, kind: type[StoreError], says: str) -> None:
    server, store = serve(plays(data, then_close=True))
    with pytest.raises(StoreError) as caught:
        read_bytes(store, "key", WANTED, etag="v1")
    assert type(caught.value) is kind
    assert says in str(caught.value)
    assert "key" in str(caught.value)
    assert "uthorization" not in repr(caught.value)
    for secret in ("very-secret-key", "session-token-value", "AKIDTEST"):
        assert secret not in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (kind, str(caught.value))
    assert store._wire is not None
    assert len(store._wire._idle) == 0  # a connection with an unread answer is never used again
    assert server.connections == 1  # nothing was retried


@pytest.mark.parametrize(
    "refused",
    [
        answer("408 Request Timeout", {"Content-Length": "0"}),
        answer("425 Too Early", {"Content-Length": "0"}),
        refusal("400 Bad Request", b"KMS.ThrottlingException"),
    ],
    ids=["408", "425", "KMS"],
)
def test_look_ups_listings_and_writes_are_tried_again(serve: Serve, refused: bytes) -> None:
    listing = b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>"
    seen: Counter[str] = Counter()

    def play(sock: socket.socket, _: int) -> None:
        method = server.head.split(" ")[0]
        seen[method] += 1
        if seen[method] == 1:
            sock.sendall(refused if method != "HEAD" else refused.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        elif method == "HEAD":
            sock.sendall(answer("200 OK", {"Content-Length": "10", "ETag": '"v1"'}))
        else:
            body = listing if method == "GET" else b""
            sock.sendall(answer("200 OK", {"Content-Length": str(len(body)), "ETag": '"v1"'}, body))

    server, store = serve(play)
    if b"KMS" not in refused:  # the answer to a HEAD has no body, and so no code
        assert store.stat("key").etag == "v1"
        assert seen.pop("HEAD") == 2
    assert list(store.list()) == []
    assert store.put("key", b"data").etag == "v1"
    with store.upload("key") as upload:
        upload.write(memoryview(b"data"))
        upload.complete()
    assert seen == {"GET": 2, "PUT": 3}


# 409: another write is under way, and succeeds or fails. 501: the server knows no conditions, so it is asked without.
@pytest.mark.parametrize("statuses", ["200", "412", "409 412", "409 200", "501 200"])
@pytest.mark.parametrize("etag", [None, "v1"])
def test_a_conditional_write_has_the_condition(serve: Serve, etag: str | None, statuses: str) -> None:
    answers = {
        "200": answer("200 OK", {"Content-Length": "0", "ETag": '"v2"'}),
        "409": refusal("409 Conflict", b"ConditionalRequestConflict"),
        "412": refusal("412 Precondition Failed", b"PreconditionFailed"),
        "501": refusal("501 Not Implemented", b"NotImplemented"),
    }
    conditions: list[list[str]] = []

    def play(sock: socket.socket, _: int) -> None:
        if server.head.startswith("HEAD"):  # before the write, nothing has changed
            is_there = etag is not None or "/pre/key" not in server.head
            return sock.sendall(answer("200 OK" if is_there else "404 Not Found", GOOD | {"Content-Length": "0"}))
        conditions.append(re.findall(r"If-\w*-?Match: \S+", server.head))
        return sock.sendall(answers[statuses.split()[len(conditions) - 1]])

    server, store = serve(play)
    if statuses.endswith("200"):
        assert store.put_if("key", b"data", etag).etag == "v2"
    else:
        with pytest.raises(ObjectChanged):
            store.put_if("key", b"data", etag)
    condition = ["If-None-Match: *" if etag is None else 'If-Match: "v1"']
    assert conditions == [condition, [] if statuses.startswith("501") else condition][: len(statuses.split())]


def test_416_is_asked_after_when_a_version_is_pinned(serve: Serve) -> None:
    def play(sock: socket.socket, _: int) -> None:
        is_head = server.heads[-1].startswith("HEAD")
        changed = {"Content-Length": "5", "ETag": '"v2"'}
        sock.sendall(answer("200 OK", changed) if is_head else refusal("416 R", b"InvalidRange"))

    server, store = serve(play)
    with pytest.raises(ObjectChanged, match="found=v2"):
        read_bytes(store, "key", WANTED, etag="v1")
    with pytest.raises(RangeMismatch, match="past the object's end"):
        read_bytes(store, "key", WANTED, etag="v2")


def test_huge_error_body_is_read_in_part(serve: Serve) -> None:
    sent: list[int] = []

    def play(sock: socket.socket, _: int) -> None:
        sock.sendall(answer("500 X", {"Content-Length": str(1 << 40)}))
        while not server.over.is_set():
            sent.append(sock.send(b"<Code>Deep</Code>" * 1000))

    server, store = serve(play)
    with pytest.raises(StoreUnavailable, match="status=500"):
        read_bytes(store, "key", WANTED)
    assert sum(sent) < 64 << 20  # what sockets hold, not what was promised


def test_silent_server_times_out(serve: Serve) -> None:
    server, store = serve(lambda *_: server.over.wait(10) and None, read_timeout_s=0.3)
    with pytest.raises(StoreUnavailable, match="in time"):
        read_bytes(store, "key", WANTED)


def test_server_that_stops_in_mid_body_times_out(serve: Serve) -> None:
    def play(sock: socket.socket, _: int) -> None:
        sock.sendall(answer("206 P", GOOD, BODY[:5]))
        server.over.wait(10)

    server, store = serve(play, read_timeout_s=0.3)
    with pytest.raises(StoreUnavailable, match="in time"):
        read_bytes(store, "key", WANTED)


def test_dripping_server_times_out(serve: Serve) -> None:
    size = 1 << 20

    def play(sock: socket.socket, _: int) -> None:
        sock.sendall(answer("200 OK", {"Content-Length": str(size)}))
        while not server.over.wait(0.05):
            sock.sendall(b"x")

    server, store = serve(play, read_timeout_s=0.4)
    with pytest.raises(StoreUnavailable, match="too slowly"):
        read_bytes(store, "key", ByteRange(0, size))


def test_reset_in_mid_body(serve: Serve) -> None:
    def play(sock: socket.socket, _: int) -> None:
        sock.sendall(answer("206 P", GOOD, BODY[:5]))
        # Closing with a zero linger time sends RST.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        sock.close()
        raise OSError

    _, store = serve(play)
    with pytest.raises(StoreUnavailable):
        read_bytes(store, "key", WANTED)


def test_connection_closed_while_idle_is_replaced_once(serve: Serve) -> None:
    def play(sock: socket.socket, number: int) -> None:
        if number:
            raise OSError  # the second request on a connection finds it closed
        sock.sendall(answer("206 P", GOOD, BODY))

    server, store = serve(play)
    for _ in range(3):
        assert read_bytes(store, "key", WANTED) == BODY
    assert server.connections == 3


def test_connection_close_is_honoured(serve: Serve) -> None:
    server, store = serve(plays(answer("206 P", GOOD | {"Connection": "close"}, BODY), then_close=True))
    for _ in range(2):
        assert read_bytes(store, "key", WANTED) == BODY
    assert server.connections == 2


def test_closed_store_refuses(serve: Serve) -> None:
    _, store = serve(plays(answer("206 P", GOOD, BODY)))
    assert read_bytes(store, "key", WANTED) == BODY
    assert store._wire is not None
    wire = store._wire
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        wire._take_idle()


def test_bytes_after_the_body_are_not_taken_for_the_next_answer(serve: Serve) -> None:
    forged = answer("206 P", GOOD, b"FORGED....")
    _, store = serve(plays(answer("206 P", GOOD, BODY) + forged))
    assert read_bytes(store, "key", WANTED) == BODY
    assert read_bytes(store, "key", WANTED) == BODY


@given(
    status=st.sampled_from([200, 206]),
    start=st.integers(0, 50),
    size=st.integers(1, 50),
    headers=st.dictionaries(
        st.sampled_from(["content-range", "content-length", "etag", "content-encoding", "transfer-encoding"]),
        st.text(max_size=30)
        | st.builds("bytes {}-{}/{}".format, st.integers(0, 60), st.integers(0, 60), st.integers(0, 100))
        | st.integers(0, 100).map(str),
    ),
)
def test_an_accepted_content_range_is_exactly_the_requested_one(
    status: int, start: int, size: int, headers: dict[str, str]
) -> None:
    wanted = ByteRange(start, start + size)
    try:
        check_answer(status, headers, wanted, None)
    except LongshoreError:
        return
    assert int(headers["content-length"]) == size
    if "content-range" in headers:
        assert headers["content-range"].strip().startswith(f"bytes {start}-{start + size - 1}/")
    else:
        assert (status, start) == (200, 0)


@pytest.mark.parametrize(
    ("value", "expected"), [('"a"', "a"), ('W/"a"', "a"), ("a", "a"), ("", None), (None, None), ('""', None)]
)
def test_normal_etag(value: str | None, expected: str | None) -> None:
    assert normal_etag(value) == expected


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificates(tmp_path_factory.mktemp("tls"))


class TestTls:
    @pytest.fixture
    def server(self, certificates: tuple[Path, Path]) -> Iterator[ScriptedServer]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates[1])

        def play(sock: socket.socket, _: int) -> None:
            is_head = server.heads[-1].startswith("HEAD")
            sock.sendall(answer("206 P", {**GOOD, "Content-Length": "10"}, b"" if is_head else BODY))

        server = ScriptedServer(play, context)
        yield server
        server.close()

    def _store(self, server: ScriptedServer, ca: Path | None, read_timeout_s: float = 10.0) -> S3Store:
        ref = StoreRef(
            "s3", "bucket", "", endpoint_url=f"https://127.0.0.1:{server.port}", ca_bundle=str(ca) if ca else None
        )
        return S3Store(ref, Credentials("AKIDTEST", "secret-secret"), read_timeout_s=read_timeout_s)

    @contextmanager
    def _playing(
        self, certificates: tuple[Path, Path], play: Play, read_timeout_s: float = 10.0
    ) -> Iterator[tuple[ScriptedServer, S3Store]]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates[1])
        server = ScriptedServer(play, context)
        with closing(server), closing(self._store(server, certificates[0], read_timeout_s)) as store:
            yield server, store

    def test_own_ca_is_trusted(self, server: ScriptedServer, certificates: tuple[Path, Path]) -> None:
        with closing(self._store(server, certificates[0])) as store:
            assert read_bytes(store, "key", WANTED, etag="v1") == BODY
            assert store.stat("key").etag == "v1"

    def test_ca_from_the_environment(
        self, server: ScriptedServer, certificates: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates[0]))
        with closing(self._store(server, None)) as store:
            assert read_bytes(store, "key", WANTED) == BODY

    def test_unknown_ca_is_refused(self, server: ScriptedServer) -> None:
        with closing(self._store(server, None)) as store:
            for ask in (lambda: read_bytes(store, "key", WANTED), lambda: store.stat("key")):
                with pytest.raises(StoreError, match="not trusted") as caught:
                    ask()
                assert type(caught.value) is StoreError  # a retry would not help
        assert server.heads == []

    def test_an_invalid_ca_file_is_refused(self, server: ScriptedServer, tmp_path: Path) -> None:
        with pytest.raises(StoreError), closing(self._store(server, tmp_path / "none.pem")) as store:
            read_bytes(store, "key", WANTED)

    def test_a_body_of_many_records_fills_odd_pieces(self, certificates: tuple[Path, Path]) -> None:
        body = random.Random(1).randbytes(300_001)
        head = {"Content-Length": str(len(body)), "ETag": '"v1"'}
        with self._playing(certificates, plays(answer("200 OK", head, body))) as (server, store):
            for _ in range(2):
                memory = bytearray(len(body))
                whole = memoryview(memory)
                pieces = [whole[:1], whole[1:20_000], whole[20_000:20_000], whole[20_000:200_000], whole[200_000:]]
                store.read_pieces("key", ByteRange(0, len(body)), pieces, etag="v1")
                assert memory == body
        assert server.connections == 1

    def test_a_body_that_ends_early(self, certificates: tuple[Path, Path]) -> None:
        body = answer("200 OK", {"Content-Length": "100000"}, bytes(50_000))
        with self._playing(certificates, plays(body, then_close=True)) as (_, store):
            with pytest.raises(ShortRead) as caught:
                read_bytes(store, "key", ByteRange(0, 100_000))
            assert caught.value.details["received_bytes"] == 50_000

    @pytest.mark.parametrize(("pause_s", "says"), [(10.0, "in time"), (0.05, "too slowly")], ids=["stops", "drips"])
    def test_a_slow_body_times_out(self, certificates: tuple[Path, Path], pause_s: float, says: str) -> None:
        def play(sock: socket.socket, _: int) -> None:
            sock.sendall(answer("200 OK", {"Content-Length": str(1 << 20)}, b"x" * 5))
            while not server.over.wait(pause_s):
                sock.sendall(b"x")

        with self._playing(certificates, play, read_timeout_s=0.4) as (server, store):
            with pytest.raises(StoreUnavailable, match=says) as caught:
                read_bytes(store, "key", ByteRange(0, 1 << 20))
            assert caught.value.details["received_bytes"] >= 5

    def test_a_read_is_ended_from_outside(self, certificates: tuple[Path, Path]) -> None:
        limit, memory = ReadLimit(), bytearray(10)

        def play(sock: socket.socket, _: int) -> None:
            sock.sendall(answer("206 P", GOOD, BODY[:4]))
            limit.end()
            server.over.wait(60)

        with self._playing(certificates, play) as (server, store):
            with pytest.raises(ReadEnded) as caught:
                store.read_pieces("key", WANTED, [memoryview(memory)], limit=limit)
            # Whatever was taken over TLS is what was sent, never the ciphertext.
            count = caught.value.details["received_bytes"]
            assert bytes(memory) == BODY[:count] + bytes(10 - count)
