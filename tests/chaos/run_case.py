"""Runs one case on a cluster that is there, and says how it ended."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import cluster
from cluster.telemetry.report import LoadReport
from storage.errors import LongshoreError
from tests.chaos.bench import CHUNK_BYTES, KV_HEADS, SETTINGS, Bench
from tests.chaos.cases import Case
from tests.chaos.early_reader import EarlyReader
from tests.chaos.judge import (
    BAD,
    EXACT,
    HUNG,
    LEAKED,
    REFUSED,
    WRONG,
    bytes_again,
    in_flight_bytes,
    justifies,
    kind_of,
    needed_of_store,
    wasted_bytes,
)
from tests.chaos.leaks import Leaks
from tests.chaos.loads import LOAD_TIMEOUT_S, Running, end_host, host, load, other_client, wait_for_end
from tests.chaos.proxy import ChaosProxy
from tests.chaos.store_script import StoreScript
from tests.chaos.strikes import Strikes
from tests.support.reference_slices import shard_differs

REFILL_TIMEOUT_S = 60.0
KEPT_S = 1.0  # a disk tier that has written nothing for so long is done


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a case."""

    case: Case
    kind: str
    said: str  # the error, or what is wrong
    took_s: float
    extra_bytes: int = 0  # left the store beyond what the loads needed; 0 when unknown
    struck: Counter[str] = field(default_factory=Counter)  # faults that did strike, by the names of the table's rows


