"""SGLang's load format "private": each rank reads only what it needs, verified, once per machine.

    python -m sglang.launch_server --model-path $(longshore config-folder s3://models/llama-8b) --load-format private

SGLang imports this module in each of its processes (entry point `sglang.srt.plugins`). Its load formats are a closed
list, so `register` puts a hook around `get_model_loader`, which returns a `LongshoreModelLoader` for "private". The
loader finds in the model's folder where the weights are (`longshore.json`), opens them with `safe_open`, and gives
SGLang lazy tensors instead of those of local files. A lazy tensor is read when a weight loader of SGLang copies it,
after it has cut out the rank's part. The ranks of an engine are one reader group.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import sglang
import torch
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.model_loader.loader import BaseModelLoader, DefaultModelLoader
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from actors.reader.open_model import OpenModel, safe_open
from cluster.errors import ConfigError
from cluster.small_files import ModelSource
from engines import warn_of_version
from engines.filling import Weights, fill, log_report, reader_group, source_of

TESTED = ("0.5.23", "0.5.23")  # oldest and newest version that tests have run
_LOG = logging.getLogger("sglang.longshore")
_LOADS: Counter[str] = Counter()  # of this process, by URI
_OWN_PRIVATE = "sglang.private.private_model_loader"  # a company's own loader, which has the format already


class LongshoreModelLoader(DefaultModelLoader):  # type: ignore[misc]  # SGLang may be absent where types are checked
    """Loads weights through Longshore."""

    def __init__(self, load_config: LoadConfig) -> None:
        BaseModelLoader.__init__(self, load_config)  # the class between checks the extra config's keys
        self._extra = dict(load_config.model_loader_extra_config or {})
        self._opened: list[OpenModel] = []
        self._uri = ""  # of what was opened last, for messages
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
        try:
            fill(model, weights, lambda named: self.load_weights_only(model, named, target_device), lambda: self._uri)
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
        options: dict[str, Any] = {**source.options, "revision": source.revision or None, "cache": False}
        if group := _group_of_engine():
            _LOADS[source.model_uri] += 1
            options |= {**group, "group": f"{group['group']} load {_LOADS[source.model_uri]}"}
        self._uri = source.model_uri
        self._opened.append(safe_open(source.model_uri, **options))
        return self._opened[-1]


@cache  # all ranks ask each other once
def _group_of_engine() -> dict[str, Any]:
    """Return the arguments by which the ranks of this engine on this machine read as one group."""
    from sglang.srt.distributed.parallel_state import get_world_group

    world = get_world_group()
    return reader_group("sglang", world.rank_in_group, world.world_size, world.cpu_group)


def _choose_loader(original: Callable[..., Any], load_config: LoadConfig, *args: Any, **more: Any) -> Any:
    """Return our loader for the format "private", and what SGLang returns for every other one."""
    if load_config.load_format == LoadFormat.PRIVATE:
        return LongshoreModelLoader(load_config)
    return original(load_config, *args, **more)


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
