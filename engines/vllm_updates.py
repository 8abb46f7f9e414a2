"""New weights for a running vLLM engine, by URI: vLLM's weight transfer with the backend "longshore".

    llm = LLM(model=folder, load_format="longshore", weight_transfer_config={"backend": "longshore"})
    update(llm, "s3://models/policy/step-200")

Every worker compares the digests of both revisions, and reads only modules with tensors that changed. They read as one
group, so each chunk leaves the store once per machine. The workers agree before anything of the model is touched
(`engines.resident_weights`).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import cache, wraps
from typing import Any

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.v1.engine.exceptions import EngineDeadError

from actors.reader.open_model import safe_open
from cluster.errors import ModelBroken, UpdateRefused
from cluster.small_files import ModelSource
from engines.resident_weights import (
    EngineUpdateReport,
    ResidentWeights,
    Update,
    error_of,
    pack,
    take_together,
    text_of,
)
from engines.vllm import every_core, group_of_engine
from storage.errors import LongshoreError
from storage.problems import quote

_LOG = logging.getLogger("vllm.longshore")
_OPTIONS = {"endpoint_url", "region", "profile", "anonymous"}
# Methods whose packing is repeated in place, or that pack nothing. All others are refused.
REPEATABLE = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
# Layers that only set scales, which do not come from weights. StaticSinkAttention keeps what was made from weights.
UNPACKED_ATTENTION = (
    "Attention",
    "ChunkedLocalAttention",
    "CrossAttention",
    "EncoderOnlyAttention",
    "MMEncoderAttention",
    "PrefillPrefixLMAttention",
    "RSWAAttention",
    "WhisperCausalAttentionWithBlockPooling",
    "WhisperEncoderAttention",
)


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM may be absent where types are checked
    """Nothing: workers connect to nobody."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The update, as plain values: they also come from the HTTP routes of vLLM's development mode."""

    uri: str = ""  # empty: that of the weights that the model has
    revision: str = ""  # the only one that is accepted; empty: the one that is stored
    streaming: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # of the store: endpoint_url, region, ...; default: as before


