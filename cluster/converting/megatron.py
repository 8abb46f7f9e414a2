"""Checkpoints of Megatron-Core in the format `torch_dist` as a source, with the names of Hugging Face.

    latest_checkpointed_iteration.txt     number of the newest iteration
    iter_0000007/metadata.json            names the format
    iter_0000007/.metadata                a pickle of torch's distributed checkpoints: tensors, chunks, places
    iter_0000007/__0_0.distcp             the chunks; each is a file of torch.save
    config.json                           of the model; may be in `huggingface/` or beside the iteration

Megatron knows a model by the arguments of its training, so the source needs the `config.json` that the converted model
will have. `megatron_names` has what becomes of the tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from cluster.converting.dcp import METADATA_KEY, read_tensors
from cluster.converting.megatron_names import FAMILIES, Shape, is_weight, to_hugging_face
from cluster.converting.source import Source, other_files
from cluster.converting.torch_files import Opaque, read_torch_file
from cluster.errors import BrokenCheckpointFile, ConvertError, UnsafePickle
from cluster.layouts.model_config import MAX_CONFIG_BYTES, parse_model_config
from storage.checkpoints.safetensors_header import MAX_ELEMENTS
from storage.problems import Problems, quote
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore

FORMAT = "Megatron-Core torch_dist"

_FORMAT_KEY = "metadata.json"
_POINTER = "latest_checkpointed_iteration.txt"
_MAX_SMALL_BYTES = 64 << 10
_COMMON_KEY = "common.pt"  # arguments of the training and other state, without weights
_COMMON_ALLOWED = ("argparse.Namespace", "megatron.*", "numpy.*", "pathlib.*", "enum.*", "collections.defaultdict")
_PLUS_ONE = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")
_MAX_UNITS = 1_000_000  # layers times experts or heads
# Written by versions of Megatron before 0.16 beside torch's own.
_ALLOWED = (
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
)


def recognise(listing: Mapping[str, ObjectInfo]) -> bool:
    """Return whether a listing has a folder that Megatron writes: with torch's metadata, and a file that names it."""
    return bool(_folders(listing))


def read(store: ObjectStore, listing: Mapping[str, ObjectInfo]) -> Source:
    """Return a checkpoint of Megatron-Core as a source.

    Args:
        store: The store, with the folder of the checkpoint or of one iteration as its root.
        listing: All objects below its root, by key.

    Returns:
        The weights of the newest iteration, or of the only one, as Hugging Face names and shapes them.

    Raises:
        ConvertError: The files do not make a model of a known family; the message lists every problem.
        ModelConfigError: The model's config.json is broken.
        UnsafePickle: A file names code that no checkpoint needs.
        StoreError: The store did not answer.
    """
    folder = _choose(store, listing)
    extra = other_files(listing, folder)
    shape = _read_shape(store, listing, extra.get("config.json"))
    problems = Problems()
    _check_arguments(store, listing, folder, problems)
    stored = read_tensors(store, listing, folder, problems, wanted=is_weight, allowed=_ALLOWED)
    tensors = to_hugging_face(stored, shape, problems)
    if len(problems):
        hint = "check that all files were copied, and that config.json is that of the trained model"
        raise ConvertError(f"{store.uri} is no Megatron checkpoint that can be converted: {problems}", hint=hint)
    return Source(FORMAT, tuple(tensors), extra)


def _folders(listing: Mapping[str, ObjectInfo]) -> list[str]:
    """Return the folders that have both files of the format, in order."""
    folders = (key.removesuffix(_FORMAT_KEY) for key in listing if key.rpartition("/")[2] == _FORMAT_KEY)
    return sorted(folder for folder in folders if folder + METADATA_KEY in listing)


def _small_file(store: ObjectStore, key: str, info: ObjectInfo, limit_bytes: int) -> bytes:
    if info.size_bytes > limit_bytes:
        raise ConvertError(f"{quote(key)} has {info.size_bytes} bytes; at most {limit_bytes} are read")
    buffer = bytearray(info.size_bytes)
    store.read_into(key, ByteRange(0, len(buffer)), memoryview(buffer))
    return bytes(buffer)


