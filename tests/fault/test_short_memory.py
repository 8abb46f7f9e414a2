"""Really too little memory: loads that do not fit are refused before any read, and no process is killed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from storage.host.memory import available_host_bytes
from tests.support.counting_proxy import CountingProxy, Request
from tests.support.ray_clusters import ENVIRONMENT, OBJECT_STORE_BYTES, REPOSITORY, TEST_SETTINGS, eventually
from tests.support.stored_models import KV_HEADS, StoredModel

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


CGROUPS = Path("/sys/fs/cgroup")
ENTER = 'echo $$ > "$1" && mount -t tmpfs -o "size=$2" tmpfs /dev/shm && shift 2 && exec "$@"'


@dataclass(frozen=True)
class ShortMemory:
    """A group of processes with little memory. Make one with `short_memory`."""

    command: tuple[str, ...]  # what to put before a command
    group: Path

    def killed_processes(self) -> int:
        """Return how many processes the kernel has killed for exceeding the limit."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                words = dict(line.split() for line in (self.group / name).read_text().splitlines())
                return int(words["oom_kill"])
        raise LookupError("the kernel does not count")

    def kill(self) -> None:
        """Kill every process in the group."""
        eventually(lambda: not _killed(self.group), f"{self.group} has processes in it")

    def used_bytes(self) -> int:
        for name in ("memory.current", "memory.usage_in_bytes"):
            with contextlib.suppress(OSError):
                return int((self.group / name).read_text())
        raise LookupError("the kernel does not count")


@contextlib.contextmanager
def short_memory(*, shm_bytes: int, memory_bytes: int) -> Iterator[ShortMemory]:
    """Make a group with little memory and kill what is left in it. Skips the test without the rights for it."""
    probe = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"]
    if os.geteuid() or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("a /dev/shm of one's own takes root and mount namespaces")
    group = _make_group(memory_bytes)
    enter = ("unshare", "--mount", "sh", "-c", ENTER, "sh", str(group / "cgroup.procs"), str(shm_bytes))
    try:
        yield ShortMemory(enter, group)
    finally:
        eventually(lambda: _removed(group), f"{group} cannot be removed")


def _make_group(memory_bytes: int) -> Path:
    name = f"longshore-test-{secrets.token_hex(4)}"
    for parent, limit in ((CGROUPS, "memory.max"), (CGROUPS / "memory", "memory.limit_in_bytes")):
        group = parent / name
        try:
            group.mkdir()
        except OSError:
            continue
        with contextlib.suppress(OSError):
            if (group / limit).exists():  # else not a control group, or not one that counts memory
                (group / limit).write_text(str(memory_bytes))
                return group
        group.rmdir()
    pytest.skip("control groups with a limit cannot be made here")


def _killed(group: Path) -> int:
    """Send SIGKILL to the group and return the number of processes."""
    pids = (group / "cgroup.procs").read_text().split()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    return len(pids)


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        _killed(group)
        group.rmdir()
    return not group.exists()


MIB = 1 << 20
GIB = 1 << 30
SHM_BYTES = 256 * MIB
LIMIT_BYTES = 4 * GIB
HALF_BYTES = 3 * GIB // 2  # there is room for one of that size beside Ray, and not for two
HUGE_BYTES = 6 * GIB

LISTING = """<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>models</Name>
<Prefix></Prefix><KeyCount>1</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated><Contents>
<Key>half-1/model.safetensors</Key><LastModified>2026-08-01T00:00:00.000Z</LastModified><ETag>"one"</ETag>
<Size>{size_bytes}</Size><StorageClass>STANDARD</StorageClass></Contents></ListBucketResult>"""

# Starts a cluster of its own and prints the result of each load, a line each.
CLIENT = """
import json, sys, threading, cluster, ray
from cluster import client
from cluster.joining.connection import disconnect
from storage.store_ref import Credentials
from tests.support.reference_slices import shard_differs
endpoint, key, secret, settings, folder, kv_heads, files, half, temp, object_store = sys.argv[1:]
ray.init(include_dashboard=False, _temp_dir=temp, object_store_memory=int(object_store), num_cpus=4,
         log_to_driver=False, configure_logging=False)
address = ray.get_runtime_context().gcs_address
options = dict(device="cpu", endpoint_url=endpoint, region="us-east-1", address=address,
               credentials=Credentials(access_key_id=key, secret_access_key=secret))

def load(uri, **changed):
    return cluster.load(uri, config=cluster.Config(**{**json.loads(settings), **changed}), **options)

def tell(uri, **changed):
    try:
        with load(uri, **changed) as model:
            said = model.call(shard_differs, folder, 1, 1, int(kv_heads))
    except cluster.LongshoreError as error:
        seen = [m.progress for m in cluster.status(address).listed if m.progress.uri == uri]
        moved = sum(progress.store_bytes + progress.placed_bytes for progress in seen)
        said = {"error": type(error).__name__, "said": str(error), "moved": moved, **error.details}
    print(json.dumps(said), flush=True)

tell("s3://models/llama", arena_bytes=1 << 30, window_bytes=0)
client.shutdown(address)
disconnect()
tell("s3://models/llama")
held = threading.Thread(target=lambda: load(half), daemon=True)
held_options, options = options, {"device": "cpu", "address": address}
tell(files + "/huge")
options = held_options
sys.stdin.readline()
held.start()
sys.stdin.readline()
options = {"device": "cpu", "address": address}
tell(files + "/half-2")
sys.stdin.read()
"""


