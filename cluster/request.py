"""The request for one load, and how it is made from the user's options and URI.

LoadOptions --make_request--> LoadRequest --> coordinator
URI --StoreOptions.resolve--> StoreRef --open_uri, open_destination--> ObjectStore

`with_live_rules` repeats a request with layout rules for model families without a built-in table, from the caller's
installation of transformers. The planner runs where the store can be reached. That may be another machine, where
transformers is not installed. So the planner raises UnknownFamily with the family's name:

do(request) --UnknownFamily("olmo2")--> AutoConfig's class for "olmo2" --> do(request with layout_rules)

Only the name comes from the store. It selects a config class of the installed library, and that class's plan. Nothing
is downloaded, and no code of a model's repository runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, TypeVar

from cluster.errors import ConfigError, UnknownFamily
from cluster.fit.device_map import DeviceKey
from cluster.fit.options import DeviceMapOptions, FitOptions, FitTry
from cluster.layouts.families import Rows, rows_of_plan
from cluster.layouts.mesh import Layout
from cluster.layouts.rules import read_rules
from cluster.options import LoadOptions, device_of
from cluster.precision.recipes import Precision
from storage.checkpoints.checkpoint import split_model_uri
from storage.errors import InvalidUri, StoreError, UnsupportedStore
from storage.problems import quote
from storage.publishing.signing import trusted_key
from storage.store_ref import ALIASES, DEFAULT_SCHEMES, Credentials, SourceRules, StoreRef, check_printable, parse_uri
from storage.store_ref import StoreAccess as StoreAccess
from storage.stores.object_store import ObjectStore
from storage.stores.open_store import open_store


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A client's request for a load, as the coordinator gets it."""

    uri: str  # as given, without secrets
    store: StoreAccess
    only_key: str | None  # the URI named one file under the root
    layout: Layout
    device: str  # "cpu" or "cuda"
    layout_rules: dict[str, str] | None
    keep: bool
    client_id: str
    wait_for_resources_s: float
    placement: str = "auto"  # "via_arena", "direct", or "auto": see `placement_reason`
    placement_group: Any = None  # ray PlacementGroup of the caller's; rank i takes bundle i
    trusted_keys: tuple[str, ...] = ()  # public keys, base64; empty: as the cluster's settings say
    fit: FitOptions = field(default_factory=FitOptions)
    precision: Precision = field(default_factory=Precision)
    device_map: DeviceMapOptions | None = None  # one rank with several devices
    node_memory: tuple[tuple[DeviceKey, int], ...] = ()  # limits of that map where none were given, once they are known
    tried: tuple[FitTry, ...] = ()  # of fit="auto", once decided: its steps, the last of them taken
    signed_name: str = ""  # under which the manifest must be signed, if it must be; "": the path of the URI
    revision: str = ""  # the only one that will do; "": what is stored
    auto_identity: str = ""  # of fit="auto", once decided: that of the request as it was asked

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.layout.ranks

    @property
    def mapping(self) -> DeviceMapOptions | None:
        """The device map with the limits that are known so far."""
        if self.device_map is None or not self.node_memory:
            return self.device_map
        return replace(self.device_map, max_memory=self.node_memory, is_all=self.device_map.max_memory is None)

    @property
    def gpus_per_rank(self) -> int:
        """Number of GPUs of a rank's worker when its device is "cuda"."""
        return max(1, (self.mapping.gpus or 0) if self.mapping else 0)

    @property
    def is_local(self) -> bool:
        """True where the model is local files, which the kernel's page cache keeps."""
        return self.store.ref.scheme == "file"

    @property
    def node_placement(self) -> str:
        """The placement that nodes and ranks are given. A GPU's memory cannot receive, so nothing is direct there."""
        return "via_arena" if self.device == "cuda" else self.placement

    def placement_reason(self, *, direct: bool, received: bool = True) -> str:
        """Return why a load went past the arena or not.

        `direct`: a node chose to let ranks receive what they alone want. `received`: there was such a chunk to fetch.
        """
        if self.device == "cuda":
            return "a GPU's memory cannot receive"
        if direct and not received:
            return "no rank alone had a whole chunk to fetch"
        if self.placement != "auto":
            return "as asked"
        if not direct:
            return "each node can keep its share"
        return "the kernel's page cache keeps local files" if self.is_local else "a node cannot keep its share"

    def identity(self) -> str:
        """Return a text that is equal for requests that can share a resident model, whatever its revision."""
        if self.auto_identity:
            return self.auto_identity
        rules = list((self.layout_rules or {}).items())  # in their order: the first match wins
        group = getattr(self.placement_group, "id", None)
        return repr(
            (
                self.store.ref.identity(),
                self.only_key,
                self.layout,
                self.device,
                rules,
                None if group is None else group.hex(),
                sorted(self.trusted_keys),  # who checks signatures never shares with who did not
                self.signed_name,
                self.precision,
                self.device_map,
                self.fit.identity(),  # nor who takes what fits with who takes nothing else
            )
        )


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """A client's request to update a resident model in place, as the coordinator gets it."""

    update_id: str  # the client chooses it, so a repeated request begins nothing anew
    client_id: str
    uri: str = ""  # of the new revision; "": the model's own, read as the model is read
    store: StoreAccess | None = None
    only_key: str | None = None
    signed_name: str = ""
    revision: str = ""  # the only one that will do; "": what is stored
    streaming: bool = False

    def target(self, now: LoadRequest) -> LoadRequest:
        """Return the request of a load that would give the new revision. `now`: that of the resident model.

        Without credentials of its own, a place in the same bucket is read with the model's.
        """
        if self.store is None:
            return replace(now, revision=self.revision, signed_name=self.signed_name or now.signed_name)
        ref, credentials = self.store.ref, self.store.credentials
        if credentials is None and replace(ref, prefix="") == replace(now.store.ref, prefix=""):
            credentials = now.store.credentials
        return replace(
            now,
            uri=self.uri,
            store=StoreAccess(ref, credentials),
            only_key=self.only_key,
            signed_name=self.signed_name,
            revision=self.revision,
        )


