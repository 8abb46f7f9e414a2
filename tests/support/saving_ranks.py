"""Functions that ranks of a training job call in tests of saving (`tests.support.gloo_ranks`)."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import cluster
from actors.handover.modules import as_dtensor, wanted_part
from actors.saving import background
from actors.saving.boxed import BoxedTensor, as_boxed
from actors.saving.hf_names import as_stored
from actors.saving.loaded import _save_rank
from cluster.errors import NoRoomToStage, SaveRefused
from cluster.layouts.mesh import Layout
from tests.support.hf_models import make_tiny
from tests.support.shards import shards_of


def sharded_model(family: str, *, wrap_layers: bool = True) -> Any:
    """Return the tiny model of a family, its parameters cut by FSDP2 over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_tiny(family)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if wrap_layers:
        for module in list(model.modules()):
            if type(module).__name__.endswith(("DecoderLayer", "VisionBlock")):
                fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def held_boxes(tensor: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Return the boxes that this rank has of a tensor to be stored, by their offsets."""
    if isinstance(tensor, BoxedTensor):
        return list(tensor.local.items())
    whole = as_dtensor(tensor)
    if whole is None:
        return [((0,) * tensor.ndim, tensor)] if dist.get_rank() == 0 else []
    local = whole.to_local()
    return [
        (offsets, local[tuple(slice(a, a + n) for a, n in zip(place, sizes, strict=True))])
        for (offsets, sizes), place in wanted_part(whole).boxes()
    ]


def write_parts(folder: str, families: list[str]) -> None:
    """Write what this rank holds of the stored tensors of each family: one file, names with offsets."""
    for family in families:
        model = sharded_model(family)
        parts = {
            f"{name}@{','.join(map(str, at))}": values.clone(memory_format=torch.contiguous_format)
            for name, tensor in as_stored(model.state_dict(), model).items()
            for at, values in held_boxes(tensor)
        }
        save_file(parts, f"{folder}/{family}-{dist.get_rank()}.safetensors")


def model_in(family: str, layout: str) -> Any:
    """Return the tiny model of a family in FSDP2, FSDP1, DDP or tensor parallelism over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if layout == "fsdp2":
        return sharded_model(family).float()
    model = make_tiny(family).float()
    if layout == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if layout == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    for layer in model.model.layers:
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        parallelize_module(layer.mlp, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return model


def trained(family: str, steps: int, layout: str) -> tuple[Any, torch.optim.Optimizer, Any]:
    """Return a model in a layout with an AdamW and a scheduler, after some steps."""
    model = model_in(family, layout)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if "norm" not in name], "lr": 0.01, "weight_decay": 0.1},
        {"params": [p for name, p in named.items() if "norm" in name], "lr": 0.02, "betas": (0.8, 0.9)},
    ]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3, 3], gamma=0.5)
    torch.manual_seed(7)
    for _ in range(steps):
        tokens = torch.randint(0, 96, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer, scheduler


def whole_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's flattened state with whole tensors. Every rank must call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=True, full_state_dict=True)
    return dict(get_optimizer_state_dict(model, optimizer, options=options))


def save_run(
    uri: str, family: str, steps: int, *, layout: str = "fsdp2", background: bool = False, **options: Any
) -> dict[str, Any]:
    """Train, save model and training state, and write the whole optimizer state beside it for comparison."""
    model, optimizer, scheduler = trained(family, steps, layout)
    if dist.get_rank() == 0:
        shutil.rmtree(f"{uri}.expected", ignore_errors=True)
        model_copy = make_tiny(family).float()
    given = {
        "model": model, "optimizer": optimizer, "scheduler": scheduler,
        "extra_state": {"step": steps, "seen": {3: torch.arange(steps)}}, **options,
    }  # fmt: skip
    if background:
        handle = cluster.asave(model.state_dict(), uri, **given)
    expected = whole_state(model, optimizer)
    weights = {
        name: value if as_dtensor(value) is None else value.full_tensor() for name, value in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        model_copy.load_state_dict(weights)
        model_copy.save_pretrained(f"{uri}.expected")
        torch.save((expected, scheduler.state_dict()), f"{uri}.expected/optimizer.pt")
    if background:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # which must not reach the checkpoint
        report = handle.result(timeout_s=120)
        assert handle.done()
    else:
        report = cluster.save(model.state_dict(), uri, **given)
    return dict(report.as_dict())


def load_run(uri: str, family: str, layout: str = "fsdp2") -> None:
    """Load the training state of `save_run` into a new optimizer, and compare it."""
    model, optimizer, scheduler = trained(family, 0, layout)
    extra = cluster.load_training_state(uri, model, optimizer, scheduler)
    expected, schedule = torch.load(f"{uri}.expected/optimizer.pt")
    found = whole_state(model, optimizer)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, found[name]), name
        else:
            assert (type(value), value) == (type(found[name]), found[name]), name
    assert scheduler.state_dict() == schedule
    assert extra["seen"][3].tolist() == list(range(extra["step"]))


def save_shards(folder: str, uri: str, layout: dict[str, int]) -> list[dict[str, Any]]:
    """Save what a rank of a load of the folder in that layout holds, twice."""
    shard = shards_of(Path(folder), Layout(**layout))[dist.get_rank()]
    options = {"save_timeout_s": 60.0}
    return [
        dict(_save_rank(shard, uri, "", dist.get_world_size(), {"config.json": b"{}"}, "", options).as_dict())
        for _ in range(2)
    ]


def refused_saves(uri: str) -> list[list[Any]]:
    """Save with an argument that differs on two ranks, for each of some. Return each error and its seconds."""
    rank, tensors, found = dist.get_rank(), {"w": torch.ones(3)}, list[list[Any]]()
    first = dist.new_group([0])  # so rank 0 is in more groups than rank 1
    cluster.save(tensors, uri)
    for options in (
        {"since": [None, "latest"][rank]},
        {"since": [None, "latest"][rank], "extra_state": {"step": 1}},
        {"save_timeout_s": [60.0, 61.0][rank]},
        {"process_group": first},
    ):
        began_s = time.monotonic()
        try:
            cluster.save(tensors, uri, **options)
            found.append(["", "", time.monotonic() - began_s])
        except cluster.LongshoreError as error:
            found.append([type(error).__name__, error.message, time.monotonic() - began_s])
    cluster.save(tensors, uri)
    return found


def save_scalars(uri: str) -> None:
    """Save DTensors without dimensions and without elements, with `save` and in the background, and read them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = {"scalar": torch.tensor(3.0), "none": torch.zeros(0, 4), "rows": torch.arange(5.0)}
    state = {
        name: distribute_tensor(tensor, mesh, [Shard(0) if tensor.ndim else Replicate()])
        for name, tensor in whole.items()
    }
    cluster.save(state, f"{uri}/saved")
    cluster.asave(state, f"{uri}/copied").result(timeout_s=60)
    for place in (f"{uri}/saved", f"{uri}/copied"):
        with cluster.safe_open(place) as found:
            assert all(found.get_tensor(name).equal(tensor) for name, tensor in whole.items()), place


def save_fsdp1(uri: str) -> list[str]:
    """Save the sharded state dict of a model in FSDP1, with `save` and in the background, and read it.

    Return the kinds of its values.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
        state = wrapped.state_dict()
    cluster.save(state, f"{uri}/saved")
    cluster.asave(state, f"{uri}/copied").result(timeout_s=60)
    for place in (f"{uri}/saved", f"{uri}/copied"):
        with cluster.safe_open(place) as found:
            assert sorted(found.keys()) == sorted(whole)
            assert all(found.get_tensor(name).equal(tensor) for name, tensor in whole.items()), place
    return sorted({type(value).__name__ for value in state.values()})


def save_updated(folder: str, uri: str, cases: list[list[str]]) -> list[str]:
    """Save what two ranks hold, of the revisions that each case names by rank; the files are of "old".

    Return the refusal of each case, or "".
    """
    shard = shards_of(Path(folder), Layout(tensor_parallel_size=2))[dist.get_rank()]
    refusals = []
    for revisions in cases:
        shard.revision, refusal = revisions[dist.get_rank()], ""
        try:
            _save_rank(shard, uri, "", 2, {"config.json": b"{}"}, "old", {"save_timeout_s": 60.0})
        except SaveRefused as error:
            refusal = str(error)
        refusals.append(refusal)
    return refusals


def boxes_of_sums() -> str:
    """Return the refusal of the boxes of a tensor whose values are sums that are not made yet."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    try:
        as_boxed("w", DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (1,)), [Partial()]))
    except SaveRefused as error:
        return str(error)
    return ""


def save_own_states(uri: str) -> list[list[Any]]:
    """Save values that differ per rank as `extra_state`, with `save` and in the background, and load them.

    Return of each: the rank, the distinct numbers of a large tensor, a tensor whose shape differs, one cut by FSDP.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rank, mesh, found = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),)), list[list[Any]]()
    own = {
        "rank": rank,
        "large": torch.full((5_000_000,), float(rank)),
        "shape": torch.ones(3 + rank),
        "cut": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]),
    }
    for save in (cluster.save, lambda *args, **options: cluster.asave(*args, **options).result(timeout_s=60)):
        save({"w": torch.ones(3)}, uri, extra_state=own)
        state = cluster.load_training_state(uri)
        found.append([state["rank"], *(state[name].unique().tolist() for name in ("large", "shape", "cut"))])
        found[-1].append(list(state["shape"].shape))
    return found


