"""DeepSpeed checkpoints as a source: ZeRO of stages 1, 2 and 3, and universal checkpoints.

    latest                                            name of the folder of the newest step
    global_step2/mp_rank_00_model_states.pt           stages 1 and 2: names, shapes, buffers, frozen weights
    global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt   the same for each rank of stage 3
    global_step2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt   a rank's share of the weights in float32
    latest_universal, global_step2/zero/NAME/fp32.pt  universal: a file for each weight

ZeRO trains flat vectors, one for each group of parameters. Each rank has a part of them. No file says where a weight is
in there. DeepSpeed computes it from the order and the shapes of the weights. So does this module, by the rules of
`deepspeed/utils/zero_to_fp32.py` (version 0.19), which the functions below name.

The weights are the float32 ones that the optimizer keeps. Buffers and frozen weights have the dtype of training.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

from cluster.converting.rank_files import clean_name
from cluster.converting.source import Source, SourceTensor, StoredPiece, other_files, read_each
from cluster.converting.torch_files import Global, Opaque, StoredTensor, is_shape, read_torch_file
from cluster.errors import ConvertError
from storage.checkpoints.safetensors_header import DTYPE_BITS, MAX_ELEMENTS
from storage.problems import MAX_LISTED, Problems, quote
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore

Shapes = Mapping[str, tuple[int, ...]]  # of the parameters of one group, in the order of the flat vector


@dataclass(frozen=True)
class Run:
    """Numbers that one file has in order: a rank's part of a flat vector."""

    file: str
    offset_bytes: int
    count: int
    dtype: str


class Runs:
    """A vector that several files have one after another."""

    def __init__(self, runs: Sequence[Run], item_bytes: int) -> None:
        self._runs = runs
        self._item_bytes = item_bytes
        self._ends = list(accumulate(run.count for run in runs))
        self.count = self._ends[-1] if runs else 0

    def pieces(self, start: int, count: int, first: int) -> Iterator[StoredPiece]:
        """Yield the places of `count` numbers from `start` on. In the flattened tensor they are from `first` on."""
        end = start + count
        index = bisect_right(self._ends, start)
        while start < end and index < len(self._runs):
            run = self._runs[index]
            begin = self._ends[index] - run.count
            taken = min(end, self._ends[index]) - start
            offset_bytes = run.offset_bytes + (start - begin) * self._item_bytes
            yield StoredPiece(run.file, offset_bytes, (first,), (taken,), flat=True)
            start, first, index = start + taken, first + taken, index + 1