def header_of(size_bytes: int) -> bytes:
    """Return the header of a file with one tensor of that size."""
    shape = [size_bytes // MIB, MIB]
    header = json.dumps({"w": {"dtype": "U8", "shape": shape, "data_offsets": [0, size_bytes]}}).encode()
    return len(header).to_bytes(8, "little") + header


class HalfHeld(CountingProxy):
    """Has a model of its own, and sends nothing of it but the header and the first chunk."""

    uri = "s3://models/half-1/model.safetensors"

    def __init__(self, upstream_url: str) -> None:
        self.begun = threading.Event()  # from here on it is all that can be listed
        self.held = threading.Event()
        self._go = threading.Event()
        super().__init__(upstream_url)

    def before_request(self, request: Request) -> None:
        if self.uri.endswith(request.path) and request.range is not None and request.range[0] >= MIB:
            self.held.set()
            self._go.wait()

    def refusal(self, request: Request) -> bytes | None:
        path, byte_range = request.path, request.range
        header = header_of(HALF_BYTES)
        size_bytes = len(header) + HALF_BYTES
        if path.rstrip("/") == "/models" and self.begun.is_set():
            listing = LISTING.format(size_bytes=size_bytes).encode()
            return f"HTTP/1.1 200 OK\r\nContent-Length: {len(listing)}\r\n\r\n".encode() + listing
        if not self.uri.endswith(path):
            return None
        start, end = byte_range or (0, size_bytes)
        head = f'HTTP/1.1 {206 if byte_range else 200} OK\r\nETag: "one"\r\nContent-Length: {end - start}\r\n'
        head += "Last-Modified: Sat, 01 Aug 2026 00:00:00 GMT\r\n"
        head += f"Content-Range: bytes {start}-{end - 1}/{size_bytes}\r\n\r\n" if byte_range else "\r\n"
        body = b"" if request.method == "HEAD" else (header[start:end] + bytes(MIB))[: end - start]
        return head.encode() + body

    def close(self) -> None:
        self._go.set()
        super().close()


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """A folder with models of one tensor, in files with a hole."""
    for name, size_bytes in (("half-2", HALF_BYTES), ("huge", HUGE_BYTES)):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.safetensors").open("wb") as file:
            file.truncate(file.write(header_of(size_bytes)) + size_bytes)
    return tmp_path


@contextlib.contextmanager
def client_in(
    short: ShortMemory, llama: StoredModel, endpoint_url: str, files: Path
) -> Iterator[subprocess.Popen[str]]:
    """All of it is killed with the group that it is in."""
    keys = (llama.server.access_key_id, llama.server.secret_access_key)
    with tempfile.TemporaryDirectory(prefix="lm-", dir="/tmp", ignore_cleanup_errors=True) as temp:
        client = subprocess.Popen(
            [
                *(*short.command, sys.executable, "-c", CLIENT, endpoint_url, *keys),
                *(json.dumps(TEST_SETTINGS), str(llama.folder), str(KV_HEADS), str(files), HalfHeld.uri, temp),
                str(OBJECT_STORE_BYTES),
            ],
            cwd=REPOSITORY,
            env={**os.environ, **ENVIRONMENT, "RAY_ADDRESS": "", "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with client:
            try:
                yield client
            finally:
                short.kill()


def told(client: subprocess.Popen[str]) -> Any:
    assert client.stdout is not None
    line = client.stdout.readline()
    assert line, f"the client ended with {client.wait()}"
    return json.loads(line)


def go_on(client: subprocess.Popen[str]) -> None:
    assert client.stdin is not None
    client.stdin.write("\n")
    client.stdin.flush()


def test_loads_that_do_not_fit_are_refused_before_any_read(llama: StoredModel, sparse: Path) -> None:
    if available_host_bytes() < 2 * LIMIT_BYTES:
        pytest.skip("the limit must be what is tight, not the host")
    with (
        short_memory(shm_bytes=SHM_BYTES, memory_bytes=LIMIT_BYTES) as short,
        HalfHeld(llama.server.endpoint_url) as proxy,
        client_in(short, llama, proxy.endpoint_url, sparse) as client,
    ):
        arena = told(client)
        assert arena["error"] == "ArenaTooLarge"
        assert arena["wanted_bytes"] == GIB
        assert 0 < arena["free_bytes"] < SHM_BYTES
        assert "--shm-size" in arena["said"]

        assert told(client) == [[]]  # a model that fits is loaded, and right

        huge = told(client)
        assert huge["error"] == "DoesNotFit"
        assert "needs 6.7" in huge["said"]  # with its worker, of which the host would have plenty
        assert "of host memory" in huge["said"]

        proxy.begun.set()
        go_on(client)
        assert proxy.held.wait(120), "the load that is to be under way is not"
        go_on(client)
        second = told(client)
        assert second["error"] == "DoesNotFit"
        assert "promised" in second["said"]
        assert "to model-safetensors-" in second["said"]  # the one that is under way

        assert arena["moved"] == huge["moved"] == second["moved"] == 0
        assert short.used_bytes() < LIMIT_BYTES
        assert short.killed_processes() == 0
