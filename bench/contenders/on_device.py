"""The GPU case: files in tmpfs or page cache to one device. The clock stops when the device has every byte."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from bench.contenders.buffers import (
    check_tensors,
    file_ranges,
    file_tensors,
    in_threads,
    map_file,
    read_exactly,
    runai_tensors,
    set_runai_variables,
)
from bench.contenders.ours import load_rank, model_uri, node_agent
from bench.harness.contender import NotRunnable, Spec
from bench.harness.measure import Measured, measured, settle
from bench.harness.models import MODEL, PLAIN
from cluster.config import Config

_PINNED_BYTES = 1 << 30  # that the ceiling copies from, again and again
_PIECE_BYTES = 64 << 20

Tensors = dict[str, Any]


class Device:
    """A CUDA device, or the host in its place: a dry run without the CUDA calls, where every copy is done at once."""

    def __init__(self, kind: str) -> None:
        """`kind`: "cuda" or "cpu". Raises NotRunnable where there is no such device."""
        import torch

        self._torch: Any = torch
        self._is_cuda = kind == "cuda"
        self.name = "cuda:0" if self._is_cuda else "cpu"
        if self._is_cuda and torch.version.cuda is None:
            raise NotRunnable(f"no CUDA: torch {torch.__version__} is built without it")
        if self._is_cuda and not torch.cuda.is_available():
            raise NotRunnable(f"no CUDA device: torch {torch.__version__} finds no GPU that it can use")

    def describe(self) -> dict[str, str]:
        """Return the names and sizes that a result is reported with."""
        if not self._is_cuda:
            return {"gpu": "none: a dry run on the host, it measures no GPU"}
        cuda = self._torch.cuda
        memory = f"{cuda.mem_get_info(0)[1] / 1e9:.0f} GB"
        return {"gpu": cuda.get_device_name(0), "gpu memory": memory, "cuda": str(self._torch.version.cuda)}

    def warm_up(self) -> None:
        """Do everything that a first use costs: the context, a pinned allocation, libraries of both directions."""
        if self._is_cuda:
            self._torch.cuda.set_device(0)
            self.host(1 << 20).to(self.name, non_blocking=True).add_(1).cpu()
            self.synchronize()

    def host(self, size_bytes: int) -> Any:
        """Return host memory that the device copies from by itself, as a tensor of bytes."""
        return self._torch.empty(size_bytes, dtype=self._torch.uint8, pin_memory=self._is_cuda)

    def memory(self, size_bytes: int) -> Any:
        """Return memory of the device, as a tensor of bytes."""
        return self._torch.empty(size_bytes, dtype=self._torch.uint8, device=self.name)

    def stream(self) -> Any:
        return self._torch.cuda.Stream(device=0) if self._is_cuda else None

    def copy(self, stream: Any, target: Any, source: Any) -> Any:
        """Start a copy to memory that no other stream uses. Returns an event for `wait`."""
        if stream is None:
            target.copy_(source)
            return None
        with self._torch.cuda.stream(stream):  # of the calling thread only
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, event: Any) -> None:
        """Return when the copy of that event is done."""
        if event is not None:
            event.synchronize()

    def synchronize(self) -> None:
        if self._is_cuda:
            self._torch.cuda.synchronize(0)


def _open(spec: Spec) -> Device:
    device = Device(spec.options["device"])
    device.warm_up()
    return device


def _measure(spec: Spec, device: Device, load: Callable[[Measured], Tensors | None]) -> None:
    """Measure `load`, and check its tensors unless it has none."""
    with measured(spec) as m:
        tensors = load(m)
        device.synchronize()
        m.stop()
        if tensors is not None and {tensor.device.type for tensor in tensors.values()} != {spec.options["device"]}:
            raise RuntimeError("not every tensor is on the device")
    if tensors is not None:
        check_tensors(spec, tensors)


def copy_pinned(spec: Spec) -> None:
    """Copy as many bytes as the model has from pinned memory: the ceiling."""
    device = _open(spec)
    size = min(_PINNED_BYTES, spec.model_bytes)
    host, memory = device.host(size).fill_(1), device.memory(size)
    starts = range(0, size, _PIECE_BYTES)

    def load(_: Measured) -> None:
        stream, left = device.stream(), spec.model_bytes
        for start in itertools.cycle(starts):
            piece = slice(start, min(start + _PIECE_BYTES, size, start + left))
            device.copy(stream, memory[piece], host[piece])
            left -= piece.stop - piece.start
            if not left:
                return

    _measure(spec, device, load)


def read_and_copy(spec: Spec) -> None:
    """Read into pinned pieces, each copied while the next ones are read. No check, no plan, no recovery."""
    device, options = _open(spec), spec.options
    piece_bytes, threads = options["piece_mib"] << 20, options["threads"]
    pieces = [[device.host(piece_bytes).fill_(1) for _ in range(options["pieces"])] for _ in range(threads)]

    def load(_: Measured) -> Tensors:
        targets = [device.memory(file.size_bytes) for file in spec.files]
        files = [os.open(file.path, os.O_RDONLY) for file in spec.files]
        todo, rings = iter(file_ranges(spec, piece_bytes)), iter(pieces)

        def work() -> None:
            ring, stream = next(rings), device.stream()
            events: list[Any] = [None] * len(ring)
            for turn, one in enumerate(todo):
                number, size = turn % len(ring), one.end - one.start
                device.wait(events[number])
                read_exactly(files[one.file], memoryview(ring[number].numpy())[:size], one.start)
                target = targets[one.file][one.start : one.end]
                events[number] = device.copy(stream, target, ring[number][:size])
            for event in events:
                device.wait(event)

        in_threads(threads, work)
        for file in files:
            os.close(file)
        # The headers are read a second time, which costs nothing beside the rest.
        maps = [memoryview(map_file(file)) for file in spec.files]
        return dict(one for file, target in zip(maps, targets, strict=True) for one in file_tensors(file, target))

    _measure(spec, device, load)


def load_longshore(spec: Spec) -> None:
    """Load with one rank of Longshore, verified or not, without Ray."""
    device, options = _open(spec), spec.options
    config = Config(**{name: options[name] for name in ("fetch_threads",) if name in options})
    uri = model_uri(spec, MODEL if options["verify"] else PLAIN)
    with node_agent(config) as agent:
        settle()  # the agent touches the arena

        def load(m: Measured) -> Tensors:
            tensors, report = load_rank(agent, config, uri, options["device"], "auto")
            m.extra["stages"] = asdict(report.stages)
            return tensors

        _measure(spec, device, load)


def load_opened(spec: Spec) -> None:
    """Copy the lazy tensors of Longshore's `safe_open` to new tensors of the device, as an engine's loader does."""
    import torch
    import torch.distributed.tensor  # which torch imports at the first copy of a subclass; engines have it by then

    import cluster

    device = _open(spec)

    def load(_: Measured) -> Tensors:
        tensors: Tensors = {}
        with cluster.safe_open(model_uri(spec, MODEL)) as opened:
            for name, lazy in opened.lazy_tensors():
                tensors[name] = torch.empty(lazy.shape, dtype=lazy.dtype, device=device.name).copy_(lazy)
        return tensors

    _measure(spec, device, load)


def load_safetensors(spec: Spec) -> None:
    """Load with safetensors' load_file."""
    from safetensors.torch import load_file

    device = _open(spec)

    def load(_: Measured) -> Tensors:
        tensors: Tensors = {}
        for file in spec.files:
            loaded = load_file(file.path, device=device.name)
            if device.name == "cpu":  # else they are views of the file, and nothing was read
                loaded = {name: tensor.clone() for name, tensor in loaded.items()}
            tensors.update(loaded)
        return tensors

    _measure(spec, device, load)


def load_runai(spec: Spec) -> None:
    """Load with Run:ai's model streamer."""
    set_runai_variables(spec.options)
    import runai_model_streamer  # noqa: F401

    device, uris = _open(spec), [file.path for file in spec.files]
    _measure(spec, device, lambda _: dict(runai_tensors(uris, device.name)))


def load_fast(spec: Spec) -> None:
    """Load with fastsafetensors."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    device, options = _open(spec), spec.options

    def load(_: Measured) -> Tensors:
        loader = SafeTensorsFileLoader(
            SingleGroup(),
            device=device.name,
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

    _measure(spec, device, load)
