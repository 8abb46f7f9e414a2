"""Device maps: the device of each module, by the rules of Hugging Face Accelerate, from names and bytes. Pure.

    infer_device_map(tree, {0: 20e9, "cpu": 60e9})      modules in running order fill 0, then "cpu", then "disk"
    balanced_memory(tree, {0: 20e9, 1: 20e9})           the same limits, lowered so that the GPUs get equal shares

A device is "cpu", "disk", or the number of a GPU among those of the rank. The first GPU and the CPU keep room for the
largest layer that is not placed yet. Code that runs such a model moves offloaded layers there, one at a time.

`module_tree` finds the modules of a model in the dotted names of its tensors.

    model.layers.0.mlp.up_proj.weight     root -> model -> layers -> 0 -> mlp -> up_proj -> (weight)

A checkpoint does not define the order in which modules run. So numbered modules are ordered by number. Embeddings and
towers come before modules with numbered ones inside, norms and heads after them. Others keep the checkpoint's order.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from cluster.errors import LayoutError
from cluster.layouts.families import HEADS, OTHER_EMBEDDINGS, TOKEN_EMBEDDINGS, TOWERS
from cluster.units import show_some
from storage.problems import MAX_LISTED, quote

MAX_PARTS = 100  # parts of a dotted name; functions on the tree are recursive
_EARLY = (*TOKEN_EMBEDDINGS, *OTHER_EMBEDDINGS, *TOWERS, "encoder")


@dataclass(slots=True, eq=False)
class Module:
    """A module, or a tensor (`is_tensor`) that lies among modules."""

    name: str  # dotted; "" for the model itself
    is_tensor: bool = False
    size_bytes: int = 0  # bytes of all its tensors
    children: list[Module] = field(default_factory=list)  # in running order
    tensors: list[Module] = field(default_factory=list)  # its own tensors
    is_layer: bool = False  # a numbered module with modules in it, not inside another layer; never split

    @property
    def can_split(self) -> bool:
        """Return whether its modules may go to different devices."""
        return bool(self.children) and not self.is_layer

    @property
    def parts(self) -> list[Module]:
        """Return the parts that it is split into: its own tensors, then its modules."""
        return [*self.tensors, *self.children]

    def covers(self, name: str) -> bool:
        """Return whether the dotted name is this module's or lies in it."""
        return not self.name or name == self.name or name.startswith(f"{self.name}.")

    def walk(self) -> Iterator[Module]:
        """Iterate over it and all modules in it, in running order, without tensors."""
        yield self
        for child in self.children:
            yield from child.walk()

    def all_tensors(self) -> Iterator[Module]:
        """Iterate over every tensor in it, in running order."""
        yield from self.tensors
        for child in self.children:
            yield from child.all_tensors()


def module_tree(sizes: Iterable[tuple[str, int]]) -> Module:
    """Return the model of tensors given as (name, size). Raises LayoutError for a name of too many parts."""
    root = Module("")
    modules = {"": root}
    for name, size_bytes in sizes:
        parts = name.split(".")
        if len(parts) > MAX_PARTS:
            raise LayoutError(
                f"a tensor's name has {len(parts)} parts, more than {MAX_PARTS}: {quote(name)}",
                hint="pass a device_map that names the modules; it has no such limit",
            )
        above = root
        above.size_bytes += size_bytes
        for depth in range(1, len(parts)):
            path = ".".join(parts[:depth])
            module = modules.get(path)
            if module is None:
                module = modules[path] = Module(path)
                above.children.append(module)
            module.size_bytes += size_bytes
            above = module
        above.tensors.append(Module(name, is_tensor=True, size_bytes=size_bytes))
    _arrange(root, inside_layer=False)
    return root


def _arrange(module: Module, *, inside_layer: bool) -> bool:
    """Sort the modules below and mark layers. Return whether any module in it is numbered."""
    last = _last_part(module)
    module.is_layer = not inside_layer and last.isdecimal() and bool(module.children)
    numbered = {id(child): _arrange(child, inside_layer=inside_layer or module.is_layer) for child in module.children}
    places = {id(child): place for place, child in enumerate(module.children)}
    module.children.sort(key=lambda child: _when(child, numbered[id(child)], places[id(child)]))
    return last.isdecimal() or any(numbered.values())


def _when(module: Module, has_numbered: bool, place: int) -> tuple[int, int]:
    last = _last_part(module)
    if last.isdecimal():
        return 1, int(last[:18])
    if last in _EARLY:
        return 0, _EARLY.index(last)
    if last in HEADS:
        return 3, HEADS.index(last)
    return (1 if has_numbered else 2), place


