"""Runs one case on a cluster that is there, and says how it ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import cluster
from actors.names import gang_of_worker
from cluster import client
from cluster.sample_checkpoint import write_llama_checkpoint
from storage.embedded_s3 import EmbeddedS3
from storage.errors import LongshoreError
from tests.chaos.cases import Case
from tests.chaos.store_script import store_script
from tests.chaos.strikes import Strikes
from tests.support.fault_proxy import FaultProxy
from tests.support.ray_clusters import Longshore, eventually
from tests.support.reference_slices import shard_differs

KV_HEADS = 2
CHUNK_BYTES = 1 << 20
LOAD_TIMEOUT_S = 120.0  # a load that has not ended by then hangs
REFILL_TIMEOUT_S = 60.0
# Deadlines short enough that every one of them strikes within a case.
SETTINGS: dict[str, Any] = {
    "read_timeout_s": 1.5,
    "lease_deadline_s": 5.0,
    "stuck_after_s": 8.0,
    "holder_ttl_s": 20.0,
    "orphan_after_s": 15.0,
    "warm_workers_s": 600.0,
    "fetch_threads": 3,  # few, so that a load has a beginning, a middle and an end
}

EXACT, REFUSED, WRONG, HUNG, LEAKED = "byte-exact", "correctly refused", "WRONG", "HUNG", "LEAKED"
BAD = (WRONG, HUNG, LEAKED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case ended."""

    case: Case
    kind: str
    said: str  # the error, or what is wrong
    took_s: float
    struck: int  # faults that did strike
    extra_bytes: int  # left the store beyond what the loads needed; 0 when unknown


