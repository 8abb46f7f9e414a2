"""SGLang's load format "private": each rank reads only what it needs, verified, once per machine.

    sglang serve --model-path $(longshore config-folder s3://models/llama-8b) --load-format private

SGLang has a closed list of load formats. "private" is the one for loaders that it does not have. SGLang calls
`register` in each of its processes (entry point `sglang.srt.plugins`). From then on `get_model_loader` returns
`LongshoreLoader` for that format. It finds in the model's folder where the weights are, as vLLM's loader does, and
gives lazy tensors to SGLang's own loading. A lazy tensor is read when a weight loader copies the part of its rank.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import sglang
import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_loader.loader import BaseModelLoader, DefaultModelLoader
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from actors.reader.lazy_tensor import assignments_read, read_assigned
from actors.reader.open_model import OpenModel, safe_open
from cluster.errors import ConfigError
from cluster.small_files import source_of
from engines import warn_of_version
from storage.errors import LongshoreError
from storage.host.processes import pid_namespace
from storage.problems import quote

TESTED = ("0.5", "0.5")  # oldest and newest version that tests have run
HOOKED = "sglang.srt.model_loader.loader.get_model_loader"
_LOG = logging.getLogger("sglang.longshore")  # so that lines appear in SGLang's own log


class LongshoreLoader(DefaultModelLoader):  # type: ignore[misc]  # SGLang may be absent where types are checked
    """Loads weights through Longshore. Everything else is that of SGLang's own loader."""

    def __init__(self, load_config: Any) -> None:
        BaseModelLoader.__init__(self, load_config)  # that of the base class refuses our extra config
        self._opened: list[OpenModel] = []
        warn_of_version("SGLang", sglang.__version__, TESTED, _LOG)

    def download_model(self, model_config: Any) -> None:
        """Do nothing: there is no download."""

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        """Return the model with its weights. Raises LongshoreError, and SGLang's errors for weights without a place."""
        try:
            with assignments_read():
                model: torch.nn.Module = super().load_model(model_config=model_config, device_config=device_config)
            read_assigned(model)
            for opened in self._opened:
                _log_report(opened)
            return model
        finally:
            opened_models, self._opened = self._opened, []
            for opened in opened_models:
                opened.close()

    def _get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the names and lazy tensors of all weights."""
        if getattr(model, "allow_patterns_overrides", None) or tuple(getattr(model, "secondary_weights", ())):
            raise ConfigError(f"{type(model).__name__} has its weights in several places, which Longshore cannot read")
        extra = self.load_config.model_loader_extra_config or {}
        source = source_of(model_config.model_path, extra)
        group = {} if model_config.is_draft_model else _group()
        options: dict[str, Any] = {**source.options, "revision": source.revision or None, "cache": False, **group}
        opened = safe_open(source.model_uri, **options)
        self._opened.append(opened)
        last = ""
        try:
            for name, tensor in opened.lazy_tensors():
                last = name
                yield name, tensor
        except GeneratorExit:  # the model's loader has raised, or takes no more
            _LOG.info("The last weight that SGLang took was %s of %s", quote(last), quote(source.model_uri))
            raise


def register() -> None:
    """Let `get_model_loader` return Longshore's loader for the format "private". May be called again."""
    HookRegistry.register(HOOKED, _choose, HookType.AROUND)


def _choose(original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
    """Return the loader for a format, in place of SGLang's `get_model_loader`."""
    if load_config.load_format == LoadFormat.PRIVATE:
        return LongshoreLoader(load_config)
    return original(load_config, model_config)


def _group() -> dict[str, Any]:
    """Return the arguments by which the ranks of this engine on this machine read as one group. All ranks call it."""
    from sglang.srt.distributed import get_world_group

    world = get_world_group()
    if world.world_size < 2:
        return {}
    found: list[tuple[str, str]] = [("", "")] * world.world_size
    place = pid_namespace()
    torch.distributed.all_gather_object(found, (uuid.uuid4().hex, place), group=world.cpu_group)
    here = [rank for rank, (_, there) in enumerate(found) if there == place]
    return {"group": f"sglang {found[0][0]}", "member": here.index(world.rank_in_group), "members": len(here)}


def _log_report(opened: OpenModel) -> None:
    try:
        report = opened.report()
    except LongshoreError:
        return
    _LOG.info(
        "Loaded %r with Longshore, %s: this process read %d bytes. Readers here: %d bytes from the store, %d from "
        "shared memory, %d read again",
        opened,
        f"verified with {report['hash']}" if report["hash"] else "not verified, as the model is not published",
        report["read_bytes"],
        report["store_bytes"],
        report["cached_bytes"],
        report["refetched_bytes"],
    )
