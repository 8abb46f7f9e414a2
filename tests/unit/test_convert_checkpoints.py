"""Conversions of real checkpoints: bit for bit what the frameworks make of them, or an error before a byte is sent."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import cluster
from cluster.command_line.cli import main
from cluster.converting import rank_files
from cluster.converting.formats import find_source
from storage.errors import LongshoreError, ObjectChanged, StoreError
from storage.publishing import saves
from storage.stores.embedded_s3 import EmbeddedS3
from storage.stores.local import LocalStore
from storage.stores.object_store import ByteRange, MemoryStore, read_bytes
from storage.stores.open_store import open_store
from tests.support.counting_proxy import CountingProxy, Request, s3_refusal
from tests.support.faulty_stores import WrappedStore
from tests.support.s3_servers import make_bucket, server_ref

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

KINDS = ("fsdp2", "fsdp_tp", "hsdp", "tp", "fsdp1", "dcp", "titan", "accelerate", "hugging_face")


def tensors_in(folder: Path) -> dict[str, Any]:
    """The tensors that the index names, or those of all files."""
    found: dict[str, Any] = {}
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else ["*.safetensors"]
    for file in (file for name in names for file in folder.glob(name)):
        found.update(safetensors_torch.load_file(file))
    return found


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def state(scale: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "a.weight": torch.randn(300 * scale, 700, generator=generator),
        "a.turned": torch.randn(500, 40, generator=generator).t(),
        "a.half": torch.randn(33, 7, generator=generator).bfloat16(),
        "a.steps": torch.arange(9),
        "a.scalar": torch.tensor(2.5),
        "a.none": torch.zeros(0, 3),
        "a.mask": torch.tensor([True, False]),
    }


def test_plain_tensors_of_ranks_are_whole_only_if_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_files, "_COMPARED_BYTES", 10_000)
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for rank in range(3):
        torch.save(state(), source / f"model_rank{rank}.pt")
    cluster.convert(source, out, progress=False)
    check_equal(tensors_in(out), state())
    other = state()
    other["a.turned"][39, 499] += 1
    other["a.mask"][1] = True
    torch.save(other, source / "model_rank2.pt")
    with pytest.raises(LongshoreError, match="is a plain tensor with other numbers") as caught:
        cluster.convert(source, tmp_path / "new", progress=False)
    assert "'a.turned'" in str(caught.value)
    assert "'a.mask'" in str(caught.value)
    assert "'a.half'" not in str(caught.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_result_is_what_torch_gathers(fsdp_checkpoints: Path, kind: str, tmp_path: Path) -> None:
    report = cluster.convert(fsdp_checkpoints / kind, tmp_path / "out", progress=False)
    assert report.verified
    expected = torch.load(fsdp_checkpoints / f"{kind}.expected.pt", weights_only=True)
    check_equal(tensors_in(tmp_path / "out"), expected)


@pytest.mark.slow
def test_result_is_that_of_the_frameworks_own_mergers(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    """verl's merger is in tests/integration/test_verl.py."""
    cluster.convert(fsdp_checkpoints / "accelerate", tmp_path / "a", progress=False)
    check_equal(tensors_in(tmp_path / "a"), tensors_in(fsdp_checkpoints / "accelerate_merged"))
    cluster.convert(fsdp_checkpoints / "dcp", tmp_path / "d", progress=False)
    merged = torch.load(fsdp_checkpoints / "dcp_merged.pt", weights_only=True)
    check_equal(tensors_in(tmp_path / "d"), merged["model"])