# Taken for a local path without this check: "s3:/models/x", "meta-llama/Llama-3-8B".
_WITHOUT_SLASHES = re.compile(rf"({'|'.join([*ALIASES, *DEFAULT_SCHEMES.split(',')])}):(?!//)(.+)", re.I | re.S)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/\w[\w.-]*/?")


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Access to a store beside its URI. None: taken from the environment."""

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    anonymous: bool | None = None  # None: False, and in an update as the model is read

    def resolve(self, uri: str | os.PathLike[str], *, new: bool = False) -> tuple[StoreRef, str | None]:
        """Return the store that `uri` names, and the file in it when `uri` names a single safetensors file.

        `new`: a local folder need not exist yet. Raises InvalidUri, also for a URI with a query, a fragment, a user
        or a password; UnsupportedStore.
        """
        text = as_text(uri)
        check_printable(text)
        root, only_key = split_model_uri(text)
        if not new and _HUB_NAME.fullmatch(root) and not os.path.lexists(root.partition("/")[0]):
            raise InvalidUri(
                f"no such file or folder here: {quote(root)}",
                hint=f"write hf://{root.rstrip('/')} for that model of the Hugging Face Hub",
                folder=os.getcwd(),
            )
        return self.place(root), only_key

    def place(self, uri: str | os.PathLike[str]) -> StoreRef:
        """Return the store that `uri` names as a folder, which may be new. Raises InvalidUri, UnsupportedStore."""
        text = as_text(uri)
        _check_local(text)
        try:
            return parse_uri(
                text,
                endpoint_url=self.endpoint_url,
                region=self.region,
                profile=self.profile,
                anonymous=bool(self.anonymous),
            )
        except UnsupportedStore:
            raise
        except StoreError as error:  # no store was asked: the text is wrong
            raise InvalidUri(error.message, hint=error.hint, **error.details) from error


def _check_local(text: str) -> None:
    """Raise InvalidUri for a URI that lacks slashes after its scheme, unless there is a local file of that name."""
    match = _WITHOUT_SLASHES.fullmatch(text)
    if match is not None and not os.path.lexists(text):
        scheme, rest = match[1].lower(), match[2].lstrip("/")
        if re.search("[?#@]", rest):  # maybe a secret
            rest = "bucket/prefix"
        elif scheme == "file":
            rest = os.path.abspath(match[2])
        meant = f"{scheme}://{rest}"
        raise InvalidUri(f"no slashes after {scheme}:, and no local file of that name", hint=f"write {quote(meant)}")


def as_text(uri: object) -> str:
    """Return a URI or a path as text. Raises ConfigError for another type, InvalidUri for an empty text."""
    text = os.fspath(uri) if isinstance(uri, os.PathLike) else uri
    if not isinstance(text, str):
        raise ConfigError(f"a URI or a path is wanted, not {type(text).__name__}")
    if not text.strip():
        raise InvalidUri("an empty URI", hint="name a folder, or write s3://bucket/prefix")
    return text


def make_request(options: LoadOptions, trusted_keys: Sequence[str | os.PathLike[str]] = ()) -> LoadRequest:
    """Return the request that goes to the coordinator.

    Args:
        options: The load as it was asked for.
        trusted_keys: Public keys in base64, or files with one, where the options name none: those of the settings.

    Returns:
        The request, without a `client_id`.

    Raises:
        ConfigError: A file of layout rules cannot be read, or holds no rules.
        InvalidKey: A trusted key is none.
        InvalidUri: No store can have that URI.
        UnsupportedStore: Nothing serves that scheme.
    """
    rules = read_rules(options.layout_rules)
    mapping, credentials = options.mapping(), options.credentials
    ref, only_key = options.part(StoreOptions).resolve(options.model_uri)
    if credentials is not None:
        ref = replace(ref, options=credentials.place())
    return LoadRequest(
        uri=f"{ref.uri}/{only_key}" if only_key else ref.uri,
        store=StoreAccess(ref, credentials),
        only_key=only_key,
        layout=options.layout(),
        device=device_of(options.device, mapping),
        layout_rules=rules,
        keep=options.keep,
        client_id="",
        wait_for_resources_s=float(options.wait_for_resources_s),
        placement=options.placement,
        placement_group=options.placement_group,
        trusted_keys=read_keys(trusted_keys if options.trusted_keys is None else options.trusted_keys),
        signed_name=options.signed_name or "",
        revision=options.revision or "",
        precision=options.precision(),
        device_map=mapping,
        fit=options.fitting(),
    )


def read_keys(sources: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Return trusted keys, each once, from base64 or files, with `:NAME` behind (`trusted_key`). Raises InvalidKey."""
    return tuple(dict.fromkeys(trusted_key(source) for source in sources))


