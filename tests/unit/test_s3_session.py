"""Credentials and clocks that are refused in mid-load: renewed, and the chunk goes on; or one clear error."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import numpy as np
import pytest

from actors.rank.chunk_fetcher import ChunkFetcher
from cluster.messages import LeaseOrder
from cluster.planning.packed_plan import SharedTables
from cluster.scheduling.retry import cause_of
from storage.checkpoints.model_index import ChunkTable, Shard
from storage.errors import AccessDenied, CredentialsExpired, StoreUnavailable
from storage.store_ref import Credentials, StoreRef
from storage.stores.object_store import ByteRange, read_bytes
from storage.stores.s3.session import clock_offset_s
from storage.stores.s3.store import S3Store
from tests.support.node_simulation import NO_TENSORS
from tests.support.s3_servers import write_credentials
from tests.support.scripted_server import ScriptedServer, answer

DATA = bytes(range(256)) * 16
ALLOWED_SKEW = timedelta(minutes=15)


class PickyServer:
    """Takes one access key, and requests signed within 15 minutes of its clock."""

    def __init__(self, access_key: str, ahead: timedelta = timedelta()) -> None:
        self.access_key, self.ahead = access_key, ahead
        self.refused = 0
        self._lock = threading.Lock()  # four connections are served at the same time
        self.server = ScriptedServer(self._play)
        self.endpoint_url = f"http://127.0.0.1:{self.server.port}"

    def ref(self) -> StoreRef:
        return StoreRef("s3", "bucket", "", endpoint_url=self.endpoint_url, region="us-east-1")

    def close(self) -> None:
        self.server.close()

    def _play(self, sock: socket.socket, _: int) -> None:
        head, clock = self.server.head, datetime.now(UTC) + self.ahead
        signed_at = re.search(r"X-Amz-Date: (\w+)", head)
        scope = re.search(r"Credential=(\w+)/(\d+)/us-east-1", head)
        assert signed_at is not None
        assert scope is not None
        assert signed_at[1].startswith(scope[2])  # the day that the signature is for
        at = datetime.strptime(signed_at[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        if abs(at - clock) > ALLOWED_SKEW:
            return self._refuse(sock, "RequestTimeTooSkewed", clock)
        if scope[1] != self.access_key:
            return self._refuse(sock, "ExpiredToken", clock)
        asked = re.search(r"Range: bytes=(\d+)-(\d+)", head)
        assert asked is not None
        start, end = int(asked[1]), int(asked[2]) + 1
        sock.sendall(
            answer(
                "206 P",
                {
                    "Content-Length": str(end - start),
                    "Content-Range": f"bytes {start}-{end - 1}/{len(DATA)}",
                    "ETag": '"v1"',
                },
                DATA[start:end],
            )
        )
        return None

    def _refuse(self, sock: socket.socket, code: str, clock: datetime) -> None:
        with self._lock:
            self.refused += 1
        body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        sock.sendall(
            answer("403 F", {"Date": format_datetime(clock, usegmt=True), "Content-Length": str(len(body))}, body)
        )


def fetch_all(store: S3Store) -> tuple[list[bytes], dict[str, int]]:
    """Every chunk of the object, by four threads at once; what it took by cause."""
    count, size = 16, len(DATA) // 16
    start = np.arange(count, dtype=np.int64) * size
    table = ChunkTable(np.zeros(count, np.int32), start, start + size, None, None)
    fetcher = ChunkFetcher(store, SharedTables((Shard("key", len(DATA), "v1"),), table, NO_TENSORS), attempts=4)
    fetcher.pause = lambda *_: None
    found: list[bytes] = [b""] * count
    retries: dict[str, int] = {}
    lock = threading.Lock()

    def work(first: int) -> None:
        for chunk in range(first, count, 4):
            memory = memoryview(bytearray(size))
            result = fetcher.fetch(LeaseOrder(f"lease-{chunk}", chunk, 0, 1000.0), [memory], fetcher.clock())
            assert result.commit is not None, result.failure
            found[chunk] = bytes(memory)
            with lock:
                for cause, times in result.retries.items():
                    retries[cause] = retries.get(cause, 0) + times

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fetcher.close()
    return found, retries


@pytest.fixture
def credentials_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a file that is all that this process's credential chain finds."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    write_credentials(tmp_path / "credentials", "OLDKEY", "secret", "token")
    return tmp_path / "credentials"


def test_credentials_that_were_replaced_are_taken_up_in_mid_load(credentials_file: Path) -> None:
    with closing(PickyServer("OLDKEY")) as server, closing(S3Store(server.ref())) as store:
        assert read_bytes(store, "key", ByteRange(0, 10)) == DATA[:10]
        server.access_key = "NEWKEY"
        write_credentials(credentials_file, "NEWKEY", "secret", "token")
        found, retries = fetch_all(store)
    assert b"".join(found) == DATA
    assert set(retries) == {"credentials_expired"}
    assert retries["credentials_expired"] == server.refused <= 4  # once for each request that was under way


def test_credentials_that_stay_expired_end_with_that_error(credentials_file: Path) -> None:
    with closing(PickyServer("NEWKEY")) as server, closing(S3Store(server.ref())) as store:
        with pytest.raises(CredentialsExpired) as caught:
            read_bytes(store, "key", ByteRange(0, 10))
        assert cause_of(caught.value) == "credentials_expired"
        assert "token has expired" in str(caught.value)
        for secret in ("OLDKEY", "secret", "=token"):
            assert secret not in str(caught.value)


def test_credentials_that_were_passed_cannot_be_renewed() -> None:
    with (
        closing(PickyServer("NEWKEY")) as server,
        closing(S3Store(server.ref(), Credentials("OLD", "secret"))) as store,
    ):
        with pytest.raises(AccessDenied) as caught:
            read_bytes(store, "key", ByteRange(0, 10))
        assert type(caught.value) is AccessDenied  # no retry helps
        assert server.refused == 1


@pytest.mark.parametrize("hours", [-30, -1, 2, 30])
def test_requests_are_signed_by_the_clock_of_the_store(hours: int) -> None:
    server = PickyServer("KEY", timedelta(hours=hours))
    with closing(server), closing(S3Store(server.ref(), Credentials("KEY", "secret"))) as store:
        found, retries = fetch_all(store)
    assert b"".join(found) == DATA
    assert retries == {"credentials_expired": server.refused}
    assert 1 <= server.refused <= 4


def test_a_clock_that_is_right_and_refused_all_the_same() -> None:
    """A server that contradicts itself is not asked for ever."""

    def play(sock: socket.socket, _: int) -> None:
        body = b"<Error><Code>RequestTimeTooSkewed</Code></Error>"
        date = format_datetime(datetime.now(UTC), usegmt=True)
        sock.sendall(answer("403 F", {"Date": date, "Content-Length": str(len(body))}, body))

    server = ScriptedServer(play)
    ref = StoreRef("s3", "bucket", "", endpoint_url=f"http://127.0.0.1:{server.port}", region="us-east-1")
    with closing(server), closing(S3Store(ref, Credentials("KEY", "secret"))) as store:
        with pytest.raises(AccessDenied, match="clock") as caught:
            read_bytes(store, "key", ByteRange(0, 10))
        assert type(caught.value) is AccessDenied


@pytest.mark.parametrize("said", [None, "", "yesterday", "Thu, 99 Nov 2026 99:00:00 GMT", "x" * 40])
def test_no_date(said: object) -> None:
    assert clock_offset_s(said, 0.0) is None


def test_a_date() -> None:
    assert clock_offset_s("Thu, 01 Jan 1970 01:00:00 GMT", 600.0) == 3000.0


def test_a_name_that_cannot_be_resolved_is_an_unavailable_store() -> None:
    ref = StoreRef("s3", "bucket", "", endpoint_url="http://no-such-host.invalid:9000", region="us-east-1")
    with closing(S3Store(ref, Credentials("KEY", "secret"))) as store:
        for ask in (lambda: read_bytes(store, "key", ByteRange(0, 10)), lambda: store.stat("key")):
            with pytest.raises(StoreUnavailable) as caught:
                ask()
            assert cause_of(caught.value) in ("dns", "unavailable")  # boto3 does not say why it got nowhere
