"""What a user would do without Longshore: a process for each rank, with its slices at the end. None checks a byte.

    contender --JSON lines--> python -m bench.contenders.ranks      one for each rank
                                load | download | check | drop
              <-- a line ----   when it is done

"cold" begins with the start of the processes: interpreter, imports, fresh memory. "warm" is the second load of the same
processes, whose malloc has given nothing back. Each slice is compared with the files, outside the clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.harness.contender import Spec

# name, number of the file, first byte of the whole tensor, its bytes, its shape, the rank's range of each dimension
Slice = tuple[str, int, int, int, tuple[int, ...], list[tuple[int, int]]]
Held = dict[str, Any]  # name -> tensor of torch, or rows of bytes
ACCESS_KEY = SECRET_KEY = "bench"
REGION = "us-east-1"  # the server checks no signature: any do


# -- the contender's process -----------------------------------------------------------------------------------


def load_by_ranks(spec: Spec) -> None:
    """Load twice, cold and warm. Options: "method", "layout", and what the method has."""
    from bench.harness.measure import measured

    slices = rank_slices(spec)
    folder = Path(spec.folder).parents[2] / "download"
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        with measured(spec, "cold", watch_memory=False) as m:
            begun_s = time.perf_counter()
            ranks = [stack.enter_context(_rank(spec, folder, wanted)) for wanted in slices]
            _ask(ranks, "ready")
            m.extra["ready_s"] = time.perf_counter() - begun_s
            _load(spec, ranks)
            m.stop()
        _ask(ranks, "check")
        _ask(ranks, "drop")
        with measured(spec, "warm", fresh=False, watch_memory=False) as m:
            _load(spec, ranks)
            m.stop()
        _ask(ranks, "check")
    shutil.rmtree(folder)


def rank_slices(spec: Spec) -> list[list[Slice]]:
    """Return the slices of every rank, as a load of Longshore cuts them."""
    from cluster.options import LoadOptions
    from cluster.planning.make_plan import prepare_plan
    from cluster.request import make_request

    request = make_request(LoadOptions(Path(spec.folder).as_uri(), device="cpu", **spec.options["layout"]))
    _, plan = prepare_plan(request, chunk_bytes=8 << 20, read_timeout_s=20.0)
    numbers = {Path(file.path).name: number for number, file in enumerate(spec.files)}
    sizes = {name: plan.cut.kinds[kind].size_bytes for name, kind in zip(plan.cut.names, plan.cut.kind, strict=True)}
    return [
        [
            (
                piece.name,
                numbers[plan.shards[piece.shard].key.rpartition("/")[2]],
                piece.start,
                sizes[piece.name],
                piece.shape,
                [ranges[0] for ranges in piece.region.ranges],
            )
            for piece in rank.slices
            if piece.size_bytes
        ]
        for rank in plan.ranks
    ]


def _load(spec: Spec, ranks: list[subprocess.Popen[str]]) -> None:
    if spec.options["method"] == "download":
        _ask(ranks[:1], "download")
    _ask(ranks, "load")


@contextlib.contextmanager
def _rank(spec: Spec, folder: Path, slices: list[Slice]) -> Iterator[subprocess.Popen[str]]:
    """Start the process of a rank, which ends when its input ends."""
    command = [sys.executable, "-m", "bench.contenders.ranks"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        print(json.dumps([spec.to_json(), str(folder), slices]), file=process.stdin)
        yield process
        if process.stdin is not None:
            process.stdin.close()


def _ask(ranks: list[subprocess.Popen[str]], command: str) -> None:
    """Let these ranks do something at the same time, and wait for them. Raises RuntimeError."""
    for rank in ranks:
        print(command, file=rank.stdin, flush=True)
    for rank in ranks:
        if next(iter(rank.stdout or ()), "") != "done\n":
            raise RuntimeError(f"a rank failed to {command}")  # it has printed why


# -- the process of a rank -------------------------------------------------------------------------------------


def main() -> None:
    """Do what the lines of the input say."""
    text, place, slices = json.loads(sys.stdin.readline())
    spec, folder = Spec.from_json(text), Path(place)
    from bench.contenders.buffers import keep_freed_memory

    keep_freed_memory()
    method = spec.options["method"]
    load: Callable[[], Held]
    if method == "runai":
        load = _prepare_runai(spec, slices)
    elif method.startswith("obstore"):
        load = _prepare_obstore(spec, slices, whole=method == "obstore_whole")
    else:
        load = _prepare_safetensors(spec, folder if method == "download" else None, slices)
    held: Held = {}
    for line in sys.stdin:
        command = line.strip()
        if command == "load":
            held = load()
        elif command == "download":
            download(spec, folder)
        elif command == "check":
            check_slices(spec, slices, held)
        elif command == "drop":
            held = {}
        print("done", flush=True)


def _prepare_runai(spec: Spec, slices: list[Slice]) -> Callable[[], Held]:
    """Stream all files with Run:ai's model streamer and keep the rank's slices, as vLLM's loader does."""
    from bench.contenders.buffers import runai_tensors, set_runai_variables

    set_s3_environment(spec)
    set_runai_variables({"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": 0, **spec.options})
    import runai_model_streamer  # noqa: F401
    import torch  # noqa: F401

    uris = [file.path if spec.source == "file" else f"s3://{spec.bucket}/{file.key}" for file in spec.files]
    wanted = {name: _index(ranges) for name, _, _, _, _, ranges in slices}
    return lambda: {
        name: tensor[wanted[name]].clone() for name, tensor in runai_tensors(uris, "cpu", owned=False) if name in wanted
    }


