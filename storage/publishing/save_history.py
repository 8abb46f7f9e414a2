"""The history of the saves at one URI, and the removal of older revisions.

    longshore.saves.json     [["save id", "number of its training state or empty"], ...], the newest last

Names of files contain a random save id, so only the history tells which is older. A revision that the history does not
name, because it is older than the history or the history was lost, counts as the oldest. What the manifest names stays
in every case.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from storage.checkpoints.checkpoint_files import HISTORY_KEY, read_whole
from storage.errors import ObjectNotFound, StoreError
from storage.publishing.saves import (
    SavesReport,
    abort_uploads,
    list_saves,
    published,
    remove_leftovers,
    unused_files,
    writes_parts,
)
from storage.stores.object_store import ObjectStore
from storage.stores.requests import RetryPolicy, with_retries

MAX_SAVES = 1000  # in the history
MAX_HISTORY_BYTES = 1 << 20
_Id = Annotated[str, StringConstraints(pattern=r"^[0-9a-z]{0,64}$")]
_HISTORY = TypeAdapter(Annotated[tuple[tuple[_Id, _Id], ...], Field(max_length=MAX_SAVES)])
_LOG = logging.getLogger("longshore.save")


def remember_save(
    store: ObjectStore,
    save_id: str,
    training: str,
    keep_last: int | None,
    revision_of: Callable[[str], str | None],
    policy: RetryPolicy,
) -> tuple[str, ...]:
    """Add a save to the history, and remove the files of older ones.

    A store that refuses is only logged: the history decides nothing about what is published.

    A save calls it twice: for the revision that it replaces before its manifest is written, as the process of that
    revision may have been killed before it did so itself, and for its own after that.

    Args:
        store: Root of the checkpoint.
        save_id: The save, as in its files' names.
        training: Number of its training state; "" without one.
        keep_last: Number of saves whose files stay, with this one. None: all.
        revision_of: Returns the save id in the name of a file, or None for another file.
        policy: Retries of requests.

    Returns:
        The keys that were removed.
    """
    try:
        history = list(read_history(store, policy))
        if (save_id, training) not in history[-1:]:
            history = [*(one for one in history if one[0] != save_id), (save_id, training)][-MAX_SAVES:]
            with_retries(lambda: store.put(HISTORY_KEY, json.dumps(history).encode()), policy)
        return () if keep_last is None else _remove(store, history[-keep_last:], revision_of, policy)
    except StoreError as error:
        _LOG.warning("the history of saves could not be written, or older revisions could not be removed: %s", error)
        return ()


def interrupted_saves(
    store: ObjectStore, revision_of: Callable[[str], str | None], policy: RetryPolicy, *, clean: bool = False
) -> SavesReport:
    """Return what interrupted saves left, and remove it if `clean`. Files of revisions in the history stay.

    A save that runs at the same time looks like an interrupted one. Without its journal it ends with SaveConflict.

    Raises UnsupportedStore and StoreError.
    """
    writes_parts(store)
    kept = read_history(store, policy)
    report = list_saves(store, revision_of, policy, kept)
    if not clean:
        return report
    remove_leftovers(store, (item for item in report.leftovers if item.kind == "journal"), policy)
    again = list_saves(store, revision_of, policy, kept)  # a save may have been published since
    remove_leftovers(store, again.leftovers, policy)
    found = set(again.leftovers)
    removed = tuple(item for item in report.leftovers if item.kind == "journal" or item in found)
    return replace(again, leftovers=removed, cleaned=True)


def read_history(store: ObjectStore, policy: RetryPolicy) -> tuple[tuple[str, str], ...]:
    """Return the saves that the stored history lists, the newest last. Raises StoreError."""
    try:
        info = with_retries(lambda: store.stat(HISTORY_KEY), policy)
    except ObjectNotFound:
        return ()
    return () if info.size_bytes > MAX_HISTORY_BYTES else parse_history(read_whole(store, info, policy))


def parse_history(data: bytes) -> tuple[tuple[str, str], ...]:
    """Return the saves that a history lists, the newest last; none if it is broken or too large."""
    if len(data) > MAX_HISTORY_BYTES:
        return ()
    try:
        return _HISTORY.validate_json(data)
    except ValidationError:
        return ()


def _remove(
    store: ObjectStore,
    kept: list[tuple[str, str]],
    revision_of: Callable[[str], str | None],
    policy: RetryPolicy,
) -> tuple[str, ...]:
    manifest, _ = published(store, policy)
    if manifest is None:
        return ()
    gone = list(unused_files(store, manifest, revision_of, policy, kept))
    for state in sorted({item.revision for item in gone if item.key.startswith("training/")}):
        with contextlib.suppress(StoreError):  # some stores cannot list uploads
            abort_uploads(store, f"training/{state}/model-", policy)  # of a state whose save was interrupted
    remove_leftovers(store, gone, policy)
    return tuple(item.key for item in gone)
