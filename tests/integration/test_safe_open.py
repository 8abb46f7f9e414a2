"""`cluster.safe_open` beside safetensors' own, and several processes that share an arena without Ray."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cluster
from actors.reader import host
from actors.reader.host import PROCESS_HOST
from cluster.config import Config
from cluster.errors import ConfigError, RankTaken, ReaderClosed, TensorNotFound
from storage.arena.arena_files import arena_path
from storage.errors import IntegrityError, LongshoreError, ObjectChanged, ObjectNotFound, RevisionMismatch
from storage.host.processes import pid_namespace
from storage.stores.embedded_s3 import EmbeddedS3
from tests.support.checkpoints import odd_objects, safetensors_bytes, write_tiny_llama
from tests.support.counting_proxy import CountingProxy
from tests.support.ray_clusters import eventually
from tests.support.stored_models import publish_to

pytestmark = pytest.mark.slow

CONFIG = Config(arena_bytes=48 << 20, slot_bytes=1 << 20, window_bytes=16 << 20, chunk_bytes=1 << 20)
DTYPES = ["F32", "BF16", "F16", "F64", "I64", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"]


@pytest.fixture(autouse=True)
def own_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for lock and socket that no other test uses."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    PROCESS_HOST.close()


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    folder = tmp_path / "odd"
    folder.mkdir()
    for key, data in odd_objects().items():
        (folder / key).write_bytes(data)
    return folder


def theirs(path: Path, name: str) -> torch.Tensor:
    with safetensors.safe_open(str(path), framework="pt") as file:
        return file.get_tensor(name)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    if found.dtype is torch.bool:  # its bytes here are any, and torch may make them 1 when it copies
        return torch.equal(found, expected)
    one, other = (torch.cat([tensor.reshape(-1), tensor.reshape(-1)]) for tensor in (found, expected))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def write_model(folder: Path, tensors: int = 12, rows: int = 512) -> dict[str, tuple[int, ...]]:
    """Write a model of tensors of 1 kB a row, in two shards."""
    folder.mkdir(exist_ok=True)
    names = [f"layers.{number}.weight" for number in range(tensors)]
    parts = names[: tensors // 2], names[tensors // 2 :]
    weight_map = {}
    for number, part in enumerate(parts):
        key = f"model-0000{number + 1}-of-00002.safetensors"
        specs = [(name, "F32", (rows, 256)) for name in part]
        (folder / key).write_bytes(safetensors_bytes(specs, seed=number))
        weight_map |= dict.fromkeys(part, key)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {name: (rows, 256) for name in names}


# --- the interface of safetensors ------------------------------------------------------------------------------


def test_every_tensor_is_that_of_safetensors(odd: Path):
    with cluster.safe_open(odd, config=CONFIG) as ours:
        count = 0
        for path in sorted(odd.glob("*.safetensors")):
            with safetensors.safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is no dict
                    try:
                        expected = file.get_tensor(name)
                    except safetensors.SafetensorError:
                        continue  # a dtype that it cannot give to torch
                    part = ours.get_slice(name)
                    assert (part.get_shape(), part.get_dtype()) == (
                        file.get_slice(name).get_shape(),
                        file.get_slice(name).get_dtype(),
                    )
                    assert same(ours.get_tensor(name), expected), name
                    count += 1
        assert count > 10
        assert len(ours) == len(ours.keys()) == len(ours.offset_keys()) >= count


def test_one_file_has_keys_and_metadata_as_in_safetensors(tmp_path: Path):
    path = tmp_path / "one.safetensors"
    specs = [("b", "F32", (3, 2)), ("a", "I64", ()), ("ünïcode", "BF16", (0, 4))]
    path.write_bytes(safetensors_bytes(specs, seed=1, metadata={"format": "pt", "who": "me"}))
    with cluster.safe_open(path, config=CONFIG) as ours, safetensors.safe_open(str(path), framework="pt") as file:
        assert ours.keys() == sorted(file.keys())
        assert ours.offset_keys() == file.offset_keys()
        assert ours.metadata() == file.metadata() == {"format": "pt", "who": "me"}
        assert "a" in ours
        assert "c" not in ours


def test_metadata_of_shards_is_what_all_have(tmp_path: Path):
    folder = tmp_path / "model"
    write_model(folder)
    for number, path in enumerate(sorted(folder.glob("*.safetensors"))):
        specs = [(f"layers.{6 * number + each}.weight", "F32", (512, 256)) for each in range(6)]
        path.write_bytes(safetensors_bytes(specs, seed=number, metadata={"format": "pt", "shard": str(number)}))
    with cluster.safe_open(folder, config=CONFIG) as ours:
        assert ours.metadata() == {"format": "pt"}


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """An index as safetensors takes it: integers, slices without steps, an ellipsis."""
    parts: list[Any] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        if draw(st.booleans()):
            parts.append(draw(st.integers(0, size - 1)))
        else:
            bounds = st.none() | st.integers(0, size)
            parts.append(slice(draw(bounds), draw(bounds)))
    if draw(st.booleans()):
        parts.append(...)
    return tuple(parts) if len(parts) != 1 or draw(st.booleans()) else parts[0]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_slices_are_those_of_safetensors(tmp_path: Path, data: st.DataObject):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    dtype = data.draw(st.sampled_from(DTYPES))
    path = tmp_path / "slices.safetensors"
    path.write_bytes(safetensors_bytes([("x", "F32", (5,)), ("w", dtype, shape)], seed=3))
    index = data.draw(indices(shape))
    with safetensors.safe_open(str(path), framework="pt") as file, cluster.safe_open(path, config=CONFIG) as ours:
        try:
            expected = file.get_slice("w")[index]
        except (safetensors.SafetensorError, IndexError, TypeError):
            return  # ours may know more
        assert same(ours.get_slice("w")[index], expected)


def test_slices_with_steps_and_new_dimensions(tmp_path: Path):
    path = tmp_path / "one.safetensors"
    path.write_bytes(safetensors_bytes([("w", "F32", (8, 6))], seed=1))
    whole = theirs(path, "w")
    with cluster.safe_open(path, config=CONFIG) as ours:
        part = ours.get_slice("w")
        for index in [(slice(1, 8, 3), slice(None, None, 2)), (None, slice(2)), ..., (slice(None), -1), [1, 4]]:
            assert same(part[index], whole[index]), index


def test_numpy_arrays(tmp_path: Path):
    path = tmp_path / "one.safetensors"
    path.write_bytes(safetensors_bytes([("w", "F32", (8, 6)), ("h", "BF16", (2,))], seed=1))
    with cluster.safe_open(path, framework="numpy", config=CONFIG) as ours:
        assert isinstance(ours.get_tensor("w"), np.ndarray)
        assert ours.get_slice("w")[2:4].tobytes() == theirs(path, "w").numpy()[2:4].tobytes()
        with pytest.raises(ConfigError, match="bfloat16"):
            ours.get_tensor("h")


# --- what it reads, and errors ----------------------------------------------------------------------------------


def test_only_chunks_of_what_is_asked_for_are_read(tmp_path: Path):
    folder = tmp_path / "model"
    write_model(folder)  # tensors of 512 kB, chunks of 1 MB
    with cluster.safe_open(folder, config=CONFIG) as ours:
        ours.get_slice("layers.7.weight")[:10]
        assert 0 < ours.report()["store_bytes"] <= 1 << 20
        for name in ours.offset_keys():
            ours.get_tensor(name)
        report = ours.report()
        assert (report["refetched_bytes"], report["retries"]) == (0, {})
        assert report["store_bytes"] <= 12 * (512 << 10)
        assert (report["host"], report["shared"], report["why_private"]) == (os.getpid(), True, "")


def test_a_second_model_of_the_same_bytes_comes_from_the_arena(tmp_path: Path):
    folder = tmp_path / "model"
    write_model(folder)
    cluster.publish(folder, chunk_bytes=1 << 20)
    for stored in (True, False):
        with cluster.safe_open(folder, config=CONFIG) as ours:
            for name in ours.offset_keys():
                ours.get_tensor(name)
            assert bool(ours.report()["store_bytes"]) is stored


def test_damaged_bytes_are_never_returned(tmp_path: Path):
    folder = tmp_path / "model"
    write_model(folder)
    cluster.publish(folder, chunk_bytes=1 << 20)
    path = sorted(folder.glob("*.safetensors"))[1]
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with cluster.safe_open(folder, config=CONFIG) as ours:
        ours.get_tensor("layers.0.weight")
        with pytest.raises(LongshoreError) as raised:
            ours.get_tensor(ours.offset_keys()[-1])
    assert isinstance(raised.value, IntegrityError | ObjectChanged)


def test_typed_errors(tmp_path: Path):
    folder = tmp_path / "model"
    write_model(folder)
    with pytest.raises(ObjectNotFound):
        cluster.safe_open(tmp_path / "nothing", config=CONFIG)
    with pytest.raises(ConfigError, match="framework"):
        cluster.safe_open(folder, framework="tf", config=CONFIG)
    with pytest.raises(ConfigError, match="members 0 to 1"):
        cluster.safe_open(folder, member=2, members=2, group="g", config=CONFIG)
    with cluster.safe_open(folder, config=CONFIG) as ours, pytest.raises(TensorNotFound, match=r"layers\.99"):
        ours.get_tensor("layers.99")
    with pytest.raises(ReaderClosed, match="closed"):
        ours.get_tensor("layers.0.weight")


def test_tensors_stay_valid_after_close(tmp_path: Path):
    folder = tmp_path / "model"
    write_model(folder)
    with cluster.safe_open(folder, config=CONFIG) as ours:
        name = ours.offset_keys()[0]
        tensor = ours.get_tensor(name)
    PROCESS_HOST.close()
    assert same(tensor, theirs(next(iter(sorted(folder.glob("*.safetensors")))), name))


def test_what_is_prefetched_must_be_of_the_model(tmp_path: Path):
    write_model(tmp_path / "model")
    with cluster.safe_open(tmp_path / "model", config=CONFIG) as f:
        with pytest.raises(TensorNotFound):
            f.prefetch(["nothing"])
        with pytest.raises(ConfigError, match="has 2 dimensions, not 1"):
            f.prefetch([("layers.0.weight", [slice(0, 2)])])
        f.prefetch(["layers.0.weight", ("layers.1.weight", [slice(0, 2), slice(None)])])
    with pytest.raises(ReaderClosed):
        f.prefetch(["layers.0.weight"])


def test_memory_of_tensors_that_die_after_close_is_given_back(tmp_path: Path):
    write_model(tmp_path / "model")
    with cluster.safe_open(tmp_path / "model", config=CONFIG) as f:
        tensors = [f.get_tensor(name) for name in f.offset_keys()]
    kept = tensors.pop()
    assert tensors.pop(0) is not None
    tensors.clear()
    gc.collect()
    assert f._reader._memory.kept_bytes == 0
    assert torch.isfinite(kept.float()).any()


def test_the_window_has_room_for_a_large_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No setting says how large it is."""
    monkeypatch.setattr(host, "WINDOW_BYTES", 2 << 20)
    write_model(tmp_path / "model")
    config = Config(arena_bytes=64 << 20, slot_bytes=1 << 20, chunk_bytes=1 << 20, group_patience_s=0.2)
    with cluster.safe_open(tmp_path / "model", config=config, group="large", member=3, members=12) as f:
        assert len(f.get_tensor("layers.0.weight")) == 512


