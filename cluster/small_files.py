"""A local folder that stands for a model in a store: its small files, and where its weights are.

Engines want a folder with `config.json` and the tokenizer. `config_folder` makes one:

    s3://models/llama                 ~/.cache/longshore/configs/llama-<revision>-<options>
      config.json            ------>    config.json            (verified)
      tokenizer.json         ------>    tokenizer.json         (verified)
      2_Dense/model.safetensors         2_Dense/...            (small weights that engines read by themselves)
      model-0000*.safetensors           longshore-headers.safetensors    names, dtypes and shapes, and no weights
                                        longshore.json         URI, revision and options of the store

Engines read the headers of weights when they make their configuration: a checkpoint with an `lm_head` of its own has no
tied embeddings, and of a quantized one only some layers are quantized. A file of headers alone tells them that; whoever
tries to load weights from it gets an error.

A loader of an engine finds `longshore.json` in the folder (`read_source`), and so the weights. Draft models and several
models of one process each have a folder of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cluster.argument_types import checks_arguments
from cluster.config import Config, TrustPolicy
from cluster.errors import ConfigError, ModelConfigError
from cluster.layouts.model_config import CONFIG_KEY
from cluster.options import LoadOptions, collect
from cluster.planning.make_plan import read_index
from cluster.request import make_request
from storage.checkpoints.checkpoint import read_other_file
from storage.checkpoints.checkpoint_files import HEADERS_KEY, map_threads
from storage.checkpoints.manifest import is_safe_path
from storage.checkpoints.model_index import ModelIndex, OtherFile
from storage.checkpoints.safetensors_header import encode_header
from storage.problems import MAX_LISTED, quote
from storage.stores.object_store import ObjectStore
from storage.stores.open_store import open_store

SOURCE_KEY = "longshore.json"
LOAD_FORMAT = "longshore"  # of vLLM (`engines.vllm`)
MAX_FILE_BYTES = 64 << 20  # of one file; a large tokenizer.json has 35 MB
MAX_TOTAL_BYTES = 256 << 20
MAX_SOURCE_BYTES = 64 << 10
_FORM = 2  # what folders have; folders of an earlier form are made anew
# What engines read beside the weights. Anything else stays in the store: images, other weights, pickles.
SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".spm", ".vocab")
CODE = ".py"
# In a folder of their own: what engines read by themselves. Larger ones are left in the store.
NESTED_WEIGHTS = re.compile(r".+/[^/]+\.safetensors")
_LOG = logging.getLogger("longshore.config_folder")
_WEIGHT_INDEX = re.compile(r".*\.(?:safetensors|bin|pt|msgpack)\.index\.json")
OPTIONS = ("endpoint_url", "region", "profile", "anonymous", "trusted_keys", "signed_name")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The place of a folder's weights, without secrets."""

    model_uri: str
    revision: str
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of `safe_open`


@checks_arguments
def config_folder(
    model_uri: str | os.PathLike[str],
    folder: str | os.PathLike[str] | None = None,
    *,
    code: bool = False,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    anonymous: bool = False,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    signed_name: str | None = None,
    revision: str | None = None,
    config: Config | None = None,
) -> str:
    """Make a local folder with a model's config, tokenizer and generation files, for engines that want a folder.

    Weights are not fetched. The folder's `longshore.json` says where they are. Credentials are not written down:
    whoever loads the weights takes them from the environment.

    Args:
        model_uri: As for `load`: a folder with shards.
        folder: The folder to make. It must not exist, or be empty. None: one in `$XDG_CACHE_HOME/longshore/configs`
            (`~/.cache`), named by model, revision and options; it is made once.
        code: Also fetch `.py` files, which an engine runs with `trust_remote_code`.
        endpoint_url: As for `load`.
        region: As for `load`.
        profile: As for `load`.
        anonymous: As for `load`.
        trusted_keys: As for `load`.
        signed_name: As for `load`.
        revision: As for `load`.
        config: Settings; None reads them from the environment.

    Returns:
        The path of the folder.

    Raises:
        ConfigError: An argument is invalid, or the folder has other files.
        ModelConfigError: The model has no config.json, or its small files are too large.
        IntegrityError: A file is not the published one.
        StoreError: The store refused access, or has no such model.

    Example:
        ```python
        path = cluster.config_folder("s3://models/llama-8b")
        tokenizer = AutoTokenizer.from_pretrained(path)
        ```
    """
    options = collect(LoadOptions, locals())
    own = config or Config.from_env()
    request = make_request(options, own.public_keys())
    own.source_rules().check(request.store.ref, None)
    with closing(open_store(request.store.ref, request.store.credentials, read_timeout_s=own.read_timeout_s)) as store:
        index = read_index(store, request, chunk_bytes=own.chunk_bytes, trust=TrustPolicy.of(own))
        given = {name: getattr(options, name) for name in OPTIONS}
        kept = {name: value for name, value in given.items() if value not in (None, False)}
        if "trusted_keys" in kept:  # the keys themselves: engines may run where there are no such files
            kept["trusted_keys"] = list(request.trusted_keys)
        source = ModelSource(request.uri, index.revision, kept)
        files = _wanted(index.files, code=code, uri=request.uri)
        path = _default_folder(source, code=code) if folder is None else os.path.abspath(os.fspath(folder))
        if folder is None and os.path.exists(os.path.join(path, SOURCE_KEY)):
            return path
        if folder is not None and os.path.isdir(path) and os.listdir(path):
            raise ConfigError("the folder has files already", hint="name a new or empty folder", folder=path)
        _make_folder(path, store, index, files, source)
    return path


