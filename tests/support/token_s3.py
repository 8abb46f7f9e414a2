"""A small S3 server that checks every signature and lets session tokens expire, which the real servers here do not.

with TokenS3({"bucket/key": b"..."}) as server:
    server.issue(file)           new keys into a credentials file; the ones before stay good
    server.expire()              the ones before are refused from now on: 403 ExpiredToken
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.support.http_servers import place, serving
from tests.support.s3_servers import write_credentials

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(\w+)/(\d{8})/([\w-]+)/s3/aws4_request,"
    r" SignedHeaders=([\w;-]+), Signature=(\w+)"
)
ALLOWED_SKEW = timedelta(minutes=15)


class TokenS3:
    """`objects`: by path; `ahead`: its clock is so far ahead of ours. Knows GET of ranges, HEAD, ListObjectsV2."""

    def __init__(self, objects: dict[str, bytes], ahead: timedelta = timedelta()) -> None:
        self.objects, self.ahead = dict(objects), ahead
        self.seen: Counter[str] = Counter()  # requests by access key and answer: "AK1 206", "AK1 ExpiredToken"
        self.before: dict[int, Callable[[], object]] = {}  # called before the n-th ranged request is judged, from 1
        self._reads = 0
        self._keys: dict[str, Credentials] = {}
        self._good: set[str] = set()
        self._lock = threading.RLock()  # what is called may issue and expire
        self._serving = serving(_Handler)
        server = self._serving.__enter__()
        server.store = self  # type: ignore[attr-defined]
        self.endpoint_url = place(server)

    def new_keys(self) -> Credentials:
        """Make keys that are accepted until they `expire`."""
        with self._lock:
            key_id = f"AK{len(self._keys) + 1}"
            keys = self._keys[key_id] = Credentials(key_id, secrets.token_hex(16), secrets.token_hex(16))
            self._good.add(key_id)
        return keys

    def issue(self, file: Path) -> str:
        """The access key id of new keys, which the credentials file has now, and nothing else; replaced in one go."""
        keys = self.new_keys()
        key_id = str(keys.access_key)
        write_credentials(file, key_id, str(keys.secret_key), str(keys.token))
        return key_id

    def expire(self, *key_ids: str) -> None:
        """These are refused from now on."""
        with self._lock:
            self._good.difference_update(key_ids)

    def refusal(self, handler: BaseHTTPRequestHandler) -> tuple[str, str]:
        """(access key id, error code); no code for a request that is well signed with keys that are good."""
        found = _AUTHORIZATION.fullmatch(handler.headers.get("Authorization", ""))
        if found is None:
            return "nobody", "AccessDenied"
        key_id, _, region, signed, signature = found.groups()
        keys = self._keys.get(key_id)
        if keys is None:
            return key_id, "InvalidAccessKeyId"
        if handler.headers.get("X-Amz-Security-Token") != keys.token:
            return key_id, "InvalidToken"
        if self._sign(handler, keys, region, signed.split(";")) != signature:
            return key_id, "SignatureDoesNotMatch"
        at = datetime.strptime(handler.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        if abs(at - datetime.now(UTC) - self.ahead) > ALLOWED_SKEW:
            return key_id, "RequestTimeTooSkewed"
        return key_id, "" if key_id in self._good else "ExpiredToken"

    def count(self) -> None:
        """A range is asked for; whether that is allowed is looked at next."""
        with self._lock:
            self._reads += 1
            call = self.before.pop(self._reads, None)
            if call is not None:
                call()

    def _sign(self, handler: BaseHTTPRequestHandler, keys: Credentials, region: str, signed: list[str]) -> str:
        url = f"{self.endpoint_url}{handler.path}"
        request = AWSRequest(handler.command, url, headers={name: handler.headers[name] for name in signed})
        request.context["timestamp"] = handler.headers["X-Amz-Date"]
        signer = S3SigV4Auth(keys, "s3", region)
        canonical = [
            request.method,
            urlsplit(url).path,
            "&".join(sorted(part if "=" in part else f"{part}=" for part in urlsplit(url).query.split("&") if part)),
            "".join(f"{name}:{' '.join(handler.headers[name].split())}\n" for name in signed),
            ";".join(signed),
            handler.headers["X-Amz-Content-SHA256"],
        ]
        return str(signer.signature(signer.string_to_sign(request, "\n".join(canonical)), request))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._serving.__exit__(*error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        store: TokenS3 = self.server.store  # type: ignore[attr-defined]
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked:
            store.count()
        key_id, code = store.refusal(self)
        if code:
            return self._answer(key_id, 403, {}, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())
        path, query = urlsplit(self.path).path.strip("/"), parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            return self._answer(key_id, 200, {}, self._listing(store, path, query.get("prefix", [""])[0]))
        data = store.objects.get(path)
        if data is None:
            return self._answer(key_id, 404, {}, b"<Error><Code>NoSuchKey</Code></Error>")
        headers = {"ETag": _etag(data)}
        if asked is None:
            return self._answer(key_id, 200, headers, data)
        start, end = int(asked[1]), min(int(asked[2]) + 1, len(data))
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        return self._answer(key_id, 206, headers, data[start:end])

    do_HEAD = do_GET

    def _listing(self, store: TokenS3, bucket: str, prefix: str) -> bytes:
        entries = "".join(
            f"<Contents><Key>{escape(path.removeprefix(f'{bucket}/'))}</Key><Size>{len(data)}</Size>"
            f"<ETag>{_etag(data)}</ETag></Contents>"
            for path, data in sorted(store.objects.items())
            if path.startswith(f"{bucket}/{prefix}")
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()

    def _answer(self, key_id: str, status: int, headers: dict[str, str], body: bytes) -> None:
        store: TokenS3 = self.server.store  # type: ignore[attr-defined]
        code = re.search(rb"<Code>(\w+)</Code>", body[:200]) if status >= 400 else None
        with store._lock:
            store.seen[f"{key_id} {code[1].decode() if code else status}"] += 1
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):
            return super().handle_one_request()
        self.close_connection = True
        return None

    def date_time_string(self, timestamp: float | None = None) -> str:
        return format_datetime(datetime.now(UTC) + self.server.store.ahead, usegmt=True)  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