def _choose(store: ObjectStore, listing: Mapping[str, ObjectInfo]) -> str:
    """Return the folder of the iteration that the pointer names, or the only one. Raises ConvertError."""
    folders = _folders(listing)
    chosen = folders[0]
    if len(folders) > 1:
        hint = f"name the folder of one of them: {', '.join(quote(one.rstrip('/')) for one in folders[:20])}"
        pointer = listing.get(_POINTER)
        if pointer is None:
            raise ConvertError(f"{store.uri} has several iterations, and no {_POINTER}", hint=hint)
        number = _small_file(store, _POINTER, pointer, _MAX_SMALL_BYTES).decode("utf-8", "replace").strip()
        named = [one for one in folders if re.fullmatch(rf"(.*/)?iter_0*{re.escape(number)}/", one)]
        if len(named) != 1:
            raise ConvertError(f"{store.uri} has no iteration {quote(number)}, which {_POINTER} names", hint=hint)
        chosen = named[0]
    key = chosen + _FORMAT_KEY
    try:
        backend = json.loads(_small_file(store, key, listing[key], _MAX_SMALL_BYTES)).get("sharded_backend")
    except (ValueError, AttributeError, RecursionError) as exc:
        raise ConvertError(f"{quote(key)} is not the JSON object that Megatron-Core writes") from exc
    if backend != "torch_dist":
        hint = "save it again with --ckpt-format torch_dist"
        raise ConvertError(f"{quote(key)} names the format {quote(backend)}; only torch_dist is read", hint=hint)
    return chosen


def _check_arguments(store: ObjectStore, listing: Mapping[str, ObjectInfo], folder: str, problems: Problems) -> None:
    """Add a problem if the arguments of the training say that norms are stored less one. Nothing else tells it."""
    key = folder + _COMMON_KEY
    if key not in listing:
        return
    try:
        common = read_torch_file(store, key, allowed=_COMMON_ALLOWED)
    except UnsafePickle as exc:
        hint = f"{_COMMON_KEY} is only looked at for arguments; without the file the checkpoint is converted unchecked"
        raise UnsafePickle(exc.message, hint=hint) from exc
    except BrokenCheckpointFile as exc:
        problems.add(exc.message)
        return
    arguments = common.get("args") if isinstance(common, dict) else None
    fields = arguments.state if isinstance(arguments, Opaque) and isinstance(arguments.state, dict) else {}
    for name in _PLUS_ONE:
        if fields.get(name) is True:
            problems.add(f"{quote(key)} says {name}: norms are stored less one, which is not read")


def _read_shape(store: ObjectStore, listing: Mapping[str, ObjectInfo], key: str | None) -> Shape:
    """Return the numbers of a model's config.json. Raises ConvertError and ModelConfigError."""
    if key is None:
        hint = "copy config.json and the tokenizer of the model of Hugging Face that was trained into the folder"
        raise ConvertError(f"{store.uri} has no config.json, which says how heads and experts are divided", hint=hint)
    data = _small_file(store, key, listing[key], MAX_CONFIG_BYTES)
    config = parse_model_config(data)
    if config.model_type not in FAMILIES:
        family = f"the family {quote(config.model_type)}; known are {', '.join(FAMILIES)}"
        raise ConvertError(f"{quote(key)} is of {family}", hint="convert it with the tools of the training framework")
    fields = json.loads(data)
    layers, vocabulary = fields.get("num_hidden_layers"), fields.get("vocab_size")
    experts = fields.get("num_experts", fields.get("num_local_experts")) or 0
    heads, groups, rows = config.num_attention_heads, config.kv_heads, config.head_rows
    counts = {"num_hidden_layers": layers, "vocab_size": vocabulary, "num_attention_heads": heads, "head_dim": rows}
    wrong = [name for name, count in counts.items() if type(count) is not int or not 1 <= count <= MAX_ELEMENTS]
    if wrong or type(experts) is not int or experts < 0 or heads is None or rows is None:
        raise ConvertError(f"{quote(key)} lacks numbers of the model: {', '.join(wrong) or 'num_experts'}")
    if layers * max(heads, experts) > _MAX_UNITS:
        raise ConvertError(f"{quote(key)}: layers times experts, or times heads, are more than {_MAX_UNITS}")
    if not groups or heads % groups:
        raise ConvertError(f"{quote(key)}: {heads} attention heads are not divided by {groups} key and value heads")
    return Shape(layers, heads, groups, rows, vocabulary, experts, config.tie_word_embeddings is True)
