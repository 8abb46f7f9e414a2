"""From a request to a load plan: open the store, read the model's index and config, cut it. Reads no weights.

`prepare_plan` is where planning touches the network. `build_load_plan` and all that it calls are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from cluster.config import TrustPolicy
from cluster.device_map.mapped_model import with_device_map
from cluster.device_map.options import DeviceMapOptions
from cluster.errors import ConfigError, ModelConfigError, PlanError
from cluster.fit.search import Change, PlannedChange
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig, check_model_config, read_model_config
from cluster.layouts.rules import Rules, parse_rules, rules_for
from cluster.plans.cut_model import AS_STORED, cut_model
from cluster.plans.load_plan import LoadPlan
from cluster.plans.rank_plans import RankPlans, node_chunks, rank_facts
from cluster.plans.read_items import SourcePatterns, pair_with_chunks
from cluster.plans.recorded_scales import ReadAmax, amax_reader, with_recorded_amax
from cluster.precision.recipes import Precision
from cluster.request import LoadRequest
from storage.checkpoints.checkpoint import check_revision, open_model
from storage.checkpoints.model_index import ModelIndex
from storage.stores.open_store import open_store


def build_load_plan(
    index: ModelIndex,
    layout: Layout,
    rules: Rules | None = None,
    config: ModelConfig | None = None,
    precision: Precision = AS_STORED,
    device_map: DeviceMapOptions | None = None,
    read_amax: ReadAmax | None = None,
) -> LoadPlan:
    """What each rank of `layout` holds of the model, where, and from which chunks. Same input, same plan.

    `rules` as `rules_for` makes them (the default: those of the family that `config` names); without tensor
    parallelism neither is needed. `read_amax` is asked for maxima that were recorded when the model was published, if
    ranks would read more than they hold without them. Raises LayoutError listing every tensor that cannot be cut,
    ConfigError for a precision that the model cannot have, what `with_device_map` and `read_amax` raise, and PlanError
    when the model's chunks do not hold all bytes of its tensors.
    """
    cut = cut_model(index, layout, rules_for(config) if rules is None else rules, config, precision)
    if read_amax is not None:
        cut = with_recorded_amax(cut, read_amax)
    if device_map is not None:
        cut = with_device_map(cut, device_map, config, index.chunks.largest_bytes)
    _check_coverage(index)
    return LoadPlan(index.revision, index.shards, index.chunks, cut, RankPlans(cut, index.chunks))


def needed_chunks(plan: LoadPlan, ranks: Iterable[int]) -> NDArray[np.int64]:
    """Chunks that any of `ranks` touches, ascending: what a node hosting those ranks fetches once."""
    return node_chunks(plan.cut, plan.chunks, ranks)


def needed_bytes(plan: LoadPlan, ranks: Iterable[int]) -> int:
    """Bytes of the chunks that a node hosting `ranks` fetches, each once."""
    return int(plan.chunks.sizes_bytes()[needed_chunks(plan, ranks)].sum())


def overfetch_bytes(plan: LoadPlan, ranks: Sequence[int]) -> int:
    """Bytes inside the chunks that a node hosting `ranks` fetches, wanted by none of those ranks."""
    return needed_bytes(plan, ranks) - plan.cut.wanted_bytes(ranks)


def _check_coverage(index: ModelIndex) -> None:
    """Raises PlanError when the chunks do not hold each byte of the tensors once. Every byte is some rank's."""
    filled = [tensor for tensor in index.tensors if tensor.size_bytes]
    size = np.array([tensor.size_bytes for tensor in filled], np.int64)
    held_bytes = 0
    if filled and len(index.chunks):
        whole = SourcePatterns(
            shard=np.array([tensor.shard for tensor in filled], np.int64),
            start=np.array([tensor.start for tensor in filled], np.int64),
            run=size,
            count=np.ones_like(size),
            src_stride=size,
        )
        tensor, _, low, high = pair_with_chunks(whole, index.chunks)
        held_bytes = int((np.minimum(high, size[tensor]) - np.maximum(low, 0)).sum())
    if held_bytes != int(size.sum()):
        raise PlanError(
            f"the chunks hold {held_bytes} of the {int(size.sum())} bytes of the model's tensors",
            hint="The manifest is broken; publish the model again",
            revision=index.revision,
        )


def prepare_plan(
    request: LoadRequest, *, chunk_bytes: int, read_timeout_s: float, trust: TrustPolicy | None = None
) -> tuple[ModelIndex, LoadPlan]:
    """What is stored, and what each rank of the request gets of it. Moves no weights.

    `trust` is of the process that plans; what the request trusts narrows it. Raises StoreError (SourceRefused before
    anything is asked), CheckpointError, ManifestError (SignatureError, RevisionMismatch) or PlanError.
    """
    # A device map asks whether the head is the embedding.
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
    """What is stored, and its config; None: it has none, or it is broken and the request can do without.

    A published config.json must be as it was published, needed or not. Raises as `prepare_plan` does.
    """
    trust = trust or TrustPolicy()
    trust.sources.check(request.store.ref, request.store.credentials)
    keys = trust.keys_for(request.trusted_keys)
    with closing(open_store(request.store.ref, request.store.credentials, read_timeout_s=read_timeout_s)) as store:
        index = open_model(
            store,
            chunk_bytes=chunk_bytes,
            only_key=request.only_key,
            trusted_keys=keys,
            signed_name=request.signed_name,
            revision=request.revision,
        )
        if not with_config:
            check_model_config(store, index)
            return index, None
        try:
            return index, read_model_config(store, index)
        except ModelConfigError:
            if request.layout.cuts_tensors:
                raise
            return index, None  # where no tensor is cut by what it is, nothing in it is needed


def plan_model(
    request: LoadRequest, index: ModelIndex, config: ModelConfig | None, read_amax: ReadAmax | None = None
) -> LoadPlan:
    """What each rank of the request gets of a model that was read. `read_amax`: of `amax_reader`.

    Raises PlanError, ConfigError, and what reading recorded maxima raises: ManifestError, IntegrityError, StoreError.
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
    """(revision, each change planned, until there are `enough`): the model is read once. Raises what reading raises."""
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
    """Each change as it would be loaded, or why it cannot be; one at least, then until there are `enough`."""
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
    """True while the store still has that revision; one small request."""
    (trust or TrustPolicy()).sources.check(request.store.ref, request.store.credentials)
    with closing(open_store(request.store.ref, request.store.credentials, read_timeout_s=read_timeout_s)) as store:
        return check_revision(store, revision, only_key=request.only_key)
