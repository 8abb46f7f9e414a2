"""What this project wants of its stats, and what a run found: pure.

Rivals are the contenders that keep their tensors and are neither ours nor written here. A goal without its lines
(a peer is not installed, a part was left out) says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.results import HAND_WRITTEN, OURS, Line, Results
from bench.spec import Source

INTO_ARENA, WHOLE_LOAD = 0.90, 0.85  # of the hand-written limit
RECYCLED_FASTER, FILES_FASTER = 1.5, 1.3
MOST_STORE_BYTES = 1.02
MOST_MIB_PER_PROCESS = 100  # of host memory beyond the tensors and the arena
AFTER_FASTER, AFTER_CPU = 2.5, 0.5  # of the fastest rival, into recycled memory: not a goal yet
_NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Goal:
    """One row of the table of goals."""

    what: str
    wanted: str
    found: str
    verdict: str  # "reached", "missed"; "" when it was not measured, or is there to be known


def find_goals(results: Results) -> list[Goal]:
    """Every goal that this run can say something about, reached or not."""
    return [
        *_of_limits(results),
        *_against_rivals(results),
        *_files(results),
        *_store_bytes(results),
        *_memory(results),
        *_what_we_are_after(results),
    ]


def _goal(what: str, wanted: str, found: float | None, is_reached: Callable[[float], bool]) -> Goal:
    if found is None:
        return Goal(what, wanted, _NOT_RUN, "")
    return Goal(what, wanted, f"{found:.2f}", "reached" if is_reached(found) else "missed")


def _ours(results: Results) -> list[Line]:
    return [line for line in results.lines if line.contender.startswith(OURS) and line.runs]


def _of_limits(results: Results) -> Iterable[Goal]:
    for line in _ours(results):
        if line.source == "http" and line.case.checks and (limit := results.limit_of(line)):
            least = WHOLE_LOAD if line.case.keeps else INTO_ARENA
            yield _goal(
                f"`{line.id}` over its hand-written limit",
                f"at least {least:.2f}",
                line.gb_per_s / limit.gb_per_s,
                lambda found, least=least: found >= least,  # type: ignore[misc]
            )


def _best(lines: Iterable[Line]) -> Line | None:
    return max(lines, key=lambda line: line.gb_per_s, default=None)


def _keeping(results: Results, source: Source, memory: str, *, ours: bool, hash_name: str = "blake3") -> list[Line]:
    return [
        line
        for line in results.lines
        if line.runs
        and line.source == source
        and line.case.keeps
        and line.case.memory == memory
        and line.contender.startswith(OURS) == ours
        and (not ours or (line.case.checks and line.case.hash_name == hash_name))
        and not line.contender.startswith((HAND_WRITTEN, "ceiling_"))
    ]


def _against_rivals(results: Results) -> Iterable[Goal]:
    for memory, least in (("fresh", 1.0), ("recycled", RECYCLED_FASTER)):
        mine = _best(_keeping(results, "http", memory, ours=True))
        rivals = _keeping(results, "http", memory, ours=False)
        rival = _best(rivals)
        name = f" (`{mine.id}` over `{rival.id}`)" if mine and rival else ""
        yield _goal(
            f"{memory} memory, verified, over the fastest rival{name}",
            f"at least {least:.1f}",
            mine.gb_per_s / rival.gb_per_s if mine and rival else None,
            lambda found, least=least: found >= least,  # type: ignore[misc]
        )
        cheapest = min((line.cpu_s_per_gb for line in rivals), default=None)
        yield _goal(
            f"{memory} memory, CPU over the cheapest rival's",
            "at most 1.0",
            mine.cpu_s_per_gb / cheapest if mine and cheapest else None,
            lambda found: found <= 1.0,
        )


def _files(results: Results) -> Iterable[Goal]:
    for memory in ("fresh", "recycled"):
        # Its other lines keep nothing (views of the mapped file), or have memory of the other kind.
        theirs = _keeping(results, "file", memory, ours=False)
        rival = _best(line for line in theirs if line.contender.startswith("safetensors"))
        for hash_name in ("blake3", "xxh3_128"):
            mine = _best(_keeping(results, "file", memory, ours=True, hash_name=hash_name))
            yield _goal(
                f"local files, {memory} memory, verified by {hash_name}, over safetensors and clone",
                f"at least {FILES_FASTER}",
                mine.gb_per_s / rival.gb_per_s if mine and rival else None,
                lambda found: found >= FILES_FASTER,
            )


def _store_bytes(results: Results) -> Iterable[Goal]:
    """What the store says that it sent, manifest and headers included."""
    ratios = [
        run.extra["served_bytes"] / run.bytes
        for line in _ours(results)
        for run in line.runs
        if "served_bytes" in run.extra
    ]
    yield _goal(
        "bytes out of the store over the model's, the most of any run",
        f"at most {MOST_STORE_BYTES}",
        max(ratios, default=None),
        lambda found: found <= MOST_STORE_BYTES,
    )


def _memory(results: Results) -> Iterable[Goal]:
    """Beyond tensors and arena, over the ranks' processes alone: the agent's and the coordinator's share is in it.

    The agent gives slots their memory without mapping it, so the baseline has none of the arena; what ranks have mapped
    of it since is the shared memory of the peak, and is taken off.
    """
    found = [
        (run.peak_bytes - kept_bytes - min(run.peak_shared_bytes, run.extra["arena_bytes"]))
        / run.extra["ranks"]
        / (1 << 20)
        for line in _ours(results)
        for run in line.runs
        if "arena_bytes" in run.extra
        for kept_bytes in [run.bytes if line.case.memory == "fresh" else 0]
    ]
    yield _goal(
        "MiB per rank beyond tensors and arena, the most of any run",
        f"at most {MOST_MIB_PER_PROCESS}",
        max(found, default=None),
        lambda found: found <= MOST_MIB_PER_PROCESS,
    )


def _what_we_are_after(results: Results) -> Iterable[Goal]:
    """To be known, and not judged."""
    mine = _best(_keeping(results, "http", "recycled", ours=True))
    rival = _best(_keeping(results, "http", "recycled", ours=False))
    yield Goal(
        "recycled memory, verified: speed and CPU over those of the fastest rival",
        f"what we are after: {AFTER_FASTER} at {AFTER_CPU}",
        f"{mine.gb_per_s / rival.gb_per_s:.2f} at {mine.cpu_s_per_gb / rival.cpu_s_per_gb:.2f}"
        if mine and rival
        else _NOT_RUN,
        "",
    )
    plain = results.line(f"{mine.contender}:{mine.case.name}_unverified@http") if mine else None
    yield Goal(
        "verified over not verified, the CPU being the limit: recycled memory",
        "what we are after: 1.00",
        f"{mine.gb_per_s / plain.gb_per_s:.2f}" if mine and plain else _NOT_RUN,
        "",
    )
