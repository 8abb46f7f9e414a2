"""The `quantization_config` that describes a model quantized during its load. Pure.

It has the form of compressed-tensors, from which vLLM, SGLang and transformers build the layers for such weights. For
nf4 it has the form of bitsandbytes.

The config also lists the modules that are not quantized. Readers compare the list with the names of their own modules,
and a checkpoint may have older names. What is stored below `visual`, `language_model.model` or
`vision_tower.vision_model` is below `model.visual`, `model.language_model` and `model.vision_tower` in transformers 5.
So unless a model is a plain language model with a head, a pattern finds the module below any such prefix:

    visual.merger.mlp.0               ->  (?:.*[.])?visual(?:[.].*)?       all of a tower that is not quantized
    language_model.model.layers.0.up  ->  (?:.*[.])?layers[.]0[.]up
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.layouts.families import HEADS, TOWERS
from cluster.planning.cut_model import CutModel
from cluster.precision import quantized_tensors
from cluster.precision.recipes import GROUP, SCHEMES, Precision, is_matrix, is_weight, skipper
from storage.checkpoints.amax import is_stacked
from storage.checkpoints.model_index import Tensor

_ANYTHING_BEFORE, _ANYTHING_BELOW = r"(?:.*[.])?", r"(?:[.].*)?"
_LANGUAGE = ("model", "language_model")  # prefixes of a language model's modules


@dataclass(frozen=True, slots=True)
class Ignored:
    """A module, or a whole tower, that is not quantized."""

    name: str  # name in the checkpoint; for a tower, its part of the name
    pattern: str = ""  # regular expression for the whole name under any prefix; "": the name is the same everywhere


def find_ignored(left: Sequence[str], quantized: Sequence[str]) -> list[Ignored]:
    """Return the modules to ignore, from the stored names. No pattern matches a quantized module."""
    left = list(left)
    if not any(name.rpartition(".")[2] in HEADS and not _tower(name)[0] for name in (*left, *quantized)):
        left.append(HEADS[0])  # the head is the embedding, but readers have a layer for it, without a tensor
    if all(_is_plain(name) for name in (*left, *quantized)):
        return [Ignored(name) for name in left]
    below: dict[str, list[str]] = {}  # quantized modules of each tower
    for name in quantized:
        tower, rest = _tower(name)
        if tower:
            below.setdefault(tower, []).append(rest)
    ends = {"": _finder_of_ends(quantized)} | {tower: _finder_of_ends(names) for tower, names in below.items()}
    found: dict[str, Ignored] = {}
    for name in left:
        tower, rest = _tower(name)
        beginning = f"{_ANYTHING_BEFORE}{tower}[.]{_ANYTHING_BEFORE}" if tower else _ANYTHING_BEFORE
        if tower and tower not in below:
            found.setdefault(tower, Ignored(tower, f"{_ANYTHING_BEFORE}{tower}{_ANYTHING_BELOW}"))
        elif not rest or ends[tower](rest):
            found.setdefault(name, Ignored(name))
        else:
            found.setdefault(name, Ignored(name, beginning + re.escape(rest).replace(r"\.", "[.]")))
    return list(found.values())


def _tower(name: str) -> tuple[str, str]:
    """Return the tower of a module or "", and the rest of its name without the prefixes that vary."""
    parts = name.split(".")
    at = next((number for number, part in enumerate(parts) if part in TOWERS), None)
    outer: Iterable[str] = _LANGUAGE if at is None else TOWERS
    rest = parts if at is None else parts[at + 1 :]
    while rest and rest[0] in outer:
        rest = rest[1:]
    return "" if at is None else parts[at], ".".join(rest)


def _is_plain(name: str) -> bool:
    """Return whether the module is of a language model with its head. Those names never vary."""
    parts = name.split(".")
    known = parts[0] == "model" or (len(parts) == 1 and name in HEADS)
    return known and "language_model" not in parts and not _tower(name)[0]


def _finder_of_ends(names: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that tells whether one of the names ends with given parts."""
    turned = sorted(f".{name}"[::-1] for name in names)

    def is_end(parts: str) -> bool:
        sought = f".{parts}"[::-1]
        at = bisect_left(turned, sought)
        return at < len(turned) and turned[at].startswith(sought)

    return is_end


