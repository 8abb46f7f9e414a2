"""SGLang's load format "private": each rank reads only what it needs, verified, once per machine.

    python -m sglang.launch_server --model-path $(longshore config-folder s3://models/llama-8b) --load-format private

SGLang imports this module in each of its processes (entry point `sglang.srt.plugins`). Its load formats are a closed
list, so `register` puts a hook around `get_model_loader`, which returns a `LongshoreModelLoader` for "private". The
loader finds in the model's folder where the weights are (`longshore.json`), opens them with `safe_open`, and gives
SGLang lazy tensors instead of those of local files. A lazy tensor is read when a weight loader of SGLang copies it,
after it has cut out the rank's part. The ranks of an engine are one reader group.

A second hook lets `update_weights_from_disk` go the way of `engines.resident_weights`: it reads only what changed,
verifies it, and puts it in place on all ranks or on none.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import sglang
import torch
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.model_loader.loader import BaseModelLoader, DefaultModelLoader
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from actors.reader.open_model import OpenModel, safe_open
from cluster.errors import ConfigError, UpdateRefused
from cluster.small_files import ModelSource
from engines import warn_of_version
from engines.filling import Weights, fill, log_report, reader_group, source_of
from engines.resident_weights import ResidentWeights, Update, pack, take_together, text_of
from engines.written_weights import Watch

TESTED = ("0.5.23", "0.5.23")  # oldest and newest version that tests have run
_LOG = logging.getLogger("sglang.longshore")
_LOADS: Counter[str] = Counter()  # of this process, by URI
_UPDATES = itertools.count(1)  # of this process
# Methods that leave weights as they were filled. Models with others take no updates, as SGLang repacks their weights.
REPEATABLE = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
# Methods of a module, or marks, by which SGLang keeps other tensors that it made from the weights.
_DERIVES = ("post_load_weights", "process_weights_after_loading", "w_kc")
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_OWN_PRIVATE = "sglang.private.private_model_loader"  # a company's own loader, which has the format already


class LongshoreModelLoader(DefaultModelLoader):  # type: ignore[misc]  # SGLang may be absent where types are checked
    """Loads weights through Longshore."""

    def __init__(self, load_config: LoadConfig) -> None:
        BaseModelLoader.__init__(self, load_config)  # the class between checks the extra config's keys
        self._extra = dict(load_config.model_loader_extra_config or {})
        self._opened: list[OpenModel] = []
        self._source = ModelSource("", "", {})  # of what was opened last
        warn_of_version("SGLang", sglang.__version__, TESTED, _LOG)

    def download_model(self, model_config: Any) -> None:
        """Do nothing: there is no download."""

    def _prepare_weights(self, model_name_or_path: str, *args: Any, **more: Any) -> Any:
        """Refuse to name local files. SGLang asks for them only to load while it captures graphs."""
        raise ConfigError(
            f"SGLang wants the weight files of {model_name_or_path!r}, which are in a store",
            hint="leave out --startup-weight-load-mode",
        )

    def _get_weights_iterator(self, source: Any, **more: Any) -> Weights:
        """Iterate over the names and lazy tensors of one place. SGLang calls this for loads and for reloads."""
        if source.allow_patterns_overrides:
            raise ConfigError(
                f"the model reads {', '.join(source.allow_patterns_overrides)} of its folder, "
                "which Longshore does not read",
                hint="use another load format for this model",
            )
        opened = self._open(source_of(source.model_or_path, self._extra))
        for name, tensor in opened.lazy_tensors():
            yield source.prefix + name, tensor

    def load_weights_and_postprocess(self, model: Any, weights: Weights, target_device: torch.device) -> None:
        """Fill the model, and let SGLang repack what it repacks. Raises LayoutError for weights that do not match."""
        watch = Watch()

        def load(named: Weights) -> None:
            self.load_weights_only(model, named, target_device)

        try:
            with watch:
                fill(model, watch.named(weights), load, lambda: self._source.model_uri)
            if len(self._opened) == 1 and "_mono_copies" not in model.__dict__:  # AMD's kernels keep copies
                ResidentWeights.attach(model, watch, self._source, self._opened[0].index)
            self.postprocess_weights(model, target_device)
            for opened in self._opened:
                log_report(opened, _LOG)
        finally:
            self.close()

    def close(self) -> None:
        """Close what the weights were read from."""
        opened, self._opened = self._opened, []
        for each in opened:
            each.close()

    def __del__(self) -> None:
        self.close()

    def _open(self, source: ModelSource) -> OpenModel:
        if _group_of_engine():
            _LOADS[source.model_uri] += 1
        self._source = source
        self._opened.append(_open(source, f"load {_LOADS[source.model_uri]}"))
        return self._opened[-1]


@cache  # all ranks ask each other once
def _group_of_engine() -> dict[str, Any]:
    """Return the arguments by which the ranks of this engine on this machine read as one group."""
    from sglang.srt.distributed.parallel_state import get_world_group

    world = get_world_group()
    return reader_group("sglang", world.rank_in_group, world.world_size, world.cpu_group)


def _open(source: ModelSource, what: str) -> OpenModel:
    """Open weights in the group of this engine's ranks. `what` is a name that no other group of the engine has."""
    options: dict[str, Any] = {**source.options, "revision": source.revision or None, "cache": False}
    if group := _group_of_engine():
        options |= {**group, "group": f"{group['group']} {what}"}
    return safe_open(source.model_uri, **options)


