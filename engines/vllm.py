"""vLLM's load format "longshore": each worker reads only what its rank needs, verified, once per machine.

    vllm serve $(longshore config-folder s3://models/llama-8b) --load-format longshore

vLLM imports this module in each of its processes (entry point `vllm.general_plugins`). The loader finds in the model's
folder where the weights are (`longshore.json`), opens them with `safe_open`, and hands lazy tensors to
`model.load_weights`. A lazy tensor is read when vLLM's weight loaders copy it, after they have cut out the rank's part.
The workers of an engine are one reader group. While vLLM makes the model without weights, another thread opens them and
fetches the first ones.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import cache
from typing import Any

import torch
import vllm
from vllm.config import LoadConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from actors.reader.open_model import OpenModel, safe_open
from cluster.errors import ConfigError, LayoutError
from cluster.joining.patience import in_thread
from cluster.small_files import LOAD_FORMAT, ModelSource
from engines import warn_of_version
from engines.filling import Weights, fill, log_report, reader_group, source_of
from engines.resident_weights import ResidentWeights
from engines.written_weights import Watch
from storage.problems import MAX_LISTED, quote

TESTED = ("0.29", "0.32")  # oldest and newest version that tests have run
_LOG = logging.getLogger("vllm.longshore")  # so that lines appear in vLLM's own log
_LOADS: Counter[tuple[str, bool]] = Counter()  # in groups, of this process, by URI and whether it is a draft model


class LongshoreModelLoader(BaseModelLoader):  # type: ignore[misc]  # vLLM may be absent where types are checked
    """Loads weights through Longshore."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._extra = dict(load_config.model_loader_extra_config or {})
        self._opened: list[OpenModel] = []
        self._opening: Future[OpenModel] | None = None  # the model's own weights, in another thread
        self._drafts = self._alone = False
        self._updates = False  # whether the engine may take new weights in place (engines.vllm_updates)
        warn_of_version("vLLM", vllm.__version__, TESTED, _LOG)

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: there is no download."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, **more: Any) -> torch.nn.Module:
        """Return the model with its weights. Online quantization reads the last ones when `load_weights` is done."""
        self._drafts = model_config.runner_type == "draft"
        # Draft models are on some workers only. A group that the target's load has not made would wait for the others.
        self._alone = self._drafts and not _LOADS
        transfer = getattr(vllm_config, "weight_transfer_config", None)
        self._updates = transfer is not None and transfer.backend == LOAD_FORMAT and not self._drafts
        drafting = vllm_config.speculative_config
        if self._drafts and drafting is not None and "model_uri" in self._extra:
            own = getattr(drafting.draft_load_config, "model_loader_extra_config", None)
            if own != self._extra and model_config.model != drafting.target_model_config.model:
                self._extra = {}  # the target's
        try:
            if model_config is vllm_config.model_config:  # others may read next to nothing
                self._open_ahead(source_of(model_config.model, self._extra), vllm_config.parallel_config)
            model: torch.nn.Module = super().load_model(vllm_config, model_config, **more)
            return model
        finally:
            self.close()

    def get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Weights:
        """Iterate over the names and lazy tensors of all weights. vLLM's `reload_weights` calls this.

        vLLM keeps some until it has those of a whole layer. So they can be read until this loader is closed or deleted.
        """
        if getattr(model, "allow_patterns_overrides", None):
            raise ConfigError(f"{type(model).__name__} has its weights in several folders, which Longshore cannot read")
        source = source_of(model_config.model, self._extra)
        ResidentWeights.reloaded(model, source)  # `load_weights` describes the model anew when it has filled it
        with every_core(os.environ):
            opened = self._open(source) if self._opening is None else self._opening.result()
            self._opening = None
            yield from opened.lazy_tensors()
            for other in getattr(model, "secondary_weights", ()):
                if (own := secondary_source(other, model_config.model, source)) is None:
                    yield from DefaultModelLoader(LoadConfig(load_format="auto"))._get_weights_iterator(other)
                else:
                    yield from ((other.prefix + name, tensor) for name, tensor in self._open(own).lazy_tensors())

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        """Fill the model's parameters. Raises LayoutError for weights that do not match it."""
        source = source_of(model_config.model, self._extra)
        uri = source.model_uri
        watch = Watch() if self._updates else contextlib.nullcontext()
        with watch:
            weights = self.get_all_weights(model_config, model)
            named = weights if not isinstance(watch, Watch) else watch.named(weights)
            loaded = fill(model, named, model.load_weights, lambda: uri)
        if isinstance(watch, Watch) and len(self._opened) == 1:
            ResidentWeights.attach(model, watch, source, self._opened[0].index)
        else:
            ResidentWeights.reloaded(model)
        check_loaded(model, model_config, loaded, uri)
        for opened in self._opened:
            log_report(opened, _LOG)

    def close(self) -> None:
        """Close what the weights are read from."""
        opening, self._opening = self._opening, None
        if opening is not None:  # vLLM could not make the model, and its error need not wait for the store
            opening.add_done_callback(lambda _: self.close())
        opened, self._opened = self._opened, []
        for each in opened:
            each.close()

    def __del__(self) -> None:
        self.close()

    def _open_ahead(self, source: ModelSource, parallel: ParallelConfig) -> None:
        """Open the weights in another thread, and fetch the first of them where every worker here reads them."""
        members = group_of_engine().get("members", 1)  # the workers ask each other, in their main threads
        reads_first = members == parallel.world_size  # all workers are here, and each has a part of every layer
        reads_first &= parallel.pipeline_parallel_size == 1 and not parallel.enable_expert_parallel

        def open_and_fetch() -> OpenModel:
            opened = self._open(source)
            if reads_first:
                opened.fetch_first()
            return opened

        with every_core(os.environ):
            self._opening = in_thread(open_and_fetch, "longshore-open")

    def _open(self, source: ModelSource) -> OpenModel:
        options: dict[str, Any] = {**source.options, "revision": source.revision or None, "cache": False}
        if not self._alone and (group := group_of_engine()):
            # A group of its own for each load: some workers begin the next one while others still end the last one.
            load = (source.model_uri, self._drafts)
            _LOADS[load] += 1
            options |= {**group, "group": f"{group['group']} {'draft' if self._drafts else 'load'} {_LOADS[load]}"}
        self._opened.append(safe_open(source.model_uri, **options))
        return self._opened[-1]


