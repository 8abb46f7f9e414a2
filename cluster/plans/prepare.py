"""From a request to a plan: open the store, read the model's index and config, cut it.

The one place where planning touches the network; `cluster.plans.planning` and everything under it is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from cluster.errors import ConfigError, ModelConfigError, PlanError
from cluster.fit.changes import Change
from cluster.fit.search import PlannedChange
from cluster.layouts.model_config import ModelConfig, check_model_config, read_model_config
from cluster.layouts.rules import parse_rules, rules_for
from cluster.load_request import LoadRequest
from cluster.plans.amax_reader import amax_reader
from cluster.plans.load_plan import LoadPlan
from cluster.plans.planning import build_load_plan
from cluster.plans.rank_plans import rank_facts
from cluster.plans.recorded_scales import ReadAmax
from cluster.trust import TrustPolicy
from storage.checkpoints.checkpoint import check_revision, open_model
from storage.checkpoints.model_index import ModelIndex
from storage.stores.open_store import open_store


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