class LongshoreWeightTransfer(WeightTransferEngine):  # type: ignore[misc]
    """The part of one worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.report: EngineUpdateReport | None = None  # of the last update
        from vllm.v1.worker.gpu_worker import Worker  # not at the top: it imports all of vLLM

        notice_writes(Worker)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: there is no connection to a trainer."""

    def start_weight_update(self) -> None:
        """Do nothing: the update begins when it is known which revision is wanted."""

    def finish_weight_update(self) -> None:
        """Do nothing: the update is complete when `receive_weights` returns."""

    def shutdown(self) -> None:
        """Do nothing: nothing stays open between updates."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take a new revision, as `receive_weights`. What was sent is read by all workers before they agree."""
        self._guarded(lambda: self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take the new revision, on every worker or on none. Only the last worker raises; others log their error.

        It raises a RuntimeError, whose cause and text are those of one of these:

            UpdateRefused: It differs in more than contents, or the engine repacks weights in a way that is not known.
            DoesNotFit: There is no room to stage what changed.
            UpdateFailed: Another worker failed before the exchange. Every worker has the revision that it had.
            ModelBroken: A worker failed later. The message says which workers have the new revision.
            LongshoreError: A read failed. Every worker has the revision that it had.
        """
        self._guarded(lambda: update_info)

    def _guarded(self, info: Callable[[], UpdateInfo]) -> None:
        # vLLM reads the answers of its workers in order, up to the first error. The next call would then take those of
        # later workers for its own. So only the last worker raises.
        world = get_world_group()
        self._updates = getattr(self, "_updates", 0) + 1
        try:
            self.report = take_together(lambda: self._begin(info()), world.cpu_group, world.world_size, _LOG)
        except Exception as error:
            if world.rank_in_group == world.world_size - 1:
                # vLLM passes on the text of an error, without its type.
                raise RuntimeError(text_of(error)) from error
            _LOG.error("The update failed: %s", error)

    @contextlib.contextmanager
    def _begin(self, info: UpdateInfo) -> Iterator[Update]:
        """Open the new revision, and yield what there is to do."""
        resident = ResidentWeights.of(self.model)
        # What a request may change. It may not change which signatures are accepted.
        if unknown := set(info.options) - _OPTIONS:
            raise UpdateRefused(
                f"an update has no options {', '.join(map(quote, sorted(unknown)))}",
                hint=f"possible are {', '.join(sorted(_OPTIONS))}",
            )
        source = resident.source
        source = ModelSource(info.uri or source.model_uri, info.revision, {**source.options, **info.options})
        options: dict[str, Any] = {**source.options, "revision": source.revision or None, "cache": False}
        if group := group_of_engine():
            options |= {**group, "group": f"{group['group']} update {self._updates}"}
        with every_core(os.environ), safe_open(source.model_uri, **options) as opened:
            resident.check_updatable(opened.index, _unknown_packing)
            yield Update(resident, opened, source, self.model.load_weights, pack, info.streaming)


# Methods of vLLM's workers that write or discard weights without the model's `load_weights`, and with which arguments.
_WRITES: dict[str, Callable[..., bool]] = {
    "discard": lambda tags: "weights" in tags,
    "reload_weights": lambda *_, **__: True,  # also those that an engine has packed
    "reset_weights": lambda: True,
    "sleep": lambda level=1: level != 1,  # at level 1 they wait in host memory
}


@cache
def notice_writes(kind: type) -> None:
    """Let every worker of this class note that it writes or discards weights, and report updates. Done once."""

    def noticing(original: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        @wraps(original)
        def method(worker: Any, *args: Any, **kwargs: Any) -> Any:
            if writes(*args, **kwargs):
                ResidentWeights.reloaded(worker.model_runner.get_model())
            return original(worker, *args, **kwargs)

        return method

    for name, writes in _WRITES.items():
        if hasattr(kind, name):  # a later version may have more of them
            setattr(kind, name, noticing(getattr(kind, name), writes))
    take_update = kind.update_weights  # type: ignore[attr-defined]

    @wraps(take_update)
    def update_weights(worker: Any, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        take_update(worker, *args, **kwargs)
        # vLLM returns nothing. It passes on the answers of workers, of plain values only.
        report = getattr(worker.weight_transfer_engine, "report", None)
        return None if report is None else asdict(report)

    kind.update_weights = update_weights  # type: ignore[attr-defined]


def _unknown_packing(module: torch.nn.Module) -> bool:
    """Return whether vLLM changes weights of this module after it was filled, in a way that is not repeated here."""
    method = getattr(module, "quant_method", None)
    if method is not None:
        return type(method).__name__ not in REPEATABLE
    if not hasattr(module, "process_weights_after_loading"):
        return False
    # A backend may keep a copy of the sinks in float32.
    sinks = getattr(getattr(module, "impl", None), "sinks", None)
    return type(module).__name__ not in UNPACKED_ATTENTION or sinks is not None


def update(
    llm: Any,
    uri: str = "",
    *,
    revision: str = "",
    streaming: bool = False,
    **options: Any,
) -> EngineUpdateReport:
    """Give a running engine the weights of another revision, in place, and empty its prefix cache.

    Args:
        llm: A `vllm.LLM` that was made with `load_format="longshore"` and
            `weight_transfer_config={"backend": "longshore"}`.
        uri: Folder of the new revision. Empty: the model's own, as it is stored now.
        revision: The only revision that is accepted. Empty: the one that is stored.
        streaming: Stage one module after the other, for less memory. A failure then leaves contents of two revisions.
        **options: Of the store, as `safe_open` has them: `endpoint_url`, `region`, `profile`, `anonymous`. They hold
            for later updates, too, until others are given.

    Returns:
        The revision that the engine has now, and what the update has read and taken.

    Raises:
        UpdateRefused: The revision differs in more than contents, or the engine repacks weights in a way that is not
            known. Or the engine is asynchronous: it has methods of its own for each step. Nothing was touched.
        DoesNotFit: There is no room to stage what changed. Nothing was touched.
        UpdateFailed: A worker failed before the exchange. Every worker has the weights that it had.
        ModelBroken: A worker failed in the exchange, and the message says which ones have the new weights. Or all have
            them, and a cache has contents of the old ones. Or a process of the engine died, which ends the engine.

    Example:
        ```python
        update(llm, "s3://models/policy/step-200")
        ```
    """
    if inspect.iscoroutinefunction(llm.collective_rpc):
        raise UpdateRefused(
            "this engine is asynchronous",
            hint="await its start_weight_update, update_weights, finish_weight_update and reset_prefix_cache",
        )
    info = {"uri": uri, "revision": revision, "streaming": streaming, "options": options}
    try:
        _ask_workers(llm, "start_weight_update")
        answers = _ask_workers(llm, "update_weights", info)
        _ask_workers(llm, "finish_weight_update")
    except Exception as error:
        errors = [error]
        try:  # vLLM goes on to take the update for active in the workers that did not raise, until it is finished
            _ask_workers(llm, "finish_weight_update")
        except Exception as another:
            errors.append(another)
        # When a worker has died, the first call is only "cancelled".
        if any(isinstance(one, EngineDeadError) or "Executor failed" in str(one) for one in errors):
            raise ModelBroken(
                "a process of the engine died in the update, and vLLM has ended the others. If it died in the "
                "exchange, the log says which workers had the new revision. Before the exchange, none had it",
                hint="start the engine anew",
            ) from error
        if isinstance(own := error.__cause__, LongshoreError):  # the worker is in this process
            raise own from own.__cause__
        raise error_of(str(error)) from error
    _empty_caches(llm)
    return EngineUpdateReport(**answers[0])


def _empty_caches(llm: Any) -> None:
    """Empty the caches that were made with the old weights. Raises ModelBroken where that cannot be done."""
    problem, cause = "", None
    try:
        if llm.reset_prefix_cache(reset_connector=True) is False:
            problem = "requests are running, or a KV connector could not empty its own"
        if hasattr(llm.llm_engine, "reset_encoder_cache"):
            llm.llm_engine.reset_encoder_cache()
    except Exception as error:
        problem, cause = text_of(error), error
    if problem:
        raise ModelBroken(
            f"every worker has the new weights, but a cache of the old ones could not be emptied: {problem}",
            hint="call reset_prefix_cache(reset_connector=True) when no request runs, or update again, which does so",
        ) from cause


LOOK_S = 0.5  # between two looks whether the engine's process lives


def _ask_workers(llm: Any, method: str, *args: Any) -> Any:
    """Call a method of every worker, and return their answers.

    Raises what the call raises, and EngineDeadError if the engine's process ends. vLLM's client waits for ever for a
    call that was under way when that process ended (`SyncMPClient.call_utility` of vLLM 0.32).
    """
    client = getattr(llm.llm_engine.engine_core, "resources", None)
    if client is None:  # the engine runs in this process
        return llm.collective_rpc(method, args=args)
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(llm.collective_rpc(method, args=args))
        except BaseException as error:
            answer.set_exception(error)

    asking = threading.Thread(target=ask, name="longshore-update", daemon=True)
    asking.start()
    while asking.is_alive() and not client.engine_dead:
        asking.join(LOOK_S)
    if not answer.done():
        asking.join(LOOK_S)  # an answer may just have come
    if not answer.done():
        raise EngineDeadError
    return answer.result()
