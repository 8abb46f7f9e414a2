"""The calls of a case: loads that may be abandoned, and those of another client, which is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cluster
from cluster import client
from storage.errors import LongshoreError
from storage.store_ref import Credentials
from tests.chaos.bench import Bench
from tests.chaos.cases import HOSTS, Case
from tests.chaos.proxy import ChaosProxy
from tests.chaos.strikes import Strikes
from tests.support.ray_clusters import REPOSITORY

LOAD_TIMEOUT_S = 120.0  # a load that has not ended by then hangs
GIVE_UP_TIMEOUT_S = 30.0  # and so does a call that returns later than this after it was abandoned


@dataclass(frozen=True, slots=True)
class Running:
    """A case with what it goes on with."""

    bench: Bench
    case: Case
    proxy: ChaosProxy
    strikes: Strikes
    folder: Path  # the checkpoint
    size_bytes: int
    wrong: list[str] = field(default_factory=list)  # what must not happen, and did

    def options(self, number: int = 0) -> dict[str, Any]:
        """Return the options of a load that nobody ends early."""
        case, bench = self.case, self.bench
        credentials = None if case.renewals else bench.server.credentials()
        there = bench.options(case, self.proxy.endpoint_url, case.layouts[number])
        return {**there, "credentials": credentials, "timeout_s": LOAD_TIMEOUT_S}


def load(running: Running, number: int) -> cluster.LoadedModel | str:
    """The model of the load with this number, or how its caller gave it up."""
    case, bench = running.case, running.bench
    given_up = case.given_up if number == 0 else ""
    options = running.options(number)
    if given_up == "timed out":
        options["timeout_s"] = case.given_up_at
    if number == 0:
        running.strikes.ask_refused = lambda: _ask_refused(running)
    if given_up == "cancelled":
        return asyncio.run(_cancelled(running.strikes, case.uri, options))
    if given_up == "released":
        running.strikes.give_up = lambda: _release(bench, case.uri)
    called_s = time.monotonic()
    try:
        return cluster.load(case.uri, **options)
    except cluster.LoadTimeout:
        if given_up == "timed out" and time.monotonic() - called_s < case.given_up_at + GIVE_UP_TIMEOUT_S:
            return "LoadTimeout"
        raise


def _ask_refused(running: Running) -> None:
    """The first load once more, with credentials that the store refuses: it must not be given the model."""
    with contextlib.suppress(LongshoreError):
        credentials = Credentials(access_key_id="unknown", secret_access_key="unknown")
        with cluster.load(running.case.uri, **{**running.options(), "credentials": credentials}):
            running.wrong.append("wrong credentials were given the model")


@contextmanager
def other_client(running: Running) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun the first load; killed in the end, if not before."""
    bench, case = running.bench, running.case
    options = {**bench.options(case, running.proxy.endpoint_url, case.layouts[0]), "timeout_s": LOAD_TIMEOUT_S}
    with _process(running, {"options": options}) as process:
        yield process


@contextmanager
def host(running: Running) -> Iterator[subprocess.Popen[str]]:
    """A process that hosts rank 0 of the first load for itself; killed in the end, if not before."""
    bench, case = running.bench, running.case
    given = bench.options(case, running.proxy.endpoint_url, case.layouts[0])
    names = ("tensor_parallel_size", "fsdp_size", "data_parallel_size", "endpoint_url", "region", "trusted_keys")
    options = {**{name: given[name] for name in names}, "device": "cpu", "timeout_s": LOAD_TIMEOUT_S}
    leaderless = case.host == HOSTS[1]
    said = {"host": True, "leaderless": leaderless, "folder": str(running.folder), "address": given["address"]}
    with _process(running, {**said, "options": options}) as process:
        yield process


def end_host(running: Running, process: subprocess.Popen[str]) -> None:
    """Kill it. What it had loaded by then is to be exact."""
    process.kill()
    found = (process.stdout.read() if process.stdout is not None else "").strip()
    if found not in ("", "[]"):
        running.wrong.append(f"a host has other bytes: {found}"[:300])


@contextmanager
def _process(running: Running, said: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """`tests.chaos.client`, which has begun its call; killed in the end."""
    server = running.bench.server
    keys = None if running.case.renewals else [server.access_key_id, server.secret_access_key]
    process = subprocess.Popen(
        [*(sys.executable, "-m", "tests.chaos.client"), json.dumps({"uri": running.case.uri, "keys": keys, **said})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,  # a Ctrl-C is for us, who end it
    )
    with process:
        try:
            if process.stdout is not None:
                process.stdout.readline()  # it calls
            yield process
        finally:
            process.kill()


def wait_for_end(process: subprocess.Popen[str]) -> None:
    """Wait until the client is dead. Kill it once it has its model, if it still runs then."""
    for line in process.stdout or ():
        if line.strip() == "ready":
            process.kill()
    process.wait()


async def _cancelled(strikes: Strikes, uri: str, options: dict[str, Any]) -> cluster.LoadedModel | str:
    """A load whose task is cancelled at its byte, or the model when it was ready before."""
    task = asyncio.ensure_future(cluster.aload(uri, **options))
    loop = asyncio.get_running_loop()

    def cancel() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is over: the model was ready
            loop.call_soon_threadsafe(task.cancel)

    strikes.give_up = cancel
    try:
        return await task
    except asyncio.CancelledError:
        return "cancelled"


def _release(bench: Bench, uri: str) -> None:
    with contextlib.suppress(LongshoreError):
        for model in bench.longshore.models():
            if model.progress.uri == uri:
                client.release(model.progress.model_id, force=True, address=bench.longshore.address)
