"""From the arguments of a verb to a checked request. Pure but for reading the environment where a URI is resolved."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.device_map.options import GivenMap, GivenMemory, parse_device_map
from cluster.errors import ConfigError
from cluster.fit.options import STRICT, FitOptions
from cluster.layouts.mesh import Layout
from cluster.layouts.rules_file import LayoutRules, read_rules
from cluster.load_request import LoadRequest, StoreAccess
from cluster.precision.recipes import Precision
from storage.checkpoints.checkpoint import split_model_uri
from storage.errors import InvalidUri, StoreError, UnsupportedStore
from storage.object_store import ObjectStore
from storage.open_store import open_store
from storage.publishing.signing_keys import public_key
from storage.source_rules import SourceRules
from storage.store_ref import Credentials, StoreRef, parse_uri

DEVICES = ("auto", "cpu", "cuda")
PLACEMENTS = ("auto", "via_arena", "direct")


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How to reach a store beyond its URI; None means what the environment says."""

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    anonymous: bool = False

    def resolve(self, uri: str | os.PathLike[str]) -> tuple[StoreRef, str | None]:
        """The store that `uri` names, and the one file in it when it names a single safetensors file."""
        root, only_key = split_model_uri(as_text(uri))
        return self.place(root), only_key

    def place(self, uri: str | os.PathLike[str]) -> StoreRef:
        """The store that `uri` names as a folder. Raises InvalidUri, UnsupportedStore."""
        try:
            return parse_uri(
                as_text(uri),
                endpoint_url=self.endpoint_url,
                region=self.region,
                profile=self.profile,
                anonymous=self.anonymous,
            )
        except UnsupportedStore:
            raise
        except StoreError as error:  # no store was asked: it is what was written that is wrong
            raise InvalidUri(error.message, hint=error.hint, **error.details) from error


def is_seconds(given: object) -> bool:
    """Whether it is a finite number from 0 on."""
    return isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given) and given >= 0


def as_text(uri: object) -> str:
    """A URI or a local path, also as a `pathlib.Path`. Raises ConfigError for what is neither, InvalidUri for none."""
    text = os.fspath(uri) if isinstance(uri, os.PathLike) else uri
    if not isinstance(text, str):
        raise ConfigError(f"a URI or a path is wanted, not {text!r:.40}")
    if not text.strip():
        raise InvalidUri("an empty URI", hint="name a folder, or write s3://bucket/prefix")
    return text


def make_request(
    uri: str | os.PathLike[str],
    *,
    layout: Layout,
    store_options: StoreOptions,
    credentials: Credentials | None,
    layout_rules: LayoutRules | None,
    device: str = "auto",
    keep: bool = False,
    wait_for_resources_s: float = 0.0,
    placement: str = "auto",
    placement_group: Any = None,
    trusted_keys: Sequence[str | os.PathLike[str]] = (),
    fit: FitOptions | None = None,
    precision: Precision | None = None,
    device_map: GivenMap | None = None,
    max_memory: GivenMemory | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
) -> LoadRequest:
    """A request that can be meant.

    `trusted_keys`: public keys in base64, or files with one, read here; so is a file of `layout_rules`. Raises
    ConfigError for arguments, InvalidKey, InvalidUri and UnsupportedStore for a URI that no store can have.
    """
    if device not in DEVICES:
        raise ConfigError(f"device must be one of {', '.join(DEVICES)}, not {device!r:.40}")
    if placement not in PLACEMENTS:
        raise ConfigError(f"placement must be one of {', '.join(PLACEMENTS)}, not {placement!r:.40}")
    if not is_seconds(wait_for_resources_s):
        raise ConfigError(f"wait_for_resources_s must be 0 or more seconds, not {wait_for_resources_s!r:.40}")
    rules = read_rules(layout_rules)
    fit, precision = fit or FitOptions(), precision or Precision()
    if fit.mode == STRICT and not precision.quantization and precision.skip != Precision().skip:
        raise ConfigError("skip_quantization says what is not quantized, but there is no quantization")
    mapping = parse_device_map(device_map, max_memory, offload_folder, layout, device)
    if mapping is not None and mapping.gpus is not None:
        device = "cuda" if mapping.gpus else "cpu"
    fit.check_device(device)
    ref, only_key = store_options.resolve(uri)
    return LoadRequest(
        uri=f"{ref.uri}/{only_key}" if only_key else ref.uri,
        store=StoreAccess(ref, credentials),
        only_key=only_key,
        layout=layout,
        device=device,
        layout_rules=rules,
        keep=keep,
        client_id="",
        wait_for_resources_s=float(wait_for_resources_s),
        placement=placement,
        placement_group=placement_group,
        trusted_keys=read_keys(trusted_keys),
        precision=precision,
        device_map=mapping,
        fit=fit,
    )