@pytest.mark.parametrize("cache", [True, False])
def test_chunks_stay_for_later_readers_unless_told_not_to(tmp_path: Path, cache: bool):
    folder = tmp_path / "model"
    write_model(folder, tensors=24)
    model_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    sizes_left_open = CONFIG.model_copy(update={"arena_bytes": 0, "window_bytes": 3 << 20})
    for again in (False, True):
        with cluster.safe_open(folder, cache=cache, config=sizes_left_open) as ours:
            for name in ours.offset_keys():
                ours.get_tensor(name)
            found = ours.report()
            assert (found["store_bytes"] > model_bytes / 2) == (not again or not cache)


def test_the_window_has_room_for_a_stack_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Engines copy one half of every expert, and then the other half of every expert."""
    monkeypatch.setattr(host, "WINDOW_BYTES", 3 << 20)
    stack = torch.arange(8 * 512 * 1024, dtype=torch.int16).reshape(8, 512, 1024)
    before = {f"before.{number}": torch.zeros(512, 1024, dtype=torch.int16) for number in range(4)}
    safetensors.torch.save_file({**before, "experts": stack}, tmp_path / "model.safetensors")
    sizes_left_open = Config(slot_bytes=1 << 20, chunk_bytes=1 << 20)
    with cluster.safe_open(tmp_path, cache=False, config=sizes_left_open) as ours:
        part = ours.get_slice("experts")
        for rows in (slice(0, 256), slice(256, 512)):
            for expert in range(8):
                assert torch.equal(part[expert, rows], stack[expert, rows])
        assert ours.report()["refetched_bytes"] == 0


def test_many_threads_read_one_model(tmp_path: Path):
    folder = tmp_path / "model"
    names = list(write_model(folder))
    expected = {name: theirs(path, name) for path in folder.glob("*.safetensors") for name in safe_names(path)}
    wrong: list[str] = []
    with cluster.safe_open(folder, config=CONFIG) as ours:

        def read(mine: list[str]) -> None:
            wrong.extend(name for name in mine if not same(ours.get_tensor(name), expected[name]))

        threads = [threading.Thread(target=read, args=(names[number::4],)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def safe_names(path: Path) -> list[str]:
    with safetensors.safe_open(str(path), framework="pt") as file:
        return list(file.keys())


def test_a_forked_process_is_told_to_open_the_model_itself(tmp_path: Path):
    folder = tmp_path / "model"
    write_model(folder)
    done = run(
        """
        import os
        with cluster.safe_open(folder, config=config) as f:
            f.get_tensor("layers.0.weight")
            if os.fork() == 0:
                try:
                    f.get_tensor("layers.1.weight")
                except cluster.ReaderClosed as error:
                    os._exit(0 if "forked" in str(error) else 3)
                os._exit(4)
            raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
        """,
        folder,
    )
    assert ended(done) == 0


FORKS = """
def read(f):
    return {name: hash(f.get_tensor(name).tobytes()) for name in f.offset_keys()}