def place_in_groups(
    groups: Sequence[Sequence[Run]],
    shapes: Sequence[Shapes],
    paddings: Sequence[Sequence[int]] | None,
    item_bytes: int,
    problems: Problems,
) -> dict[str, tuple[StoredPiece, ...]]:
    """Return the pieces of each weight of stages 1 and 2, where the parts of all ranks make one vector for each group.

    The rule of `_zero2_merge_trainable_params` in zero_to_fp32.py: weights follow each other, each with its alignment
    padding. The vector is padded to twice the number of ranks at its end.

    Args:
        groups: The parts of all ranks for each group, in the order of ranks.
        shapes: The weights of each group, in order.
        paddings: Numbers of padding after each weight of each group. None: there are none.
        item_bytes: Bytes of one number.
        problems: Gets a sentence for each group whose length does not fit.
    """
    found: dict[str, tuple[StoredPiece, ...]] = {}
    for number, (runs, names) in enumerate(zip(groups, shapes, strict=True)):
        vector, offset = Runs(runs, item_bytes), 0
        after = [0] * len(names) if paddings is None else paddings[number]
        for (name, shape), padding in zip(names.items(), after, strict=True):
            count = prod(shape)
            found[name] = tuple(vector.pieces(offset, count, 0))
            offset += count + padding
        align = 2 * len(runs)
        if -(-offset // align) != -(-vector.count // align):
            have = f"the {len(runs)} ranks have {vector.count} numbers"
            problems.add(f"group {number}: its {len(names)} weights have {offset} numbers with padding, but {have}")
    return found


def partition_count(count: int, ranks: int) -> int:
    """Return how many numbers each rank of stage 3 has of a weight (`zero3_partitioned_param_info`)."""
    return -(-count // ranks)


def place_in_ranks(
    ranks: Sequence[Sequence[Run]], shapes: Shapes, item_bytes: int, problems: Problems
) -> dict[str, tuple[StoredPiece, ...]]:
    """Return the pieces of each weight of stage 3, where every rank has an equal share of every weight.

    The rule of `_zero3_merge_trainable_params` in zero_to_fp32.py: a rank's groups make one vector. In it the rank's
    shares of all weights follow each other. The last ranks' shares are padded to the same length.

    Args:
        ranks: The groups of each rank, in order.
        shapes: All weights, in the order of groups.
        item_bytes: Bytes of one number.
        problems: Gets a sentence when a length does not fit.
    """
    vectors = [Runs(groups, item_bytes) for groups in ranks]
    found: dict[str, tuple[StoredPiece, ...]] = {}
    offset = 0
    for name, shape in shapes.items():
        count = prod(shape)
        share = partition_count(count, len(ranks))
        pieces: list[StoredPiece] = []
        for rank, vector in enumerate(vectors):
            first = rank * share
            pieces += vector.pieces(offset, max(0, min(share, count - first)), first)
        found[name] = tuple(pieces)
        offset += share
    for rank, vector in enumerate(vectors):
        if vector.count != offset:
            problems.add(
                f"rank {rank} has {vector.count} numbers, but its shares of {len(shapes)} weights are {offset}"
            )
    return found


FORMAT = "DeepSpeed ZeRO"
UNIVERSAL_FORMAT = "DeepSpeed universal"

_OPTIMIZER_FILE = re.compile(r"(.*/)?(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{2,6})_optim_states\.pt")
_MODEL_FILE = re.compile(r"(.*/)?(?:zero_pp_rank_([0-9]{1,6})_)?mp_rank_([0-9]{2,6})_model_states\.pt")
_WEIGHT_FILE = re.compile(r"(.*/)?zero/([^/]+)/fp32\.pt")
_PIPELINE_FILE = re.compile(r"(.*/)?layer_[0-9]+-model_[0-9]+-model_states\.pt")
_EXPERT_FILE = re.compile(r"(.*/)?(?:layer_[0-9]+_)?expert_[0-9]+_mp_rank_[0-9]+_model_states\.pt")
_POINTERS = ("latest", "latest_universal")
_MAX_POINTER_BYTES = 1024
_MAX_WEIGHTS = 1 << 20  # of a model, with a padding for each
_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
_STAGES = {f"{_STAGE}.optimizer_states": 1, f"{_STAGE}.gradients": 2, f"{_STAGE}.weights": 3}
_READERS = 8  # files whose pickles are read at once
_TO_UNIVERSAL = "run DeepSpeed's ds_to_universal.py first, and convert its output"

# Objects beside the tensors, of DeepSpeed and of the state that scripts hand to `save_checkpoint`. They become stubs.
ALLOWED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    _STAGE,
    "deepspeed.utils.tensor_fragment.fragment_address",
    "argparse.Namespace",
    "collections.defaultdict",
    "numpy.dtype",
    "numpy.ndarray",
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
)


@dataclass(frozen=True)
class Step:
    """The files of one step, by their ranks."""

    folder: str  # "" or with a slash at its end
    models: Mapping[tuple[int, int], str]  # (data parallel rank, model parallel rank) -> key
    optimizers: Mapping[tuple[int, int], str]
    weights: Mapping[str, str]  # of a universal checkpoint: name -> key
    others: tuple[str, ...]  # files of pipelines and experts


def steps(keys: Iterable[str]) -> dict[str, Step]:
    """Return the steps that a listing has, by folder. Folders without DeepSpeed's files are left out."""
    models: dict[str, dict[tuple[int, int], str]] = {}
    optimizers: dict[str, dict[tuple[int, int], str]] = {}
    weights: dict[str, dict[str, str]] = {}
    others: dict[str, list[str]] = {}
    for key in keys:
        if match := _OPTIMIZER_FILE.fullmatch(key):
            optimizers.setdefault(match[1] or "", {})[int(match[2]), int(match[3])] = key
        elif match := _WEIGHT_FILE.fullmatch(key):
            weights.setdefault(match[1] or "", {})[match[2]] = key
        elif _PIPELINE_FILE.fullmatch(key) or _EXPERT_FILE.fullmatch(key):
            others.setdefault(key.rpartition("/")[0] + "/" if "/" in key else "", []).append(key)
        elif match := _MODEL_FILE.fullmatch(key):
            models.setdefault(match[1] or "", {})[int(match[2] or 0), int(match[3])] = key
    return {
        folder: Step(
            folder,
            models.get(folder, {}),
            optimizers.get(folder, {}),
            weights.get(folder, {}),
            tuple(others.get(folder, ())),
        )
        for folder in sorted(optimizers.keys() | weights.keys())
    }


def _field(state: object, key: str, *kinds: type, file: str) -> Any:
    """Return a field of a state dict. Raises ConvertError unless it is there, of one of these types."""
    value = state.get(key) if isinstance(state, dict) else None
    if not isinstance(value, kinds):
        kind = "is missing" if value is None else f"is a {type(value).__name__}"
        raise ConvertError(f"{quote(file)}: {key} {kind}; was the file written by DeepSpeed?")
    return value


def _counts(value: object, file: str, what: str) -> tuple[int, ...]:
    """Return a shape or another sequence of counts. Raises ConvertError for anything else."""
    if not is_shape(value):
        raise ConvertError(f"{quote(file)}: {what} is not a shape")
    return tuple(value)


def _numbers(value: object, file: str, what: str) -> tuple[int, ...]:
    """Return counts that are no shape, one for each group or weight. Raises ConvertError for anything else."""
    if not isinstance(value, tuple | list) or len(value) > _MAX_WEIGHTS:
        raise ConvertError(f"{quote(file)}: {what} is no list of counts")
    if not all(type(one) is int and 0 <= one <= MAX_ELEMENTS for one in value):
        raise ConvertError(f"{quote(file)}: {what} is no list of counts")
    return tuple(value)


def _shapes(groups: object, file: str) -> list[Shapes]:
    """Return `param_shapes`, a dict of shapes for each group."""
    listed: list[Any] = groups if isinstance(groups, list) else [groups]
    if not all(isinstance(one, dict) and all(isinstance(name, str) for name in one) for one in listed):
        raise ConvertError(f"{quote(file)}: param_shapes are no names with shapes")
    found: list[Shapes] = []
    known: set[str] = set()
    for one in listed:
        if not known.isdisjoint(one):  # the optimizer has each weight in one group
            raise ConvertError(f"{quote(file)}: param_shapes has a name in two groups")
        known.update(one)
        found.append({name: _counts(shape, file, f"shape of {quote(name)}") for name, shape in one.items()})
    return found


@dataclass(frozen=True)
class ModelState:
    """What a model file says about all weights, checked."""

    file: str
    shapes: list[Shapes]  # of trained weights, for each group
    module: Mapping[str, StoredTensor]
    buffers: tuple[str, ...]
    shared: Mapping[str, str]  # name of a tied weight -> the name that has its numbers
    frozen: Mapping[str, StoredTensor]
    frozen_shapes: Shapes

    @classmethod
    def check(cls, state: object, file: str) -> ModelState:
        """Return the fields of an unpickled file. Raises ConvertError."""
        shapes = _shapes(_field(state, "param_shapes", list, dict, file=file), file)
        buffers = _field(state, "buffer_names", list, file=file)
        shared = _field(state, "shared_params", dict, file=file)
        optional = {key: (state.get(key) if isinstance(state, dict) else None) or {} for key in _OPTIONAL}
        if optional["ds_autoep_layers"] or optional["autoep_layers"]:
            raise ConvertError(f"{quote(file)}: experts are divided by DeepSpeed's AutoEP; {_TO_UNIVERSAL}")
        for key in ("module", "frozen_param_fragments"):
            if not isinstance(optional[key], dict):
                raise ConvertError(f"{quote(file)}: {key} is a {type(optional[key]).__name__}, not a dict")
        module = {key: one for key, one in optional["module"].items() if isinstance(one, StoredTensor)}
        frozen = {key: one for key, one in optional["frozen_param_fragments"].items() if isinstance(one, StoredTensor)}
        if not all(isinstance(one, str) for one in (*buffers, *shared, *shared.values(), *module, *frozen)):
            raise ConvertError(f"{quote(file)}: names of weights are no strings")
        frozen_shapes = _shapes(optional["frozen_param_shapes"], file)[0]
        return cls(file, shapes, module, tuple(buffers), shared, frozen, frozen_shapes)


_OPTIONAL = ("module", "frozen_param_fragments", "frozen_param_shapes", "ds_autoep_layers", "autoep_layers")


@dataclass(frozen=True)
class Partition:
    """The part of the flat vectors that one rank has, checked."""

    file: str
    stage: int
    ranks: int  # as many as the rank knew of
    groups: tuple[Run, ...]
    paddings: tuple[tuple[int, ...], ...] | None

    @classmethod
    def check(cls, state: object, file: str) -> Partition:
        """Return the fields of an unpickled file. Raises ConvertError."""
        fields: dict[Any, Any] = _field(state, "optimizer_state_dict", dict, file=file)
        # The optimizer for bfloat16 that accumulates gradients in float32 is of stage 1, and does not say so.
        stage = fields.get("zero_stage", 1)
        if isinstance(stage, Opaque) and len(stage.args) == 1:
            stage = stage.args[0]
        elif isinstance(stage, Global):
            stage = _STAGES.get(stage.name, 0)
        if stage not in (1, 2, 3):
            raise ConvertError(f"{quote(file)}: zero_stage is not 1, 2 or 3")
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        groups = _field(fields, key, list, file=file)
        counts = _field(fields, "partition_count", int, list, file=file)
        counts = _numbers(counts if isinstance(counts, list) else [counts], file, "partition_count")
        if len(set(counts)) != 1:
            parts = quote(sorted(set(counts)))
            raise ConvertError(f"{quote(file)}: groups with {parts} parts, as for experts; {_TO_UNIVERSAL}")
        paddings = fields.get("param_alignment_paddings")
        if paddings is not None:
            paddings = _field(fields, "param_alignment_paddings", list, file=file)
            if sum(len(one) for one in paddings if isinstance(one, list | tuple)) > _MAX_WEIGHTS:
                raise ConvertError(f"{quote(file)}: param_alignment_paddings has more than {_MAX_WEIGHTS} weights")
            paddings = tuple(_numbers(one, file, "param_alignment_paddings") for one in paddings)
        runs = tuple(_run(one, file, f"{key}[{number}]") for number, one in enumerate(groups))
        return cls(file, stage, counts[0], runs, paddings)


def _run(tensor: object, file: str, what: str) -> Run:
    """Return a flat tensor as a run. Raises ConvertError for anything else."""
    if (
        not isinstance(tensor, StoredTensor)
        or len(tensor.shape) != 1
        or (tensor.strides != (1,) and tensor.shape[0] > 1)
    ):
        raise ConvertError(f"{quote(file)}: {what} is not a flat tensor")
    return Run(tensor.file, tensor.offset_bytes, tensor.shape[0], tensor.dtype)


def zero_tensors(models: Sequence[ModelState], parts: Sequence[Partition], problems: Problems) -> list[SourceTensor]:
    """Return the weights of a checkpoint of ZeRO.

    Args:
        models: The model files. Stage 3 with frozen weights has one for each rank, otherwise the first is enough.
        parts: The optimizer files of all ranks, in order.
        problems: Gets a sentence for all that does not fit together.

    Returns:
        Buffers, frozen and trained weights, and the other names of tied weights, in the order of zero_to_fp32.py.
    """
    first = models[0]
    _check_parts(first, parts, problems)
    if len(problems):
        return []
    dtypes = {run.dtype for part in parts for run in part.groups}
    if len(dtypes) > 1:
        problems.add(f"the flat vectors have several dtypes: {', '.join(sorted(dtypes))}")
        return []
    dtype = next(iter(dtypes), "F32")
    item_bytes = DTYPE_BITS[dtype] // 8
    if parts[0].stage == 3:
        shapes: Shapes = {name: shape for group in first.shapes for name, shape in group.items()}
        placed = place_in_ranks([part.groups for part in parts], shapes, item_bytes, problems)
        if first.frozen_shapes and len(models) != len(parts):
            problems.add(f"{len(parts)} ranks have shares of frozen weights, but there are {len(models)} model files")
        frozen = _frozen_of_ranks(models, problems)
    else:
        shapes = {name: shape for group in first.shapes for name, shape in group.items()}
        groups = list(zip(*(part.groups for part in parts), strict=True))
        placed = place_in_groups(groups, first.shapes, parts[0].paddings, item_bytes, problems)
        frozen = _frozen_in_module(first, shapes)
    trained = [SourceTensor(name, dtype, shape, placed[name], refuses_nan=True) for name, shape in shapes.items()]
    return _with_shared(first, [*_buffers(first, problems), *frozen, *trained], problems)


def _check_parts(model: ModelState, parts: Sequence[Partition], problems: Problems) -> None:
    """Add a problem for each optimizer file that does not suit the others or the model file."""
    for part in parts:
        if part.stage != parts[0].stage:
            problems.add(
                f"{quote(part.file)} is of ZeRO stage {part.stage}, {quote(parts[0].file)} of {parts[0].stage}"
            )
        if part.ranks != len(parts):
            there = f"there are {len(parts)} optimizer files"
            problems.add(f"{quote(part.file)} was written by one of {part.ranks} ranks, but {there}")
        if len(part.groups) != len(parts[0].groups):
            groups = f"{len(part.groups)} groups, {quote(parts[0].file)} {len(parts[0].groups)}"
            problems.add(f"{quote(part.file)} has {groups}")
    if parts[0].stage < 3:
        if len(parts[0].groups) != len(model.shapes):
            groups = f"{len(parts[0].groups)} groups, but {quote(model.file)} {len(model.shapes)}"
            problems.add(f"{quote(parts[0].file)} has {groups}")
        paddings = parts[0].paddings
        if paddings is not None and list(map(len, paddings)) != list(map(len, model.shapes)):
            problems.add(f"{quote(parts[0].file)} has not one alignment padding for each weight")


def _buffers(model: ModelState, problems: Problems) -> list[SourceTensor]:
    """Return the buffers, which every model file has whole. They keep their dtype; DeepSpeed's script casts them."""
    missing = [name for name in model.buffers if name not in model.module]
    for name in missing:
        problems.add(f"{quote(model.file)} names the buffer {quote(name)} and does not have it")
    return [_whole(name, model.module[name]) for name in model.buffers if name in model.module]


def _frozen_in_module(model: ModelState, trained: Shapes) -> list[SourceTensor]:
    """Return the frozen weights of stages 1 and 2, which model files have whole.

    Files of stage 1 do not list them, and DeepSpeed's script leaves them out. They are what else the module has.
    """
    known = {*trained, *model.buffers, *model.shared, *model.frozen}
    listed = [_whole(name, tensor) for name, tensor in model.frozen.items()]
    return listed + [_whole(name, tensor) for name, tensor in model.module.items() if name not in known]


def _frozen_of_ranks(models: Sequence[ModelState], problems: Problems) -> list[SourceTensor]:
    """Return the frozen weights of stage 3: each rank has an equal share, padded (`_zero3_merge_frozen_params`)."""
    found = []
    for name, shape in models[0].frozen_shapes.items():
        count = prod(shape)
        share = partition_count(count, len(models))
        pieces: list[StoredPiece] = []
        dtypes = set()
        for rank, model in enumerate(models):
            tensor = model.frozen.get(name)
            if tensor is None or prod(tensor.shape) < share:
                problems.add(f"{quote(model.file)} lacks its share of the frozen weight {quote(name)}")
                continue
            run = _run(tensor, model.file, f"share of {quote(name)}")
            dtypes.add(run.dtype)
            taken = max(0, min(share, count - rank * share))
            if taken:
                pieces.append(StoredPiece(run.file, run.offset_bytes, (rank * share,), (taken,), flat=True))
        if len(dtypes) > 1:
            problems.add(
                f"the shares of the frozen weight {quote(name)} have several dtypes: {', '.join(sorted(dtypes))}"
            )
        if dtypes:
            found.append(SourceTensor(name, min(dtypes), shape, tuple(pieces)))
    return found


def _with_shared(model: ModelState, tensors: Sequence[SourceTensor], problems: Problems) -> list[SourceTensor]:
    """Return tensors with those that share their numbers added, and add a problem for names that several have."""
    by_name: dict[str, SourceTensor] = {}
    for tensor in tensors:
        if tensor.name in by_name:
            problems.add(f"{quote(model.file)} has {quote(tensor.name)} more than once")
        by_name[tensor.name] = tensor
    for name, source in model.shared.items():
        if source in by_name:
            by_name[name] = replace(by_name[source], name=name)
    return list(by_name.values())


def _whole(name: str, tensor: StoredTensor) -> SourceTensor:
    start = (0,) * len(tensor.shape)
    piece = StoredPiece(tensor.file, tensor.offset_bytes, start, tensor.shape, tensor.strides)
    return SourceTensor(name, tensor.dtype, tensor.shape, (piece,))


def universal_tensors(
    weights: Mapping[str, tuple[str, object]], models: Sequence[ModelState], problems: Problems
) -> list[SourceTensor]:
    """Return the weights of a universal checkpoint.

    Args:
        weights: (key, unpickled content) of the file of each weight. It has a tensor, or a dict with one as `param`.
        models: The model files, as for `zero_tensors`.
        problems: Gets a sentence for all that does not fit together.

    Returns:
        As `zero_tensors`. A flat tensor, as `ds_to_universal.py` writes it from stage 3, gets the shape of the weight.
    """
    first = models[0]
    shapes = {name: shape for group in first.shapes for name, shape in group.items()}
    trained = []
    for name, (file, state) in sorted(weights.items()):
        if name in first.buffers or name in first.shared:
            continue  # as float32 from the dtype of training there; the model file has it exactly
        tensor = state.get("param") if isinstance(state, dict) else state
        if not isinstance(tensor, StoredTensor):
            problems.add(f"{quote(file)} has no tensor")
            continue
        if name not in shapes and (name in first.module or name in first.frozen):
            continue
        shape = shapes.get(name, tensor.shape)
        if isinstance(state, dict):  # whole, from all tensor parallel ranks
            trained.append(replace(_whole(name, tensor), refuses_nan=True))
        elif prod(shape) != prod(tensor.shape):
            problems.add(f"{quote(file)} has {prod(tensor.shape)} numbers, but the weight has the shape {shape}")
        else:
            run = _run(tensor, file, "the weight")
            piece = StoredPiece(run.file, run.offset_bytes, (0,), (run.count,), flat=True)
            trained.append(SourceTensor(name, run.dtype, shape, (piece,), refuses_nan=True))
    for name in shapes:
        if name not in weights:
            problems.add(f"{quote(name)} has no file {quote(f'zero/{name}/fp32.pt')}")
    divided = any(tensor.shape != first.frozen_shapes.get(name) for name, tensor in first.frozen.items())
    frozen = _frozen_of_ranks(models, problems) if divided else _frozen_in_module(first, shapes)
    return _with_shared(first, [*_buffers(first, problems), *frozen, *trained], problems)


def recognise(listing: Mapping[str, ObjectInfo]) -> bool:
    """Return whether a listing has files that DeepSpeed writes."""
    return bool(steps(listing))


def read(store: ObjectStore, listing: Mapping[str, ObjectInfo]) -> Source:
    """Return a DeepSpeed checkpoint as a source.

    Args:
        store: The store, with the checkpoint's folder, or the folder of a step, as its root.
        listing: All objects below its root, by key.

    Returns:
        The weights of the step that the file `latest` names, or of the only step.

    Raises:
        ConvertError: The files do not make a checkpoint; the message lists every problem.
        UnsafePickle: A file names code that no checkpoint needs.
        StoreError: The store did not answer.
    """
    step = _choose(store, listing)
    problems = Problems()
    universal = bool(step.weights) and not step.optimizers
    _check_layout(step, universal, problems)
    if problems:
        raise _refused(store, problems)
    _check_files(step, universal, problems)
    checks: dict[str, Callable[[object, str], Any]] = dict.fromkeys(step.models.values(), ModelState.check)
    checks |= dict.fromkeys(step.optimizers.values(), Partition.check)

    def checked(key: str) -> Any:
        state = read_torch_file(store, key, allowed=ALLOWED)
        return checks[key](state, key) if key in checks else state

    files = [*step.models.values(), *(step.weights if universal else step.optimizers).values()]
    found, broken = read_each(checked, files, problems, _READERS)
    tensors: list[SourceTensor] = []
    if not problems:
        models = [found[key] for _, key in sorted(step.models.items())]
        parts = [found[key] for _, key in sorted(step.optimizers.items())]
        try:
            if universal:
                weights = {name: (key, found[key]) for name, key in step.weights.items()}
                tensors = universal_tensors(weights, models, problems)
            else:
                tensors = zero_tensors(models, parts, problems)
        except ConvertError as exc:
            problems.add(exc.message)
    tensors = [replace(tensor, name=clean_name(tensor.name)) for tensor in tensors]
    for name, count in Counter(tensor.name for tensor in tensors).items():
        if count > 1:
            problems.add(f"{quote(name)} is there {count} times, with different prefixes")
    if problems:
        raise _refused(store, problems, broken)
    return Source(UNIVERSAL_FORMAT if universal else FORMAT, tuple(tensors), other_files(listing, step.folder))


def _choose(store: ObjectStore, listing: Mapping[str, ObjectInfo]) -> Step:
    """Return the step that a pointer names, or the only one. Raises ConvertError when there are several."""
    found = steps(listing)
    if len(found) == 1:
        return next(iter(found.values()))
    named = []
    for pointer in _POINTERS:
        info = listing.get(pointer)
        if info is not None and info.size_bytes <= _MAX_POINTER_BYTES:
            buffer = bytearray(info.size_bytes)
            store.read_into(pointer, ByteRange(0, len(buffer)), memoryview(buffer))
            named.append(f"{buffer.decode('utf-8', 'replace').strip()}/")
    for folder in named:
        if folder in found:
            return found[folder]
    choices = ", ".join(quote(folder.rstrip("/")) for folder in list(found)[:MAX_LISTED])
    missing = f"; latest names {quote(named[0].rstrip('/'))}, which is not there" if named else ""
    raise ConvertError(
        f"{store.uri} has several steps of DeepSpeed{missing}", hint=f"name the folder of one of them: {choices}"
    )


def _check_layout(step: Step, universal: bool, problems: Problems) -> None:
    """Add a problem for weights that are divided in a way that this module does not read."""
    if step.others:
        problems.add(f"{quote(step.others[0])} is of pipeline stages or experts of DeepSpeed; {_TO_UNIVERSAL}")
    tensor_ranks = {rank for _, rank in (*step.optimizers, *(() if universal else step.models))}
    if tensor_ranks - {0}:
        problems.add(f"the weights are divided over {max(tensor_ranks) + 1} tensor parallel ranks; {_TO_UNIVERSAL}")


def _check_files(step: Step, universal: bool, problems: Problems) -> None:
    """Add a problem for each file that is missing."""
    ranks = {rank for rank, _ in step.optimizers}
    models = {rank for rank, _ in step.models}
    if not step.models:
        problems.add(f"{quote(step.folder)} has no file with the names and shapes, mp_rank_00_model_states.pt")
    for rank in sorted(set(range(max(ranks, default=0) + 1)) - ranks if ranks else ()):
        problems.add(f"the optimizer file of rank {rank} is missing (zero_pp_rank_{rank}_mp_rank_00_optim_states.pt)")
    if len(models) > 1 and not universal:
        for rank in sorted(ranks ^ models):
            kind = "optimizer" if rank in models else "model"
            problems.add(f"the {kind} file of rank {rank} is missing")


def _refused(store: ObjectStore, problems: Problems, error: type[ConvertError] = ConvertError) -> ConvertError:
    hint = "copy the folder again, with the files of all ranks"
    return error(f"{store.uri} is no DeepSpeed checkpoint that can be converted: {problems}", hint=hint)