@contextlib.contextmanager
def every_core(environment: Mapping[str, str]) -> Iterator[None]:
    """Let this thread, and the threads that it starts, run on every core of the OpenMP threads of this process.

    On processors vLLM gives each OpenMP thread of a worker a core of its own, by GNU's or Intel's variable. The main
    thread is one of them, and what it starts inherits its only core. No other cores are taken: memory that is written
    there first would be far from the worker.
    """
    listed = environment.get("GOMP_CPU_AFFINITY") or environment.get("KMP_AFFINITY", "").partition("proclist=")[2]
    before = os.sched_getaffinity(0)
    cores = {
        core
        for first, last, step in re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", listed)
        for core in range(int(first), int(last or first) + 1, int(step or 1))
    }
    with contextlib.suppress(OSError):  # there are no such cores
        os.sched_setaffinity(0, before | cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def check_loaded(model: torch.nn.Module, model_config: ModelConfig, loaded: Any, uri: str) -> None:
    """Raise LayoutError naming parameters that got no weights.

    vLLM's own loader lets those of linear layers and embeddings pass, with whatever is in their memory. Quantized
    models make some parameters themselves, so nothing is checked for them.
    """
    if model_config.quantization is not None or loaded is None:
        return
    missing = sorted({name for name, _ in model.named_parameters()} - set(loaded))
    if model_config.runner_type == "draft":  # it may have those of its target
        missing = [name for name in missing if not name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    if missing:
        raise LayoutError(
            f"{len(missing)} parameters got no weights: {', '.join(map(quote, missing[:MAX_LISTED]))}",
            hint="the config is not that of these weights",
            uri=uri,
        )


def secondary_source(other: DefaultModelLoader.Source, folder: str, first: ModelSource) -> ModelSource | None:
    """Return where weights are that a model reads from a second place: beside the first ones, or in a folder of theirs.

    None: in a repository of their own, or in the model's folder on this machine and not as safetensors. vLLM's own
    loader reads those. Raises ConfigError where it could not.
    """
    if other.model_or_path != folder:
        return None
    patterns = other.allow_patterns_overrides or [""]
    name = "/".join(filter(None, (other.subfolder, patterns[0])))
    if len(patterns) == 1 and (not patterns[0] or patterns[0].endswith(".safetensors")) and "*" not in name:
        # A folder below has a manifest of its own, if any. It is not signed under the name of the first one.
        options = {key: value for key, value in first.options.items() if key != "signed_name" or not other.subfolder}
        return ModelSource(f"{first.model_uri.rstrip('/')}/{name}", "", options)
    if not any(glob.glob(os.path.join(folder, other.subfolder or "", pattern)) for pattern in patterns):
        raise ConfigError(
            f"the model also reads {', '.join(map(quote, patterns))}, which Longshore does not read",
            hint=f"copy it into {folder}",
        )
    return None


@cache  # a draft model is loaded later, by some of the workers only: they could not ask all
def group_of_engine() -> dict[str, Any]:
    """Return the arguments by which the workers of this engine on this machine read as one group."""
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    return reader_group("vllm", world.rank_in_group, world.world_size, world.cpu_group)


register_model_loader(LOAD_FORMAT)(LongshoreModelLoader)
with contextlib.suppress(ImportError):  # vLLM before 0.30 has no factory for it
    WeightTransferEngineFactory = importlib.import_module(
        "vllm.distributed.weight_transfer.factory"
    ).WeightTransferEngineFactory
    WeightTransferEngineFactory.register_engine(LOAD_FORMAT, "engines.vllm_updates", "LongshoreWeightTransfer")
