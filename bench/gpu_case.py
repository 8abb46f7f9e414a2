"""One contender of the GPU case in a process of its own: `python -m bench.gpu_case NAME SPEC.json`.

Files in tmpfs or page cache to one device. All read the same files; the clock stops when the device has every byte.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench.accelerator import Accelerator, open_accelerator
from bench.contender import EXIT_NOT_RUNNABLE, NotRunnable
from bench.delivered import check_tensors, read_tensors, torch_dtype
from bench.host_buffers import file_ranges
from bench.measure import Measured, measured
from bench.spec import Spec

ARENA_BYTES = 1 << 30
_PINNED_BYTES = 1 << 30  # that the ceiling copies from, again and again
_PIECE_BYTES = 64 << 20

Tensors = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GpuContender:
    """What the driver must know of it."""

    title: str
    checks: bool
    settings: tuple[Mapping[str, Any], ...]
    prepare: Callable[[Spec, Accelerator], Any]  # outside the clock; what `load` is given
    load: Callable[[Spec, Accelerator, Any, Measured], Tensors | None]  # None: nothing to compare
    finish: Callable[[Any], None] = lambda _: None  # outside the clock again


def main(arguments: list[str]) -> None:
    name, path = arguments
    spec, contender = Spec.read(path), CONTENDERS[name]
    accelerator = open_accelerator(spec.options["device"])
    accelerator.warm_up()
    prepared = contender.prepare(spec, accelerator)
    try:
        before_bytes = accelerator.used_bytes()
        with measured(spec) as m:
            tensors = contender.load(spec, accelerator, prepared, m)
            accelerator.synchronize()
            m.stop()
            m.extra["device_bytes"] = accelerator.used_bytes() - before_bytes
            if tensors is not None and {tensor.device.type for tensor in tensors.values()} != {spec.options["device"]}:
                raise RuntimeError("not every tensor is on the device")
        if tensors is not None:
            check_tensors(spec, tensors)
    finally:
        contender.finish(prepared)


# -- the ceilings ----------------------------------------------------------------------------------------------


def _pinned_ring(spec: Spec, accelerator: Accelerator) -> tuple[Any, Any]:
    size = min(_PINNED_BYTES, spec.model_bytes)
    host, device = accelerator.host(size), accelerator.device(size)
    host.fill_(1)
    return host, device


def _copy_pinned(spec: Spec, accelerator: Accelerator, prepared: tuple[Any, Any], m: Measured) -> None:
    host, device = prepared
    copies, left = accelerator.copies(), spec.model_bytes
    while left:
        for start in range(0, len(host), _PIECE_BYTES):
            size = min(_PIECE_BYTES, len(host) - start, left)
            copies.copy(device[start : start + size], host[start : start + size])
            left -= size
            if not left:
                break


def _read_rings(spec: Spec, accelerator: Accelerator) -> list[list[Any]]:
    """For each thread a few pinned pieces."""
    options = spec.options
    size = options["piece_mib"] << 20
    return [[accelerator.host(size).fill_(1) for _ in range(options["pieces"])] for _ in range(options["threads"])]


def _read_and_copy(spec: Spec, accelerator: Accelerator, rings: list[list[Any]], m: Measured) -> Tensors:
    """Positioned reads into pinned pieces, each copied while the next ones are read; no check, no plan, no recovery."""
    targets = [accelerator.device(file.size_bytes) for file in spec.files]
    files = [os.open(file.path, os.O_RDONLY) for file in spec.files]
    todo = iter(file_ranges(spec, spec.options["piece_mib"] << 20))
    errors: list[BaseException] = []

    def work(ring: list[Any]) -> None:
        try:
            copies = accelerator.copies()
            marks: list[Any] = [None] * len(ring)
            for turn, one in enumerate(todo):
                number = turn % len(ring)
                if marks[number] is not None:
                    copies.wait(marks[number])
                size = one.end - one.start
                _read_exactly(files[one.file], memoryview(ring[number].numpy())[:size], one.start)
                copies.copy(targets[one.file][one.start : one.end], ring[number][:size])
                marks[number] = copies.mark()
            for mark in marks:
                if mark is not None:
                    copies.wait(mark)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(ring,)) for ring in rings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for file in files:
        os.close(file)
    if errors:
        raise errors[0]
    return dict(_views(spec, targets))


def _read_exactly(file: int, target: memoryview, offset: int) -> None:
    at = 0
    while at < len(target):
        got = os.preadv(file, [target[at:]], offset + at)
        if not got:
            raise EOFError(f"a file ends at {offset + at}")
        at += got


def _views(spec: Spec, targets: list[Any]) -> Iterator[tuple[str, Any]]:
    """Tensors as views of whole files on the device. Their headers are read again, which is nothing beside the rest."""
    for file, target in zip(spec.files, targets, strict=True):
        with open(file.path, "rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
        tensors = read_tensors(memoryview(mapped))
        for tensor in tensors:
            data = target[tensor.start : tensor.end].view(torch_dtype(tensor.dtype))
            yield tensor.name, data.reshape(tensor.shape)


# -- ours ------------------------------------------------------------------------------------------------------


def _ours_prepare(spec: Spec, accelerator: Accelerator) -> Any:
    from bench.local_rank import node_agent
    from bench.our_cluster import our_config, settle

    config = our_config(spec, arena_bytes=spec.options.get("arena_bytes", ARENA_BYTES))
    context = node_agent(config)
    agent = context.__enter__()
    settle()  # the arena is being touched
    return context, agent, config


def _ours_load(spec: Spec, accelerator: Accelerator, prepared: Any, m: Measured) -> Tensors:
    from bench.local_rank import load_rank
    from bench.our_cluster import main_model

    _, agent, config = prepared
    kind, placement = spec.options["device"], spec.options.get("placement", "auto")
    tensors, report = load_rank(agent, config, main_model(spec), kind, placement)
    m.extra["stages"] = asdict(report.stages)
    return tensors


def _ours_finish(prepared: Any) -> None:
    prepared[0].__exit__(None, None, None)


# -- the rivals ------------------------------------------------------------------------------------------------


def _safetensors_load(spec: Spec, accelerator: Accelerator, prepared: Any, m: Measured) -> Tensors:
    tensors: Tensors = {}
    for file in spec.files:
        loaded = prepared(file.path, device=accelerator.name)
        if accelerator.name == "cpu":  # else they are views of the file, and nothing was read
            loaded = {name: tensor.clone() for name, tensor in loaded.items()}
        tensors.update(loaded)
    return tensors


def _safetensors_prepare(spec: Spec, accelerator: Accelerator) -> Any:
    from safetensors.torch import load_file

    return load_file


def _runai_prepare(spec: Spec, accelerator: Accelerator) -> Any:
    from bench.runai import set_variables

    set_variables(spec.options)
    from runai_model_streamer import SafetensorsStreamer

    return SafetensorsStreamer


def _runai_load(spec: Spec, accelerator: Accelerator, streamer: Any, m: Measured) -> Tensors:
    with streamer() as opened:
        opened.stream_files([file.path for file in spec.files], device=accelerator.name)
        return dict(opened.get_tensors())


def _fast_prepare(spec: Spec, accelerator: Accelerator) -> Any:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    return SafeTensorsFileLoader, SingleGroup


def _fast_load(spec: Spec, accelerator: Accelerator, prepared: Any, m: Measured) -> Tensors:
    file_loader, single_group = prepared
    options = spec.options
    loader = file_loader(
        single_group(),
        device=accelerator.name,
        nogds=True,  # files in tmpfs have no direct storage
        max_threads=options["threads"],
        bbuf_size_kb=options["bounce_mib"] << 10,
    )
    try:
        loader.add_filenames({0: [file.path for file in spec.files]})
        buffers = loader.copy_files_to_device(max_copy_block_size=options["block_mib"] << 20)
        try:
            return {name: buffers.get_tensor(name) for name in loader.get_keys()}
        finally:
            buffers.close()  # its tensors share the memory and stay valid
    finally:
        loader.close()


def _nothing(spec: Spec, accelerator: Accelerator) -> None:
    return None


_OURS: tuple[dict[str, Any], ...] = ({}, {"fetch_threads": 8}, {"fetch_threads": 16})

CONTENDERS: dict[str, GpuContender] = {
    "pinned_copy": GpuContender("limit: copies of pinned memory", False, ({},), _pinned_ring, _copy_pinned),
    "read_and_copy": GpuContender(
        "limit: positioned reads and copies",
        False,
        tuple({"threads": threads, "piece_mib": piece, "pieces": 3} for threads in (2, 4, 8, 16) for piece in (4, 16)),
        _read_rings,
        _read_and_copy,
    ),
    "longshore": GpuContender(
        "Longshore, verified",
        True,
        tuple({**one, "verify": True} for one in _OURS),
        _ours_prepare,
        _ours_load,
        _ours_finish,
    ),
    "longshore_unverified": GpuContender(
        "Longshore, not verified",
        False,
        tuple({**one, "verify": False} for one in _OURS),
        _ours_prepare,
        _ours_load,
        _ours_finish,
    ),
    "safetensors": GpuContender("safetensors", False, ({},), _safetensors_prepare, _safetensors_load),
    "runai": GpuContender(
        "Run:ai streamer",
        False,
        tuple({"RUNAI_STREAMER_CONCURRENCY": concurrency} for concurrency in (16, 8, 32)),
        _runai_prepare,
        _runai_load,
    ),
    "fastsafetensors": GpuContender(
        "fastsafetensors",
        False,
        tuple(
            {"threads": threads, "bounce_mib": 16, "block_mib": block}
            for threads, block in ((16, 16), (16, 160), (8, 16), (16, 16 << 10))
        ),
        _fast_prepare,
        _fast_load,
    ),
}


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (NotRunnable, ImportError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(EXIT_NOT_RUNNABLE) from error
