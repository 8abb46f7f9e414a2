"""Models of transformers straight from a store: `from_pretrained` without a download of the weights.

    config_folder --> config, tokenizer files (a local folder)
    safe_open ------> slices: transformers asks each for what it needs, `[...]` or the part of its rank
                  --> model_class.from_pretrained(None, config=..., state_dict=slices)

The weights are opened, and the first ones fetched, while Python imports the model's class.

transformers reads with a few threads, and asks the slices for exactly the part that a rank holds when it shards
(`distributed_config`). So each rank reads only the chunks that its parts touch, and the ranks of a machine share them.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import transformers

from actors.devices.convert import torch_dtype
from actors.reader.open_model import OpenModel, TensorSlice, safe_open
from cluster.argument_types import checks_arguments
from cluster.config import Config
from cluster.errors import ConfigError, LayoutError
from cluster.joining.patience import in_thread
from cluster.small_files import config_folder, read_source
from engines import warn_of_version
from storage.problems import MAX_LISTED, quote

TESTED = ("5.19", "5.23")  # oldest and newest version that was tried: tests run the newest
_LOG = logging.getLogger("transformers.longshore")  # so that lines appear in transformers' own log


_LOADS: Counter[str] = Counter()  # in groups, of this process, by URI
# Number of processes of a job, as torchrun, Slurm, Open MPI and other kinds of MPI set it
_JOB_SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_REFUSED = ("subfolder", "variant", "gguf_file", "state_dict")  # they name other weights than those of the URI


class _Weight(TensorSlice):
    """A slice with what transformers asks of tensors before it reads them."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype as torch has it."""
        return torch_dtype(self.get_dtype(), tuple(self.get_shape()))[0]

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return torch.Size(self.get_shape())

    def is_floating_point(self) -> bool:
        """Return whether the dtype is one of floating-point numbers."""
        return self.dtype.is_floating_point


@checks_arguments
def from_pretrained(
    model_uri: str | os.PathLike[str],
    model_class: Any = None,
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    anonymous: bool = False,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    signed_name: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    settings: Config | None = None,
    **options: Any,
) -> Any:
    """Return a model of transformers with weights from a store, every chunk verified.

    Args:
        model_uri: As for `load`: a folder with `config.json` and shards.
        model_class: Class of the model, or an Auto class of transformers. None: the one that the config names in
            `architectures`.
        endpoint_url: As for `load`.
        region: As for `load`.
        profile: As for `load`.
        anonymous: As for `load`.
        trusted_keys: As for `load`.
        signed_name: As for `load`.
        revision: The only revision of the model that is accepted.
        trust_remote_code: Fetch the model's `.py` files and let transformers run them.
        settings: Settings of Longshore; None reads them from the environment.
        options: Passed on to transformers' `from_pretrained`: `dtype`, `device_map`, `quantization_config`,
            `distributed_config`, `attn_implementation`, `config`, ... Fields of the config, such as `num_labels`,
            change it, if `config` is not among them.

    Returns:
        The model. `model.name_or_path` is a local folder with config and tokenizer, for `AutoTokenizer`.

    Raises:
        ConfigError: There is no such class, or an argument is invalid.
        ModelConfigError: The model has no config.json.
        LayoutError: Parameters got no weights, and `model_class` is None.
        IntegrityError: Bytes are not the published ones.
        LongshoreError: As `safe_open`, and transformers' own errors.
        ConfigError: An option names other weights (`subfolder`, `variant`, `gguf_file`, `state_dict`).

    Example:
        ```python
        from engines.transformers import from_pretrained

        model = from_pretrained("s3://models/llama-8b", dtype="auto", device_map="auto")
        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
        ```
    """
    warn_of_version("transformers", transformers.__version__, TESTED, _LOG)
    if refused := [name for name in _REFUSED if options.get(name)]:
        raise ConfigError(
            f"{', '.join(refused)} cannot be passed: the weights are the safetensors files at the URI",
            hint="pass the URI of the folder that has them",
        )
    store = {
        "endpoint_url": endpoint_url,
        "region": region,
        "profile": profile,
        "anonymous": anonymous,
        "trusted_keys": trusted_keys,
        "signed_name": signed_name,
    }
    given: dict[str, Any] = {**store, "config": settings}
    folder = config_folder(model_uri, code=trust_remote_code, revision=revision, **given)
    source = read_source(folder)
    given |= {"revision": source.revision if source else revision, **_group(options, os.fspath(model_uri))}
    alone = _reads_alone_by_name(options)
    tells = options.pop("output_loading_info", False)
    with _opening(model_uri, given, alone=alone) as opening:
        config = options.pop("config", None)
        if config is None:
            config = _read_config(folder, options, trust_remote_code=trust_remote_code)
        chosen = _class_of(model_class, config, folder, trust_remote_code=trust_remote_code)
        config = _config_for(chosen, config)
        opened = opening.result()
        weights = {name: _Weight(opened, opened._tensor(name)) for name in opened.offset_keys()}
        model, info = chosen.from_pretrained(
            None, config=config, state_dict=weights, output_loading_info=True, **options
        )
    missing = sorted(info["missing_keys"])
    if missing and model_class is None:  # another class may have layers that are yet to be trained
        raise LayoutError(
            f"{len(missing)} parameters got no weights: {', '.join(map(quote, missing[:MAX_LISTED]))}",
            hint="the config is not that of these weights",
            uri=os.fspath(model_uri),
        )
    model.name_or_path = model.config._name_or_path = folder
    if hasattr(model, "adjust_generation_fn") and options.get("generation_config") is None:
        model.adjust_generation_fn(  # as transformers does for a model from a folder
            generation_config=None,
            from_auto_class=False,
            from_pipeline=False,
            pretrained_model_name_or_path=folder,
            cache_dir=None,
            force_download=False,
            proxies=None,
            local_files_only=True,
            token=None,
            revision=None,
            subfolder="",
            trust_remote_code=trust_remote_code,
        )
    return (model, info) if tells else model


