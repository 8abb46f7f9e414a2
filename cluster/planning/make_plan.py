"""Makes a load plan from a request: opens the store, reads index and config, cuts the model, maps it to devices.

`prepare_plan` reads the store. `build_load_plan` and all that it calls are pure, except for `read_amax`.

Some quantized tensors need a scale that depends on more of the tensor than a rank holds. When the largest absolute
values ("amax") of such tensors were recorded at publishing, `with_recorded_amax` adds them to the plan. Then ranks read
only what they hold. Maxima are read from the store at most once, however many plans are tried, and only for tensors
that need them. A tensor with a NaN or an infinity is read as if nothing was recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cluster.config import TrustPolicy
from cluster.errors import ConfigError, DoesNotFit, LayoutError, ModelConfigError, PlanError
from cluster.fit.device_map import (
    DISK,
    DeviceKey,
    DeviceMap,
    Memory,
    balanced_memory,
    device_name,
    infer_device_map,
    module_tree,
)
from cluster.fit.options import DeviceMapOptions, offload_name
from cluster.fit.search import Change, PlannedChange
from cluster.layouts.families import TOKEN_EMBEDDINGS
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig, check_model_config, read_model_config
from cluster.layouts.rules import Rules, parse_rules, region_of, rules_for
from cluster.planning.cut_model import AS_STORED, CutModel, TensorKind, cut_model
from cluster.planning.packed_plan import RankPlans, node_chunks, rank_facts
from cluster.planning.plan import LoadPlan
from cluster.planning.read_items import ALIGNMENT_BYTES, SourcePatterns, pair_with_chunks
from cluster.precision.recipes import SCALES, SCHEMES, Amax, Precision, are_finite, carried_bytes, gather, read_region
from cluster.request import LoadRequest
from cluster.units import show_bytes
from storage.checkpoints.amax import AMAX_KEY, MIN_COLUMNS, read_amax
from storage.checkpoints.checkpoint import check_revision, open_model
from storage.checkpoints.model_index import ModelIndex, OtherFile
from storage.problems import MAX_LISTED, quote
from storage.stores.object_store import ObjectStore
from storage.stores.open_store import open_store

_EMBEDDINGS = tuple(f".{module}.weight" for module in TOKEN_EMBEDDINGS)
_HEAD = "lm_head"


def with_device_map(
    cut: CutModel, options: DeviceMapOptions, config: ModelConfig | None = None, chunk_bytes: int = 0
) -> CutModel:
    """Return the same model with each tensor on a device. For layouts of one rank.

    Tensors count with their size in memory, converted and aligned. `chunk_bytes` is that of `rank_facts`. Raises
    LayoutError listing tensors that the map does not name or whose names no file can have, DoesNotFit with need and
    have of each device, and ConfigError for a policy without limits.
    """
    pieces = cut.slices(cut.layout.rank_coords(0))
    sizes = [
        (name, sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in pieces[kind].sizes_bytes))
        for name, kind in zip(cut.names, cut.kind.tolist(), strict=True)
    ]
    tied = _tied(cut.names, config)
    options = options.beside(rank_facts(cut, chunk_bytes)[0].staging_bytes)
    found = options.device_map or _inferred(sizes, options, tied)
    devices = found.assign(cut.names)
    found.check_modules(cut.names)
    _check_limits(sizes, devices, options)
    _check_files(cut.names, devices)
    return replace(cut, device_map=_with_tied_head(found, tied))


def _inferred(sizes: list[tuple[str, int]], options: DeviceMapOptions, tied: Sequence[str]) -> DeviceMap:
    tree = module_tree(sizes)
    memory: Memory = options.memory
    if options.policy != "sequential":
        memory = balanced_memory(tree, memory, low_zero=options.policy == "balanced_low_0")
    return infer_device_map(tree, memory, [tied] if len(tied) > 1 else [])


def _check_limits(sizes: Sequence[tuple[str, int]], devices: Sequence[DeviceKey], options: DeviceMapOptions) -> None:
    needs: Counter[DeviceKey] = Counter()
    for (_, size_bytes), device in zip(sizes, devices, strict=True):
        needs[device] += size_bytes
    have = dict(options.max_memory or ())
    lines = []
    for device, need_bytes in sorted(needs.items(), key=lambda need: device_name(need[0])):
        if device in have and need_bytes > have[device]:
            lines.append(f"{device_name(device)} needs {show_bytes(need_bytes)}, has {show_bytes(have[device])}")
    if needs[DISK] and not options.offload_folder:
        limits = "free for it" if options.is_all else "max_memory"
        rest = ", ".join(f"{device_name(device)} {show_bytes(limit)}" for device, limit in have.items())
        lines.append(f"{show_bytes(needs[DISK])} have no room on any device ({limits}: {rest or 'none'})")
    if lines:
        raise DoesNotFit(
            f"the device map does not fit: {'; '.join(lines)}",
            hint=_what_helps(options),
            need_bytes=sum(needs.values()),
            have_bytes=sum(limit for device, limit in have.items() if device != DISK) if have else None,
        )


def _what_helps(options: DeviceMapOptions) -> str:
    limits = "use a node with more memory" if options.is_all else "raise max_memory"
    if options.offload_folder:
        return f"{limits}, also of the disk if it is limited, or quantize" if not options.is_all else limits
    return f"{limits}, or set offload_folder for the modules that are left over"


def _check_files(names: Sequence[str], devices: Sequence[DeviceKey]) -> None:
    wrong = [
        quote(name)
        for name, device in zip(names, devices, strict=True)
        if device == DISK and offload_name(name) is None
    ]
    if wrong:
        raise LayoutError(
            f"{len(wrong)} tensors on disk have names that no file can have: {', '.join(wrong[:MAX_LISTED])}",
            hint="map their modules to another device",
        )


def _tied(names: Sequence[str], config: ModelConfig | None) -> list[str]:
    """Return the names of the token embedding and, when it is stored, of the head tied to it."""
    if config is None or not config.tie_word_embeddings:
        return []
    embedding = [name for name in names if f".{name}".endswith(_EMBEDDINGS)][:1]
    return embedding + [name for name in names if name == f"{_HEAD}.weight"] if embedding else []


def _with_tied_head(found: DeviceMap, tied: Sequence[str]) -> DeviceMap:
    """Add a tied head that is not stored, on its embedding's device. Programs that run the model look it up."""
    known = {name for name, _ in found.modules}
    if len(tied) != 1 or "" in known or _HEAD in known:
        return found
    device = found.devices_of(tied)[0]
    return found if device is None else DeviceMap((*found.modules, (_HEAD, device)))


