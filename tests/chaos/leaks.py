"""Checks for leaks after a case: models, slots, actors, shared memory, files, threads and open files."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from actors.links import COORDINATOR, group_of_worker
from storage.arena.arena_files import sweep
from storage.stores.local import is_temporary
from tests.chaos.interrupts import check_interrupted
from tests.support.losable_nodes import LosableNodes
from tests.support.ray_clusters import eventually

LEAK_TIMEOUT_S = 40.0
# A process that lives through many cases opens connections to others at its first few, and then no more.
FIRST_CASES = 6
MORE_FILES, MORE_THREADS = 24, 12


class Leaks:
    """Keeps what it has seen of the processes that live on: agents, the coordinator, this one."""

    def __init__(self, longshore: LosableNodes, folder: Path) -> None:
        self._longshore, self._folder = longshore, folder
        self._seen: dict[psutil.Process, list[tuple[int, int]]] = {}  # (open files, threads) after each case

    @property
    def watched(self) -> str:
        """Summarise the observed processes in a line."""
        long_lived = [counts for counts in self._seen.values() if len(counts) > FIRST_CASES]
        if not long_lived:
            return f"{len(self._seen)} processes watched, none of them for long"
        files, threads = (max(counts[-1][i] - _most(counts, i) for counts in long_lived) for i in (0, 1))
        return (
            f"{len(self._seen)} agents and coordinators watched, {len(long_lived)} of them for more than "
            f"{FIRST_CASES} loads; most that one had at its end beyond its first loads: {files} open files, "
            f"{threads} threads"
        )

    def found(self) -> str:
        """ "" when there is nothing, at once or soon."""
        last = ""

        def nothing() -> bool:
            nonlocal last
            check_interrupted()
            last = self._cluster() or self._processes() or self._files()
            return not last

        try:
            eventually(nothing, "", timeout_s=LEAK_TIMEOUT_S, every_s=0.1)
        except AssertionError:
            return last
        for process, counts in self._counts().items():
            self._seen.setdefault(process, []).append(counts)
        return ""

    # -- inside ------------------------------------------------------------------------------------------------

    def _cluster(self) -> str:
        there = self._longshore
        sweep()  # the arenas of nodes that were lost
        if COORDINATOR in there.actor_names():
            status = there.status()
            if used := [node for node in status.nodes if node.leased_slots or node.quarantined_slots]:
                return f"slots in use: {[(n.leased_slots, n.quarantined_slots) for n in used]}"
            if models := there.models():
                return f"models: {[(m.progress.model_id, m.progress.state) for m in models]}"
            warm = {worker_group.worker_group_id for worker_group in status.worker_groups}
        else:
            warm = set()
        if workers := [name for name in there.actor_names("worker-") if group_of_worker(name) not in warm]:
            return f"workers: {workers}"
        if groups := there.placement_groups():
            return f"placement groups: {groups}"
        agents, arenas = there.actor_names("agent-"), there.arenas()
        return f"{len(agents)} agents and arenas {arenas}" if len(arenas) > len(agents) else ""

    def _processes(self) -> str:
        if stopped := stopped_processes():
            return f"stopped processes: {stopped}"
        for process, (files, threads) in self._counts().items():
            before = self._seen.get(process, [])
            if len(before) < FIRST_CASES:
                continue
            if files > _most(before, 0) + MORE_FILES or threads > _most(before, 1) + MORE_THREADS:
                return f"process {process.pid} has {files} open files and {threads} threads, after {before}"
        return ""

    def _files(self) -> str:
        left = [
            path.name for path in (self._folder / "tmp").iterdir() if path.name.startswith(("longshore", ".longshore"))
        ]
        left += [path.name for path in self._folder.glob("disk-*/*/*") if is_temporary(path.name)]
        return f"temporary files: {left}" if left else ""

    def _counts(self) -> dict[psutil.Process, tuple[int, int]]:
        found = {}
        names = [*self._longshore.actor_names("agent-"), *self._longshore.actor_names(COORDINATOR)]
        for pid in (os.getpid(), *(_pid(self._longshore, name) for name in names)):
            with contextlib.suppress(psutil.Error, ValueError):  # ValueError: it is being restarted
                process = psutil.Process(pid)
                not_ours = self._longshore.added if pid == os.getpid() else 0
                found[process] = (process.num_fds(), process.num_threads() - not_ours)
        return found


def stopped_processes() -> list[str]:
    """Return descendants of this process that are still stopped."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                found.append(f"{process.pid} {process.name()}")
    return found


def _pid(longshore: LosableNodes, name: str) -> int:
    with contextlib.suppress(LookupError):
        return longshore.pid(name)
    return -1


def _most(counts: list[tuple[int, int]], which: int) -> int:
    return max(count[which] for count in counts[:FIRST_CASES])