def _choose_loader(original: Callable[..., Any], load_config: LoadConfig, *args: Any, **more: Any) -> Any:
    """Return our loader for the format "private", and what SGLang returns for every other one."""
    if load_config.load_format == LoadFormat.PRIVATE:
        return LongshoreModelLoader(load_config)
    return original(load_config, *args, **more)


def _update(original: Callable[..., Any], updater: Any, path: str, load_format: str, *args: Any, **more: Any) -> Any:
    """Take a new revision in place, for the format "private". Return whether it was taken, and a message.

    `path` is the URI of the revision, or a folder that names it. SGLang calls this on each rank, when no request runs,
    and then empties its prefix cache. Its own way fills the live model while it reads.
    """
    if load_format != LoadFormat.PRIVATE:
        _filled_by_others(updater)
        return original(updater, path, load_format, *args, **more)
    from sglang.srt.distributed.parallel_state import get_world_group
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    if updater.get_model_runner().pp_group.world_size > 1:  # they could not agree
        return False, "Pipeline stages of SGLang take updates one after the other. Start the engine anew"
    world, number = get_world_group(), next(_UPDATES)
    try:
        with set_default_torch_dtype(updater.model_config.dtype):
            report = take_together(lambda: _begin(updater, path, number), world.cpu_group, world.world_size, _LOG)
    except Exception as error:
        _LOG.error("The update failed: %s", error)
        return False, text_of(error)
    updater.model_config.model_path = path
    updater.update_model_fields(
        updater.get_model(), model_path=path, load_format=load_format, load_config=LoadConfig(load_format=load_format)
    )
    return True, f"Succeeded to update model weights to {report}."


@contextlib.contextmanager
def _begin(updater: Any, path: str, number: int) -> Iterator[Update]:
    """Open the new revision, and yield what this rank has to do. Raises UpdateRefused for what SGLang cannot take."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    model = updater.get_model()
    resident = ResidentWeights.of(model)
    problem = weight_updater._unsupported_derived_weight_cache_error(model)
    if not updater.get_model_runner().spec_algorithm.is_none():
        problem = "draft models of SGLang take updates after the model"
    if problem:
        raise UpdateRefused(problem, hint="start the engine anew", uri=path)
    source = ModelSource(path, "", resident.source.options) if "://" in path else source_of(path, {})
    device = torch.device(updater.device)

    def load(weights: Weights) -> None:
        DefaultModelLoader.load_weights_only(model, weights, device)

    with _open(source, f"update {number}") as opened:
        resident.check_updatable(opened.index, _unknown_packing)
        yield Update(resident, opened, source, load, pack, streaming=False)


def _filled_by_others(updater: Any, *args: Any, **more: Any) -> None:
    """Note that SGLang writes other weights into the model. The next update reads everything."""
    ResidentWeights.reloaded(updater.get_model())


def _released(manager: Any, request: Any) -> None:
    """Note that SGLang releases the memory of the weights, and may discard them. The next update reads everything."""
    if not request.tags or "weights" in request.tags:
        ResidentWeights.reloaded(manager.tp_worker.model_runner.model)


def _unknown_packing(module: torch.nn.Module) -> bool:
    """Return whether SGLang changes the weights of this module, or keeps others made from them."""
    method = getattr(module, "quant_method", None)
    if getattr(module, "use_intel_amx_backend", False) or any(hasattr(module, name) for name in _DERIVES):
        return True
    return method is not None and type(method).__name__ not in REPEATABLE


def _has_own_loader() -> bool:
    try:
        return find_spec(_OWN_PRIVATE) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def register() -> None:
    """Let SGLang load the format "private" through Longshore, unless it has a private loader of its own.

    SGLang also replaces the function in modules that have imported it by its name.
    """
    if _has_own_loader():
        _LOG.warning("%s is installed, so the load format 'private' does not use Longshore", _OWN_PRIVATE)
        return
    HookRegistry.register("sglang.srt.model_loader.loader.get_model_loader", _choose_loader, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.update_weights_from_disk", _update, HookType.AROUND)
    for name in ("update_weights_from_tensor", "load_weights_from_distributed", "update_weights_from_ipc"):
        HookRegistry.register(f"{_UPDATER}.{name}", _filled_by_others, HookType.BEFORE)
    HookRegistry.register(f"{_MANAGER}.release_memory_occupation", _released, HookType.BEFORE)