def read_keys(sources: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Public keys in base64, each once, from base64 or files. Raises ConfigError, InvalidKey."""
    if isinstance(sources, str | bytes):
        raise ConfigError("trusted_keys is a list of public keys, not one text")
    if not isinstance(sources, Iterable):
        raise ConfigError(f"trusted_keys is a list of public keys, not {sources!r:.60}")
    sources = list(sources)
    wrong = [source for source in sources if not isinstance(source, str | os.PathLike)]
    if wrong:
        raise ConfigError(f"a trusted key is base64 or a file, not {wrong[0]!r:.60}")
    return tuple(dict.fromkeys(public_key(source) for source in sources))


def open_uri(
    uri: str | os.PathLike[str],
    options: StoreOptions,
    credentials: Credentials | None,
    read_timeout_s: float,
    rules: SourceRules | None = None,
) -> tuple[ObjectStore, str | None]:
    """An open store for `uri`, which the caller closes, and the one file in it when it names one.

    Raises SourceRefused.
    """
    ref, only_key = options.resolve(uri)
    (rules or SourceRules()).check(ref, credentials)
    return open_store(ref, credentials, read_timeout_s=read_timeout_s), only_key


def open_destination(
    uri: str | os.PathLike[str],
    source: str | os.PathLike[str],
    options: StoreOptions,
    credentials: Credentials | None,
    read_timeout_s: float,
    rules: SourceRules | None = None,
) -> ObjectStore:
    """An open store for the folder that a copy of `source` goes to; a local one is made.

    Raises ConfigError for a file, and for a place inside the source or around it: the copy would become part of
    what is copied. SourceRefused, StoreError when a local folder cannot be made.
    """
    ref, only_key = options.resolve(uri)
    if only_key is not None:
        raise ConfigError("the destination must be a folder, not a file", dest=os.fspath(uri))
    (rules or SourceRules()).check(ref, credentials)
    origin, _ = options.resolve(source)
    if is_nested(origin, ref) or is_nested(ref, origin):
        raise ConfigError(
            "source and destination may not be one inside the other",
            hint="copy to a folder beside it, or publish in place without a destination",
            source=origin.uri,
            dest=ref.uri,
        )
    if ref.scheme == "file":
        try:
            os.makedirs(ref.prefix, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make the folder: {error.strerror}", path=ref.prefix) from error
    return open_store(ref, credentials, read_timeout_s=read_timeout_s)


def is_nested(outer: StoreRef, inner: StoreRef) -> bool:
    """Whether `inner` is a place below `outer`, and not `outer` itself; links are followed for local paths."""
    if replace(outer, prefix="") != replace(inner, prefix=""):
        return False
    prefixes = [outer.prefix, inner.prefix]
    if outer.scheme == "file":
        prefixes = [os.path.realpath(prefix) for prefix in prefixes]
    parts = [[part for part in prefix.split("/") if part] for prefix in prefixes]
    return len(parts[0]) < len(parts[1]) and parts[1][: len(parts[0])] == parts[0]