class Bench:
    """What all cases of a run share: a cluster, a store, a folder."""

    def __init__(self, longshore: Longshore, server: EmbeddedS3, folder: Path) -> None:
        self.longshore, self.server, self.folder = longshore, server, folder
        server.make_bucket("chaos")

    def run(self, case: Case) -> Outcome:
        """Never raises for what a case does."""
        begun_s = time.monotonic()
        self.longshore.configure(**SETTINGS)
        if any(strike.name == "coordinator killed" for strike in case.strikes):
            # Idle workers are nobody's after it, and wait for `orphan_after_s`: so would every such case.
            client.release_warm(address=self.longshore.address)
        with self._model(case) as (folder, size_bytes), FaultProxy(self.server.endpoint_url) as proxy:
            struck = Strikes(self.longshore, case.strikes, proxy, size_bytes)
            proxy.script = store_script(case, size_bytes, lambda: self._replace(case))
            with ThreadPoolExecutor(len(case.layouts)) as pool:
                loads = [pool.submit(self._load, case, layout, proxy) for layout in case.layouts]
                struck.begin()
                kind, said, extra_bytes = self._judge(case, loads, folder, proxy, struck)
            took_s = time.monotonic() - begun_s
            number = len(proxy.struck) + struck.count
        if kind in (EXACT, REFUSED) and (left := self.leaks()):
            kind, said = LEAKED, left
        if kind in BAD:  # the next case begins with a cluster that is in order
            with contextlib.suppress(Exception):
                self.longshore.end_longshore()
        return Outcome(case, kind, said, took_s, number, extra_bytes)

    def leaks(self) -> str:
        """What is left that nothing uses any more; "" when there is nothing, at once or soon."""
        found = ""

        def nothing() -> bool:
            nonlocal found
            found = self._leaks_now()
            return not found

        try:
            eventually(nothing, "", timeout_s=40.0, every_s=0.1)
        except AssertionError:
            return found
        return ""

    # -- inside ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _model(self, case: Case) -> Iterator[tuple[Path, int]]:
        """A checkpoint of about 7 MB that no other case has, in the bucket; its folder and its tensors' bytes."""
        folder = self.folder / str(case.seed)
        in_bucket = self.server.folder / "chaos" / str(case.seed)
        write_llama_checkpoint(
            folder, hidden=256, layers=2, intermediate=704, heads=8, kv_heads=KV_HEADS, vocab=4096, shards=2,
            seed=case.seed,
        )  # fmt: skip
        try:
            if case.published:
                target = f"s3://chaos/{case.seed}"
                cluster.publish(str(folder), target, chunk_bytes=CHUNK_BYTES, **self._options(self.server.endpoint_url))
            else:
                shutil.copytree(folder, in_bucket)
                self.server.refresh()
            yield folder, sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        finally:
            shutil.rmtree(in_bucket, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            self.server.refresh()

    def _options(self, endpoint_url: str) -> dict[str, Any]:
        return {
            "endpoint_url": endpoint_url,
            "region": self.server.region,
            "credentials": self.server.credentials(),
        }

    def _load(self, case: Case, layout: tuple[int, int, int], proxy: FaultProxy) -> cluster.LoadedModel:
        tp, fsdp, dp = layout
        return cluster.load(
            f"s3://chaos/{case.seed}",
            tensor_parallel_size=tp,
            fsdp_size=fsdp,
            data_parallel_size=dp,
            device="cpu",
            placement=case.placement,
            address=self.longshore.address,
            timeout_s=LOAD_TIMEOUT_S,
            **self._options(proxy.endpoint_url),
        )

    def _judge(
        self,
        case: Case,
        loads: Sequence[Future[cluster.LoadedModel]],
        folder: Path,
        proxy: FaultProxy,
        struck: Strikes,
    ) -> tuple[str, str, int]:
        """(kind, what was said, extra bytes): the worst of the loads; all are released."""
        verdicts: list[tuple[str, str]] = []
        needed_bytes: dict[str, int] = {}  # by node: what two loads of a node need leaves the store once
        for future in loads:
            try:
                with future.result(LOAD_TIMEOUT_S + 60) as model:
                    struck.end()  # what has not struck by now strikes no more
                    for node in model.report.nodes:
                        needed_bytes[node.node] = max(node.needed_bytes, needed_bytes.get(node.node, 0))
                    verdicts.append(self._compare(model, folder))
            except LongshoreError as error:
                verdicts.append(_verdict(case, error))
            except TimeoutError:
                verdicts.append((HUNG, "the call did not come back"))
            except Exception as error:
                verdicts.append((WRONG, f"{type(error).__name__}: {error}"[:300]))
        struck.end()
        kind, said = min(verdicts, key=lambda verdict: (HUNG, WRONG, REFUSED, EXACT).index(verdict[0]))
        if kind != EXACT:
            return kind, said, 0
        extra_bytes = max(0, proxy.weights_bytes() - sum(needed_bytes.values()))
        in_flight_bytes = (len(proxy.struck) + self._in_flight(case)) * CHUNK_BYTES
        if len(loads) == 1 and case.placement != "direct" and extra_bytes > in_flight_bytes:
            return WRONG, f"{extra_bytes} bytes fetched again, at most {in_flight_bytes} were in flight", extra_bytes
        return kind, said, extra_bytes

    def _in_flight(self, case: Case) -> int:
        """Chunks that may be fetched again for what struck processes had in flight."""
        tp, fsdp, dp = case.layouts[0]
        threads = 2 * int(SETTINGS["fetch_threads"])  # being read, and read but not yet told to the agent
        ranks = {"worker": 1, "agent": tp * fsdp * dp, "coordinator": 0}
        return sum(threads * ranks[strike.who] for strike in case.strikes)

    def _compare(self, model: cluster.LoadedModel, folder: Path) -> tuple[str, str]:
        report = model.report
        give_up_s = time.monotonic() + REFILL_TIMEOUT_S
        while True:
            try:
                differing = model.call(
                    shard_differs, str(folder), report.tensor_parallel_size, report.fsdp_size, KV_HEADS
                )
            except cluster.RankLost as error:  # struck at the very end: it is being filled again
                if time.monotonic() > give_up_s:
                    return HUNG, f"not filled again: {error}"[:300]
                time.sleep(0.2)
                continue
            return (WRONG, f"other bytes: {differing}"[:300]) if any(differing) else (EXACT, "")

    def _replace(self, case: Case) -> None:
        """Other bytes of the same length, in both shards."""
        for path in (self.server.folder / "chaos" / str(case.seed)).glob("*.safetensors"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2 :] = bytes(byte ^ 0x5A for byte in data[len(data) // 2 :])
            fresh = path.with_suffix(".new")
            fresh.write_bytes(data)
            os.replace(fresh, path)
        self.server.refresh()

    def _leaks_now(self) -> str:
        status = self.longshore.status()
        used = [node for node in status.nodes if node.leased_slots or node.quarantined_slots]
        if used:
            return f"slots in use: {[(n.leased_slots, n.quarantined_slots) for n in used]}"
        if models := self.longshore.models():
            return f"models: {[(m.progress.model_id, m.progress.state) for m in models]}"
        warm = {gang.gang_id for gang in status.gangs}
        workers = [name for name in self.longshore.actor_names("worker-") if gang_of_worker(name) not in warm]
        if workers:
            return f"workers: {workers}"
        if groups := self.longshore.placement_groups():
            return f"placement groups: {groups}"
        agents, arenas = self.longshore.actor_names("agent-"), self.longshore.arenas()
        if len(arenas) > len(agents):
            return f"{len(agents)} agents and arenas {arenas}"
        if stopped := stopped_processes():
            return f"stopped processes: {stopped}"
        return ""


def stopped_processes() -> list[str]:
    """Descendants of this process that somebody stopped and nobody woke."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                found.append(f"{process.pid} {process.name()}")
    return found


def _verdict(case: Case, error: LongshoreError) -> tuple[str, str]:
    name = type(error).__name__
    if isinstance(error, cluster.LoadTimeout):
        return HUNG, f"{error}"[:300]
    cause = str(error.details.get("cause", "")).partition(" (")[0]
    known = f"{name} {cause}" if name == "ChunkFailed" else name
    return (REFUSED, known) if case.justifies(known) else (WRONG, f"{known} is not justified: {error}"[:400])
