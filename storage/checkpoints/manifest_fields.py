"""The fields of a manifest: its version, bounded numbers, digests, and paths that are safe to use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from storage.checkpoints.dtypes import MAX_ELEMENTS
from storage.errors import StoreError
from storage.object_store import check_key
from storage.problems import quote

MANIFEST_VERSION: Literal[1] = 1
MAX_PATH_CHARACTERS = 1024  # what S3 allows in bytes


def is_safe_path(key: str) -> bool:
    """Whether a key may stand in a manifest: no control characters, nothing that looks like a scheme or drive."""
    return key.isprintable() and ":" not in key.partition("/")[0] and len(key) <= MAX_PATH_CHARACTERS


def _safe_path(path: str) -> str:
    try:
        check_key(path)
    except StoreError as error:
        raise PydanticCustomError(
            "path", "not a relative path below the model: {path}", {"path": quote(path)}
        ) from error
    if not is_safe_path(path):
        raise PydanticCustomError("path", "unsafe characters in path {path}", {"path": quote(path)})
    return path


Size = Annotated[int, Field(ge=0, le=MAX_ELEMENTS)]
Hex = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2})+$")]
ETag = Annotated[str, StringConstraints(max_length=1024)] | None
Path = Annotated[str, StringConstraints(max_length=MAX_PATH_CHARACTERS), AfterValidator(_safe_path)]