def open_uri(
    uri: str | os.PathLike[str],
    options: StoreOptions,
    credentials: Credentials | None,
    read_timeout_s: float,
    rules: SourceRules | None = None,
) -> tuple[ObjectStore, str | None]:
    """Return an open store for `uri`, which the caller closes, and the file in it when `uri` names one.

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
    """Return an open store for the folder that `source` is copied to. A local folder is made.

    Raises as `check_destination` and `open_folder` do.
    """
    return open_folder(check_destination(uri, source, options, credentials, rules), credentials, read_timeout_s)


def open_folder(ref: StoreRef, credentials: Credentials | None, read_timeout_s: float) -> ObjectStore:
    """Return an open store to write to. A local folder is made. Raises StoreError when that cannot be made."""
    if ref.scheme == "file":
        try:
            os.makedirs(ref.prefix, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make the folder: {error.strerror}", path=ref.prefix) from error
    return open_store(ref, credentials, read_timeout_s=read_timeout_s)


def check_destination(
    uri: str | os.PathLike[str],
    source: str | os.PathLike[str],
    options: StoreOptions,
    credentials: Credentials | None,
    rules: SourceRules | None = None,
) -> StoreRef:
    """Return the folder that `source` is copied to. Nothing is made there.

    Raises ConfigError for a file, and for a folder inside the source or around it, as the copy would become part of its
    source. Raises SourceRefused.
    """
    ref, only_key = options.resolve(uri, new=True)
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
    return ref


def is_nested(outer: StoreRef, inner: StoreRef) -> bool:
    """Return whether `inner` is below `outer` and not `outer` itself. Links of local paths are followed."""
    if replace(outer, prefix="") != replace(inner, prefix=""):
        return False
    prefixes = [outer.prefix, inner.prefix]
    if outer.scheme == "file":
        prefixes = [os.path.realpath(prefix) for prefix in prefixes]
    parts = [[part for part in prefix.split("/") if part] for prefix in prefixes]
    return len(parts[0]) < len(parts[1]) and parts[1][: len(parts[0])] == parts[0]


Answer = TypeVar("Answer")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


def with_live_rules(request: LoadRequest, do: Callable[[LoadRequest], Answer]) -> Answer:
    """Return `do(request)`. For a model of an unknown family, repeat it with the rules from transformers.

    Exceptions of `do` pass through. The hint of UnknownFamily says where rules were looked for.
    """
    try:
        return do(request)
    except UnknownFamily as error:
        family, text_family = (str(error.details.get(key) or "") for key in ("family", "text_family"))
        if find_spec("transformers") is None:
            raise _with_hint(
                error, "its rules can be read from transformers, which is not installed: pip install transformers"
            ) from None
        try:
            rows = live_rows(family, text_family)
        except Exception as problem:  # the import of a library may raise anything
            hint = f"transformers is installed, but its plan cannot be read ({type(problem).__name__}: {problem})"
            raise _with_hint(error, hint) from problem
        if not rows:
            raise _with_hint(error, f"transformers {_version()} has no tensor-parallel plan for it") from None
        own = request.layout_rules or {}
        more = {pattern: str(rule) for pattern, rule in rows if pattern not in own}
        again = replace(request, layout_rules={**own, **more})
    try:
        return do(again)
    except UnknownFamily as error:
        raise _with_hint(
            error, f"the plan of transformers {_version()} was used, but does not name these tensors"
        ) from None


def live_rows(family: str, text_family: str = "") -> Rows:
    """Return the rules of transformers for a model type, or none if it has no plan. Needs no torch."""
    config = _config_class(family)
    nested = _config_class(text_family) or _part_of(config, "text_config")
    # In a multimodal model, the config of the language model has the plan.
    return _rows_of_class(nested, nested=True) or _rows_of_class(config, nested=False)


def _config_class(family: str) -> Any:
    """Return the config class of transformers for a model type, or None."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family] if _NAME.fullmatch(family) and family in CONFIG_MAPPING else None


def _part_of(config: Any, name: str) -> Any:
    """Return the class of a nested config. Different versions of transformers name the table differently."""
    for table in ("sub_configs_defaults", "sub_configs"):
        parts = getattr(config, table, None)
        if isinstance(parts, dict) and name in parts:
            return parts[name]
    return None


def _rows_of_class(config: Any, *, nested: bool) -> Rows:
    plan, expert_plan = (getattr(config, f"base_model_{kind}_plan", None) or {} for kind in ("tp", "ep"))
    return rows_of_plan(plan, expert_plan, nested=nested) if plan else ()


def _with_hint(error: UnknownFamily, hint: str) -> UnknownFamily:
    return UnknownFamily(error.message, hint=f"{hint}. {error.hint}", **error.details)


def _version() -> str:
    from importlib.metadata import version

    return version("transformers")
