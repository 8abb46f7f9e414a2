"""A checkpoint of another format as the places of its numbers: which bytes of which file belong to which tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storage.stores.object_store import ObjectInfo


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A part of a tensor at a place of one file."""

    file: str  # key below the root of the source
    offset_bytes: int  # of its first element in the file
    start: tuple[int, ...]  # index of its first element in the tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None  # in elements; None: row-major without gaps
    flat: bool = False  # start and shape are one number each, and count elements of the flattened tensor


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor and where its parts are."""

    name: str
    dtype: str  # safetensors' own name: "BF16", "F32"...
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]
    refuses_nan: bool = False  # the optimizer's own copy: a NaN there means that the training failed


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint of another format, ready to be converted."""

    format: str  # its name, for messages
    tensors: tuple[SourceTensor, ...]
    extra_files: Mapping[str, str]  # config, tokenizer: name in the result -> key in the source


# Beside the weights: config, tokenizer, chat template. Folders where trainers put them.
_EXTRA_FOLDERS = ("", "huggingface/", "hf/")
_EXTRA_ENDINGS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_NOT_EXTRA = ("metadata.json", "latest_checkpointed_iteration.txt", "trainer_state.json")
_MAX_EXTRA_BYTES = 64 << 20


def other_files(listing: Mapping[str, ObjectInfo], folder: str = "") -> dict[str, str]:
    """Return the files for config and tokenizer that are beside the weights.

    Args:
        listing: All objects of the source, by key.
        folder: The folder of the weights, with a slash at its end. Its parents and their `huggingface/` are looked at.

    Returns:
        Name in the result -> key. A file that is nearer to the weights wins.
    """
    found: dict[str, str] = {}
    parents = ["", *(folder[: end + 1] for end, one in enumerate(folder) if one == "/")]
    for parent in parents:
        for inner in _EXTRA_FOLDERS:
            for key, info in listing.items():
                name = key.removeprefix(parent + inner)
                in_folder = key.startswith(parent + inner) and "/" not in name and name.endswith(_EXTRA_ENDINGS)
                if in_folder and name not in _NOT_EXTRA and info.size_bytes <= _MAX_EXTRA_BYTES:
                    found[name] = key
    return found