def _prepare_safetensors(spec: Spec, folder: Path | None, slices: list[Slice]) -> Callable[[], Held]:
    """Take slices of local files with `safe_open`. They are views of the mapped file, so they are cloned."""
    import torch  # noqa: F401
    from safetensors import safe_open

    files = [Path(file.path) if folder is None else folder / Path(file.path).name for file in spec.files]

    def load() -> Held:
        held = {}
        for number, path in enumerate(files):
            with safe_open(path, framework="pt") as file:
                for name, own, _, _, _, ranges in slices:
                    if own == number:
                        held[name] = file.get_slice(name)[_index(ranges)].clone()
        return held

    return load


def _prepare_obstore(spec: Spec, slices: list[Slice], *, whole: bool) -> Callable[[], Held]:
    """Read ranges with obstore: the rows of each tensor that the rank has a part of, or every tensor whole."""
    import numpy as np
    import obstore

    from bench.contenders.buffers import in_threads

    store, options = obstore_store(spec), spec.options
    range_bytes = options["range_mib"] << 20

    def load() -> Held:
        held, reads = {}, []
        for name, number, start, size_bytes, shape, ranges in slices:
            row_bytes = size_bytes // shape[0]
            first, end = ranges[0]
            left, right = 0, row_bytes
            if len(shape) > 1:
                left, right = (at * row_bytes // shape[1] for at in ranges[1])
            held[name] = np.empty((end - first, right - left), np.uint8)
            step = max(1, range_bytes // row_bytes)
            upto = shape[0] if whole else end
            for row in range(0 if whole else first, upto, step):
                rows = (row, min(row + step, upto))
                reads.append((spec.files[number].key, start, row_bytes, rows, first, end, left, right, held[name]))
        todo = iter(reads)  # next() of a list's iterator is atomic under the GIL

        def work() -> None:
            for key, start, row_bytes, (row, past), first, end, left, right, target in todo:
                data = obstore.get_range(store, key, start=start + row * row_bytes, end=start + past * row_bytes)
                one, other = max(row, first), min(past, end)
                if one < other:
                    block = np.frombuffer(memoryview(data), np.uint8).reshape(-1, row_bytes)
                    target[one - first : other - first] = block[one - row : other - row, left:right]

        in_threads(options["tasks"], work)
        return held

    return load


# -- S3 clients ------------------------------------------------------------------------------------------------


def set_s3_environment(spec: Spec) -> None:
    """Set endpoint, keys and region for clients that read the environment, instead of those of the user."""
    os.environ.update(
        AWS_ENDPOINT_URL=spec.endpoint,
        AWS_ACCESS_KEY_ID=ACCESS_KEY,
        AWS_SECRET_ACCESS_KEY=SECRET_KEY,
        AWS_REGION=REGION,
        AWS_DEFAULT_REGION=REGION,
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
    )
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        os.environ.pop(name, None)
    if spec.ca_bundle:
        os.environ["AWS_CA_BUNDLE"] = spec.ca_bundle


def obstore_store(spec: Spec) -> Any:
    """Return the store of obstore (Rust's object_store) that has the model."""
    from obstore.store import S3Store

    set_s3_environment(spec)
    client_options: Any = {"allow_http": True}
    if spec.ca_bundle:
        # Its TLS takes no self-signed certificate. Checking one costs nothing beside the weights.
        client_options["allow_invalid_certificates"] = True
    return S3Store(spec.bucket, virtual_hosted_style_request=False, client_options=client_options)


def download(spec: Spec, folder: Path) -> None:
    """Download every file with range requests of obstore. The pages of files that are there are used again."""
    import obstore

    from bench.contenders.buffers import file_ranges, in_threads

    store, options = obstore_store(spec), spec.options
    files = [os.open(folder / Path(file.path).name, os.O_RDWR | os.O_CREAT, 0o600) for file in spec.files]
    todo = iter(file_ranges(spec, options["range_mib"] << 20))  # next() of a list's iterator is atomic under the GIL

    def work() -> None:
        for one in todo:
            data = obstore.get_range(store, spec.files[one.file].key, start=one.start, end=one.end)
            os.pwrite(files[one.file], memoryview(data), one.start)

    in_threads(options["tasks"], work)
    for file in files:
        os.close(file)


# -- the comparison --------------------------------------------------------------------------------------------


def check_slices(spec: Spec, slices: list[Slice], held: Held) -> None:
    """Compare every slice with the files. Raises WrongDelivery."""
    import numpy as np

    from bench.contenders.buffers import WrongDelivery, map_file

    files = [np.frombuffer(map_file(file), np.uint8) for file in spec.files]
    for name, number, start, size_bytes, shape, ranges in slices:
        got = held.get(name)
        if got is not None and not isinstance(got, np.ndarray):
            import torch

            got = got.contiguous().view(torch.uint8).numpy()
        stored = files[number][start : start + size_bytes].reshape(*shape, -1)[_index(ranges)]
        if got is None or got.tobytes() != stored.tobytes():
            raise WrongDelivery(f"{name} has other bytes than the file")


def _index(ranges: list[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in ranges)


if __name__ == "__main__":
    main()
