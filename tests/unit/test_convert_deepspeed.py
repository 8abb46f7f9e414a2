"""DeepSpeed checkpoints as a source: real ones against DeepSpeed's own merge, and the rules of flat vectors."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import cluster
from actors.saving.conversion import FLOATS, has_nan
from cluster.converting.deepspeed import Run, place_in_groups, place_in_ranks, read, recognise
from cluster.converting.source import Source, SourceTensor
from cluster.errors import BrokenCheckpointFile, ConvertError, UnsafePickle
from storage.problems import Problems
from storage.stores.embedded_s3 import EmbeddedS3
from storage.stores.local import LocalStore
from tests.support.s3_servers import make_bucket
from tests.support.trainer_checkpoints import assemble

NAMES = ["zero1-bf16", "zero1-fp32", "zero2-bf16", "zero3-bf16", "zero3-fp32"]
STEP = "global_step2"


def source(folder: Path) -> Source:
    store = LocalStore(folder)
    listing = {info.key: info for info in store.list()}
    assert recognise(listing)
    return read(store, listing)


def bits(folder: Path) -> dict[str, np.ndarray]:
    return {tensor.name: assemble(folder, tensor) for tensor in source(folder).tensors}


def merged(path: Path) -> dict[str, np.ndarray]:
    """The weights that zero_to_fp32.py made."""
    with safe_open(path, "pt") as file:
        return {name: as_bits(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118


def as_bits(tensor) -> np.ndarray:  # type: ignore[no-untyped-def]
    import torch

    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    unsigned = {2: np.uint16, 4: np.uint32, 8: np.uint64}
    return tensor.view(kinds[tensor.element_size()]).numpy().view(unsigned[tensor.element_size()])


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    for name, one in wanted.items():
        assert np.array_equal(found[name], one), name
        assert found[name].dtype == one.dtype, name


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_zero_to_fp32(deepspeed_checkpoints: Path, name: str) -> None:
    found, wanted = bits(deepspeed_checkpoints / name), merged(deepspeed_checkpoints / f"{name}.safetensors")
    assert_same(found, wanted)
    # its script loses frozen weights of stage 1
    assert found.keys() - wanted.keys() == ({"frozen.weight"} if name.startswith("zero1") else set())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_universal_form_has_the_same_weights(deepspeed_checkpoints: Path, name: str) -> None:
    universal = deepspeed_checkpoints / f"{name}-universal"
    assert source(universal).format == "DeepSpeed universal"
    assert_same(bits(universal), merged(deepspeed_checkpoints / f"{name}.safetensors"))


@pytest.mark.slow
def test_bf16_optimizer_is_read_though_its_stage_is_missing(deepspeed_checkpoints: Path) -> None:
    """zero_to_fp32.py refuses these files; the weights are compared with the universal form."""
    found = bits(deepspeed_checkpoints / "zero1-accumulating")
    assert_same(found, bits(deepspeed_checkpoints / "zero1-accumulating-universal"))
    assert found["first.weight"].dtype == np.uint32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1-bf16", "zero3-bf16", "zero3-bf16-universal"])
def test_published_model_has_the_weights(deepspeed_checkpoints: Path, tmp_path: Path, name: str) -> None:
    wanted = merged(deepspeed_checkpoints / f"{name.removesuffix('-universal')}.safetensors")
    cluster.convert(deepspeed_checkpoints / name, tmp_path / "same", workers=2)
    (file,) = (tmp_path / "same").glob("*.safetensors")
    assert_same(merged(file), wanted)
    report = cluster.convert(deepspeed_checkpoints / name, tmp_path / "cast", dtype="bfloat16")
    assert report.format.startswith("DeepSpeed")
    (file,) = (tmp_path / "cast").glob("*.safetensors")
    with safe_open(file, "pt") as cast, safe_open(tmp_path / "same" / _only(tmp_path / "same"), "pt") as same:
        for key in wanted:
            one = same.get_tensor(key)
            assert np.array_equal(
                as_bits(cast.get_tensor(key)), as_bits(one.bfloat16() if one.is_floating_point() else one)
            )


@pytest.mark.slow
def test_checkpoint_in_a_bucket_is_converted(deepspeed_checkpoints: Path, rclone: EmbeddedS3, tmp_path: Path) -> None:
    make_bucket(rclone, "trained")
    shutil.copytree(deepspeed_checkpoints / "zero3-fp32", rclone.folder / "trained" / "run")
    rclone.refresh()
    server = {"endpoint_url": rclone.endpoint_url, "credentials": rclone.credentials(), "region": "us-east-1"}
    cluster.convert("s3://trained/run", "s3://trained/model", **server)
    (file,) = (rclone.folder / "trained" / "model").glob("*.safetensors")
    assert_same(merged(file), merged(deepspeed_checkpoints / "zero3-fp32.safetensors"))


def _only(folder: Path) -> str:
    (file,) = folder.glob("*.safetensors")
    return file.name


def drop(name: str) -> Callable[[Path], None]:
    return lambda step: (step / name).unlink()


def copy(name: str, other: str) -> Callable[[Path], object]:
    return lambda step: shutil.copy(step / name, step / other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("zero3-bf16", drop("bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"), ["optimizer file of rank 2 is missing"]),
        ("zero3-bf16", drop("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"), ["optimizer file of rank 3 is missing"]),
        ("zero3-bf16", drop("zero_pp_rank_1_mp_rank_00_model_states.pt"), ["model file of rank 1 is missing"]),
        ("zero2-bf16", drop("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"), ["one of 4 ranks", "3 optimizer files"]),
        ("zero2-bf16", drop("mp_rank_00_model_states.pt"), ["no file with the names"]),
        (
            "zero1-bf16",
            copy("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"),
            ["2 tensor parallel ranks", "ds_to_universal.py"],
        ),
    ],
)
def test_missing_files_are_named(
    deepspeed_checkpoints: Path, tmp_path: Path, name: str, damage: Callable[[Path], object], words: list[str]
) -> None:
    shutil.copytree(deepspeed_checkpoints / name, tmp_path / "copy")
    damage(tmp_path / "copy" / STEP)
    with pytest.raises(ConvertError) as raised:
        source(tmp_path / "copy")
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.slow
def test_ranks_of_another_stage_are_refused(deepspeed_checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(deepspeed_checkpoints / "zero1-fp32", tmp_path / "copy")
    file = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(deepspeed_checkpoints / "zero3-fp32" / STEP / file, tmp_path / "copy" / STEP / file)
    with pytest.raises(ConvertError, match="is of ZeRO stage 3"):
        source(tmp_path / "copy")


@pytest.mark.slow
def test_newest_step_is_the_one_that_latest_names(deepspeed_checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(deepspeed_checkpoints / "zero1-bf16", tmp_path / "copy")
    shutil.copytree(deepspeed_checkpoints / "zero2-bf16" / STEP, tmp_path / "copy" / "global_step9")
    assert {piece.file.split("/")[0] for one in source(tmp_path / "copy").tensors for piece in one.pieces} == {STEP}
    (tmp_path / "copy" / "latest").write_text("global_step9\n")
    assert_same(bits(tmp_path / "copy"), merged(deepspeed_checkpoints / "zero2-bf16.safetensors"))
    (tmp_path / "copy" / "latest").unlink()
    with pytest.raises(ConvertError, match="several steps"):
        source(tmp_path / "copy")
    assert recognise({info.key: info for info in LocalStore(tmp_path / "copy" / STEP).list()})


@pytest.mark.slow
def test_hostile_pickle_is_refused_and_not_run(deepspeed_checkpoints: Path, tmp_path: Path) -> None:
    import torch

    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'run'}",)

    shutil.copytree(deepspeed_checkpoints / "zero1-bf16", tmp_path / "copy")
    file = tmp_path / "copy" / STEP / "mp_rank_00_model_states.pt"
    torch.save({"module": {}, "client_state": Attack()}, file)
    with pytest.raises(UnsafePickle, match=r"posix\.system"):
        source(tmp_path / "copy")
    assert not (tmp_path / "run").exists()
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BrokenCheckpointFile):
        source(tmp_path / "copy")
    file.write_bytes(pickle.dumps({}))
    with pytest.raises(BrokenCheckpointFile, match="not a zip file"):
        source(tmp_path / "copy")


def test_nan_in_the_weights_of_the_optimizer_is_refused(tmp_path: Path) -> None:
    """Every weight and file is listed, also when the conversion casts. Nothing stays of what was written before."""
    import torch

    rows, run = 2_000_000, tmp_path / "run"
    run.mkdir()
    shapes = {"first": torch.Size([rows, 2]), "second": torch.Size([rows, 2]), "third": torch.Size([8])}
    buffer = torch.tensor([1.0, float("nan")])  # of the model, where NaN may have a meaning
    state = {"module": {"mask": buffer}, "param_shapes": [shapes], "buffer_names": ["mask"], "shared_params": {}}
    torch.save(state, run / "mp_rank_00_model_states.pt")
    vector = torch.ones(4 * rows + 8)
    vector[4 * rows + 5 :] = torch.inf  # that is a number

    def save() -> None:
        for rank, part in enumerate(vector.chunk(2)):
            fields = {"zero_stage": 1, "single_partition_of_fp32_groups": [part.clone()], "partition_count": [2]}
            torch.save({"optimizer_state_dict": fields}, run / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")

    save()
    assert cluster.convert(run, tmp_path / "whole", progress=False).tensors == 4
    vector[0] = vector[2 * rows + 9] = torch.nan
    save()
    for dtype in (None, "bfloat16"):
        with pytest.raises(ConvertError) as raised:
            cluster.convert(run, tmp_path / "out", dtype=dtype, progress=False)
        for rank, name in enumerate(("first", "second")):
            assert f"'{name}' has NaN in 'zero_pp_rank_{rank}_mp_rank_00_optim_states.pt'" in str(raised.value)
        assert raised.value.details["problems"] == 2
        assert [path.name for path in (tmp_path / "out").rglob("*") if "lock" not in path.name] == []


def test_many_groups_of_many_weights_are_read(tmp_path: Path) -> None:
    """DeepSpeed 0.19 stores the padding of each weight. There are more than a shape has dimensions."""
    import torch

    ranks, groups, run = 16, 20, tmp_path / "run"
    run.mkdir()
    names = [{f"{group}.{number}": torch.Size([5]) for number in range(100)} for group in range(groups)]
    state = {"module": {}, "param_shapes": names, "buffer_names": [], "shared_params": {}}
    torch.save(state, run / "mp_rank_00_model_states.pt")
    vectors = [torch.arange(800.0).reshape(100, 8) + 1000 * group for group in range(groups)]
    fields = {"zero_stage": 1, "partition_count": [ranks] * groups, "param_alignment_paddings": [[3] * 100] * groups}
    for rank in range(ranks):
        fields["single_partition_of_fp32_groups"] = [vector.view(ranks, -1)[rank].clone() for vector in vectors]
        torch.save({"optimizer_state_dict": fields}, run / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    found = bits(run)
    assert len(found) == groups * 100
    for group, vector in enumerate(vectors):
        for number in range(100):
            assert found[f"{group}.{number}"].view(np.float32).tolist() == vector[number, :5].tolist()
    for damage in ({"zero_stage": (1, 2)}, {"param_alignment_paddings": [[-1]]}, {"partition_count": [1 << 70]}):
        torch.save({"optimizer_state_dict": {**fields, **damage}}, run / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        with pytest.raises(ConvertError, match=next(iter(damage))):
            source(run)
    torch.save({**state, "param_shapes": [names[0], names[0]]}, run / "mp_rank_00_model_states.pt")
    with pytest.raises(ConvertError, match="a name in two groups"):
        source(run)
    torch.save({**state, "module": [1]}, run / "mp_rank_00_model_states.pt")
    with pytest.raises(ConvertError, match="module is a list"):
        source(run)


def test_nan_is_found_in_every_dtype() -> None:
    import torch

    for stored, name in FLOATS.items():
        numbers = torch.tensor([[0.0, -torch.inf], [torch.inf, 1.0]], dtype=getattr(torch, name))
        size = numbers.element_size()
        for value, wanted in ((1.0, False), (torch.nan, True), (-torch.nan, True)):
            numbers[1, 1] = value
            raw = numbers.view(torch.uint8).numpy().reshape(-1).view(f"V{size}").reshape(2, 2)
            assert has_nan(raw.T, stored) is wanted, name
            assert has_nan(raw[:, :1], stored) is False


SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=6)


def named(shapes: list[tuple[int, ...]], prefix: str) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}{number}": shape for number, shape in enumerate(shapes)}


@given(groups=st.lists(SHAPES, min_size=1, max_size=3), ranks=st.integers(1, 5), data=st.data())
def test_pieces_of_groups(tmp_path_factory: pytest.TempPathFactory, groups: list, ranks: int, data) -> None:  # type: ignore[no-untyped-def]
    """Stages 1 and 2: a group is one vector, padded to twice the ranks, in equal parts."""
    folder, next_value = tmp_path_factory.getbasetemp(), 0
    wanted, shapes, runs, paddings = {}, [], [], []
    for number, listed in enumerate(groups):
        names, vector, after = named(listed, f"{number}."), [], []
        for name, shape in names.items():
            wanted[name] = np.arange(next_value, next_value + prod(shape), dtype=np.uint32).reshape(shape)
            next_value += prod(shape)
            after.append(data.draw(st.integers(0, 3)))
            vector += [*wanted[name].reshape(-1).tolist(), *[0] * after[-1]]
        vector += [0] * (-len(vector) % (2 * ranks))
        part = len(vector) // ranks
        for rank in range(ranks):
            np.array(vector[rank * part : rank * part + part], np.uint32).tofile(folder / f"{number}-{rank}")
        runs.append([Run(f"{number}-{rank}", 0, part, "F32") for rank in range(ranks)])
        shapes.append(names)
        paddings.append(after)
    problems = Problems()
    placed = place_in_groups(runs, shapes, paddings, 4, problems)
    assert not problems
    for name, one in wanted.items():
        assert np.array_equal(assemble(folder, SourceTensor(name, "F32", one.shape, placed[name])), one)
    place_in_groups(runs, shapes, [[*one[:-1], one[-1] + 2 * ranks] for one in paddings], 4, problems)
    assert len(problems) == len(groups)


@given(shapes=SHAPES, ranks=st.integers(1, 5), data=st.data())
def test_pieces_of_ranks(tmp_path_factory: pytest.TempPathFactory, shapes: list, ranks: int, data) -> None:  # type: ignore[no-untyped-def]
    """Stage 3: a rank has an equal, padded share of every weight, and its vector is cut into groups anywhere."""
    folder, names, next_value = tmp_path_factory.getbasetemp(), named(shapes, "w"), 0
    wanted, vectors = {}, [[] for _ in range(ranks)]
    for name, shape in names.items():
        wanted[name] = np.arange(next_value, next_value + prod(shape), dtype=np.uint32).reshape(shape)
        next_value += prod(shape)
        flat = [*wanted[name].reshape(-1).tolist()]
        flat += [0] * (-len(flat) % ranks)
        share = len(flat) // ranks
        for rank, vector in enumerate(vectors):
            vector += flat[rank * share : rank * share + share]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(vectors[0])), max_size=3)))
    bounds = [0, *cuts, len(vectors[0])]
    runs = []
    for rank, vector in enumerate(vectors):
        np.array(vector, np.uint32).tofile(folder / f"rank{rank}")
        runs.append([Run(f"rank{rank}", 4 * low, high - low, "F32") for low, high in itertools.pairwise(bounds)])
    problems = Problems()
    placed = place_in_ranks(runs, names, 4, problems)
    assert not problems
    for name, one in wanted.items():
        assert np.array_equal(assemble(folder, SourceTensor(name, "F32", one.shape, placed[name])), one)
    place_in_ranks(runs, {**names, "more": (1,)}, 4, problems)
    assert len(problems) == ranks
