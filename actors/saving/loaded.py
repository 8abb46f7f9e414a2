"""The save of a model that `load` has loaded, from its ranks.

    client: config and tokenizer files of the source; config.json says how the weights are quantized now
    rank 0's worker: an address for the process group
    every worker: a gloo group for this save alone --> the boxes of all ranks --> `save`

The bytes go from rank to rank and to the store, never through the client or an actor call. What was loaded is written:
tensors that were cast or quantized while they were loaded are stored so.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from actors.devices.convert import stored_dtype
from actors.saving.boxed import BoxedTensor
from actors.saving.exchange import Ranks, forget_groups
from actors.saving.save import ExtraFiles, SaveReport, read_files, save
from cluster.argument_types import checks_arguments
from cluster.errors import SaveRefused
from cluster.model import LoadedModel
from cluster.small_files import SOURCE_KEY, config_folder
from cluster.telemetry.report import LoadReport
from storage.checkpoints.checkpoint_files import HEADERS_KEY
from storage.problems import Problems, quote
from storage.publishing.saves import STATE_FILE

if TYPE_CHECKING:
    from actors.shard import RankShard

CONFIG_KEY = "config.json"
_BOXES = TypeAdapter(dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]])  # name -> (offsets, sizes)


@checks_arguments
def save_loaded(
    model: LoadedModel,
    uri: str | os.PathLike[str],
    *,
    extra_files: ExtraFiles | None = None,
    source_options: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    save_timeout_s: float = 600.0,
    **options: Any,
) -> SaveReport:
    """Save a loaded model from its ranks, whatever its layout, as one published checkpoint.

    Copies of a tensor are written once. The config and tokenizer files of the source are copied. For a model that was
    quantized by its load, config.json gets the `quantization_config` of the load's report.

    Args:
        model: The loaded model.
        uri: Folder of the checkpoint, in a store or on a file system that the nodes share.
        extra_files: Further files, as for `save`. They replace those of the source.
        source_options: Where and how the source's store is reached from here, as for `config_folder`.
        timeout_s: Longest time in seconds for all of it. None: no limit.
        save_timeout_s: As for `save`.
        **options: Further keyword arguments of `save` for the store and the files, such as `endpoint_url`.

    Returns:
        What was written.

    Raises:
        SaveRefused: A tensor is held in a form that cannot be put together from several ranks; lists every one. Or the
            model was updated meanwhile; nothing was written.
        SaveError: A rank ended the save.
        RankLost: A worker died.
        StoreError: The store cannot be written, or the source's files cannot be read.

    Example:
        ```python
        with cluster.load("s3://models/llama", tensor_parallel_size=4, quantize="int4") as model:
            model.save("s3://models/llama-int4")
        ```
    """
    report = model.current_report()  # another client may have updated the model
    files = read_files(extra_files, _source_files(report, source_options or {}))
    (address,) = model.call(_free_address, ranks=[0], timeout_s=timeout_s)
    ranks = list(model.ranks)  # others may join before the next call
    saved: list[SaveReport] = model.call(
        _save_rank,
        os.fspath(uri),
        address,
        len(ranks),
        files,
        report.revision,
        {**options, "save_timeout_s": save_timeout_s},
        ranks=ranks,
        timeout_s=timeout_s,
    )
    return saved[0]


def _source_files(report: LoadReport, options: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the small files of the model's source, with a config.json that describes what is loaded."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = config_folder(report.uri, Path(scratch) / "files", code=True, revision=report.revision, **options)
        found = {
            path.relative_to(folder).as_posix(): path
            for path in sorted(Path(folder).rglob("*"))
            if path.is_file() and path.name not in (HEADERS_KEY, SOURCE_KEY) and path.suffix != ".safetensors"
        }
        # The state of a training run stays with the source, and so does the file that names it.
        files = {name: path.read_bytes() for name, path in found.items() if not STATE_FILE.fullmatch(name)}
    config = json.loads(files[CONFIG_KEY]) if CONFIG_KEY in files else {}
    quantized, dtype = report.quantization_config, report.precision.dtype
    if CONFIG_KEY in files and (quantized or dtype != "auto"):
        if quantized:
            config["quantization_config"] = quantized
        if dtype != "auto":
            config.pop("torch_dtype", None)
            config["dtype"] = dtype
        files[CONFIG_KEY] = (json.dumps(config, indent=2) + "\n").encode()
    return files


def _free_address(shard: RankShard) -> str:
    """Return an address of this node with a port that is free now."""
    import ray

    host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _save_rank(
    shard: RankShard,
    uri: str,
    address: str,
    world_size: int,
    files: dict[str, bytes],
    revision: str,
    options: dict[str, Any],
) -> SaveReport:
    """Save this rank's share. Runs in every worker at once. `revision`: of the files, which all ranks must have."""
    import torch.distributed as dist

    is_own = world_size > 1 and not dist.is_initialized()
    if is_own:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{address}",
            rank=shard.rank,
            world_size=world_size,
            timeout=timedelta(seconds=float(options["save_timeout_s"])),
        )
    try:
        if world_size > 1 and (dist.get_rank(), dist.get_world_size()) != (shard.rank, world_size):
            raise SaveRefused("the worker has a process group of other ranks", hint="call `save` there")
        return save(_boxed(shard, revision, float(options["save_timeout_s"])), uri, extra_files=files, **options)
    finally:
        if is_own:
            forget_groups()
            dist.destroy_process_group()