with cluster.safe_open(folder, "np", config=config) as f:
    expected = read(f)
    parent = os.getpid()
    if os.fork() == 0:
        with cluster.safe_open(folder, "np", config=config) as own:
            ok = read(own) == expected and own.report()["host"] == parent
        sys.exit(0 if ok else 3)  # runs what runs at the end of a process
    ok = all(read(f) == expected for _ in range(20))
    code = os.waitstatus_to_exitcode(os.wait()[1])
    visitor = os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", visits, str(parent))
    sys.exit(code or visitor or (0 if ok and read(f) == expected else 4))
"""
VISITS = """
import sys, cluster
from cluster.config import Config
with cluster.safe_open({folder!r}, config=Config.model_validate({config!r})) as f:
    f.get_tensor("layers.3.weight")
    sys.exit(0 if f.report()["host"] == int(sys.argv[1]) else 5)
"""


def test_a_forked_process_leaves_the_host_to_its_parent(tmp_path: Path):
    folder = tmp_path / "model"
    write_model(folder)
    visits = VISITS.format(folder=str(folder), config=CONFIG.model_dump(exclude_unset=True))
    assert ended(run(FORKS, folder, visits=visits)) == 0


def test_nothing_is_left_of_the_host_when_a_forked_process_lives_on(tmp_path: Path):
    folder = tmp_path / "model"
    write_model(folder)
    parent = run(
        """
        with cluster.safe_open(folder, config=config) as f:
            f.get_tensor("layers.0.weight")
            child = os.fork()
            if child == 0:
                os.close(1)
                time.sleep(60)
                os._exit(0)
            print(child, flush=True)
            time.sleep(60)
        """,
        folder,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        parent.kill()
        parent.communicate()
        with cluster.safe_open(folder, config=CONFIG) as ours:
            ours.get_tensor("layers.1.weight")
            assert (ours.report()["host"], ours.report()["why_private"]) == (os.getpid(), "")
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_program_that_was_replaced_is_no_host(tmp_path: Path):
    folder = tmp_path / "model"
    write_model(folder)
    code = """
    f = cluster.safe_open(folder, config=config)
    f.get_tensor("layers.0.weight")
    os.execvp("sh", ["sh", "-c", "echo up; exec sleep 60"])
    """
    with living(code, folder), cluster.safe_open(folder, config=CONFIG) as ours:
        ours.get_tensor("layers.1.weight")
        assert (ours.report()["host"], ours.report()["why_private"]) == (os.getpid(), "")


def test_a_host_of_another_version_is_not_shared(tmp_path: Path):
    folder = tmp_path / "model"
    write_model(folder)
    code = """
    from actors.reader import door
    door.VERSION = (99, "9.9.9")
    with cluster.safe_open(folder, config=config) as f:
        f.get_tensor("layers.0.weight")
        print("up", flush=True)
        time.sleep(60)
    """
    with living(code, folder), cluster.safe_open(folder, config=CONFIG) as ours:
        ours.get_tensor("layers.1.weight")
        assert not ours.report()["shared"]
        assert "9.9.9" in ours.report()["why_private"]


def test_a_report_is_no_use_of_the_host(tmp_path: Path):
    folder = tmp_path / "model"
    write_model(folder)
    ours = cluster.safe_open(folder, config=CONFIG)
    ours.report()
    ours.close()
    assert PROCESS_HOST._users == 0
    with pytest.raises(ReaderClosed):
        ours.report()
    assert PROCESS_HOST._users == 0


def test_a_member_that_is_opened_again_takes_the_place_of_the_first(tmp_path: Path):
    folder = tmp_path / "model"
    write_model(folder)
    with cluster.safe_open(folder, group="g", config=CONFIG) as first:
        first.get_tensor("layers.0.weight")
        with cluster.safe_open(folder, group="g", config=CONFIG) as second:
            for name in second.offset_keys():
                second.get_tensor(name)
            with pytest.raises(RankTaken):
                first.get_tensor("layers.11.weight")


def test_a_model_that_is_not_closed_is_closed_when_it_is_gone(tmp_path: Path):
    write_model(tmp_path / "model")
    opened = cluster.safe_open(filename=tmp_path / "model", config=CONFIG)
    assert {*opened.get_tensors()} == {*opened.keys()}
    reader = opened._reader
    del opened
    eventually(lambda: not reader._thread.is_alive(), "the model stays open")


def test_members_with_other_chunks_are_no_group(tmp_path: Path):
    folder = tmp_path / "model"
    write_model(folder)
    smaller = CONFIG.model_copy(update={"chunk_bytes": 512 << 10})
    with cluster.safe_open(folder, group="g", members=2, config=CONFIG) as first:
        first.get_tensor("layers.0.weight")
        with (
            cluster.safe_open(folder, group="g", member=1, members=2, config=smaller) as second,
            pytest.raises(RevisionMismatch),
        ):
            second.get_tensor("layers.0.weight")


def test_close_ends_a_read_that_waits_for_slots(tmp_path: Path):
    smallest = CONFIG.model_copy(update={"arena_bytes": 3 << 20, "window_bytes": 3 << 20})  # for one model
    for name in ("first", "second"):
        write_model(tmp_path / name)
    with cluster.safe_open(tmp_path / "first", config=smallest) as first, ThreadPoolExecutor(1) as pool:
        first.get_tensor("layers.0.weight")
        second = cluster.safe_open(tmp_path / "second", config=smallest)
        reading = pool.submit(second.get_tensor, "layers.0.weight")
        with pytest.raises(TimeoutError):
            reading.result(1)
        second.close()
        with pytest.raises(ReaderClosed):
            reading.result(2)  # before the first one is idle for so long that its slots are taken
        first.get_tensor("layers.11.weight")


# --- several processes ------------------------------------------------------------------------------------------


def run(
    code: str, folder: Path, environ: Mapping[str, str] = {}, config: Config = CONFIG, **variables: object
) -> subprocess.Popen[str]:
    """Start a process that runs the code, with `folder`, `config` and the variables."""
    lines = [
        "import os, sys, time, json, cluster",
        "from pathlib import Path",
        "from cluster.config import Config",
        f"folder = Path({str(folder)!r})",
        f"config = Config.model_validate({config.model_dump(exclude_unset=True)!r})",
        *(f"{name} = {value!r}" for name, value in variables.items()),
        textwrap.dedent(code),
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environ})


@contextmanager
def living(code: str, folder: Path, config: Config = CONFIG) -> Iterator[None]:
    """A process that runs the code, from when it says "up" until the end of the block."""
    process = run(code, folder, config=config)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield
    finally:
        process.kill()
        process.communicate()


HOST = """
with cluster.safe_open(folder / "first", config=config) as f:
    f.get_tensor("layers.0.weight")
    print("up", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("hosts", "own", "why"),
    [
        ({}, {"slot_bytes": 4 << 20, "chunk_bytes": 4 << 20}, "too small"),
        ({"arena_bytes": 3 << 20, "window_bytes": 3 << 20}, {}, "other readers hold the slots"),
    ],
)
def test_a_host_without_room_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: dict[str, int], own: dict[str, int], why: str
):
    monkeypatch.setattr(host, "PRIVATE_AFTER_S", 1.0)  # the host's own reader has its slots for longer
    for name in ("first", "second"):
        write_model(tmp_path / name)
    with (
        living(HOST, tmp_path, CONFIG.model_copy(update=hosts)),
        cluster.safe_open(tmp_path / "second", config=CONFIG.model_copy(update=own)) as opened,
    ):
        opened.get_tensor("layers.0.weight")
        assert why in opened.report()["why_private"]