def _last_part(module: Module) -> str:
    return module.name.rpartition(".")[2]


CPU, DISK = "cpu", "disk"
# Last parts of names: modules that rotate, drop or add to activations, and heads, which may be tied to an embedding.
_WITHOUT_TENSORS = re.compile(rf"(?:^|\.)(?:[^.]*(?:rot|rope|drop|act|alibi|pos)[^.]*|{'|'.join(HEADS)})\Z")
DeviceKey = int | str
Memory = Mapping[DeviceKey, int]  # bytes by device, in the order in which devices are filled


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """The device of each listed module or tensor. Everything inside a module has its device."""

    modules: tuple[tuple[str, DeviceKey], ...]  # "" is the whole model

    @property
    def devices(self) -> tuple[DeviceKey, ...]:
        """Return the devices of the map, GPUs first."""
        return tuple(sorted({device for _, device in self.modules}, key=device_order))

    def as_dict(self) -> dict[str, DeviceKey]:
        """Return the map in Accelerate's form."""
        return dict(self.modules)

    def devices_of(self, names: Iterable[str]) -> list[DeviceKey | None]:
        """Return the device of each tensor, or None if no module of the map contains it."""
        known = dict(self.modules)
        return [_find(known, name) for name in names]

    def assign(self, names: Iterable[str]) -> list[DeviceKey]:
        """Return the device of each tensor. Raises LayoutError listing those that no module of the map contains."""
        names = list(names)
        devices = self.devices_of(names)
        unnamed = [quote(name) for name, device in zip(names, devices, strict=True) if device is None]
        if unnamed:
            raise LayoutError(
                f"the device map names no module for {len(unnamed)} tensors: {show_some(unnamed, MAX_LISTED)}",
                hint='name their modules, or the whole model with {"": "cpu"}; all inside a module has its device',
                unnamed=len(unnamed),
            )
        return [device for device in devices if device is not None]

    def check_modules(self, names: Iterable[str]) -> None:
        """Raise LayoutError listing modules of the map that hold none of the tensors.

        Modules without tensors of their own are allowed, because maps of Accelerate and transformers have them.
        """
        there = {""}
        for name in names:
            while name not in there:
                there.add(name)
                name = name.rpartition(".")[0]
        lost = [quote(name) for name, _ in self.modules if name not in there and not _WITHOUT_TENSORS.search(name)]
        if lost:
            raise LayoutError(
                f"the device map names {len(lost)} modules that the model does not have: {show_some(lost, MAX_LISTED)}",
                hint="names are those of the checkpoint's tensors up to a dot, such as model.layers.0",
            )


def device_order(device: DeviceKey) -> tuple[int, int]:
    """Return a sort key: GPUs by number, then the CPU, then the disk."""
    return (0, device) if isinstance(device, int) else ((1, 0) if device == CPU else (2, 0))


def device_name(device: DeviceKey) -> str:
    """Return torch's name of the device, such as "cuda:0" or "cpu", or "disk"."""
    return f"cuda:{device}" if isinstance(device, int) else device


def infer_device_map(tree: Module, memory: Memory, tied: Sequence[Sequence[str]] = ()) -> DeviceMap:
    """Return a map that places modules in order, each on the first device with room, never before its predecessor.

    `tied` has groups of tensor names that stay on one device. Modules without room anywhere go to "disk".
    """
    filling = _Filling(tree, memory, tied)
    while filling.queue:
        filling.step()
    return DeviceMap(tuple(_fewest(tree, filling.placed)))


def balanced_memory(tree: Module, memory: Memory, *, low_zero: bool = False) -> dict[DeviceKey, int]:
    """Return limits that spread the model evenly: all GPUs but the last get an equal share and about one layer more.

    With `low_zero`, GPU 0 gets only what the others have no room for.
    """
    limits = dict(memory)
    gpus = sorted(device for device in limits if isinstance(device, int) and limits[device] > 0)
    if not gpus:
        return limits
    low_zero = low_zero and len(gpus) > 1
    share = tree.size_bytes // (len(gpus) - 1 if low_zero else len(gpus))
    share += int(1.25 * max(_largest_first_layer(tree), _mean_leaf_bytes(tree)))
    for gpu in gpus[:-1]:
        limits[gpu] = limits[gpu] if low_zero and gpu == 0 else min(share, limits[gpu])
    if low_zero and 0 in limits:
        left = tree.size_bytes - sum(limits[gpu] for gpu in gpus if gpu != 0)
        limits[0] = min(max(0, left), limits[0])
    return limits


