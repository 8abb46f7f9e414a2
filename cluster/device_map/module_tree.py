"""The modules of a model, found in the dotted names of its tensors: a tree, in the order in which a model runs.

    model.layers.0.mlp.up_proj.weight     root -> model -> layers -> 0 -> mlp -> up_proj -> (weight)

A checkpoint does not say in which order its modules run. Numbered ones run by number; embeddings and towers before
what has numbered modules, norms and heads after it; the rest in the order in which the checkpoint names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cluster.errors import LayoutError
from cluster.layouts.module_names import HEADS, OTHER_EMBEDDINGS, TOKEN_EMBEDDINGS, TOWERS
from storage.problems import quote

MAX_PARTS = 100  # of a dotted name: what goes down the tree calls itself
_EARLY = (*TOKEN_EMBEDDINGS, *OTHER_EMBEDDINGS, *TOWERS, "encoder")


@dataclass(slots=True, eq=False)
class Module:
    """One module, or (`is_tensor`) one tensor that stands among modules."""

    name: str  # dotted; "" for the model itself
    is_tensor: bool = False
    size_bytes: int = 0  # of all its tensors
    children: list[Module] = field(default_factory=list)  # in running order
    tensors: list[Module] = field(default_factory=list)  # its own
    is_layer: bool = False  # numbered, with modules in it, in no other layer: never split

    @property
    def can_split(self) -> bool:
        return bool(self.children) and not self.is_layer

    @property
    def parts(self) -> list[Module]:
        """What it is split into: its own tensors, then its modules."""
        return [*self.tensors, *self.children]

    def covers(self, name: str) -> bool:
        """Whether the dotted name is this module's or lies in it."""
        return not self.name or name == self.name or name.startswith(f"{self.name}.")

    def walk(self) -> Iterator[Module]:
        """It and all modules in it, no tensors; in running order."""
        yield self
        for child in self.children:
            yield from child.walk()

    def all_tensors(self) -> Iterator[Module]:
        """Every tensor in it, in running order."""
        yield from self.tensors
        for child in self.children:
            yield from child.all_tensors()


def module_tree(sizes: Iterable[tuple[str, int]]) -> Module:
    """The model of tensors given as (name, size in bytes). Raises LayoutError for a name of too many parts."""
    root = Module("")
    modules = {"": root}
    for name, size_bytes in sizes:
        parts = name.split(".")
        if len(parts) > MAX_PARTS:
            raise LayoutError(
                f"a tensor's name has {len(parts)} parts, more than {MAX_PARTS}: {quote(name)}",
                hint="a device map that names modules itself takes any",
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
    """Sort and mark everything below. Whether any module in it is numbered."""
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