@contextlib.contextmanager
def _opening(
    model_uri: str | os.PathLike[str], given: Mapping[str, Any], *, alone: bool
) -> Iterator[Future[OpenModel]]:
    """Open the weights in another thread. They are closed after the block.

    `alone`: fetch them ahead in the order of names, and keep in the window what will be read again. Others find what
    they read again in the cache.
    """

    def open_and_fetch() -> OpenModel:
        opened = safe_open(model_uri, cache=not alone, **given)
        try:
            if alone:
                names: list[str] = sorted(opened.keys(), key=_natural)
                opened.prefetch(names)
        except BaseException:
            opened.close()
            raise
        return opened

    def close(opened: Future[OpenModel]) -> None:
        if opened.exception() is None:
            opened.result().close()

    opening = in_thread(open_and_fetch, "longshore-open")
    try:
        yield opening
    finally:
        if opening.done():
            close(opening)
        else:  # transformers could not make the model, and its error need not wait for the store
            opening.add_done_callback(close)


def _reads_alone_by_name(options: Mapping[str, Any]) -> bool:
    """Return whether this process reads the whole model, no other of its job does, and it reads in the order of names.

    transformers does not where it quantizes or offloads to disk while it loads (`core_model_loading`, its thread pool).
    """
    devices = options.get("device_map")
    to_disk = options.get("offload_folder") or (isinstance(devices, Mapping) and "disk" in devices.values())
    others = _shards(options) or _is_distributed() or multiprocessing.parent_process() is not None
    others = others or any(os.environ.get(name, "") not in ("", "0", "1") for name in _JOB_SIZES)
    in_order = not (options.get("quantization_config") or to_disk or os.environ.get("HF_DEACTIVATE_ASYNC_LOAD"))
    return in_order and not others


def _natural(name: str) -> list[tuple[bool, str, int]]:
    """Return the key by which transformers sorts names: numbers as numbers, also at the end of words."""
    parts = [re.fullmatch(r"(.*?)([0-9]*)", part, re.DOTALL) for part in name.split(".")]
    return [(bool(part[1]), part[1], int(part[2] or -1)) for part in parts if part is not None]


# Arguments of transformers' `from_pretrained` that a config has a field for too
_LOADING = {"dtype", "torch_dtype", "attn_implementation", "experts_implementation", "quantization_config"}


def _read_config(folder: str, options: dict[str, Any], *, trust_remote_code: bool) -> Any:
    """Return the folder's config, changed by those `options` that are fields of it. They are taken out."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    own = {name: options.pop(name) for name in list(options) if name not in _LOADING and hasattr(config, name)}
    if not own:
        return config
    return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **own)


def _config_for(chosen: Any, config: Any) -> Any:
    """Return the part of the config that the class takes: for a language model, that of a model of text and images.

    As transformers' Auto classes do.
    """
    parts = getattr(config, "sub_configs", {})
    if parts.get("text_config") is None or getattr(chosen, "config_class", None) is not parts["text_config"]:
        return config
    text = config.get_text_config()
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantization
    return text


def _class_of(asked: Any, config: Any, folder: str, *, trust_remote_code: bool) -> Any:
    """Return the concrete class of a model. Raises ConfigError."""
    mapping = getattr(asked, "_model_mapping", None)
    if asked is not None and mapping is None:
        return asked
    if trust_remote_code and (references := getattr(config, "auto_map", None)):
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        auto = asked.__name__ if asked is not None else "AutoModelForCausalLM"
        if auto in references:
            return get_class_from_dynamic_module(references[auto], folder)
    names = config.architectures or []
    if mapping is None:
        found = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
        if found is None:
            raise ConfigError(
                f"transformers has none of the classes that the config names: {', '.join(map(quote, names)) or 'none'}",
                hint="pass model_class=, or trust_remote_code=True for a model with code of its own",
            )
        return found
    try:
        classes = mapping[type(config)]
    except KeyError as error:
        raise ConfigError(f"{asked.__name__} has no class for {type(config).__name__}") from error
    several = classes if isinstance(classes, tuple | list) else (classes,)
    return next((one for one in several if one.__name__ in names), several[0])


def _shards(options: Mapping[str, Any]) -> bool:
    return any(options.get(name) is not None for name in ("distributed_config", "tp_plan", "tp_size"))


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _group(options: Mapping[str, Any], uri: str) -> dict[str, Any]:
    """Return the arguments that let the ranks of a `torchrun` on this machine read as a group; none for one process.

    `options`: those of transformers. It joins the ranks by itself when it is asked to shard. Each load of a model has a
    group of its own: some ranks begin the next one while others still end the last one.
    """
    size = int(os.environ.get("LOCAL_WORLD_SIZE") or "1")
    if size < 2 or not (_shards(options) or _is_distributed()):
        return {}
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    place = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    _LOADS[uri] += 1
    name = f"torchrun {run} {place} {_LOADS[uri]}"
    return {"group": name, "member": int(os.environ.get("LOCAL_RANK", "0")), "members": size}
