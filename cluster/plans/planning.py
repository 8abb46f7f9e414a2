"""From a model and a layout to a load plan. Pure: no byte of weights is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.device_map.mapped_model import with_device_map
from cluster.device_map.options import DeviceMapOptions
from cluster.errors import PlanError
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig
from cluster.layouts.rules import Rules, rules_for
from cluster.plans.cut_model import AS_STORED, cut_model
from cluster.plans.load_plan import LoadPlan
from cluster.plans.rank_plans import RankPlans, node_chunks
from cluster.plans.recorded_scales import ReadAmax, with_recorded_amax
from cluster.plans.slice_patterns import SourcePatterns, pair_with_chunks
from cluster.precision.recipes import Precision
from storage.checkpoints.model_index import ModelIndex


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
