"""What does not go together when a torch module is to be filled, and how one error says it all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actors.handover.tensor_names import likely_prefix
from cluster.errors import ModuleMismatch
from cluster.precision import nf4
from cluster.precision.quantized_tensors import OF_MODULE, OF_WEIGHT
from cluster.units import show_some

if TYPE_CHECKING:
    import torch

_OF_BITSANDBYTES = (nf4.ABSMAX, nf4.QUANT_MAP, nf4.STATE)
_LISTED = 20  # names of a kind in one message


@dataclass(slots=True)
class Problems:
    """By the module's names, but for `unexpected`."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)  # the rank's own names
    offered: list[str] = field(default_factory=list)  # the same after prefix, rename and convert
    differing: list[str] = field(default_factory=list)  # with what differs
    untied: list[str] = field(default_factory=list)
    unmade: list[str] = field(default_factory=list)  # buffers on the meta device that no checkpoint has
    dtypes: set[tuple[torch.dtype, torch.dtype]] = field(default_factory=set)  # wanted, had
    float32: frozenset[str] = frozenset()  # no problem: names that are right in this dtype too

    def any(self, *, strict: bool) -> bool:
        """Whether there is one."""
        names = strict and (self.missing or self.unexpected)
        return bool(self.differing or self.untied or self.unmade or names)


def mismatch(problems: Problems, *, known: bool, convert: bool, strict: bool) -> ModuleMismatch:
    """The error for them. `known`: the module is a model of transformers."""
    parts, hints = [], []
    missing, unexpected = (problems.missing, problems.unexpected) if strict else ([], [])
    if missing:
        parts.append(f"{len(missing)} names of the module are not on this rank: {_some(missing)}")
    if unexpected:
        parts.append(f"{len(unexpected)} tensors have no place in the module: {_some(unexpected)}")
    if any(_is_of_quantization(name) for name in unexpected):
        hints.append("the rank's weights are quantized: make the module for them (see docs/handing_over.md)")
    elif missing or unexpected:
        hints += _hints_of_names(problems, known=known, convert=convert)
    if problems.differing:
        parts.append(
            f"{len(problems.differing)} tensors differ from what the module expects: {_some(problems.differing)}"
        )
    if problems.dtypes and not any("quantized" in hint for hint in hints):
        had = ", ".join(sorted({str(dtype) for _, dtype in problems.dtypes}))
        hints.append(f"make the module in the dtype of the checkpoint ({had}), or load with dtype=")
    if problems.untied:
        parts.append(f"{len(problems.untied)} tied names hold different values: {_some(problems.untied)}")
        hints.append("the module ties what the checkpoint does not: make it with tie_word_embeddings=False")
    if problems.unmade:
        parts.append(
            f"{len(problems.unmade)} buffers on the meta device are in no checkpoint: {_some(problems.unmade)}"
        )
        hints.append(
            "make the module with buffers for real, as accelerate's init_empty_weights(include_buffers=False) does, "
            "or set them before"
        )
    return ModuleMismatch(
        "; ".join(parts),
        hint=". ".join(hints),
        missing=len(missing) or None,
        unexpected=len(unexpected) or None,
        differing=len(problems.differing) or None,
        untied=len(problems.untied) or None,
        unmade=len(problems.unmade) or None,
    )


def _hints_of_names(problems: Problems, *, known: bool, convert: bool) -> list[str]:
    hints = []
    if likely := likely_prefix(problems.missing, problems.offered):
        hints.append(f"{likely} would fit most names")
    elif problems.unexpected:
        hints.append("names can be changed with prefix= and rename=")
    elif problems.missing:
        hints.append("a stage of a pipeline holds a part of the model: make that part only, or pass strict=False")
    if known and not convert:
        hints.append("convert=True names and stacks tensors as transformers does when it loads them")
    return hints


def _is_of_quantization(name: str) -> bool:
    return name.endswith((*OF_WEIGHT, *_OF_BITSANDBYTES)) or name.rpartition(".")[2] in OF_MODULE


def _some(names: Sequence[str]) -> str:
    return show_some((f"{name:.300}" for name in names), _LISTED)
