"""A checkpoint of another format as the places of its numbers: which bytes of which file belong to which tensor.

Formats read the source through `PinnedStore`. So none of them repeats requests or compares versions itself. They read
its files with `read_each`, so that all broken ones are in one error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from cluster.errors import BrokenCheckpointFile, ConvertError, UnsafePickle
from storage.errors import InvalidHeader, ObjectChanged
from storage.problems import Problems, quote
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore, Upload
from storage.stores.requests import RetryPolicy, with_retries


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


class PinnedStore:
    """A store whose requests are repeated, and whose objects must stay the versions that were seen first.

    Thread-safe. An object whose store names no versions is not compared.
    """

    def __init__(self, store: ObjectStore, policy: RetryPolicy) -> None:
        self.uri = store.uri
        self._store, self._policy = store, policy
        self._etags: dict[str, str] = {}
        self._lock = threading.Lock()

    def stat(self, key: str) -> ObjectInfo:
        return self._pinned(with_retries(lambda: self._store.stat(key), self._policy))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        yield from map(self._pinned, with_retries(lambda: [*self._store.list(prefix)], self._policy))

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        wanted = etag or self._etags.get(key)
        found = with_retries(lambda: self._store.read_into(key, byte_range, buffer, etag=wanted), self._policy)
        self._pin(key, found)
        return found

    def put(self, key: str, data: bytes) -> ObjectInfo:
        return self._store.put(key, data)

    def upload(self, key: str) -> AbstractContextManager[Upload]:
        return self._store.upload(key)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def close(self) -> None:
        self._store.close()

    def _pinned(self, info: ObjectInfo) -> ObjectInfo:
        self._pin(info.key, info.etag)
        return info

    def _pin(self, key: str, etag: str | None) -> None:
        """Note the version of an object. Raises ObjectChanged if another one was seen before."""
        if etag is None:
            return
        with self._lock:
            first = self._etags.setdefault(key, etag)
        if first != etag:
            raise ObjectChanged(
                "a file of the source was replaced while it was read",
                hint="convert again when nobody writes to the source",
                uri=self.uri,
                key=key,
            )


_Read = TypeVar("_Read")


def read_each(
    read: Callable[[str], _Read], files: Iterable[str], problems: Problems, readers: int
) -> tuple[dict[str, _Read], type[ConvertError]]:
    """Read files in several threads, and list all that are broken.

    Args:
        read: Returns what a file contains, by its key. Its ConvertError or InvalidHeader is a problem of the file.
        files: Keys of the files.
        problems: Gets a sentence for each file that cannot be read.
        readers: Threads.

    Returns:
        What the others contain, in the order of `files`; and the error to raise if there are problems, which is
        BrokenCheckpointFile if a file is one of them.

    Raises:
        UnsafePickle: A file names code that no checkpoint needs.
        StoreError: The store did not answer.
    """

    def attempt(file: str) -> _Read | ConvertError | InvalidHeader:
        try:
            return read(file)
        except UnsafePickle:
            raise
        except (ConvertError, InvalidHeader) as error:
            return error

    found: dict[str, _Read] = {}
    hints: set[str] = set()
    kind: type[ConvertError] = ConvertError
    files = list(files)
    with ThreadPoolExecutor(readers) as pool:
        for file, result in zip(files, pool.map(attempt, files), strict=True):
            if not isinstance(result, ConvertError | InvalidHeader):
                found[file] = result
                continue
            kind = BrokenCheckpointFile
            text = result.message if quote(file) in result.message else f"{quote(file)}: {result.message}"
            problems.add(f"{text} ({result.hint})" if result.hint and result.hint not in hints else text)
            hints.add(result.hint)
    return found, kind


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