class CaseRunner:
    """Runs cases one after another on a bench."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.longshore = bench, bench.longshore
        self.leaks = Leaks(bench.longshore, bench.folder)
        self.early_reads = 0  # times that ranks handed out tensors while their loads ran

    def run(self, case: Case) -> Outcome:
        """Never raises for what a case does."""
        begun_s = time.monotonic()
        with self.bench.disk(case) as disk:
            try:
                kind, said, extra_bytes, struck = self._run(case, disk)
                took_s = time.monotonic() - begun_s
                if kind in (EXACT, REFUSED) and (left := self.leaks.found()):
                    kind, said = LEAKED, left
            except Exception as error:  # before a load could begin, or when it was over
                kind, said, extra_bytes, struck = WRONG, f"{type(error).__name__}: {error}"[:400], 0, Counter()
                took_s = time.monotonic() - begun_s
            except BaseException:  # interrupted
                self.bench.kill_everything()
                raise
            if kind in BAD or case.own_cluster:  # the next case begins with a cluster that is in order
                with contextlib.suppress(Exception):
                    self.longshore.end_longshore()
        return Outcome(case, kind, said, took_s, extra_bytes, struck)

    # -- inside ------------------------------------------------------------------------------------------------

    def _run(self, case: Case, disk: Path) -> tuple[str, str, int, Counter[str]]:
        bench = self.bench
        bench.configure(case, disk)
        with (
            bench.model(case) as (folder, size_bytes),
            ChaosProxy(bench.server.endpoint_url) as proxy,
            contextlib.ExitStack() as stack,
        ):
            if case.renewals:
                proxy.require(bench.credentials.token)
            if case.disk in ("kept", "damaged") and case.staying != "changed the manifest":
                self._fill_disk(case, proxy, disk)
            if case.other_version:
                for node_id in self.longshore.node_ids:
                    self.longshore.start_other_agent(node_id)
            if case.peers_damage:
                for node_id in self.longshore.node_ids:
                    self.longshore.start_damaging_agent(node_id)
            script = StoreScript(case, size_bytes, lambda: bench.replace_objects(case))
            proxy.script = script.script
            strikes = Strikes(self.longshore, case, proxy, size_bytes, bench.credentials)
            stack.callback(strikes.close)
            running = Running(bench, case, proxy, strikes, folder, size_bytes)
            if any(strike.who == "client" for strike in case.strikes):
                strikes.client = stack.enter_context(other_client(running))
            if case.host:
                strikes.host = stack.enter_context(host(running))
            pool = ThreadPoolExecutor(len(case.layouts))
            stack.callback(pool.shutdown, wait=False)  # (a load that was interrupted ends with its cluster)
            strikes.begin()
            if strikes.client is not None and case.client_alone:
                wait_for_end(strikes.client)
            reader = stack.enter_context(EarlyReader(self.longshore, case, folder))
            loads = [pool.submit(load, running, number) for number in range(len(case.layouts))]
            kind, said, extra_bytes = self._judge(running, loads)
            reader.end()
            self.early_reads += reader.read
            if strikes.host is not None:
                end_host(running, strikes.host)
            if running.wrong:
                kind, said = WRONG, running.wrong[0]
            if reader.wrong:
                kind, said = WRONG, f"before it was verified {', '.join(reader.wrong)}"[:400]
            return kind, said, extra_bytes, _struck(running, script)

    def _judge(self, running: Running, loads: Sequence[Future[cluster.LoadedModel | str]]) -> tuple[str, str, int]:
        """Return (kind, message, extra bytes) of the worst load, and release all loads."""
        case, proxy, strikes = running.case, running.proxy, running.strikes
        verdicts: list[tuple[str, str]] = []
        needed_bytes: dict[str, int] = {}  # by node: what two loads of a node need leaves the store once
        reports: list[LoadReport] = []
        for future in loads:
            try:
                loaded = strikes.attend(future, LOAD_TIMEOUT_S + 60)
                if isinstance(loaded, str):
                    verdicts.append((REFUSED, loaded))
                    continue
                with loaded as model:
                    strikes.end()  # what has not struck by now strikes no more
                    for node in model.report.nodes:
                        store_bytes = node.needed_bytes - node.disk_bytes
                        needed_bytes[node.node] = max(store_bytes, needed_bytes.get(node.node, 0))
                    reports.append(model.report)
                    strikes.struck["nodes fed each other"] |= any(node.peer_chunks for node in model.report.nodes)
                    strikes.struck["nodes sent other bytes"] += model.report.retries.get("peer_damaged", 0)
                    verdicts.append(self._compare(case, model, running.folder))
                    if case.loaded_again:
                        verdicts.append(self._load_again(running, model))
            except LongshoreError as error:
                verdicts.append(_verdict(case, error))
            except TimeoutError:
                verdicts.append((HUNG, "the call did not come back"))
            except Exception as error:
                verdicts.append((WRONG, f"{type(error).__name__}: {error}"[:300]))
        strikes.end()
        kind, said = min(verdicts, key=lambda verdict: (HUNG, WRONG, REFUSED, EXACT).index(verdict[0]))
        if any(kind != EXACT for kind, _ in verdicts):
            return kind, said, 0
        needed = sum(needed_bytes.values())
        if len(reports) == 1:
            needed = needed_of_store(case, reports[0].nodes, CHUNK_BYTES, running.size_bytes)
        extra_bytes = max(0, proxy.weights_bytes() - needed)
        threads = int(SETTINGS["fetch_threads"])
        may_bytes = sum(bytes_again(report, CHUNK_BYTES) for report in reports) + wasted_bytes(
            proxy.struck, CHUNK_BYTES
        )
        may_bytes += in_flight_bytes(case, strikes.struck, threads, CHUNK_BYTES, running.size_bytes)
        accounts = [(report.hedges, report.retries, [rank.incarnation for rank in report.ranks]) for report in reports]
        if (
            len(loads) == 1
            and not (case.loaded_again or case.host)
            and case.placement != "direct"
            and extra_bytes > may_bytes
        ):
            return (
                WRONG,
                f"{extra_bytes} bytes fetched again, the faults account for {may_bytes}: {accounts}",
                extra_bytes,
            )
        return kind, said, extra_bytes

    def _load_again(self, running: Running, model: cluster.LoadedModel) -> tuple[str, str]:
        with ThreadPoolExecutor(1) as pool:
            released = pool.submit(model.release)
            try:
                with cluster.load(running.case.uri, **running.options()) as again:
                    return self._compare(running.case, again, running.folder)
            except LongshoreError as error:
                return _verdict(running.case, error)
            finally:
                released.result()

    def _compare(self, case: Case, model: cluster.LoadedModel, folder: Path) -> tuple[str, str]:
        report = model.report
        give_up_s = time.monotonic() + REFILL_TIMEOUT_S
        while True:
            try:
                differing = model.call(
                    shard_differs, str(folder), report.layout.tensor_parallel_size, report.layout.fsdp_size, KV_HEADS
                )
            except cluster.RankLost as error:  # struck at the very end: it is being filled again
                if time.monotonic() > give_up_s:
                    return HUNG, f"not filled again: {error}"[:300]
                time.sleep(0.2)
                continue
            except cluster.ModelNotFound:
                if case.given_up != "released":
                    raise
                return REFUSED, "released when it was ready"
            return (WRONG, f"other bytes: {differing}"[:300]) if any(differing) else (EXACT, "")

    def _fill_disk(self, case: Case, proxy: ChaosProxy, disk: Path) -> None:
        """A cluster before this one has loaded the model, and was killed; bits of what it kept may have changed."""
        options = self.bench.options(case, proxy.endpoint_url, (1, 1, 1))
        credentials = None if case.renewals else self.bench.server.credentials()
        with cluster.load(case.uri, credentials=credentials, timeout_s=LOAD_TIMEOUT_S, **options) as m:
            _wait_until_kept(disk, sum(node.needed_chunks for node in m.report.nodes))
        self.bench.kill_everything()
        if case.disk == "damaged":
            rng = random.Random(case.seed)
            for path in sorted(disk.glob("*/*.chunk")):
                data = bytearray(path.read_bytes())
                if rng.random() < 0.4:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                elif rng.random() < 0.2:
                    del data[rng.randrange(len(data)) :]
                path.write_bytes(data)
        proxy.forget()
        self.bench.configure(case, disk)


def _wait_until_kept(disk: Path, chunks: int) -> None:
    """Wait until the folder has so many chunks, or gets no more: chunks evicted before their turn are not kept."""
    kept, since_s = -1, time.monotonic()
    while kept < chunks and time.monotonic() < since_s + KEPT_S:
        now = len(list(disk.glob("*/*.chunk")))
        if now != kept:
            kept, since_s = now, time.monotonic()
        time.sleep(0.02)


def _struck(running: Running, script: StoreScript) -> Counter[str]:
    """Rows of the table that the case counts in, and how often each struck."""
    case, found = running.case, Counter(running.strikes.struck)
    for _, fault in running.proxy.struck:
        if (kind := kind_of(fault)) in case.passing:
            found[f"store: {kind}"] += 1
    found["store: credentials ended and were renewed"] = running.proxy.expired
    found[f"store {case.staying}"] = script.stayed or case.staying == "changed the manifest"
    found[f"disk tier: {case.disk}"] = bool(case.disk)
    found["smallest arena"] = case.arena == "smallest"
    found["two loads at once"] = len(case.layouts) > 1
    found["agents of another version"] = case.other_version
    found["loaded again during the release"] = case.loaded_again
    found["timed out"] += case.given_up == "timed out"
    return +found


def _verdict(case: Case, error: LongshoreError) -> tuple[str, str]:
    name = type(error).__name__
    if isinstance(error, cluster.LoadTimeout):
        return HUNG, f"{error}"[:300]
    cause = str(error.details.get("cause", "")).partition(" (")[0]
    known = f"{name} {cause}" if name == "ChunkFailed" else name
    return (REFUSED, known) if justifies(case, known) else (WRONG, f"{known} is not justified: {error}"[:400])
