"""Checks of an object store: it answers, with these credentials, and its clock agrees with ours."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any

from cluster.config import Config
from cluster.doctor.check import Check
from cluster.request import StoreOptions
from cluster.units import show_bytes
from storage.checkpoints.manifest import MANIFEST_KEY
from storage.stores.object_store import ByteRange, ObjectStore, read_bytes
from storage.stores.open_store import open_store

READ_TIMEOUT_S = 10.0
LISTED = 1000  # objects looked at
READ_BYTES = 16
MAX_SKEW_S = 300.0  # S3 refuses signatures that are 15 minutes off; this is early enough to say so


def check_store(uri: str | None, store_args: dict[str, Any]) -> Iterator[Check]:
    """List, stat and read a few bytes under `uri`. Raises the StoreError of the first step that fails."""
    if uri is None:
        yield Check("store", "skip", "no URI was given: longshore doctor s3://bucket/model")
        return
    ref, _ = StoreOptions(**store_args).resolve(uri)
    Config.from_env().source_rules().check(ref)
    if ref.scheme == "s3" and ref.endpoint_url:
        yield check_clock(ref.endpoint_url)
    with closing(open_store(ref, read_timeout_s=READ_TIMEOUT_S)) as store:
        yield from check_objects(store)


def check_objects(store: ObjectStore) -> Iterator[Check]:
    """What is under the store's root, and that it can be read."""
    found = list(islice(store.list(), LISTED))
    if not found:
        yield Check("store", "warn", f"{store.uri} answers and lists nothing", "is the path right?")
        return
    more = "at least " if len(found) == LISTED else ""
    yield Check("store", "ok", f"{store.uri}: {more}{len(found)} objects")
    keys = {info.key: info for info in found}
    shards = [key for key in keys if key.endswith(".safetensors")]
    wanted = MANIFEST_KEY if MANIFEST_KEY in keys else next(iter(shards), found[0].key)
    info = store.stat(wanted)
    started_s = time.monotonic()
    read_bytes(store, wanted, ByteRange(0, min(READ_BYTES, info.size_bytes)), etag=info.etag)
    took_ms = 1000 * (time.monotonic() - started_s)
    yield Check("read", "ok", f"{wanted} ({show_bytes(info.size_bytes)}) in {took_ms:.0f} ms, version {info.etag}")
    if MANIFEST_KEY in keys:
        yield Check("model", "ok", "published: chunks have digests")
    elif shards:
        hint = "`longshore publish` writes a manifest; without one a load can check lengths and versions only"
        yield Check("model", "warn", f"{len(shards)} safetensors files, no manifest", hint)
    else:
        yield Check("model", "skip", "no safetensors files directly under this URI")


def check_clock(endpoint_url: str) -> Check:
    """The store's Date header against this machine's clock; a signature depends on it."""
    request = urllib.request.Request(endpoint_url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=READ_TIMEOUT_S) as answer:
            date = answer.headers.get("Date")
    except urllib.error.HTTPError as error:  # refused without a signature, and dated all the same
        with error:
            date = error.headers.get("Date")
    except (OSError, ValueError) as error:
        return Check("clock", "skip", f"{endpoint_url} gave no answer to compare with: {error}")
    try:
        skew_s = time.time() - parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return Check("clock", "skip", "the store sends no date")
    detail = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the store"
    if abs(skew_s) > MAX_SKEW_S:
        return Check("clock", "fail", detail, "signed requests will be refused: set this machine's clock (NTP)")
    return Check("clock", "ok", detail)
