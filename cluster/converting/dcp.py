"""Checkpoints that training scripts wrote with torch's distributed checkpoints (DCP): FSDP, Accelerate, torchtitan.

Names in the files are those of a nested dict of training, which `.metadata` has, too. Without the keys around the model
(`model` in most scripts, and in Accelerate) they are the model's own. What is not part of the model is never read.
`dcp_files` reads the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cluster.converting.dcp_files import METADATA_KEY, read_metadata, read_tensors
from cluster.converting.rank_files import clean_name, refused
from cluster.converting.source import Source, SourceTensor, other_files
from cluster.converting.torch_files import Opaque
from cluster.errors import BrokenCheckpointFile, ConvertError
from storage.problems import Problems, quote
from storage.stores.object_store import ObjectInfo, ObjectStore

DCP = "torch DCP"
_MAX_PATH = 64  # keys around a tensor
# Where the checkpoint was written. Nobody needs it.
_ALLOWED = ("pathlib.PosixPath", "pathlib._local.PosixPath", "torch.distributed.checkpoint.filesystem._StoragePrefix")
_AROUND = ("app", "state")  # keys that scripts put around model and optimizer
_MODEL_KEYS = ("model", "state_dict", "module", "model_state_dict")
_OTHERS = ("optimizer", "optim", "lr_scheduler", "scheduler", "dataloader", "train_state", "optimizers", "ema")
_MODEL_FOLDER = re.compile(r"(?:.*/)?(?:pytorch_model_fsdp_[0-9]+|model|pytorch_model)/")


def folders(listing: Mapping[str, ObjectInfo]) -> list[str]:
    """Return the folders with a `.metadata`, each "" or with a slash at its end."""
    return sorted(
        key.removesuffix(METADATA_KEY) for key in listing if key == METADATA_KEY or key.endswith(f"/{METADATA_KEY}")
    )


def recognise(listing: Mapping[str, ObjectInfo]) -> bool:
    """Return whether a listing has a folder of DCP."""
    return bool(folders(listing))


def read(store: ObjectStore, listing: Mapping[str, ObjectInfo]) -> Source:
    """Return a folder of DCP as a source.

    Args:
        store: The store, with the folder as its root, or one around it (as Accelerate writes it).
        listing: All objects below its root, by key.

    Returns:
        The model's tensors.

    Raises:
        ConvertError: The folder is not complete; the message lists every problem.
        UnsafePickle: A pickle names code that no checkpoint needs.
        StoreError: The store did not answer.
    """
    folder = _choose(store, listing)
    metadata = read_metadata(store, listing, folder, allowed=_ALLOWED)
    names = model_names(_paths(metadata, folder + METADATA_KEY))
    if not names:
        raise ConvertError(f"{store.uri} has no tensors of a model", hint="name the folder with the model's weights")
    problems = Problems()
    found: dict[str, SourceTensor] = {}
    for tensor in read_tensors(store, listing, folder, problems, wanted=names.__contains__, metadata=metadata):
        name = names[tensor.name]
        if name in found:
            problems.add(f"{quote(name)} is there under two keys")
        found[name] = replace(tensor, name=name)
    if problems:
        raise refused(store, DCP, problems)
    return Source(DCP, tuple(found.values()), other_files(listing, folder))


def _choose(store: ObjectStore, listing: Mapping[str, ObjectInfo]) -> str:
    found = folders(listing)
    if "" in found:
        return ""
    models = [folder for folder in found if _MODEL_FOLDER.fullmatch(folder)] if len(found) > 1 else found
    if len(models) == 1:
        return models[0]
    choices = ", ".join(quote(folder.rstrip("/")) for folder in found[:8])
    raise ConvertError(f"{store.uri} has {len(found)} checkpoints of torch DCP", hint=f"name one of: {choices}")


def _paths(metadata: Any, key: str) -> dict[str, tuple[str, ...]]:
    """Return the keys in the nested dict of training for each tensor. Raises BrokenCheckpointFile."""
    try:
        entries, planned = metadata.state["state_dict_metadata"], metadata.state.get("planner_data")
        found = {}
        for name, entry in entries.items():
            if isinstance(entry, Opaque) and entry.name.endswith(".TensorStorageMetadata") and isinstance(name, str):
                path = planned.get(name) if isinstance(planned, dict) else None
                keys = path if isinstance(path, tuple) and len(path) <= _MAX_PATH else ()
                good = bool(keys) and all(isinstance(one, str | int) for one in keys)
                found[name] = tuple(map(str, keys)) if good else (name,)
    except (AttributeError, KeyError, TypeError) as exc:
        raise BrokenCheckpointFile(f"{quote(key)} is not the metadata of a distributed checkpoint") from exc
    return found


def model_names(paths: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the name in the model for each tensor of the checkpoint that belongs to it.

    Args:
        paths: Name in the checkpoint -> keys in the nested dict, or the name alone where the checkpoint has no others.
    """
    known = {name: path[1:] if len(path) > 2 and path[0] in _AROUND else path for name, path in paths.items()}
    keys = {path[0] for path in known.values() if len(path) > 1}
    model = next((key for key in _MODEL_KEYS if key in keys), None)
    if model is not None:
        return {
            name: clean_name(".".join(path[1:])) for name, path in known.items() if len(path) > 1 and path[0] == model
        }
    return {
        name: clean_name(".".join(path)) for name, path in known.items() if path[0].partition(".")[0] not in _OTHERS
    }
