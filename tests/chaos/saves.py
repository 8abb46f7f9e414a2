"""Random saves under random faults, from a number: the same number gives the same case.

A published checkpoint is saved anew. Its first two saves meet faults: ranks are killed at a step, the store loses,
delays or refuses answers, or goes away. After each the checkpoint must be that of the last save that ended well, or of
the one that was interrupted, bit for bit and with its small files. The third save meets no fault and must end well.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cluster
from cluster.publishing import list_saves
from cluster.small_files import read_small_file
from storage.errors import LongshoreError
from storage.stores.embedded_s3 import EmbeddedS3
from tests.chaos.judge import EXACT, LEAKED, REFUSED, WRONG
from tests.support.counting_proxy import Answer, CountingProxy, Request, s3_refusal
from tests.support.save_job import LAST_ROUND, Ended, run_jobs, small_files, small_tensors

BUCKET = "chaos-saves"
STEPS = (
    "plan",
    "begin",
    LAST_ROUND,
    "write",
    *(f"commit: {step}" for step in ("shards", "files", "index", "manifest")),
)
RANKS = 2
SAVE_TIMEOUT_S = 16.0
SHARD_BYTES = (6_000_000, 12_000_000)  # two layouts; only a save of the same one continues
AT_ONCE = 4
FAULTS = ("all ranks killed", "a rank killed", "store lost answers", "store went away", "none")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One save of a case."""

    fault: str  # one of FAULTS
    step: str  # of STEPS, at which ranks are killed
    rank: int
    share: float  # of requests whose answers are lost
    away_from: int  # number of the first request that the store does not answer
    contents: int  # seed of the tensors and files
    shard_bytes: int


@dataclass(frozen=True, slots=True)
class SaveCase:
    """Two saves under faults, of one checkpoint."""

    seed: int
    where: str  # "folder" or "s3"
    attempts: tuple[Attempt, ...]

    def __str__(self) -> str:
        texts = []
        for one in self.attempts:
            at = {FAULTS[0]: f" at {one.step}", FAULTS[1]: f" (rank {one.rank}) at {one.step}"}
            at |= {FAULTS[2]: f" of {one.share:.0%}", FAULTS[3]: f" at request {one.away_from}"}
            texts.append(f"{one.fault}{at.get(one.fault, '')}, contents {one.contents}, {one.shard_bytes} B")
        return f"save to {self.where}: {'; then '.join(texts)}"


@dataclass(slots=True)
class SaveOutcome:
    """The outcome of a case: REFUSED if a save ended with an error, rightly."""

    case: SaveCase
    kind: str = EXACT
    said: str = ""
    struck: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return f"{self.case.seed}: {self.kind}{f' ({self.said})' if self.said else ''} | {self.case}"


def make_save_case(seed: int) -> SaveCase:
    """Return the case of a number."""
    rng = random.Random(f"save {seed}")
    where = rng.choice(("folder", "s3", "s3"))
    faults = FAULTS[:4] if where == "s3" else FAULTS[:2]
    attempts = tuple(_make_attempt(rng, rng.choice(faults) if rng.random() < 0.9 else "none") for _ in range(2))
    return SaveCase(seed, where, attempts)


def _make_attempt(rng: random.Random, fault: str) -> Attempt:
    step = rng.choice(STEPS)
    return Attempt(
        fault=fault,
        step=step,
        rank=0 if step.startswith("commit") else rng.randrange(RANKS),  # rank 0 alone commits
        share=rng.uniform(0.02, 0.3),
        away_from=rng.randrange(60),
        contents=rng.choice((1, 1, 2)),
        shard_bytes=rng.choice((*SHARD_BYTES[:1], *SHARD_BYTES)),
    )


class LossyProxy(CountingProxy):
    """A store that loses answers: it has done what was asked, and the connection ends or the answer is another."""

    def __init__(self, upstream_url: str) -> None:
        self.struck = 0
        self._attempt: Attempt | None = None
        self._seed, self._number = "", 0
        self._counting = threading.Lock()
        super().__init__(upstream_url)

    def begin(self, attempt: Attempt | None, seed: str) -> None:
        """Meet requests from now on as the attempt says; None: pass everything."""
        with self._counting:
            self._attempt, self._seed, self._number, self.struck = attempt, seed, 0, 0

    def before_request(self, request: Request) -> None:
        with self._counting:
            self._number += 1
            away = self._attempt is not None and self._attempt.fault == "store went away"
            if away and self._number > self._attempt.away_from:  # type: ignore[union-attr]
                self.struck += 1
                raise EOFError

    def pass_answer(self, answer: Answer, client: Any, count: Callable[[int], None]) -> None:
        with self._counting:
            rng, attempt = random.Random(f"{self._seed} {self._number}"), self._attempt
            lossy = attempt is not None and attempt.fault == "store lost answers"
            strikes = lossy and rng.random() < attempt.share  # type: ignore[union-attr]
            self.struck += strikes
        if not strikes:
            super().pass_answer(answer, client, count)
            return
        if rng.random() < 0.5:
            client.sendall(s3_refusal(*rng.choice(((500, "InternalError"), (503, "SlowDown")))))
        raise EOFError