@pytest.mark.slow
def test_all_problems_are_listed_before_a_byte_is_written(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    source = tmp_path / "ranks"
    shutil.copytree(fsdp_checkpoints / "fsdp2", source)
    (source / "model_world_size_4_rank_1.pt").unlink()
    (source / "model_world_size_4_rank_3.pt").rename(source / "model_world_size_4_rank_7.pt")
    with pytest.raises(cluster.ConvertError) as caught:
        cluster.convert(source, tmp_path / "out", progress=False)
    for text in ("rank 1 of 4 is missing", "rank 3 of 4 is missing", "rank_7.pt"):
        assert text in str(caught.value)
    shutil.copy(fsdp_checkpoints / "fsdp2/model_world_size_4_rank_0.pt", source / "model_world_size_2_rank_0.pt")
    with pytest.raises(cluster.ConvertError, match="files of 2 jobs"):
        cluster.convert(source, tmp_path / "out", progress=False)
    smaller = tmp_path / "smaller"  # two ranks of four, which claim to be all
    smaller.mkdir()
    for rank in range(2):
        shutil.copy(
            fsdp_checkpoints / f"fsdp2/model_world_size_4_rank_{rank}.pt",
            smaller / f"model_world_size_2_rank_{rank}.pt",
        )
    with pytest.raises(cluster.ConvertError, match="are in no file"):
        cluster.convert(smaller, tmp_path / "out", progress=False)
    broken = tmp_path / "dcp"
    shutil.copytree(fsdp_checkpoints / "dcp", broken)
    (broken / "__1_0.distcp").unlink()
    with open(broken / "__2_0.distcp", "r+b") as file:
        file.truncate(100)
    with pytest.raises(cluster.ConvertError) as caught:
        cluster.convert(broken, tmp_path / "out", progress=False)
    assert "__1_0.distcp" in str(caught.value)
    assert "__2_0.distcp" in str(caught.value)
    assert not (tmp_path / "out").exists()


def write_files(folder: Path, kind: str) -> None:
    """Write the same tensors in four files or more."""
    names = sorted(state())
    if kind == "ranks":
        for rank in range(4):
            torch.save(state(), folder / f"model_world_size_4_rank_{rank}.pt")
    elif kind == "dcp":
        dcp = pytest.importorskip("torch.distributed.checkpoint")
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
        dcp.save({"model": state()}, storage_writer=writer, no_dist=True)
    elif kind == "deepspeed":
        shapes = [{"w": torch.Size([8])}]
        model = {"module": {}, "param_shapes": shapes, "buffer_names": [], "shared_params": {}}
        torch.save(model, folder / "mp_rank_00_model_states.pt")
        fields = {"zero_stage": 1, "single_partition_of_fp32_groups": [torch.ones(2)], "partition_count": [4]}
        for rank in range(4):
            torch.save({"optimizer_state_dict": fields}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    else:
        ending = {"state dicts": ".bin"}.get(kind, ".safetensors")
        weight_map = {name: f"model-{number + 1:05d}-of-{len(names):05d}{ending}" for number, name in enumerate(names)}
        for name, file in weight_map.items():
            save = torch.save if ending == ".bin" else safetensors_torch.save_file
            save({name: state()[name].contiguous()}, folder / file)
        if kind != "safetensors without index":
            index = {".bin": "pytorch_model.bin", ".safetensors": "model.safetensors"}[ending]
            (folder / f"{index}.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", ["ranks", "dcp", "deepspeed", "state dicts", "safetensors", "safetensors without index"]
)
def test_missing_and_cut_files_are_one_error(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "in"
    source.mkdir()
    write_files(source, kind)
    cluster.convert(source, tmp_path / "whole", dry_run=True, progress=False)
    *_, missing, first, second = sorted(path for path in source.iterdir() if path.suffix != ".json")
    missing.unlink()
    for file in (first, second):
        os.truncate(file, file.stat().st_size - 20)
    with pytest.raises(cluster.ConvertError) as caught:
        cluster.convert(source, tmp_path / "out", progress=False)
    counted = {"ranks": "rank 1 of 4", "deepspeed": "of rank 1", "safetensors without index": "of 7 files, but 6"}
    for text in (counted.get(kind, missing.name), first.name, second.name):
        assert text in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_state_dicts_keep_their_bits(tmp_path: Path) -> None:
    whole = state()
    names = sorted(whole)
    source = tmp_path / "in"
    source.mkdir()
    weight_map = {}
    for number, some in enumerate((names[:3], names[3:])):
        file = f"pytorch_model-{number + 1:05d}-of-00002.bin"
        torch.save({name: whole[name] for name in some}, source / file)
        weight_map.update(dict.fromkeys(some, file))
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (source / "config.json").write_text("{}")
    torch.save({"state": {}}, source / "optimizer.bin")
    report = cluster.convert(source, tmp_path / "out", progress=False)
    check_equal(tensors_in(tmp_path / "out"), whole)
    assert report.files == ("config.json",)
    assert (report.tensors, report.cast) == (len(whole), 0)
    one = tmp_path / "model.pt"
    torch.save({"model": whole, "step": 3, "optimizer": {"state": {}}}, one)
    cluster.convert(one, tmp_path / "one", progress=False)
    check_equal(tensors_in(tmp_path / "one"), whole)
    again = cluster.convert(tmp_path / "out", tmp_path / "again", max_shard_bytes=1 << 20, progress=False)
    assert again.format == "safetensors"
    check_equal(tensors_in(tmp_path / "again"), whole)


SET = ("model-00001-of-00002", "model-00002-of-00002")


@pytest.mark.parametrize(
    ("files", "taken", "refused"),
    [
        (["model"], ["model"], []),
        (["model", "ema/model", "checkpoint-3/optimizer"], ["model"], []),
        (SET, SET, []),
        (["only-weights"], ["only-weights"], []),
        (["inner/model"], ["inner/model"], []),
        (["shard-00001-model-00001-of-00001", "shard-00002-model-00001-of-00001"], None, []),
        (["model", "optimizer"], [], ["optimizer"]),
        (["model", *SET], [], SET),
        ([*SET, "consolidated", "adapter_model"], [], ["consolidated", "adapter_model"]),
        ([*SET, "model-00001-of-00003"], [], ["model-00001-of-00003"]),
        (["a", "b"], [], ["b"]),
        (["vae/model", "unet/model"], [], ["vae", "unet"]),
        ([SET[1]], [], ["is one of 2 files, but 1 are there"]),
    ],
)
def test_only_files_of_one_model_are_taken_without_an_index(
    tmp_path: Path, files: list[str], taken: list[str] | None, refused: list[str]
) -> None:
    source = tmp_path / "in"
    for number, name in enumerate(files):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        safetensors_torch.save_file({f"{number}": torch.full((3,), number)}, source / f"{name}.safetensors")
    if refused:
        with pytest.raises(cluster.ConvertError) as caught:
            find_source(LocalStore(source))
        assert all(one in str(caught.value) for one in refused)
    else:
        found, _ = find_source(LocalStore(source))
        names = [str(number) for number, name in enumerate(files) if taken is None or name in taken]
        assert sorted(tensor.name for tensor in found.tensors) == names


def test_weights_of_a_subfolder_do_not_hide_a_state_dict(tmp_path: Path) -> None:
    source = tmp_path / "in"
    (source / "adapter").mkdir(parents=True)
    safetensors_torch.save_file({"a": torch.zeros(1)}, source / "adapter/model.safetensors")
    torch.save(state(), source / "pytorch_model.bin")
    found, _ = find_source(LocalStore(source))
    assert {tensor.name for tensor in found.tensors} == state().keys()


def test_dtype_casts_as_torch_casts(tmp_path: Path) -> None:
    whole = state(4)
    torch.save(whole, tmp_path / "model.pt")
    for name in ("bfloat16", "float16"):
        report = cluster.convert(tmp_path / "model.pt", tmp_path / name, dtype=name, progress=False)
        dtype = getattr(torch, name)
        expected = {key: one.to(dtype) if one.is_floating_point() else one for key, one in whole.items()}
        check_equal(tensors_in(tmp_path / name), expected)
        assert report.cast == sum(one.dtype not in (dtype, torch.int64, torch.bool) for one in whole.values())
    with pytest.raises(cluster.ConfigError, match="bfloat16, float16 or float32"):
        cluster.convert(tmp_path / "model.pt", tmp_path / "no", dtype="int8", progress=False)


def test_impossible_ranks_are_listed(tmp_path: Path) -> None:
    for name in ("size_2_rank_0", "size_2_rank_00", "size_2_rank_2"):
        torch.save({"w": torch.zeros(2)}, tmp_path / f"model_world_{name}.pt")
    with pytest.raises(cluster.ConvertError) as caught:
        cluster.convert(tmp_path, tmp_path.parent / "out", progress=False)
    for text in ("rank 1 of 2 is missing", "rank_00.pt' is of a rank that another file has", "rank_2.pt' is of a rank"):
        assert text in str(caught.value)
    for file in tmp_path.iterdir():
        file.unlink()
    torch.save({"w": torch.zeros(2)}, tmp_path / "model_world_size_0_rank_0.pt")
    with pytest.raises(cluster.ConvertError, match="a job of 0 ranks"):
        cluster.convert(tmp_path, tmp_path.parent / "out", progress=False)


@pytest.mark.filterwarnings("ignore")
def test_places_in_metadata_stay_inside_the_checkpoint(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    whole = {"w": torch.randn(10, 10), "b": torch.zeros(3)}
    dcp.save({"model": whole}, checkpoint_id=tmp_path / "in", no_dist=True)
    saved = (tmp_path / "in/.metadata").read_bytes()
    for change in (
        {"relative_path": "../../../../etc/passwd"},
        {"relative_path": "/etc/passwd"},
        {"relative_path": 3},
        {"offset": -5},
        {"offset": 1 << 70},
        {"length": 1 << 70},
        {"length": 0},
    ):
        metadata = pickle.loads(saved)
        index = next(one for one in metadata.storage_data if one.fqn == "model.w")
        metadata.storage_data[index] = dataclasses.replace(metadata.storage_data[index], **change)
        (tmp_path / "in/.metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(cluster.ConvertError):
            cluster.convert(tmp_path / "in", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
    (tmp_path / "in/.metadata").write_bytes(saved)
    cluster.convert(tmp_path / "in", tmp_path / "out", progress=False)
    check_equal(tensors_in(tmp_path / "out"), whole)


class _Wrapper:
    """An object with a state dict, as torchtitan hands those of model, optimizers and training to DCP's planner."""

    def __init__(self, state_dict: Callable[[], dict[str, Any]]) -> None:
        self.state_dict = state_dict

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["model", "model_state", "model in the root", "model alone"])
def test_result_of_dcp_has_the_model_alone(tmp_path: Path, layout: str) -> None:
    """torchtitan's `CheckpointManager` saves `ModelWrapper` under `model`; newer versions put its state dict in the
    root. Other trainers name the keys `model_state` and `optimizer_state`.
    """
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    model = torch.nn.ModuleDict({"tok_embeddings": torch.nn.Embedding(9, 4), "norm": torch.nn.Linear(4, 4)})
    model.register_buffer("freqs", torch.randn(3, dtype=torch.complex64))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    losses = io.BytesIO()
    torch.save([1.5], losses)
    states = {
        "train_state": _Wrapper(lambda: {"step": torch.tensor(3, dtype=torch.int32), "global_avg_losses": losses}),
        "optimizer": _Wrapper(lambda: get_optimizer_state_dict(model, optimizer, options=flat)),
        "dataloader": _Wrapper(lambda: {"dp_rank_0": pickle.dumps({"seen": 7}), "world_size": 1}),
        "lr_scheduler": _Wrapper(lambda: {"last_epoch": 3, "base_lrs": [0.1]}),
    }
    if layout in ("model", "model_state"):
        states[layout] = _Wrapper(lambda: get_model_state_dict(model))
        states[layout.replace("model", "optimizer")] = states.pop("optimizer")
    else:
        states = {**(states if layout == "model in the root" else {}), **get_model_state_dict(model)}
    dcp.save(states, checkpoint_id=tmp_path / "step-3", no_dist=True)
    cluster.convert(tmp_path / "step-3", tmp_path / "out", progress=False)
    check_equal(tensors_in(tmp_path / "out"), dict(model.state_dict()))


def test_full_disk_ends_a_conversion_that_can_continue(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3_000_000)}, tmp_path / "model.pt")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000_000, limits[1]))
    try:
        with pytest.raises(StoreError, match="the file system refused"):
            cluster.convert(tmp_path / "model.pt", tmp_path / "out", progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list((tmp_path / "out").glob("*.safetensors"))
    cluster.convert(tmp_path / "model.pt", tmp_path / "out", progress=False)
    check_equal(tensors_in(tmp_path / "out"), {"w": torch.ones(3_000_000)})


class _Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch hostile",)


def test_pickles_with_code_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in"
    source.mkdir()
    torch.save({"a": torch.zeros(2), "b": _Hostile()}, source / "pytorch_model.bin")
    with pytest.raises(cluster.UnsafePickle, match=r"posix\.system"):
        cluster.convert(source, tmp_path / "out", progress=False)
    code = main(["convert", str(source), str(tmp_path / "out"), "--json"])
    assert code == 3
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "UnsafePickle"
    (source / "pytorch_model.bin").unlink()
    (source / ".metadata").write_bytes(pickle.dumps(_Hostile()))
    with pytest.raises(cluster.UnsafePickle):
        cluster.convert(source, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
    assert not Path("hostile").exists()


class RefusesEachOnce(CountingProxy):
    """Answers 503 to the first request of each kind: listings, and every range of every file."""

    def __init__(self, upstream_url: str) -> None:
        self.refused: set[tuple[str, str, tuple[int, int] | None]] = set()
        super().__init__(upstream_url)

    def refusal(self, request: Request) -> bytes | None:
        kind = request.method, request.path, request.range
        if kind in self.refused:
            return None
        self.refused.add(kind)
        return s3_refusal(503, "SlowDown")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["dcp", "state_dicts", "safetensors"])
def test_planning_repeats_requests_that_were_refused(rclone: EmbeddedS3, tmp_path: Path, kind: str) -> None:
    bucket = f"planned-{kind.replace('_', '-')}"
    make_bucket(rclone, bucket)
    folder = rclone.folder / bucket / "in"
    folder.mkdir()
    if kind == "dcp":
        dcp = pytest.importorskip("torch.distributed.checkpoint")
        dcp.save({"model": state()}, checkpoint_id=folder, no_dist=True)
    elif kind == "state_dicts":
        torch.save(state(), folder / "pytorch_model-1.bin")
        weight_map = dict.fromkeys(state(), "pytorch_model-1.bin")
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        cluster.save(state(), folder)
    rclone.refresh()
    with RefusesEachOnce(rclone.endpoint_url) as proxy:
        server = {"endpoint_url": proxy.endpoint_url, "credentials": rclone.credentials(), "region": "us-east-1"}
        plan = cluster.convert(f"s3://{bucket}/in", tmp_path / "out", dry_run=True, progress=False, **server)
        assert plan.tensors == len(state())
        assert len(proxy.refused) >= 3


class _Replaced(WrappedStore):
    """A file gets other bytes after the first read of it."""

    def __init__(self, inner: MemoryStore, honours_etag: bool) -> None:
        super().__init__(inner)
        self.honours_etag = honours_etag

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        found = super().read_into(key, byte_range, buffer, etag=etag if self.honours_etag else None)
        if len(self.reads) == 1:
            self.inner.put(key, read_bytes(self.inner, key, ByteRange(0, self.stat(key).size_bytes)) + b"more")
        return found


@pytest.mark.parametrize("honours_etag", [True, False])
def test_source_that_is_replaced_during_planning_is_refused(honours_etag: bool) -> None:
    buffer = io.BytesIO()
    torch.save(state(), buffer)
    with pytest.raises(ObjectChanged):
        find_source(_Replaced(MemoryStore({"model.pt": buffer.getvalue()}), honours_etag))


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(state(), tmp_path / "model.pt")
    for verb in ("convert", "merge"):
        assert main([verb, str(tmp_path / "model.pt"), str(tmp_path / "out"), "--dry-run", "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert (plan["dry_run"], plan["tensors"], plan["revision"]) == (True, 7, "")
        assert not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    assert main(["convert", str(tmp_path / "empty"), str(tmp_path / "out")]) == 3
    assert "no checkpoint of a known format" in capsys.readouterr().err


def test_the_command_shows_its_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(state(), tmp_path / "model.pt")
    assert main(["convert", str(tmp_path / "model.pt"), str(tmp_path / "out")]) == 0
    assert "convert    921 kB of 921 kB (100 %)" in capsys.readouterr().err


def test_source_and_destination_are_apart(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "model.pt")
    with pytest.raises(cluster.ConfigError, match="one inside the other"):
        cluster.convert(tmp_path, tmp_path / "out", progress=False)
    (tmp_path / "link").symlink_to(tmp_path)
    for dest in (tmp_path, tmp_path / "link"):
        with pytest.raises(cluster.ConfigError, match="the same folder"):
            cluster.convert(tmp_path, dest, progress=False)
    (tmp_path / "link").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_destination_with_another_model_is_left_alone(tmp_path: Path) -> None:
    source, dest = tmp_path / "model.pt", tmp_path / "out"
    torch.save(state(), source)
    dest.mkdir()
    (dest / "model.safetensors").write_bytes(b"other weights")
    for dry_run in (True, False):
        with pytest.raises(cluster.ConfigError, match=r"has a model\.safetensors"):
            cluster.convert(source, dest, dry_run=dry_run, progress=False)
    assert [path.name for path in dest.iterdir()] == ["model.safetensors"]
    cluster.convert(source, tmp_path / "new", progress=False)
    again = cluster.convert(source, tmp_path / "new", progress=False)
    check_equal(tensors_in(tmp_path / "new"), state())
    assert (again.verified, again.reused_bytes) == (True, 0)
    with pytest.raises(StoreError, match="cannot make the folder"):
        cluster.convert(source, tmp_path / "new/model.safetensors.index.json/below", progress=False)


def test_lazy_conjugates_are_refused(tmp_path: Path) -> None:
    """`torch.save` stores their other numbers, and a note."""
    numbers = torch.tensor([1 + 2j, 3j], dtype=torch.complex64)
    for lazy in (numbers.conj(), numbers.conj().imag):
        torch.save({"a": numbers.clone(), "b": lazy}, tmp_path / "model.pt")
        with pytest.raises(cluster.ConvertError, match="resolve_conj"):
            cluster.convert(tmp_path / "model.pt", tmp_path / "out", progress=False)
        torch.save({"a": numbers.clone(), "b": lazy.resolve_conj().resolve_neg()}, tmp_path / "model.pt")
        cluster.convert(tmp_path / "model.pt", tmp_path / "out", progress=False)
        check_equal(tensors_in(tmp_path / "out"), torch.load(tmp_path / "model.pt"))


def test_dtypes_that_safetensors_lacks_are_named(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "model.pt")
    with pytest.raises(cluster.ConvertError, match="has tensors of complex128") as caught:
        cluster.convert(tmp_path / "model.pt", tmp_path / "out", progress=False)
    assert not isinstance(caught.value, cluster.UnsafePickle)


def test_small_file_cannot_become_a_large_result(tmp_path: Path) -> None:
    """Its tensors have stride 0. The same number is in the file once."""
    torch.save({"a": torch.zeros(1).expand(40_000_000)}, tmp_path / "model.pt")
    for dry_run in (True, False):
        with pytest.raises(cluster.ConvertError, match="160000"):
            cluster.convert(tmp_path / "model.pt", tmp_path / "out", dry_run=dry_run, progress=False)
    assert not (tmp_path / "out").exists()
    torch.save({"a": torch.zeros(1).expand(1_000_000)}, tmp_path / "model.pt")
    cluster.convert(tmp_path / "model.pt", tmp_path / "out", progress=False)
    check_equal(tensors_in(tmp_path / "out"), {"a": torch.zeros(1_000_000)})


def test_names_that_cannot_be_stored_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"": torch.zeros(1), "__metadata__": torch.zeros(1)}, tmp_path / "model.pt")
    assert main(["convert", str(tmp_path / "model.pt"), str(tmp_path / "out"), "--json"]) == 3
    assert "'' is no name" in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.mark.slow
def test_processes_write_the_same_files(tmp_path: Path) -> None:
    torch.save(state(60), tmp_path / "model.pt")
    reports = {}
    for workers in (1, 3):
        reports[workers] = cluster.convert(
            tmp_path / "model.pt", tmp_path / str(workers), workers=workers, progress=False
        )
    assert reports[1].size_bytes == reports[3].size_bytes
    assert reports[1].read_bytes == reports[3].read_bytes
    check_equal(tensors_in(tmp_path / "3"), state(60))
    (one,) = (tmp_path / "1").glob("*.safetensors")
    (other,) = (tmp_path / "3").glob("*.safetensors")
    assert one.read_bytes() == other.read_bytes()


def test_interrupted_conversion_reads_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "MIN_PAUSE_S", 0.0)  # the journal is written after every part
    monkeypatch.setattr(saves, "PAUSE_PER_WRITE", 0.0)
    source, dest = tmp_path / "model.pt", tmp_path / "out"
    generator = torch.Generator().manual_seed(3)
    torch.save({"w": torch.randn(6000, 2000, generator=generator)}, source)

    def interrupt(moment: Any) -> None:
        if moment.done_bytes > moment.total_bytes // 2:
            raise KeyboardInterrupt

    def begin() -> None:
        with pytest.raises(KeyboardInterrupt):
            cluster.convert(source, dest, progress=interrupt)

    begin()
    report = cluster.convert(source, dest, progress=False)
    (file,) = dest.glob("*.safetensors")
    assert report.written_bytes + report.reused_bytes == file.stat().st_size
    assert report.reused_bytes > report.size_bytes // 2
    # Of the source: an element at each end of a run of parts, and the missing parts without the header of the file.
    assert abs(report.read_bytes - report.written_bytes) < 1000
    begin()  # a source with other numbers has other parts
    torch.save({"w": torch.randn(6000, 2000, generator=generator)}, source)
    report = cluster.convert(source, dest, progress=False)
    assert (report.reused_bytes, report.read_bytes >= report.size_bytes) == (0, True)
    check_equal(tensors_in(dest), torch.load(source))


KILLED = """
import os, sys, time, cluster
from storage.store_ref import Credentials
calls = 0
def progress(moment):
    global calls
    calls += 1
    time.sleep(0.4)  # the journal is written at most once a second
    if calls == 6:
        os.kill(os.getpid(), 9)
cluster.convert(sys.argv[1], sys.argv[2], endpoint_url=sys.argv[3], progress=progress)
"""


@pytest.mark.slow
def test_killed_conversion_continues_on_s3(rclone: EmbeddedS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = f"convert-{uuid.uuid4().hex}"
    make_bucket(rclone, bucket)
    keys = rclone.credentials()
    whole = state(120)
    torch.save(whole, tmp_path / "model.pt")
    with closing(open_store(server_ref(rclone, f"{bucket}/in"), keys)) as store:
        with store.upload("pytorch_model.bin") as upload:
            upload.write(memoryview((tmp_path / "model.pt").read_bytes()))
            upload.complete()
        store.put("config.json", b"{}")
    uris = [f"s3://{bucket}/in", f"s3://{bucket}/out"]
    access = {"AWS_ACCESS_KEY_ID": rclone.access_key_id, "AWS_SECRET_ACCESS_KEY": rclone.secret_access_key}
    for name, value in {**access, "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", KILLED, *uris, rclone.endpoint_url], timeout=120, check=False)
    assert done.returncode == -9
    with closing(open_store(server_ref(rclone, f"{bucket}/out"), keys)) as store:
        assert "longshore.manifest.json" not in {info.key for info in store.list()}
        report = cluster.convert(uris[0], uris[1], endpoint_url=rclone.endpoint_url, workers=2, progress=False)
        assert report.reused_bytes > 5_000_000
        assert report.read_bytes < report.size_bytes - report.reused_bytes + 2_000_000  # it has turned tensors
        files = [info for info in store.list() if info.key.endswith(".safetensors")]
        assert report.reused_bytes + report.written_bytes == sum(info.size_bytes for info in files)
        for info in files:
            (tmp_path / "out").mkdir(exist_ok=True)
            data = read_bytes(store, info.key, ByteRange(0, info.size_bytes))
            (tmp_path / "out" / info.key.replace("/", "_")).write_bytes(data)
    check_equal(tensors_in(tmp_path / "out"), whole)


MEASURED = """
import sys, cluster
cluster.convert(sys.argv[1], sys.argv[2], progress=False)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_memory_is_the_same_for_a_model_ten_times_as_large(tmp_path: Path) -> None:
    peaks = []
    for scale in (50, 500):  # 42 MB and 420 MB
        file = tmp_path / f"{scale}.pt"
        torch.save({"w": torch.zeros(300 * scale, 700), "t": torch.zeros(40, 30 * scale).t()}, file)
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, str(file), str(tmp_path / "out")],
            capture_output=True,
            text=True,
            timeout=200,
            check=True,
        )
        peaks.append(int(done.stdout.split()[-1]) * 1024)
        file.unlink()
        shutil.rmtree(tmp_path / "out")
    assert peaks[1] - peaks[0] < 60_000_000, peaks


def test_objects_of_other_kinds_are_no_checkpoint(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(cluster.ConvertError, match="no state dict"):
        cluster.convert(tmp_path / "list.pt", tmp_path / "out", progress=False)
    (tmp_path / "text.bin").write_bytes(b"no zip at all" * 40)
    with pytest.raises(LongshoreError, match="not a zip file"):
        cluster.convert(tmp_path / "text.bin", tmp_path / "out", progress=False)