MAX_CARRIED_BYTES = 64 << 20  # of maxima in a plan, which every node receives; above it none are used

# Takes names of tensors and their shapes, returns the maxima of their rows.
ReadAmax = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, Amax]]


def with_recorded_amax(cut: CutModel, read: ReadAmax) -> CutModel:
    """Return the model with the maxima of those tensors of which ranks would read more than they hold.

    `read` is called at most once. Its exceptions pass through.
    """
    helped = [_is_helped(cut, kind) for kind in cut.kinds]
    numbers = np.flatnonzero(np.array(helped, bool)[cut.kind]) if any(helped) else np.empty(0, np.int64)
    shapes = {cut.names[number]: cut.kinds[cut.kind[number]].shape for number in numbers.tolist()}
    sizes = [carried_bytes(cut.kinds[at].shape, _scale(cut.kinds[at])) for at in cut.kind[numbers].tolist()]
    if not shapes or sum(sizes) > MAX_CARRIED_BYTES:
        return cut
    found = read(shapes)
    used = [number for number in numbers.tolist() if are_finite(found, cut.names[number])]
    kinds, kind = _with_kinds(cut, np.array(used, np.int64))
    amax = gather(used, [(found[cut.names[at]], _scale(cut.kinds[cut.kind[at]])) for at in used])
    return replace(cut, kinds=kinds, kind=kind, amax=amax)


def _is_helped(cut: CutModel, kind: TensorKind) -> bool:
    """Return whether recorded maxima would spare some rank from reading more of such a tensor than it holds."""
    if _scale(kind) not in SCALES or kind.shape[-1] < MIN_COLUMNS:
        return False
    regions = [region_of(kind.shape, kind.cut, place, cut.layout) for place in cut.places(range(cut.layout.ranks))]
    return any(read_region(kind.recipe, kind.shape, region) != region for region in regions)


def _scale(kind: TensorKind) -> str:
    return SCHEMES[kind.recipe.scheme].scale if kind.recipe is not None and kind.recipe.scheme else ""


def _with_kinds(cut: CutModel, used: NDArray[np.int64]) -> tuple[tuple[TensorKind, ...], NDArray[np.int32]]:
    """Return kinds, and the kind of each tensor, with kinds of their own for tensors with maxima."""
    kinds, kind = list(cut.kinds), cut.kind.copy()
    for number in np.unique(cut.kind[used]).tolist():
        recorded = replace(cut.kinds[number], recorded=True)
        here = used[cut.kind[used] == number]
        if len(here) == int((cut.kind == number).sum()):
            kinds[number] = recorded
        else:
            kind[here] = len(kinds)
            kinds.append(recorded)
    return tuple(kinds), kind