def save_drifted(uri: str) -> list[list[str]]:
    """Save replicas that are equal or not, with `save` and in the background. Return the refusals of each.

    A large one that is equal has other strides on each rank, and its rows have values of their own.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    large = torch.arange(300_000.0).reshape(500, 600)
    same = {"same": large.t().contiguous().t() if rank else large, "few": torch.ones(3)}
    same |= {"rows": DTensor.from_local(torch.full((4,), float(rank)), mesh, [Shard(0)])}
    scaled = large * (2 if rank == 1 else 1)
    differs = {
        "bn.running_mean": torch.full((4,), float(rank)),
        "large": scaled,
        "replicated": DTensor.from_local(scaled[:9], mesh, [Replicate()], run_check=False),
    }
    found = []
    for save in (cluster.save, lambda *args, **options: cluster.asave(*args, **options).result(timeout_s=60)):
        refusals = []
        for state in (same, same | differs):
            try:
                save(state, uri, extra_state={"step": 1} if state is not same else None)
                refusals.append("")
            except SaveRefused as error:
                refusals.append(error.message)
        found.append(refusals)
    return found


def save_with_room(uri: str, room_bytes: int) -> dict[str, Any]:
    """Save 4000 bytes of each rank in the background, on a host with that memory. Return details of the error."""
    background.available_host_bytes = lambda: room_bytes  # type: ignore[attr-defined]
    try:
        cluster.asave({f"of rank {dist.get_rank()}": torch.ones(1000)}, uri).result(timeout_s=60)
    except NoRoomToStage as error:
        return dict(error.details)
    return {}


def save_alone(uri: str) -> list[str]:
    """Let rank 0 alone save by torch.distributed.checkpoint: with writers of the wrong group, then of the right one.

    Return what went wrong with each of them, and the loaded value.
    """
    import torch.distributed.checkpoint as dcp

    from engines.dcp import LongshoreWriter

    alone = dist.new_group([0], backend="gloo")
    if dist.get_rank():
        return []
    errors = []
    ways: list[tuple[Any, dict[str, Any]]] = [
        (None, {"no_dist": True}),
        (None, {"process_group": alone}),
        (alone, {"process_group": alone}),
        (alone, {"no_dist": True}),
    ]
    for group, how in ways:
        error = None
        try:
            dcp.save({"weight": torch.ones(3)}, storage_writer=LongshoreWriter(uri, process_group=group), **how)
        except dcp.api.CheckpointException as failed:
            ((error, _),) = failed.failures.values()
        errors.append("" if error is None else f"{type(error).__name__}: {error}")
    return errors


def save_rows(uri: str, changed: str = "", **options: Any) -> dict[str, int]:
    """Save three tensors whose rows the ranks share, one of them changed. Return counts.

    They are the number of files, how many this rank completed, and bytes of the report.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from storage.stores.fsspec_store import StreamedStore

    completed: list[str] = []
    real = StreamedStore.complete_parts

    def counted(self: StreamedStore, key: str, *arguments: Any) -> Any:
        completed.extend([key] if key in self._streams else [])
        return real(self, key, *arguments)

    StreamedStore.complete_parts = counted  # type: ignore[method-assign]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = {name: torch.arange(1_998_000.0).reshape(999, 2000) + number for number, name in enumerate("abc")}
    whole |= {name: whole[name] + 10 for name in changed}
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    report = cluster.save(state, uri, **options)
    assert "save-exchange" not in [thread.name for thread in threading.enumerate()]  # or the interpreter's end aborts
    counted_bytes = {name: count for name, count in report.as_dict().items() if name.endswith("_bytes")}
    return {"shards": report.shards, "writes": len(completed), **counted_bytes}


def save_measured(uri: str, scale: int) -> int:
    """Save 8.4 MB for each unit of scale, which the ranks share. Return the most memory of this rank beside them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    held = {f"layer.{number}": torch.full((700, 1250), float(rank + number)) for number in range(2 * scale - 2)}
    held["turned"] = torch.full((1250 * 2, 700), float(rank)).t()
    state = {name: DTensor.from_local(one, mesh, [Shard(0)], run_check=False) for name, one in held.items()}
    cluster.save(state, uri, since=None, max_shard_bytes=100 << 20)
    status = Path("/proc/self/status").read_text()
    peak_bytes = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024
    return peak_bytes - sum(one.numel() * one.element_size() for one in held.values())
