"""A hostile S3 server redirects requests. Neither Longshore's reads nor boto3 follow it to another host."""

from __future__ import annotations

import contextlib
from contextlib import closing
from http.server import BaseHTTPRequestHandler

import pytest

from storage.errors import StoreError
from storage.store_ref import Credentials, parse_uri
from storage.stores.object_store import ByteRange, read_bytes
from storage.stores.s3.store import S3Store
from tests.support.http_servers import place, serving

pytestmark = pytest.mark.slow
KEYS = Credentials(access_key_id="id", secret_access_key="secret")


class Handler(BaseHTTPRequestHandler):
    """Refuses everything with its server's answer."""

    protocol_version = "HTTP/1.1"
    answer: tuple[int, dict[str, str], bytes] = (500, {}, b"")

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        status, headers, body = Handler.answer
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_PUT = do_DELETE = do_POST = do_GET

    def finish(self) -> None:
        with contextlib.suppress(OSError):  # who has read enough hangs up
            super().finish()

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("region", ["", "eu-west-9", "x.evil.example/"])
def test_redirects_to_other_hosts_are_not_followed(status: int, region: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Handler) as home, serving(Handler) as other:
        elsewhere = place(other)
        error = f"<Error><Code>PermanentRedirect</Code><Endpoint>{elsewhere[7:]}</Endpoint></Error>".encode()
        headers = {"Location": f"{elsewhere}/x"} | ({"x-amz-bucket-region": region} if region else {})
        monkeypatch.setattr(Handler, "answer", (status, headers, error))
        ref = parse_uri("s3://bucket/model", endpoint_url=place(home), region="us-east-1", environ={})
        with closing(S3Store(ref, KEYS, read_timeout_s=5)) as store:
            for request in (
                lambda: read_bytes(store, "key", ByteRange(0, 10)),
                lambda: store.stat("key"),
                lambda: list(store.list()),
                lambda: store.put("key", b"x"),
                lambda: store.delete("key"),
            ):
                with pytest.raises(StoreError):
                    request()
        assert 5 <= len(home.asked) <= 20  # type: ignore[attr-defined]  # boto3 alone would go round and round
        assert not other.asked  # type: ignore[attr-defined]
