"""SIGKILL of a process that reads a model without Ray, in every state, as the host of the arena and as its guest."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from actors.reader.door import host_folder
from storage.arena.arena_files import arena_path
from storage.host.processes import pid_namespace
from tests.support.gated_proxy import GatedProxy
from tests.support.python_processes import ask, start_python
from tests.support.ray_clusters import MIB, environment, eventually
from tests.support.stored_models import StoredModel

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(120)]

SETTINGS = {
    "arena_bytes": 16 * MIB,
    "window_bytes": 10 * MIB,
    "slot_bytes": MIB,
    "chunk_bytes": MIB,
    "heartbeat_s": 0.2,
    "group_patience_s": 1.0,
}
STARTS = """
import pickle, sys, time
import cluster, torch
from actors.reader import host, model_reader
from cluster.config import Config

state, uri, settings, options = pickle.loads(bytes.fromhex(sys.argv[1]))
options["config"] = Config(**settings)
"""
VICTIM = (
    STARTS
    + """
def stand_still(*_, **__):
    print(state, flush=True)
    time.sleep(600)

PLACES = {
    "has the lock": (host, "OwnHost"),
    "has the arena": (host, "HostDoor"),
    "has begun": (host.OwnHost if options.pop("as_host") else host.VisitedHost, "join"),
    "has joined": (model_reader.ModelReader, "_attach"),
    "has verified": (model_reader.ReaderWork, "fetched"),
    "copies": (model_reader, "place_items"),
    "leaves": (model_reader.ReaderWork, "close"),
}
if state in PLACES:
    setattr(*PLACES[state], stand_still)
with cluster.safe_open(uri, group="engine", member=0, members=2, **options) as f:
    for name in f.offset_keys()[:6] if state == "has read" else f.offset_keys():
        f.get_tensor(name)
    if state == "has read":
        stand_still()
"""
)
READER = (
    STARTS
    + """
import hashlib, json
first = options.pop("first", 0)
with cluster.safe_open(uri, group="engine", member=1, members=2, **options) as f:
    for name in f.offset_keys()[:first]:
        f.get_tensor(name)
    print("open", flush=True)
    sys.stdin.readline()
    found = {name: hashlib.sha256(f.get_tensor(name).view(torch.uint8).numpy()).hexdigest() for name in f.offset_keys()}
    print(json.dumps({"found": found, "report": f.report()}), flush=True)
"""
)
KEEPER = (
    STARTS
    + """
with cluster.safe_open(uri, **options) as f:  # one tensor, to be the host
    f.get_tensor(f.offset_keys()[0])
    print("open", flush=True)
    sys.stdin.readline()
"""
)
AS_HOST = ("has the lock", "has the arena")
STATES = ("has begun", "has joined", "fetches", "has verified", "copies", "has read", "leaves")


Start = Callable[..., Any]


@pytest.fixture
def proxy(llama: StoredModel) -> Iterator[GatedProxy]:
    """The store, which lets some ranges pass until it is opened."""
    with GatedProxy(llama.server.endpoint_url, ranges=2) as proxy:
        yield proxy


@pytest.fixture
def start(tmp_path: Path, llama: StoredModel, proxy: GatedProxy) -> Iterator[Start]:
    """Starts processes that share an arena which no other test uses. It is gone after the test."""
    (tmp_path / "run").mkdir(mode=0o700)
    keys = llama.server.credentials()
    variables = {"AWS_ACCESS_KEY_ID": keys.access_key_id, "AWS_SECRET_ACCESS_KEY": keys.secret_access_key}
    with environment({"XDG_RUNTIME_DIR": str(tmp_path / "run"), **variables}), ExitStack() as stack:

        def start(code: str, state: str = "", **options: Any) -> Any:
            store = {"endpoint_url": proxy.endpoint_url, "region": llama.server.region}
            said = pickle.dumps((state, llama.uri, SETTINGS, {**store, **options})).hex()
            process = stack.enter_context(start_python(code, said))
            stack.callback(process.kill)
            return process

        yield start
        left = os.path.basename(arena_path(f"user-{os.geteuid()}", f"{host_folder()} {pid_namespace()}"))
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(left)]


@pytest.mark.parametrize(
    ("as_host", "state"), [*((True, state) for state in AS_HOST + STATES), *((False, state) for state in STATES)]
)
def test_others_read_everything(start: Start, proxy: GatedProxy, llama: StoredModel, as_host: bool, state: str) -> None:
    if state != "fetches":
        proxy.open()
    keeper = None
    if not as_host:
        keeper = start(KEEPER, endpoint_url=llama.server.endpoint_url)
        assert ask(keeper) == "open"
    victim = start(VICTIM, state, as_host=as_host)
    if state == "fetches":
        eventually(lambda: proxy.holds_for(victim.pid), "it fetches nothing")
    else:
        assert ask(victim) == state
    reader = start(READER)
    assert ask(reader) == "open"
    victim.kill()
    victim.wait()
    proxy.open()
    done = json.loads(ask(reader, "go on"))
    assert done["found"] == digests(llama.folder)
    assert done["report"]["why_private"] == ""
    assert done["report"]["host"] == (reader.pid if keeper is None else keeper.pid)
    assert reader.wait(60) == 0
    model_bytes = sum(path.stat().st_size for path in llama.folder.glob("*.safetensors"))
    assert sum(size for path, size in proxy.bytes_by_path().items() if path.endswith(".safetensors")) <= 2 * model_bytes
    if keeper is not None:
        keeper.communicate("\n", timeout=60)


@pytest.mark.parametrize("first", [0, 2])
def test_a_host_that_is_stopped_holds_nobody_up(
    start: Start, proxy: GatedProxy, llama: StoredModel, first: int
) -> None:
    """`first`: tensors that the reader has read when its host is stopped."""
    proxy.open()
    host = start(KEEPER)
    assert ask(host) == "open"
    reader = start(READER, first=first)
    assert ask(reader) == "open"
    host.send_signal(signal.SIGSTOP)
    done = json.loads(ask(reader, "go on"))
    host.send_signal(signal.SIGCONT)
    assert done["found"] == digests(llama.folder)
    assert done["report"]["host"] == reader.pid
    assert "host" in done["report"]["why_private"] or "lock" in done["report"]["why_private"]
    assert reader.wait(60) == 0
    host.communicate("\n", timeout=60)


def digests(folder: Path) -> dict[str, str]:
    """The digest of every tensor of a folder's safetensors files."""
    import torch

    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                found[name] = hashlib.sha256(file.get_tensor(name).view(torch.uint8).numpy()).hexdigest()
    return found
