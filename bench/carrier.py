"""What chunks from one node to another cost, on loopback and one connection: `python -m bench.carrier --help`.

    the server, a process of its own --sendfile of a file in memory--> one client in this process, recv into its memory

Longshore's server and client do all that they do in a load, except for digests. Beside them: nginx, and a plain socket
without HTTP, each with a client that only receives. The rounds are interleaved; the table has medians.
"""

from __future__ import annotations

import http.client
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from bench.harness.report import markdown_table
from bench.harness.run_folder import run_folder
from bench.harness.store import NoRangeServer, RangeServer
from bench.options import new_parser, positive_int, size
from storage.peers import Asker, NoChunk, Peer
from storage.peers.chunk_server import ChunkServer, ServedChunk
from storage.peers.peer_client import PeerClient
from storage.stores.object_store import ByteRange, cut

CHUNKS = 8  # different ones in the file
LOAD, KEY = "load", b"k" * 32
PIECE_BYTES = 1 << 20  # in one call of recv

Read = Callable[[int, memoryview], object]  # (chunk, memory for it)


class Shelf:
    """Chunks of one file."""

    node = "agent"

    def __init__(self, path: str, chunk_bytes: int) -> None:
        self._file, self._chunk_bytes = os.open(path, os.O_RDONLY), chunk_bytes

    def load_key(self, load_id: str) -> bytes | None:
        return KEY

    def take(self, load_id: str, chunk: int, asker: Asker, wait_s: float) -> ServedChunk | NoChunk:
        return ServedChunk(self._file, chunk * self._chunk_bytes, self._chunk_bytes, b"", lambda received: None)


def serve(kind: str, path: str, chunk_bytes: int) -> None:
    """Serve in this process until its standard input ends. Prints the port."""
    if kind == "longshore":
        print(ChunkServer(Shelf(path, chunk_bytes), "127.0.0.1", 0).port, flush=True)
        sys.stdin.read()
        return
    with socket.create_server(("127.0.0.1", 0)) as listening, Path(path).open("rb") as file:
        print(listening.getsockname()[1], flush=True)
        connection, _ = listening.accept()
        while number := connection.recv(1):
            at = number[0] * chunk_bytes
            end = at + chunk_bytes
            while at < end:
                at += os.sendfile(connection.fileno(), file.fileno(), at, end - at)


@contextmanager
def _process(kind: str, path: Path, chunk_bytes: int) -> Iterator[tuple[psutil.Process, int]]:
    command = [sys.executable, "-c", "import sys, bench.carrier as c; c.serve(*sys.argv[1:3], int(sys.argv[3]))"]
    command += [kind, str(path), str(chunk_bytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield psutil.Process(process.pid), int(process.stdout.readline() if process.stdout else 0)
    finally:
        process.communicate("")


@contextmanager
def longshore(path: Path, chunk_bytes: int) -> Iterator[tuple[list[psutil.Process], Read]]:
    """Longshore's chunk server and client."""
    with _process("longshore", path, chunk_bytes) as (process, port):
        client, peer, whole = PeerClient("this node"), Peer("127.0.0.1", port, "agent"), ByteRange(0, chunk_bytes)
        yield [process], lambda chunk, memory: client.read(peer, LOAD, chunk, KEY, whole, cut(memory))
        client.close()


@contextmanager
def plain_socket(path: Path, chunk_bytes: int) -> Iterator[tuple[list[psutil.Process], Read]]:
    """A byte that asks, and sendfile."""
    with _process("plain", path, chunk_bytes) as (process, port), socket.create_connection(("127.0.0.1", port)) as sock:

        def read(chunk: int, memory: memoryview) -> None:
            sock.sendall(bytes([chunk]))
            _receive(sock, memory)

        yield [process], read


@contextmanager
def nginx(path: Path, chunk_bytes: int) -> Iterator[tuple[list[psutil.Process], Read]]:
    """nginx with sendfile, and a client of the standard library that receives into its memory."""
    state = path.parent.parent / "nginx"
    with RangeServer(path.parent.parent, state) as server:
        master = psutil.Process(int((state / "nginx.pid").read_text()))
        url = urlsplit(server.endpoint)
        connection = http.client.HTTPConnection(str(url.hostname), url.port)

        def read(chunk: int, memory: memoryview) -> None:
            at = chunk * chunk_bytes
            where = f"/{path.parent.name}/{path.name}"
            connection.request("GET", where, headers={"Range": f"bytes={at}-{at + chunk_bytes - 1}"})
            response = connection.getresponse()
            got = 0
            while count := response.readinto(memory[got:]):
                got += count
            if got < chunk_bytes:
                raise NoRangeServer(f"it answered {response.status} with {got} bytes")
            response.read()

        yield [master, *master.children()], read
        connection.close()


CONTENDERS = {"Longshore": longshore, "nginx": nginx, "plain socket": plain_socket}


def _receive(sock: socket.socket, memory: memoryview) -> None:
    got = 0
    while got < len(memory):
        got += sock.recv_into(memory[got : got + PIECE_BYTES], 0, socket.MSG_WAITALL)


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(each.user + each.system for each in times))


def measure(name: str, path: Path, chunk_bytes: int, reads: int) -> tuple[float, float, float]:
    """Return GB/s, and the CPU seconds per GB of the client and of the server."""
    memory = memoryview(bytearray(os.urandom(PIECE_BYTES) * (chunk_bytes // PIECE_BYTES)))
    with CONTENDERS[name](path, chunk_bytes) as (processes, read):
        read(0, memory)  # the connection is open, and the memory was written
        before_s, began_s, own_s = _cpu_s(processes), time.monotonic(), time.process_time()
        for number in range(reads):
            read(number % CHUNKS, memory)
        took_s, own_s = time.monotonic() - began_s, time.process_time() - own_s
        gb = reads * chunk_bytes / 1e9
        return gb / took_s, own_s / gb, (_cpu_s(processes) - before_s) / gb


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table. Returns the exit code."""
    parser = new_parser("bench.carrier", __doc__)
    parser.add_argument("--chunk", type=size, default="8MiB", help="size of a chunk")
    parser.add_argument("--reads", type=positive_int, default=1000, help="chunks in one round")
    parser.add_argument("--rounds", type=positive_int, default=5, help="of each contender")
    options = parser.parse_args(arguments)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CONTENDERS}
    with run_folder(Path("/dev/shm"), "longshore-bench-") as folder:
        path = folder / "bucket" / "chunks"
        path.parent.mkdir()
        path.write_bytes(os.urandom(CHUNKS * options.chunk))
        try:
            for number in range(options.rounds):
                for name in list(CONTENDERS)[:: -1 if number % 2 else 1]:
                    found[name].append(measure(name, path, options.chunk, options.reads))
        except NoRangeServer as error:
            print(markdown_table(["one connection"], [[f"not run: {error}"]]))
            return 0
    rows = []
    for name, runs in found.items():
        rate, client, server = (statistics.median(column) for column in zip(*runs, strict=True))
        rows.append((name, f"{rate:.1f}", f"{client:.2f}", f"{server:.2f}", f"{client + server:.2f}"))
    print(markdown_table(("one connection on loopback", "GB/s", "client, CPU s/GB", "server", "both"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