_SHOWN_LENGTHS = 4
# The inputs of fp8 layers are quantized at run time, with a scale per token, as kernels multiply fp8 by fp8.
_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def quantization_config(cut: CutModel) -> dict[str, Any] | None:
    """Return the config, or None when nothing is quantized, or stacked experts are, which no format describes.

    `ignore` (nf4: `llm_int8_skip_modules`) lists every matrix that is not quantized.
    """
    schemes = [kind.recipe.scheme if kind.recipe else "" for kind in cut.kinds]
    used = next(filter(None, schemes), "")
    matrices = [len(kind.shape) == 2 for kind in cut.kinds]
    if not used or not all(matrix or not of for matrix, of in zip(matrices, schemes, strict=True)):
        return None
    scheme = SCHEMES[used]
    form = "pack-quantized" if scheme.packed else "float-quantized"
    modules: dict[bool, list[str]] = {False: [], True: []}  # keyed by: is quantized
    for name, kind in zip(cut.names, cut.kind.tolist(), strict=True):
        if matrices[kind] and name.endswith(".weight"):
            modules[bool(schemes[kind])].append(name.removesuffix(".weight"))
    ignored = find_ignored(modules[False], modules[True])
    if scheme.scale == "block":
        computed = next(kind.recipe.dtype for kind in cut.kinds if kind.recipe is not None and kind.recipe.scheme)
        # transformers reads patterns; other libraries read names and parts of names.
        skipped = [form for one in ignored for form in (one.name, one.pattern) if form]
        return _bitsandbytes(quantized_tensors.DTYPES[computed], skipped)
    group = {
        "targets": ["Linear"],
        "weights": {
            "num_bits": scheme.bits,
            "type": "int" if scheme.packed else "float",
            "strategy": scheme.scale,
            "group_size": GROUP if scheme.scale == "group" else None,
            "symmetric": True,
            "dynamic": False,
        },
        "input_activations": None if scheme.packed else dict(_TOKENS),
        "output_activations": None,
        "format": form,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [f"re:{one.pattern}$" if one.pattern else one.name for one in ignored],
        "kv_cache_scheme": None,
    }


def _bitsandbytes(dtype: str, ignored: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": ignored,
        "llm_int8_threshold": 6.0,
    }


def precision_notes(tensors: Sequence[Tensor], precision: Precision) -> tuple[str, ...]:
    """Return remarks for people about matrices that a scheme cannot quantize, and about stacked experts."""
    if not precision.quantization:
        return ()
    is_skipped = skipper(precision.skip)
    matrices = [(tensor, is_skipped(tensor)) for tensor in tensors if is_matrix(tensor)]
    weights = [tensor for tensor, skipped in matrices if not skipped]
    left = [tensor for tensor in weights if not is_weight(tensor, precision.quantization)]
    stacked = [skipped for tensor, skipped in matrices if is_stacked(tensor.name, tensor.shape)]
    notes = []
    if left:
        lengths = sorted({tensor.shape[-1] for tensor in left})
        more = ", ..." if len(lengths) > _SHOWN_LENGTHS else ""
        unit = SCHEMES[precision.quantization].unit
        notes.append(
            f"{precision.quantization} does not quantize {len(left)} of {len(weights)} weight matrices: their rows of "
            f"{', '.join(map(str, lengths[:_SHOWN_LENGTHS]))}{more} are not a multiple of {unit}"
        )
    if any(stacked):
        notes.append(
            f"all experts of a layer in one tensor ({sum(stacked)} of them) are not quantized, because no library "
            "reads such a tensor quantized; one tensor per expert can be quantized"
        )
    if not all(stacked):
        notes.append(
            f"all experts of a layer in one tensor ({len(stacked) - sum(stacked)} of them) are quantized under names "
            "that no library reads, and no quantization_config can describe them"
        )
    return tuple(notes)


def precision_of(cut: CutModel) -> str:
    """Return the conversions for people, such as "cast to BF16: 3 tensors, int4: 224 tensors"."""
    counts = Counter[str]()
    for kind, count in zip(cut.kinds, np.bincount(cut.kind, minlength=len(cut.kinds)).tolist(), strict=True):
        if kind.recipe is not None:
            counts[kind.recipe.scheme or f"cast to {kind.recipe.dtype}"] += count
    return ", ".join(f"{what}: {count} tensors" for what, count in sorted(counts.items())) or "as stored"
