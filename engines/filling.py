"""The parts that loaders of engines share: where the weights are, who reads with whom, and how a model is filled.

An engine's loader opens the weights that `source_of` names, in the group of `reader_group`, and lets the engine's own
`load_weights` take lazy tensors (`fill`).
"""

from __future__ import annotations

import logging
import os
import resource
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch

from actors.reader.lazy_tensor import assignments_read, read_assigned
from actors.reader.open_model import OpenModel
from cluster.errors import ConfigError, LayoutError
from cluster.small_files import OPTIONS, ModelSource, read_source
from storage.checkpoints.checkpoint_files import HEADERS_KEY
from storage.errors import LongshoreError
from storage.host.processes import pid_namespace
from storage.problems import quote

_KEYS = {"model_uri", "revision", *OPTIONS}

Weights = Iterator[tuple[str, torch.Tensor]]


def source_of(folder: str, extra: dict[str, Any]) -> ModelSource:
    """Return where the weights are: as the model's folder says, else as `--model-loader-extra-config` says.

    A folder with safetensors files of its own is its own source. The other keys than `model_uri` change what the folder
    says. Raises ConfigError, also when folder and `model_uri` name different places.
    """
    unknown = set(extra) - _KEYS
    if unknown:
        raise ConfigError(
            f"unknown keys in model_loader_extra_config: {', '.join(map(quote, sorted(unknown)))}",
            hint=f"known are {', '.join(sorted(_KEYS))}",
        )
    found = read_source(folder)
    files = os.listdir(folder) if found is None and os.path.isdir(folder) else []
    if any(name.endswith(".safetensors") and name != HEADERS_KEY for name in files):
        found = ModelSource(folder, "", {})
    if found is None and "model_uri" in extra:
        found = ModelSource(extra["model_uri"], "", {})
    if found is None:
        raise ConfigError(
            f"{quote(folder)} does not say where the weights are",
            hint="make the folder with `longshore config-folder URI`, or pass "
            '--model-loader-extra-config \'{"model_uri": "s3://..."}\'',
        )
    if extra.get("model_uri", found.model_uri) != found.model_uri:
        raise ConfigError(
            f"{quote(folder)} has its weights in {quote(found.model_uri)}, and model_loader_extra_config names others",
            hint="leave `model_uri` out of --model-loader-extra-config, or name a folder that says nothing",
            model_uri=extra["model_uri"],
        )
    options = {name: value for name, value in extra.items() if name in OPTIONS}
    return ModelSource(found.model_uri, extra.get("revision", found.revision), {**found.options, **options})


def reader_group(engine: str, rank: int, ranks: int, group: Any) -> dict[str, Any]:
    """Return the arguments of `safe_open` by which the ranks of an engine on this machine read as one group.

    Every rank calls it. Args: `group` is a process group of all ranks that works with host memory. {}: this rank is
    alone here.
    """
    if ranks < 2:
        return {}
    # Where Ray starts the workers, none of them knows how many are on its machine. So they tell each other where they
    # are: those of one PID namespace can share memory. The first worker's random name is the group's.
    place = pid_namespace()
    told: list[tuple[str, str]] = [("", "")] * ranks
    torch.distributed.all_gather_object(told, (uuid.uuid4().hex, place), group=group)
    here = [rank for rank, (_, there) in enumerate(told) if there == place]
    if len(here) < 2:
        return {}
    return {"group": f"{engine} {told[0][0]}", "member": here.index(rank), "members": len(here)}


def fill(model: Any, weights: Weights, load_weights: Callable[[Weights], Any], uri: Callable[[], str]) -> Any:
    """Let an engine's `load_weights` take the lazy tensors, and return its result. `uri` says whose, for messages.

    Raises LayoutError naming the tensor that the model has no place for.
    """
    last = ""

    def named() -> Weights:
        nonlocal last
        for name, tensor in weights:
            last = name
            yield name, tensor

    try:
        with assignments_read():
            loaded = load_weights(named())
        read_assigned(model)
    except (LongshoreError, torch.OutOfMemoryError):
        raise
    except (KeyError, ValueError, RuntimeError, AssertionError, AttributeError) as error:
        if not last:  # nothing was read yet
            raise
        raise LayoutError(
            f"{quote(last)} has no place in the model, has another shape there, or could not be copied: "
            f"{type(error).__name__}: {error}",
            hint="see whether the config is that of these weights",
            uri=uri(),
        ) from error
    return loaded


def log_report(opened: OpenModel, log: logging.Logger) -> None:
    """Log what reading this model has cost."""
    try:
        report = opened.report()
    except LongshoreError:
        return
    shared = "" if report["shared"] else f"; not shared: {report['why_private']}"
    log.info(
        "Loaded %r with Longshore, %s: this process read %d bytes and has used %d bytes of memory at most. Readers "
        "here: %d bytes from the store, %d from shared memory, %d read again%s",
        opened,
        f"verified with {report['hash']}" if report["hash"] else "not verified, as the model is not published",
        report["read_bytes"],
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        report["store_bytes"],
        report["cached_bytes"],
        report["refetched_bytes"],
        shared,
    )