def amax_reader(request: LoadRequest, index: ModelIndex, read_timeout_s: float) -> ReadAmax | None:
    """Return a reader of the recorded maxima, or None if there are none. `read_model` has checked the source."""
    file = next((file for file in index.files if file.key == AMAX_KEY), None)
    return None if file is None or index.source != "manifest" else _AmaxReader(request, file, read_timeout_s)


class _AmaxReader:
    def __init__(self, request: LoadRequest, file: OtherFile, read_timeout_s: float) -> None:
        self._store = request.store
        self._file = file
        self._read_timeout_s = read_timeout_s
        self._found: dict[str, Amax] = {}

    def __call__(self, weights: Mapping[str, tuple[int, ...]]) -> Mapping[str, Amax]:
        """Return the maxima by name. `weights`: name -> shape.

        Raises ManifestMismatch, IntegrityError, InvalidAmax or StoreError.
        """
        missing = {name: shape for name, shape in weights.items() if name not in self._found}
        if missing:
            ref, credentials = self._store.ref, self._store.credentials
            with closing(open_store(ref, credentials, read_timeout_s=self._read_timeout_s)) as store:
                self._found |= read_amax(store, self._file, missing)
        return {name: self._found[name] for name in weights}


def build_load_plan(
    index: ModelIndex,
    layout: Layout,
    rules: Rules | None = None,
    config: ModelConfig | None = None,
    precision: Precision = AS_STORED,
    device_map: DeviceMapOptions | None = None,
    read_amax: ReadAmax | None = None,
) -> LoadPlan:
    """Return what each rank of `layout` holds of the model, where it puts it, and from which chunks it reads.

    Same input, same plan. `rules` come from `rules_for`; the default is the rules of the family that `config` names.
    Without tensor parallelism neither is needed. `read_amax` reads recorded maxima, if ranks would read more than they
    hold without them. Raises LayoutError listing every tensor that cannot be cut, ConfigError for a precision that the
    model cannot have, and PlanError when the chunks do not hold all bytes of the tensors. Exceptions of
    `with_device_map` and `read_amax` pass through.
    """
    cut = cut_model(index, layout, rules_for(config) if rules is None else rules, config, precision)
    if read_amax is not None:
        cut = with_recorded_amax(cut, read_amax)
    if device_map is not None:
        cut = with_device_map(cut, device_map, config, index.chunks.largest_bytes)
    _check_coverage(index, cut)
    return LoadPlan(index.revision, index.shards, index.chunks, cut, RankPlans(cut, index.chunks))


def needed_chunks(plan: LoadPlan, ranks: Iterable[int]) -> NDArray[np.int64]:
    """Return the chunks that any of `ranks` touches, ascending. A node that hosts those ranks fetches each once."""
    return node_chunks(plan.cut, plan.chunks, ranks)


def needed_bytes(plan: LoadPlan, ranks: Iterable[int]) -> int:
    """Return the bytes of the chunks that a node hosting `ranks` fetches, each once."""
    return int(plan.chunks.sizes_bytes()[needed_chunks(plan, ranks)].sum())


def overfetch_bytes(plan: LoadPlan, ranks: Sequence[int]) -> int:
    """Return the bytes of fetched chunks that none of the node's `ranks` needs."""
    return needed_bytes(plan, ranks) - plan.cut.wanted_bytes(ranks)


def _check_coverage(index: ModelIndex, cut: CutModel) -> None:
    """Raise PlanError when the chunks do not hold each byte of the tensors once, as some rank needs each."""
    size = cut.sizes_bytes()
    filled = np.flatnonzero(size)
    size = size[filled]
    held_bytes = 0
    if len(filled) and len(index.chunks):
        whole = SourcePatterns(
            shard=cut.shard[filled].astype(np.int64),
            start=cut.start[filled],
            run=size,
            count=np.ones_like(size),
            src_stride=size,
        )
        tensor, _, low, high = pair_with_chunks(whole, index.chunks)
        held_bytes = int((np.minimum(high, size[tensor]) - np.maximum(low, 0)).sum())
    if held_bytes != int(size.sum()):
        raise PlanError(
            f"the chunks hold {held_bytes} of the {int(size.sum())} bytes of the model's tensors",
            hint="the manifest is broken; publish the model again",
            revision=index.revision,
        )


