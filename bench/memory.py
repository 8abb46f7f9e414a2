"""The cost of each way to keep a chunk in shared memory: `python -m bench.memory`.

    in place    the slot that a chunk was received in stays, so the next chunk needs another one
    copied      the chunk is copied from a warm window to a kept slot, and read back from there

One thread, chunks of 8 MiB in pieces of 1 MiB, in /dev/shm and, for root, in a tmpfs with huge pages. Seconds are
processor time per GB. Memory that the host has taken back costs more the first time, so one round is not counted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.harness.report import markdown_table
from bench.options import new_parser, positive_int
from storage.arena.arena import Arena
from storage.arena.arena_files import SHM_DIRECTORY
from storage.host.memory import huge_pages

PIECE_BYTES = 1 << 20
SLOT_BYTES = 8 << 20


def main(arguments: list[str] | None = None) -> None:
    """Measure and print the table."""
    parser = new_parser("bench.memory", __doc__)
    parser.add_argument("--slots", type=positive_int, default=64, help="of each kind, 8 MiB each")
    parser.add_argument("--rounds", type=positive_int, default=5, help="whose median counts, after one that does not")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=SHM_DIRECTORY) as shm, tempfile.TemporaryDirectory() as huge:
        folders = {f"/dev/shm, huge={huge_pages(SHM_DIRECTORY)}": shm}
        if not subprocess.run(["mount", "-t", "tmpfs", "-o", "huge=within_size", "tmpfs", huge]).returncode:
            folders["huge=within_size"] = huge
        try:
            every = range(1 + options.rounds)
            found = [[measure(Path(folder), options.slots) for _ in every][1:] for folder in folders.values()]
        finally:
            subprocess.run(["umount", "-q", huge])
    costs = [{name: statistics.median(each[name] for each in rounds) for name in rounds[0]} for rounds in found]
    rows = [(name, *(f"{cost[name]:.2f}" for cost in costs)) for name in costs[0]]
    print(markdown_table(("operation, CPU s/GB", *folders), rows))


def measure(folder: Path, slots: int) -> dict[str, float]:
    """Return CPU seconds per GB of each operation, in one round."""
    size_gb = slots * SLOT_BYTES / 1e9
    source = memoryview(bytearray(os.urandom(PIECE_BYTES)) * (SLOT_BYTES // PIECE_BYTES))
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[int], object]) -> None:
        since_s = time.thread_time()
        for slot in range(slots):
            work(slot)
        found[name] = (time.thread_time() - since_s) / size_gb

    path = str(folder / "arena")
    with Arena.create(path, slot_count=2 * slots, slot_bytes=SLOT_BYTES, window_slots=slots) as arena:
        arena.reserve()

        with Arena.open(path) as worker:

            def write(slot: int) -> None:
                with worker.slot(slot) as memory:
                    for at in range(0, SLOT_BYTES, PIECE_BYTES):
                        memory[at : at + PIECE_BYTES] = source[:PIECE_BYTES]

            timed("in place: first write of a process to a slot that has memory", write)
            timed("in place: the next write", write)
        with Arena.open(path) as reader:
            timed("in place: map a slot in one more process", lambda slot: reader.slot(slot).release())
        arena.unlink()
        timed("copied: to a kept slot without memory", lambda slot: arena.keep(slots + slot, source))
        timed("copied: to a kept slot that has memory", lambda slot: arena.keep(slots + slot, source))
        timed("copied: read back into warm memory", lambda slot: arena.read(slots + slot, [source]))
        timed("copied: give the memory back", lambda slot: arena.give_back(slots + slot))
    return found


if __name__ == "__main__":
    main()