class _Saving:
    """One case while it runs."""

    def __init__(self, case: SaveCase, base: Path, folder: Path, server: EmbeddedS3) -> None:
        self.outcome = SaveOutcome(case)
        self.root = folder / "local" / f"{case.seed}"
        self.proxy: LossyProxy | None = None
        self._server = server
        self.uri = str(self.root)
        if case.where == "s3":
            self.root = server.folder / BUCKET / f"{case.seed}"
            self.uri = f"s3://{BUCKET}/{case.seed}"
            self.proxy = LossyProxy(server.endpoint_url)
        shutil.copytree(base, self.root)
        self.allowed = {0}  # contents that may be published now

    def job(self, number: int) -> dict[str, Any]:
        """Return the save as `tests.support.save_job` runs it."""
        case, attempt = self.outcome.case, self.outcome.case.attempts[number]
        job: dict[str, Any] = {
            "case": "small",
            "world": RANKS,
            "slots": 1,
            "uri": self.uri,
            "seed": attempt.contents,
            "max_shard_bytes": attempt.shard_bytes,
            "save_timeout_s": SAVE_TIMEOUT_S,
        }
        if attempt.fault == "all ranks killed":
            job["all_die_at"] = attempt.step
        elif attempt.fault == "a rank killed":
            job["only"] = {f"{attempt.rank}": {"die_at": attempt.step}}
        if self.proxy is not None:
            self.proxy.begin(attempt, f"{case.seed} {number}")
            job |= {
                "endpoint_url": self.proxy.endpoint_url,
                "keys": [self._server.access_key_id, self._server.secret_access_key],
            }
        return job

    def judge(self, number: int, ended: Sequence[Ended]) -> None:
        """Judge the end of an attempt, and what is published after it."""
        attempt = self.outcome.case.attempts[number]
        lost = self.proxy.struck if self.proxy is not None else 0
        struck = lost or any(one.code == -9 for one in ended)
        if self.proxy is not None:
            self.proxy.begin(None, "")
        if struck:
            self.outcome.struck[f"save: {attempt.fault}"] += 1
        self.allowed.add(attempt.contents)
        if all(one.code == 0 for one in ended):
            self.allowed = {attempt.contents}
        else:
            self._note(REFUSED, next((one.error for one in ended if one.error), "killed"))
        for one in ended:
            of_store = bool(lost) and one.error in ("StoreUnavailable", "Throttled")
            justified = {
                0: True,
                3: bool(struck) and (one.error == "SaveError" or of_store),
                -9: attempt.fault.endswith("killed"),
            }
            if not justified.get(one.code, False):
                self._note(WRONG, f"attempt {number}: code {one.code}, {one.document or one.log[-300:]}")
        self._compare(f"after attempt {number}")

    def end(self) -> None:
        """Save once more, without a fault."""
        last = self.outcome.case.attempts[-1]
        try:
            cluster.save(
                small_tensors(last.contents),
                self.uri,
                extra_files=small_files(last.contents),
                max_shard_bytes=last.shard_bytes,
                chunk_bytes=1 << 20,
                **self._options(),
            )
            self.allowed = {last.contents}
            self._compare("after the last save")
            left = list_saves(self.uri, **self._options())
            if kinds := {item.kind for item in left.leftovers} - {"file"}:
                self._note(LEAKED, f"left behind: {kinds}")
        except LongshoreError as error:
            self._note(WRONG, f"the last save: {type(error).__name__}: {error}"[:400])

    def close(self) -> None:
        """End the store of the case."""
        if self.proxy is not None:
            self.proxy.close()

    def _options(self) -> dict[str, Any]:
        if self.proxy is None:
            return {}
        keys = {"credentials": self._server.credentials(), "region": self._server.region}
        return {"endpoint_url": self.proxy.endpoint_url, **keys}

    def _compare(self, when: str) -> None:
        try:
            report = cluster.verify(self.uri, progress=False, **self._options())
            files = {name: read_small_file(self.uri, name, **self._options())[0] for name in small_files(0)}
            with cluster.safe_open(self.uri, **self._options()) as opened:
                found = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
        except LongshoreError as error:
            self._note(WRONG, f"{when}: {type(error).__name__}: {error}"[:400])
            return
        for contents in self.allowed:
            wanted = small_tensors(contents)
            same = found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)
            if same and files == small_files(contents):
                break
        else:
            self._note(WRONG, f"{when}: neither the revision before nor the new one")
        if not report.ok:
            self._note(WRONG, f"{when}: verify: {report}"[:400])

    def _note(self, kind: str, said: str) -> None:
        if self.outcome.kind in (EXACT, REFUSED):
            self.outcome.kind, self.outcome.said = kind, said


def run_saves(cases: Sequence[SaveCase]) -> list[SaveOutcome]:
    """Run all cases; each of their attempts beside those of the others."""
    if not cases:
        return []
    with tempfile.TemporaryDirectory(prefix="longshore-chaos-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        base, bucket = folder / "base", folder / "s3" / BUCKET
        cluster.save(
            small_tensors(0), base, extra_files=small_files(0), max_shard_bytes=SHARD_BYTES[0], chunk_bytes=1 << 20
        )
        bucket.mkdir(parents=True)
        server = stack.enter_context(EmbeddedS3(folder / "s3", start_timeout_s=120.0))
        running = [_Saving(case, base, folder, server) for case in cases]
        for one in running:
            stack.callback(one.close)
        server.refresh()
        for number in range(2):
            jobs = [one.job(number) for one in running]
            for one, ended in zip(
                running, run_jobs(folder / f"{number}", jobs, at_once=AT_ONCE, timeout_s=600), strict=True
            ):
                one.judge(number, ended)
        for one in running:
            one.end()
        return [one.outcome for one in running]
