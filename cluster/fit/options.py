"""Options about memory: how a load has to fit, the devices of one rank, and its offload folder. Pure.

    fit="auto", gpu_memory_utilization=0.9, reserve_bytes=2 << 30
    device_map="auto", max_memory={0: "20GB", "cpu": "60GB"}, offload_folder="/scratch/llama"
    device_map={"model.embed_tokens": 0, "model.layers": 1, "model.norm": "cpu", "lm_head": "disk"}

An offload folder has the format of Hugging Face Accelerate: a file per tensor, and an index.

    index.json                            {"model.norm.weight": {"dtype": "bfloat16", "shape": [4096]}, ...}
    model.norm.weight.dat                 the tensor's bytes, nothing else

Names of tensors come from a bucket. One that could leave the folder, or that no file can have, is refused.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

from cluster.errors import ConfigError
from cluster.fit.device_map import CPU, DISK, DeviceKey, DeviceMap, device_order
from cluster.layouts.mesh import Layout
from cluster.units import parse_bytes
from storage.problems import quote

if TYPE_CHECKING:
    from cluster.config import Config


STRICT, AUTO = "strict", "auto"
FitMode = Literal["strict", "auto"]
MODES = get_args(FitMode)


@dataclass(frozen=True, slots=True)
class FitTry:
    """One step of fit="auto"."""

    what: str  # "as given", 'quantization="int8"'
    need_bytes: int  # of the largest rank; 0: it could not be planned
    why_not: str = ""  # it does not fit, or cannot be; "": this is what was taken


def what_was_taken(tried: Sequence[FitTry]) -> str:
    """Return the change that was taken, 'quantization="int8"'; "" when the model is as it was asked for."""
    return tried[-1].what if len(tried) > 1 else ""


@dataclass(frozen=True, slots=True)
class FitOptions:
    """Memory that a load leaves free, and what happens when it does not fit. Raises ConfigError for a wrong value.

    `gpu_memory_utilization` is the part of a GPU's memory, 0 to 1, that may be in use in all, as vLLM has it. It,
    `reserve_bytes` and the settings' reserve each keep memory free. The one that leaves most applies.
    """

    mode: str = STRICT  # "auto": lowers the precision, in steps, until it fits
    gpu_memory_utilization: float | None = None
    reserve_bytes: int | None = None  # kept free on each GPU, or on each host for CPU ranks

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"fit must be one of {', '.join(MODES)}, not {self.mode!r:.40}")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, not {share!r:.40}",
                hint="it is the part of each GPU's memory that may be in use in all: 0.9 leaves a tenth free",
            )
        left = self.reserve_bytes
        if left is not None and left < 0:
            raise ConfigError(f"reserve_bytes must be a whole number of bytes from 0 on, not {left!r:.40}")

    def check_device(self, device: str) -> None:
        """Raise ConfigError when an option has no meaning for ranks on `device`."""
        if device == "cpu" and self.gpu_memory_utilization is not None:
            raise ConfigError(
                "gpu_memory_utilization is about GPUs, and the ranks are in host memory (device=cpu)",
                hint="reserve_bytes keeps memory of the hosts free",
            )

    def kept_free_bytes(self, total_bytes: int, config: Config) -> int:
        """Return the bytes that the load must leave free on a GPU of `total_bytes`."""
        kept = max(config.device_reserve_bytes, self.reserve_bytes or 0)
        if self.gpu_memory_utilization is not None:
            kept = max(kept, total_bytes - math.floor(total_bytes * self.gpu_memory_utilization))
        return min(kept, total_bytes)

    def host_reserve_bytes(self, config: Config) -> int:
        """Return the bytes that the load must leave free on a host."""
        return max(config.host_reserve_bytes, self.reserve_bytes or 0)

    def identity(self) -> tuple[object, ...]:
        """Return the part that decides what the load holds in the end; nothing for "strict"."""
        return () if self.mode == STRICT else (self.mode, self.gpu_memory_utilization, self.reserve_bytes)


POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")
MAX_GPUS = 64  # of one rank
MAX_ENTRIES = 1 << 20
GPU_SHARE_ALONE = 0.9  # of a single GPU whose limit nobody gave, as Accelerate has it: the rest is for activations


@runtime_checkable
class TorchDevice(Protocol):
    """A torch.device, where torch need not be installed."""

    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


GivenDevice = int | str | TorchDevice
GivenMap = GivenDevice | Mapping[str, GivenDevice]
GivenMemory = Mapping[int | str, int | float | str]


@dataclass(frozen=True, slots=True)
class DeviceMapOptions:
    """A rank with several devices."""

    policy: str  # one of POLICIES; "" when `modules` says it all
    modules: tuple[tuple[str, DeviceKey], ...] = ()
    max_memory: tuple[tuple[DeviceKey, int], ...] | None = None  # bytes; None: what the rank's node has
    offload_folder: str = ""  # absolute, on the rank's node; "": nothing may go to disk
    is_all: bool = False  # max_memory is all there is: what is converted on its way in must find room in it too

    @property
    def gpus(self) -> int | None:
        """GPUs that the rank needs; None: as many as a node has."""
        named = [device for _, device in self.modules] if self.modules else None
        if named is None and self.max_memory is not None:
            named = [device for device, _ in self.max_memory]
        return None if named is None else max((gpu + 1 for gpu in named if isinstance(gpu, int)), default=0)

    @property
    def memory(self) -> dict[DeviceKey, int]:
        """The limits, in the order in which devices are filled. Raises ConfigError when there are none yet."""
        if self.max_memory is None:
            raise ConfigError(
                f"device_map={self.policy!r} needs max_memory where no cluster says what it has",
                hint='give it: max_memory={0: "20GB", "cpu": "60GB"}',
            )
        return dict(sorted(self.max_memory, key=lambda limit: device_order(limit[0])))

    def on_node(self, gpu_bytes: list[int], cpu_bytes: int) -> DeviceMapOptions:
        """Return these options with the limits of a node, where none were given. A single GPU keeps a tenth free."""
        if self.max_memory is not None or self.modules:
            return self
        limits: dict[DeviceKey, int] = dict(enumerate(gpu_bytes))
        if len(gpu_bytes) == 1 and self.policy != "sequential":
            limits[0] = int(gpu_bytes[0] * GPU_SHARE_ALONE)
        limits[CPU] = max(0, cpu_bytes)
        return replace(self, max_memory=tuple(limits.items()), is_all=True)

    def beside(self, staging_bytes: int) -> DeviceMapOptions:
        """Return these options with `staging_bytes` kept free on each device that holds tensors in memory."""
        if self.max_memory is None or not self.is_all:
            return self
        limits = ((key, limit if key == DISK else max(0, limit - staging_bytes)) for key, limit in self.max_memory)
        return replace(self, max_memory=tuple(limits))

    @property
    def device_map(self) -> DeviceMap | None:
        """The device map that was given, or None."""
        return DeviceMap(self.modules) if self.modules else None


def parse_device_map(
    device_map: GivenMap | None,
    max_memory: GivenMemory | None,
    offload_folder: str | os.PathLike[str] | None,
    layout: Layout,
    device: str,
) -> DeviceMapOptions | None:
    """Return the options; None when there is no device map. Raises ConfigError.

    `max_memory` or `offload_folder` alone stands for the device map "auto".
    """
    given = {"device_map": device_map, "max_memory": max_memory, "offload_folder": offload_folder}
    asked = [name for name, value in given.items() if value is not None]
    if not asked:
        return None
    if layout.ranks > 1:
        raise ConfigError(
            f"{asked[0]} is for one rank that owns several devices, and the layout has {layout.ranks} ranks ({layout})",
            hint="leave the other sizes at 1, or use pipeline_parallel_size to spread layers over ranks; "
            "gpu_memory_utilization and reserve_bytes say what each rank leaves free",
        )
    device_map = POLICIES[0] if device_map is None else device_map
    folder = _folder(offload_folder)
    limits = None if max_memory is None else _limits(max_memory)
    if isinstance(device_map, str) and device_map in POLICIES:
        options = DeviceMapOptions(device_map, (), limits, folder)
    elif isinstance(device_map, Mapping):
        options = DeviceMapOptions("", _modules(device_map), limits, folder)
    elif isinstance(device_map, str | int | TorchDevice):
        options = DeviceMapOptions("", (("", parse_device(device_map, ", ".join(POLICIES))),), limits, folder)
    else:
        raise ConfigError(f"device_map must be a word or a dictionary, not {device_map!r:.80}")
    return _agreeing(options, device)


def parse_device(given: object, others: str = "") -> DeviceKey:
    """Return the device for 0, "0", "cuda:0", "cuda", "cpu", "disk" or a torch.device. Raises ConfigError.

    `others`: words that the message offers beside devices.
    """
    text = str(given).strip().lower() if not isinstance(given, bool) else ""
    if text in (CPU, DISK):
        return text
    match = re.fullmatch(r"(?:cuda:)?([0-9]{1,4})|cuda", text)
    if match is None or (number := int(match[1] or 0)) >= MAX_GPUS:
        raise ConfigError(
            f"unknown device {quote(given)}",
            hint=f'devices are 0 to {MAX_GPUS - 1} (the GPUs of the rank), "cpu" and "disk"'
            + (f"; a device_map can also be {others}" if others else ""),
        )
    return number


def _agreeing(options: DeviceMapOptions, device: str) -> DeviceMapOptions:
    """Return the options. Raises ConfigError when they contradict each other."""
    if device == "cpu" and options.gpus:
        raise ConfigError(
            f"device='cpu' has no GPUs, and the device map asks for {options.gpus}", hint="device='cuda' has them"
        )
    if device == "cuda" and options.gpus == 0:
        raise ConfigError("device='cuda' with a device map that names no GPU", hint="leave device out, or name GPU 0")
    if any(where == DISK for _, where in options.modules) and not options.offload_folder:
        raise ConfigError("the device map sends modules to disk, and there is no offload_folder")
    return options


def _modules(given: Mapping[str, GivenDevice]) -> tuple[tuple[str, DeviceKey], ...]:
    if not given:
        raise ConfigError("device_map is empty", hint='name modules and their devices, or use device_map="auto"')
    if len(given) > MAX_ENTRIES:
        raise ConfigError(f"device_map has {len(given)} entries; at most {MAX_ENTRIES} are read")
    wrong = [name for name in given if not isinstance(name, str)]
    if wrong:
        raise ConfigError(f"device_map must name modules by dotted names, not {quote(wrong[0])}")
    return tuple((name, parse_device(device)) for name, device in given.items())


def _limits(given: GivenMemory) -> tuple[tuple[DeviceKey, int], ...]:
    if not isinstance(given, Mapping) or not given:
        raise ConfigError('max_memory must be a dictionary like {0: "20GB", "cpu": "60GB"}')
    limits: dict[DeviceKey, int] = {}
    for name, size in given.items():
        device = parse_device(name)
        if device in limits:
            raise ConfigError(f"max_memory names {quote(str(name))} twice")
        limits[device] = _size_bytes(name, size)
    return tuple(sorted(limits.items(), key=lambda limit: device_order(limit[0])))


def _size_bytes(name: object, size: object) -> int:
    if isinstance(size, str):
        return parse_bytes(size)
    if isinstance(size, float) and size.is_integer():
        size = int(size)
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 62:
        raise ConfigError(f"max_memory of {quote(str(name))} must be bytes or a size like 20GB, not {quote(size)}")
    return size


def _folder(given: str | os.PathLike[str] | None) -> str:
    if given is None:
        return ""
    folder = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(folder, str) or not os.path.isabs(folder) or "\0" in folder:
        raise ConfigError(
            f"offload_folder must be an absolute path, not {quote(folder)}",
            hint="it is a folder on the node that loads, which may be another machine",
        )
    folder = os.path.normpath(folder)
    if folder == os.sep:
        raise ConfigError("offload_folder must be a folder of its own")
    return folder


INDEX_NAME = "index.json"
MAX_NAME_BYTES = 255  # of a file, on every file system that matters


def offload_name(tensor: str) -> str | None:
    """Return the name of the tensor's file; None when no file can have it."""
    name = f"{tensor}.dat"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return None
    unsafe = any(char in name for char in "/\\\0") or not tensor.isprintable()
    return None if unsafe or not tensor or size > MAX_NAME_BYTES else name


def index_entry(torch_dtype: str, shape: tuple[int, ...]) -> dict[str, object]:
    """Return the entry of a tensor in the index; `torch_dtype` is a name such as "bfloat16"."""
    return {"dtype": torch_dtype, "shape": list(shape)}