def ended(process: subprocess.Popen[str]) -> int:
    """Wait for the process, and return its exit code."""
    process.communicate(timeout=60)
    return process.returncode


PAUSE_S = 0.02  # of a process after each tensor
READ_ALL = """
import hashlib
with cluster.safe_open(uri, config=config, group="engine", member=member, members=2, **store) as f:
    found = hashlib.sha256()
    for name in f.offset_keys():
        found.update(f.get_tensor(name).view(dtype=__import__("torch").uint8).numpy().tobytes())
        time.sleep(pause_s)  # longer than reading a tensor takes
    (folder / str(member)).write_text("done")
    while len(list(folder.iterdir())) < 2:  # so that both reports are those of one host
        time.sleep(0.02)
    print(json.dumps({"digest": found.hexdigest(), **f.report()}))
    (folder / f"{member} reported").write_text("done")
    while len(list(folder.iterdir())) < 4:  # the host among them stays until then
        time.sleep(0.02)
"""


def test_a_thread_reads_while_the_interpreter_ends(tmp_path: Path):
    """No thread can be started then, so the one that reads copies."""
    folder = tmp_path / "model"
    write_model(folder, tensors=2, rows=6000)  # tensors of 6 chunks
    code = """
    import threading
    f = cluster.safe_open(folder, config=config)
    f.get_slice("layers.0.weight")[:1]

    def late():
        threading.main_thread().join()
        print(len(f.get_tensor("layers.1.weight")), flush=True)
        f.close()

    threading.Thread(target=late).start()
    """
    done = run(code, folder)
    assert done.communicate(timeout=60)[0] == "6000\n"
    assert done.returncode == 0


