"""How a model that was quantized on its way in would say so: `quantization_config` of its config.json. Pure.

In the form of compressed-tensors, from which vLLM, SGLang and transformers build the layers that hold such weights;
for nf4 in that of bitsandbytes.

Modules that a quantized model leaves as they are, as readers find them. Pure.

Readers go by the names of their own modules, and a checkpoint has those of its day: what is stored below `visual`,
`language_model.model` or `vision_tower.vision_model` is below `model.visual`, `model.language_model` and
`model.vision_tower` in transformers 5. So where a model is more than a language model, or less (saved without its
head), a pattern finds the module under any such beginning:

    visual.merger.mlp.0               ->  (?:.*[.])?visual(?:[.].*)?       all of a tower that is left whole
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
_LANGUAGE = ("model", "language_model")  # before what a language model is made of


@dataclass(frozen=True, slots=True)
class Ignored:
    """A module, or all of a tower."""

    name: str  # in the checkpoint; of a tower: the part that it is known by
    pattern: str = ""  # regular expression of the whole name, also under other names; "": they are the same


def find_ignored(left: Sequence[str], quantized: Sequence[str]) -> list[Ignored]:
    """From the names of modules as stored. No pattern finds one that is quantized."""
    left = list(left)
    if not any(name.rpartition(".")[2] in HEADS and not _tower(name)[0] for name in (*left, *quantized)):
        left.append(HEADS[0])  # it is the embedding: a layer all the same, which has nothing of its own to read
    if all(_is_plain(name) for name in (*left, *quantized)):
        return [Ignored(name) for name in left]
    below: dict[str, list[str]] = {}  # what is quantized of each tower
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
    """The tower that a module is of, "" for none, and the rest of its name, without what names differ in."""
    parts = name.split(".")
    at = next((number for number, part in enumerate(parts) if part in TOWERS), None)
    outer: Iterable[str] = _LANGUAGE if at is None else TOWERS
    rest = parts if at is None else parts[at + 1 :]
    while rest and rest[0] in outer:
        rest = rest[1:]
    return "" if at is None else parts[at], ".".join(rest)


def _is_plain(name: str) -> bool:
    """Whether it is one of a language model with its head: those are called the same everywhere."""
    parts = name.split(".")
    known = parts[0] == "model" or (len(parts) == 1 and name in HEADS)
    return known and "language_model" not in parts and not _tower(name)[0]


def _finder_of_ends(names: Iterable[str]) -> Callable[[str], bool]:
    """Whether one of the names ends with those parts."""
    turned = sorted(f".{name}"[::-1] for name in names)

    def is_end(parts: str) -> bool:
        sought = f".{parts}"[::-1]
        at = bisect_left(turned, sought)
        return at < len(turned) and turned[at].startswith(sought)

    return is_end


_SHOWN_LENGTHS = 4
# The inputs of fp8 layers are quantized as they come, a scale for each token: kernels multiply fp8 by fp8.
_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def quantization_config(cut: CutModel) -> dict[str, Any] | None:
    """For config.json. None when nothing is quantized, and for stacked experts that are: no format speaks of them.

    `ignore` (nf4: `llm_int8_skip_modules`) finds every other matrix.
    """
    schemes = [kind.recipe.scheme if kind.recipe else "" for kind in cut.kinds]
    used = next(filter(None, schemes), "")
    matrices = [len(kind.shape) == 2 for kind in cut.kinds]
    if not used or not all(matrix or not of for matrix, of in zip(matrices, schemes, strict=True)):
        return None
    scheme = SCHEMES[used]
    form = "pack-quantized" if scheme.packed else "float-quantized"
    modules: dict[bool, list[str]] = {False: [], True: []}  # by whether they are quantized
    for name, kind in zip(cut.names, cut.kind.tolist(), strict=True):
        if matrices[kind] and name.endswith(".weight"):
            modules[bool(schemes[kind])].append(name.removesuffix(".weight"))
    ignored = find_ignored(modules[False], modules[True])
    if scheme.scale == "block":
        computed = next(kind.recipe.dtype for kind in cut.kinds if kind.recipe is not None and kind.recipe.scheme)
        # transformers takes patterns, others names and parts of names.
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
    """For people: what a scheme leaves as it is because of its rows, and what becomes of experts in one tensor."""
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
            f"{precision.quantization} leaves {len(left)} of {len(weights)} weight matrices as they are: their rows of "
            f"{', '.join(map(str, lengths[:_SHOWN_LENGTHS]))}{more} are no multiple of {unit}"
        )
    if any(stacked):
        notes.append(
            f"all experts of a layer in one tensor ({sum(stacked)} of them) stay as they are: no library reads that "
            "quantized, as it does a tensor for each expert"
        )
    if not all(stacked):
        notes.append(
            f"all experts of a layer in one tensor ({len(stacked) - sum(stacked)} of them) are quantized under names "
            "that no library reads: there is no quantization_config that says so"
        )
    return tuple(notes)


def precision_of(cut: CutModel) -> str:
    """What tensors become, for people: "cast to BF16: 3 tensors, int4: 224 tensors"."""
    counts = Counter[str]()
    for kind, count in zip(cut.kinds, np.bincount(cut.kind, minlength=len(cut.kinds)).tolist(), strict=True):
        if kind.recipe is not None:
            counts[kind.recipe.scheme or f"cast to {kind.recipe.dtype}"] += count
    return ", ".join(f"{what}: {count} tensors" for what, count in sorted(counts.items())) or "as stored"