def _boxed(shard: RankShard, revision: str, timeout_s: float) -> dict[str, BoxedTensor]:
    """Return a rank's tensors as boxes, with the boxes of all ranks. Raises SaveRefused on all ranks alike."""
    problems = Problems()
    mine: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    local: dict[str, dict[tuple[int, ...], Any]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, piece in shard.slices.items():
        tensor, region, shape = shard[name], piece.region, piece.shape
        packs = stored_dtype(tensor.dtype) != piece.dtype or tuple(tensor.shape) != region.sizes
        if packs and region.filled == piece.shape:  # in one piece: as it is
            zero = (0,) * tensor.ndim
            shapes[name], local[name], mine[name] = tuple(tensor.shape), {zero: tensor}, [(zero, tuple(tensor.shape))]
            continue
        if packs:
            problems.add(f"{quote(name)} is packed as {tuple(tensor.shape)} for the part {region.ranges} of {shape}")
            continue
        shapes[name], mine[name], local[name] = shape, [], {}
        for (offsets, sizes), place in region.boxes():
            mine[name].append((offsets, sizes))
            local[name][offsets] = tensor[tuple(slice(at, at + n) for at, n in zip(place, sizes, strict=True))]
    with Ranks(timeout_s=timeout_s) as ranks:
        own = {"boxes": mine, "problems": list(problems), "revision": shard.revision}
        answers = ranks.gather(json.dumps(own).encode())
    found = [json.loads(answer) for answer in answers]
    # A rank's call may begin before an exchange, and that of another rank after it.
    revisions = {str(one["revision"]) for one in found}
    if revisions != {revision}:
        raise SaveRefused(
            "the model was updated while its save began",
            hint="save again when `longshore status` shows no update of the model",
            revision=revision,
            found=", ".join(sorted(revisions)),
        )
    if refused := [f"rank {rank}: {problem}" for rank, one in enumerate(found) for problem in one["problems"]]:
        raise SaveRefused(f"tensors cannot be put together from several ranks: {'; '.join(refused[:20])}")
    boxes: dict[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}
    for rank, one in enumerate(found):
        for name, held in _BOXES.validate_python(one["boxes"]).items():
            boxes.setdefault(name, []).extend((rank, offsets, sizes) for offsets, sizes in held)
    return {
        name: BoxedTensor(shapes[name], shard[name].dtype, tuple(boxes[name]), local[name]) for name in shard.slices
    }