def _make_folder(
    path: str, store: ObjectStore, index: ModelIndex, files: Sequence[OtherFile], source: ModelSource
) -> None:
    """Make the folder under another name, and rename it, so that it appears whole."""
    parent = os.path.dirname(path)
    os.makedirs(parent, exist_ok=True)
    new = tempfile.mkdtemp(prefix=".longshore-", dir=parent)

    def fetch(file: OtherFile) -> None:
        target = os.path.join(new, *file.key.split("/"))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).write_bytes(read_other_file(store, file))

    try:
        os.chmod(new, 0o755)
        map_threads(fetch, files)
        headers = encode_header((tensor.name, tensor.dtype, tensor.shape) for tensor in index.tensors)
        Path(new, HEADERS_KEY).write_bytes(headers)
        Path(new, SOURCE_KEY).write_text(json.dumps(asdict(source), indent=2) + "\n")
        with contextlib.suppress(OSError):
            os.rmdir(path)  # an empty one
        try:
            os.rename(new, path)
        except OSError:
            if not os.path.exists(os.path.join(path, SOURCE_KEY)):  # else another process was faster
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def read_source(folder: str | os.PathLike[str]) -> ModelSource | None:
    """Return where the weights of a folder are; None for a folder that `config_folder` did not make.

    Raises ConfigError for a broken file.
    """
    path = os.path.join(os.fspath(folder), SOURCE_KEY)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SOURCE_BYTES + 1)
    except OSError:
        return None
    try:
        found = json.loads(data) if len(data) <= MAX_SOURCE_BYTES else None
    except (ValueError, RecursionError):
        found = None
    texts = isinstance(found, dict) and all(isinstance(found.get(name), str) for name in ("model_uri", "revision"))
    if not isinstance(found, dict) or not texts or not isinstance(found.get("options"), dict):
        raise ConfigError(
            "the file is not as `longshore config-folder` writes it", hint="make the folder anew", path=path
        )
    unknown = set(found["options"]) - set(OPTIONS)
    if unknown:
        raise ConfigError(f"unknown options: {', '.join(map(quote, sorted(unknown)))}", path=path)
    return ModelSource(found["model_uri"], found["revision"], found["options"])


def _wanted(files: Sequence[OtherFile], *, code: bool, uri: str) -> list[OtherFile]:
    """Return the files to fetch, and warn of weights that are left out.

    Raises ModelConfigError without a config.json, and for too many bytes.
    """
    suffixes = (*SUFFIXES, CODE) if code else SUFFIXES
    found = [
        file
        for file in files
        if file.key.endswith(suffixes) and is_safe_path(file.key) and not _WEIGHT_INDEX.fullmatch(file.key)
        if file.key not in (SOURCE_KEY, HEADERS_KEY)
    ]
    if not any(file.key == CONFIG_KEY for file in found):
        raise ModelConfigError(
            "the model has no config.json, so no engine can run it", hint="upload it beside the shards", uri=uri
        )
    large = [file.key for file in found if file.size_bytes > MAX_FILE_BYTES]
    if large or sum(file.size_bytes for file in found) > MAX_TOTAL_BYTES:
        raise ModelConfigError(
            f"the small files of the model are too large: {', '.join(map(quote, large[:5])) or 'all together'}",
            uri=uri,
            most_bytes=MAX_FILE_BYTES if large else MAX_TOTAL_BYTES,
        )
    room_bytes = MAX_TOTAL_BYTES - sum(file.size_bytes for file in found)
    for file in files:
        is_small = file.size_bytes <= min(MAX_FILE_BYTES, room_bytes)
        if is_small and NESTED_WEIGHTS.fullmatch(file.key) and is_safe_path(file.key):
            room_bytes -= file.size_bytes
            found.append(file)
    left = sorted({file.key for file in files if NESTED_WEIGHTS.fullmatch(file.key)} - {file.key for file in found})
    if left:
        names = ", ".join(map(quote, left[:MAX_LISTED]))
        _LOG.warning("left in the store: %s. An engine that reads them by itself does not find them", names)
    return found


def _default_folder(source: ModelSource, *, code: bool) -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", source.model_uri.rstrip("/").rpartition("/")[2])[:60] or "model"
    about = json.dumps([source.model_uri, source.options, code, _FORM], sort_keys=True)
    digest = hashlib.blake2b(about.encode(), digest_size=6).hexdigest()
    return os.path.join(base, "longshore", "configs", f"{name}-{source.revision[:12]}-{digest}")