def prepare_plan(
    request: LoadRequest, *, chunk_bytes: int, read_timeout_s: float, trust: TrustPolicy | None = None
) -> tuple[ModelIndex, LoadPlan]:
    """Return the model's index and the plan of each rank of the request. Moves no weights.

    `trust` is the policy of the planning process; the request's trusted keys narrow it.
    Raises StoreError (SourceRefused before any request is sent), CheckpointError, PlanError or ManifestError
    (SignatureError, RevisionMismatch).
    """
    # A device map needs the config to know whether the head is tied to the embedding.
    with_config = request.layout.cuts_tensors or request.device_map is not None
    index, config = read_model(
        request, chunk_bytes=chunk_bytes, read_timeout_s=read_timeout_s, trust=trust, with_config=with_config
    )
    return index, plan_model(request, index, config, amax_reader(request, index, read_timeout_s))


def read_model(
    request: LoadRequest,
    *,
    chunk_bytes: int,
    read_timeout_s: float,
    trust: TrustPolicy | None = None,
    with_config: bool = True,
) -> tuple[ModelIndex, ModelConfig | None]:
    """Return the model's index, and its config or None.

    The config is None if there is none, or if it is broken and the request does not need it. The digest of a published
    config.json is checked, needed or not. Raises as `prepare_plan` does.
    """
    trust = trust or TrustPolicy()
    trust.sources.check(request.store.ref, request.store.credentials)
    with closing(open_store(request.store.ref, request.store.credentials, read_timeout_s=read_timeout_s)) as store:
        index = read_index(store, request, chunk_bytes=chunk_bytes, trust=trust, check_config=not with_config)
        if not with_config:
            return index, None
        try:
            return index, read_model_config(store, index)
        except ModelConfigError:
            if request.layout.cuts_tensors:
                raise
            return index, None  # the config is only needed to cut tensors


def read_index(
    store: ObjectStore, request: LoadRequest, *, chunk_bytes: int, trust: TrustPolicy, check_config: bool = True
) -> ModelIndex:
    """Return the index of the request's model, which is in the store.

    The caller has checked that it may read from there. `check_config`: compare a published config.json with its digest.
    Raises as `prepare_plan` does.
    """
    index = open_model(
        store,
        chunk_bytes=chunk_bytes,
        only_key=request.only_key,
        trusted_keys=trust.keys_for(request.trusted_keys),
        signed_name=request.signed_name,
        revision=request.revision,
    )
    if check_config:
        check_model_config(store, index)
    return index


def plan_model(
    request: LoadRequest, index: ModelIndex, config: ModelConfig | None, read_amax: ReadAmax | None = None
) -> LoadPlan:
    """Return the load plan of a request for a model whose index was read. `read_amax` comes from `amax_reader`.

    Raises PlanError and ConfigError, and from reading maxima ManifestError, IntegrityError and StoreError.
    """
    own = None if request.layout_rules is None else parse_rules(request.layout_rules)
    rules = rules_for(config, own)
    return build_load_plan(index, request.layout, rules, config, request.precision, request.mapping, read_amax)


def prepare_changes(
    request: LoadRequest,
    changes: Sequence[Change],
    *,
    chunk_bytes: int,
    read_timeout_s: float,
    trust: TrustPolicy | None = None,
    enough: Callable[[], bool] = lambda: False,
) -> tuple[str, list[PlannedChange]]:
    """Return the revision and the plan of each change, until `enough` returns True. Reads the model once.

    Raises as `read_model` does.
    """
    index, config = read_model(request, chunk_bytes=chunk_bytes, read_timeout_s=read_timeout_s, trust=trust)
    read_amax = amax_reader(request, index, read_timeout_s)
    return index.revision, plan_changes(index, config, changes, enough, read_amax)


def plan_changes(
    index: ModelIndex,
    config: ModelConfig | None,
    changes: Sequence[Change],
    enough: Callable[[], bool] = lambda: False,
    read_amax: ReadAmax | None = None,
) -> list[PlannedChange]:
    """Return the plan of each change, or why it has none. Plans one at least, then until `enough` returns True."""
    planned: list[PlannedChange] = []
    for change in changes:
        if planned and enough():
            break
        try:
            plan = plan_model(change.request, index, config, read_amax)
            planned.append(PlannedChange(change, rank_facts(plan.cut, plan.chunks.largest_bytes)))
        except (PlanError, ConfigError) as error:
            planned.append(PlannedChange(change, problem=error.message))
    return planned


def still_current(request: LoadRequest, revision: str, read_timeout_s: float, trust: TrustPolicy | None = None) -> bool:
    """Return whether the store still has that revision. Sends one small request."""
    (trust or TrustPolicy()).sources.check(request.store.ref, request.store.credentials)
    with closing(open_store(request.store.ref, request.store.credentials, read_timeout_s=read_timeout_s)) as store:
        return check_revision(store, revision, only_key=request.only_key)
