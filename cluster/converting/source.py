"""A checkpoint of another format as the places of its numbers: which bytes of which file belong to which tensor."""

from __future__ import annotations

from dataclasses import dataclass


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