@pytest.mark.parametrize("slower", [1, 10])
def test_processes_of_a_group_read_each_byte_once_without_ray(tmp_path: Path, s3_server: EmbeddedS3, slower: int):
    """`slower`: how many times slower one of them is. The window is an eighth of the model."""
    folder = tmp_path / "done"
    folder.mkdir()
    write_model(tmp_path / "model", tensors=44, rows=1024)
    model = publish_to(s3_server, tmp_path / "model", f"eighth-{slower}")
    model_bytes = sum(path.stat().st_size for path in model.folder.glob("*.safetensors"))
    window = {"arena_bytes": model_bytes // 8, "window_bytes": model_bytes // 8, "group_patience_s": 60.0}
    config = CONFIG.model_copy(update=window)
    with CountingProxy(s3_server.endpoint_url) as proxy:
        key = s3_server.credentials()
        store = {"endpoint_url": proxy.endpoint_url, "region": s3_server.region}
        os_environ = {"AWS_ACCESS_KEY_ID": key.access_key_id, "AWS_SECRET_ACCESS_KEY": key.secret_access_key}
        work = [
            run(
                READ_ALL,
                folder,
                os_environ,
                config,
                uri=model.uri,
                store=store,
                member=number,
                pause_s=(1, slower)[number] * PAUSE_S,
            )
            for number in range(2)
        ]
        found = [json.loads(process.communicate(timeout=120)[0]) for process in work]
        read_bytes = sum(size for path, size in proxy.bytes_by_path().items() if path.endswith(".safetensors"))
    assert found[0]["digest"] == found[1]["digest"]
    assert found[0]["host"] == found[1]["host"]
    assert {each["why_private"] for each in found} == {""}
    assert read_bytes <= model_bytes
    assert found[0]["store_bytes"] <= model_bytes
    assert found[0]["refetched_bytes"] == 0


def test_another_process_adopts_the_arena_of_a_killed_host(tmp_path: Path):
    folder = tmp_path / "model"
    write_model(folder)
    cluster.publish(folder, chunk_bytes=1 << 20)
    host = run(
        """
        with cluster.safe_open(folder, config=config) as f:
            f.get_tensor("layers.0.weight")
            print("ready", flush=True)
            time.sleep(600)
        """,
        folder,
    )
    assert host.stdout is not None
    assert host.stdout.readline() == "ready\n"
    reader = run(
        """
        with cluster.safe_open(folder, config=config) as f:
            f.get_tensor("layers.1.weight")
            first = f.report()["host"]
            print(first, flush=True)
            while os.path.exists(f"/proc/{first}"):
                time.sleep(0.05)
            for name in f.offset_keys():
                f.get_tensor(name)
            print(f.report()["host"] == os.getpid(), flush=True)
        """,
        folder,
    )
    assert reader.stdout is not None
    assert int(reader.stdout.readline()) == host.pid
    host.send_signal(signal.SIGKILL)
    assert ended(host) == -signal.SIGKILL
    assert reader.communicate(timeout=60)[0] == "True\n"
    assert reader.returncode == 0


def test_the_arena_is_gone_when_all_processes_have_ended(tmp_path: Path, own_host: Path):
    folder = tmp_path / "model"
    write_tiny_llama(folder)
    arena = arena_path(f"user-{os.geteuid()}", f"{own_host / 'longshore'} {pid_namespace()}")
    code = """
    f = cluster.safe_open(folder, config=config)
    f.get_tensor(f.keys()[0])
    print(os.path.exists(arena))
    """
    done = run(code, folder, arena=arena)
    assert done.communicate(timeout=60)[0] == "True\n"
    assert done.returncode == 0
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(os.path.basename(arena))]


def test_ray_is_not_imported(tmp_path: Path):
    folder = tmp_path / "model"
    write_tiny_llama(folder)
    done = run(
        """
        with cluster.safe_open(folder, config=config) as f:
            f.get_tensor(f.keys()[0])
        raise SystemExit("ray" in sys.modules)
        """,
        folder,
    )
    assert ended(done) == 0