@dataclass(slots=True)
class _Filling:
    """The state of one pass over the modules."""

    tree: Module
    memory: Memory
    tied: Sequence[Sequence[str]]
    queue: deque[Module] = field(init=False)  # still to be placed, in order
    placed: dict[str, DeviceKey] = field(init=False, default_factory=dict)
    devices: list[DeviceKey] = field(init=False)
    main: frozenset[DeviceKey] = field(init=False)  # devices that keep room for the largest layer
    current: int = field(init=False, default=0)
    used: dict[DeviceKey, int] = field(init=False)
    largest_bytes: int = field(init=False, default=0)  # bytes of the largest layer that is not placed yet
    largest: set[str] = field(init=False, default_factory=set)  # names of the layers of that size

    def __post_init__(self) -> None:
        self.queue = deque(self.tree.parts)
        self.devices = [device for device in sorted(self.memory, key=device_order) if device != DISK] + [DISK]
        self.main = frozenset((*self.devices[:1], CPU)) if isinstance(self.devices[0], int) else frozenset((CPU,))
        self.used = dict.fromkeys(self.devices, 0)
        self._find_largest(self.queue)

    def step(self) -> None:
        """Place the next module, or split it, or go to the next device."""
        module = self.queue.popleft()
        self.largest.difference_update(each.name for each in _layers([module]))
        if not self.largest:
            self._find_largest([each for each in self.queue if not each.is_tensor])
        device = self.devices[self.current]
        kept_bytes = self.largest_bytes if device in self.main else 0
        partners = self._partners(module)
        wanted_bytes = module.size_bytes + sum(each.size_bytes for each in partners)
        room_bytes = self.memory[device] - kept_bytes - self.used[device] if device != DISK else wanted_bytes
        if wanted_bytes <= room_bytes:
            self.used[device] += wanted_bytes
            for each in (module, *partners):
                self.placed[each.name] = device
            if partners:
                self.queue = deque(each for each in self.queue if each not in partners)
            return
        if partners and module.size_bytes <= room_bytes:
            for partner in partners:
                if partner.can_split:  # only its tied part must be on the same device
                    split = ([each] if each is not partner else each.parts for each in self.queue)
                    self._requeue([module, *chain.from_iterable(split)])
                    return
        if module.size_bytes >= room_bytes and module.can_split:
            self._requeue([*module.parts, *self.queue])
            return
        self.used[device] += kept_bytes
        self.current += 1
        self.queue.appendleft(module)

    def _requeue(self, queue: list[Module]) -> None:
        self.queue = deque(queue)
        self._find_largest([module for module in queue if not module.is_tensor])

    def _partners(self, module: Module) -> list[Module]:
        """Return the unplaced modules that must be on its device: those with a tensor tied to one of its own."""
        names = {
            name
            for group in self.tied
            if any(module.covers(name) for name in group)
            for name in group
            if not module.covers(name)
        }
        return [other for other in self.queue if any(other.covers(name) for name in names)] if names else []

    def _find_largest(self, modules: Iterable[Module]) -> None:
        self.largest_bytes, self.largest = 0, set()
        for layer in _layers(modules):
            if layer.size_bytes > self.largest_bytes:
                self.largest_bytes, self.largest = layer.size_bytes, set()
            if layer.size_bytes == self.largest_bytes:
                self.largest.add(layer.name)


def _layers(modules: Iterable[Module]) -> Iterator[Module]:
    """Iterate over the modules inside that are never split, and those without modules in them."""
    stack = list(modules)
    while stack:
        module = stack.pop()
        if module.can_split:
            stack += module.children
        else:
            yield module


def _find(known: Mapping[str, DeviceKey], name: str) -> DeviceKey | None:
    while name not in known:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return known[name]


def _fewest(module: Module, placed: Mapping[str, DeviceKey], above: DeviceKey = DISK) -> list[tuple[str, DeviceKey]]:
    """Return the fewest modules that describe where everything in `module` was placed."""
    device = placed.get(module.name, above)
    found = [entry for part in module.parts for entry in _fewest(part, placed, device)]
    devices = {where for _, where in found} or {device}
    return [(module.name, devices.pop())] if len(devices) == 1 else found


def _largest_first_layer(tree: Module) -> int:
    """Return the bytes of the largest first layer of a stack. All layers of a stack count as equal."""
    first: dict[str, int] = {}
    for module in tree.walk():
        if module.is_layer:
            first.setdefault(module.name.rpartition(".")[0], module.size_bytes)
    return max(first.values(), default=0)


def _mean_leaf_bytes(tree: Module) -> int:
    leaves = [module.size_bytes for module in tree.walk() if not module.children]
    return sum(leaves) // max(1, len(leaves))
