"""From a request to a plan: open the store, read the model's index and config, cut it.

The one place where planning touches the network; `cluster.planning` and everything under it is pure.
"""

from __future__ import annotations

from contextlib import closing

from cluster.layout_rules import parse_rules, rules_for
from cluster.load_plan import LoadPlan
from cluster.load_request import LoadRequest
from cluster.model_config import read_model_config
from cluster.planning import build_load_plan
from cluster.trust import TrustPolicy
from storage.checkpoint import check_revision, open_model
from storage.model_index import ModelIndex
from storage.open_store import open_store


def prepare_plan(
    request: LoadRequest, *, chunk_bytes: int, read_timeout_s: float, trust: TrustPolicy | None = None
) -> tuple[ModelIndex, LoadPlan]:
    """What is stored, and what each rank of the request gets of it. Moves no weights.

    `trust` is of the process that plans; what the request trusts narrows it. Raises StoreError (SourceRefused before
    anything is asked), CheckpointError, ManifestError (SignatureError) or PlanError.
    """
    trust = trust or TrustPolicy()
    trust.sources.check(request.store.ref, request.store.credentials)
    keys = trust.keys_for(request.trusted_keys)
    with closing(open_store(request.store.ref, request.store.credentials, read_timeout_s=read_timeout_s)) as store:
        index = open_model(store, chunk_bytes=chunk_bytes, only_key=request.only_key, trusted_keys=keys)
        # Where no tensor is cut by what it is nothing in it matters, so a broken one must not stand in the way.
        config = read_model_config(store, index) if request.layout.cuts_tensors else None
    own = None if request.layout_rules is None else parse_rules(request.layout_rules)
    rules = rules_for(config, own)
    return index, build_load_plan(index, request.layout, rules, config)


def still_current(request: LoadRequest, revision: str, read_timeout_s: float, trust: TrustPolicy | None = None) -> bool:
    """True while the store still has that revision; one small request."""
    (trust or TrustPolicy()).sources.check(request.store.ref, request.store.credentials)
    with closing(open_store(request.store.ref, request.store.credentials, read_timeout_s=read_timeout_s)) as store:
        return check_revision(store, revision, only_key=request.only_key)
