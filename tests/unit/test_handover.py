"""A rank's tensors in torch modules: assigned without a copy, and only when all of them match."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from actors.devices.cpu_device import CpuDevice
from actors.shard import RankShard
from cluster.errors import ConfigError, ModuleMismatch
from cluster.layouts.mesh import Layout
from cluster.layouts.rules import parse_rules
from cluster.planning.make_plan import build_load_plan
from tests.support.planned_models import store_arrays
from tests.support.shards import shard_of


class Net(nn.Module):
    """An embedding, two layers, a head that may share the embedding's weight, and one buffer of each kind."""

    def __init__(self, *, tied: bool = False, own_buffer: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
        self.head = nn.Linear(4, 10, bias=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if own_buffer:
            self.register_buffer("scale", torch.ones(4), persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


ARRAYS: dict[str, NDArray[np.generic]] = {
    name: np.random.default_rng(number).standard_normal(shape).astype(np.float32)
    for number, (name, shape) in enumerate(
        {
            "embed.weight": (10, 4),
            "layers.0.weight": (4, 4),
            "layers.0.bias": (4,),
            "layers.1.weight": (4, 4),
            "head.weight": (10, 4),
        }.items()
    )
} | {"steps": np.array(7, np.int64)}
DTYPES = {"float32": "F32", "int64": "I64", "float16": "F16"}


def shard(
    arrays: Mapping[str, NDArray[np.generic]] = ARRAYS,
    layout: Layout | None = None,
    rank: int = 0,
    rules: Mapping[str, str] | None = None,
) -> RankShard:
    named = {name: (DTYPES[str(array.dtype)], array) for name, array in arrays.items()}
    model = store_arrays(named, shards=2, chunk_bytes=64)
    plan = build_load_plan(model.index, layout or Layout(), parse_rules(rules))
    return shard_of(plan, rank, list(model.files))


def without(*names: str) -> dict[str, NDArray[np.generic]]:
    return {name: array for name, array in ARRAYS.items() if name not in names}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def net(**options: bool) -> Net:
    """Return a net on the meta device, except for its own buffer."""
    made = on_meta(lambda: Net(**options))
    if "scale" in dict(made.named_buffers()):
        made.scale = torch.ones(4)
    assert isinstance(made, Net)
    return made


def all_meta(module: nn.Module) -> bool:
    return all(parameter.is_meta for parameter in module.parameters())


def test_fills_by_assignment_without_a_copy() -> None:
    mine, module = shard(), net()
    done = mine.into(module)
    assert (done.filled, done.missing, done.unexpected, done.tied, done.copied) == (6, (), (), (), ())
    saved = module.state_dict()
    assert set(saved) == set(ARRAYS)
    for name, tensor in saved.items():
        assert tensor.data_ptr() == mine[name].data_ptr()
        assert np.array_equal(tensor.numpy(), ARRAYS[name])
    assert isinstance(module.head.weight, nn.Parameter)
    assert module.scale.tolist() == [1] * 4
    expected = Net()
    expected.load_state_dict({name: torch.from_numpy(array) for name, array in ARRAYS.items()})
    ids = torch.tensor([[1, 2, 9]])
    assert torch.equal(module(ids), expected(ids))


def test_every_mismatch_is_listed_and_nothing_is_changed() -> None:
    arrays = {**without("layers.0.bias", "embed.weight"), "other": np.zeros(3, np.float32)}
    arrays["layers.1.weight"] = np.zeros((4, 4), np.float16)
    arrays["head.weight"] = np.zeros((11, 4), np.float32)
    module = net()
    with pytest.raises(ModuleMismatch) as error:
        shard(arrays).into(module)
    text = str(error.value)
    assert "2 names of the module are not on this rank: embed.weight, layers.0.bias" in text
    assert "1 tensors have no place in the module: other" in text
    assert "layers.1.weight: expected torch.float32 (4, 4), got torch.float16 (4, 4)" in text
    assert "head.weight: expected torch.float32 (10, 4), got torch.float32 (11, 4)" in text
    assert "make the module in the dtype of the checkpoint (torch.float16)" in text
    assert error.value.details == {"missing": 2, "unexpected": 1, "differing": 2, "untied": None, "unmade": None}
    assert all_meta(module)


def test_long_lists_are_cut_short() -> None:
    many = {f"extra.{number}": np.zeros(1, np.float32) for number in range(30)}
    with pytest.raises(ModuleMismatch, match=r"30 tensors have no place.*extra\.9 and 10 more"):
        shard({**ARRAYS, **many}).into(net())


def test_non_strict_filling_reports_what_was_left() -> None:
    module = net()
    done = shard({**without("layers.0.weight", "layers.0.bias"), "other": np.zeros(3, np.float32)}).into(
        module, strict=False
    )
    assert done.missing == ("layers.0.weight", "layers.0.bias")
    assert done.unexpected == ("other",)
    assert module.layers[0].weight.is_meta
    assert not module.layers[1].weight.is_meta
    with pytest.raises(ModuleMismatch, match=r"expected torch.float32 \(10, 4\)"):  # that is never allowed
        shard({"head.weight": np.zeros((2, 4), np.float32)}).into(module, strict=False)


def test_two_ranks_fill_one_module_together() -> None:
    layout = Layout(pipeline_parallel_size=2)
    module = net()
    for rank in range(2):
        shard(layout=layout, rank=rank).into(module, strict=False)
    for name, tensor in module.state_dict().items():
        assert np.array_equal(tensor.numpy(), ARRAYS[name])


@pytest.mark.parametrize("stored", [("embed.weight",), ("head.weight",), ("embed.weight", "head.weight")])
@pytest.mark.parametrize("said", [False, True])
def test_tied_names_share_one_parameter(stored: tuple[str, ...], said: bool) -> None:
    """This includes modules that only declare the tie, as models do whose parameters were recreated one by one."""
    arrays = without("embed.weight", "head.weight") | {name: ARRAYS["embed.weight"] for name in stored}
    module = net(tied=not said)
    if said:
        module.all_tied_weights_keys = {"head.weight": "embed.weight"}
    mine = shard(arrays)
    done = mine.into(module)
    assert module.head.weight is module.embed.weight
    assert done.tied == (("embed.weight", "head.weight"),)
    assert done.filled == 5
    assert module.embed.weight.data_ptr() in {mine[name].data_ptr() for name in stored}
    assert np.array_equal(module.embed.weight.detach().numpy(), ARRAYS["embed.weight"])


def test_tied_names_with_different_values_are_refused() -> None:
    module = net(tied=True)
    with pytest.raises(ModuleMismatch, match=r"1 tied names hold different values: embed.weight = head.weight.*=False"):
        shard().into(module)
    assert all_meta(module)


def test_missing_tied_names_are_listed() -> None:
    with pytest.raises(ModuleMismatch, match=r"2 names of the module are not on this rank: embed\.weight, head"):
        shard(without("embed.weight", "head.weight")).into(net(tied=True))


def test_a_nan_is_equal_to_itself() -> None:
    tables = np.full((10, 4), np.nan, np.float32)
    module = net(tied=True)
    shard(ARRAYS | {"embed.weight": tables, "head.weight": tables}).into(module)
    assert module.head.weight is module.embed.weight


def test_a_buffer_outside_the_checkpoint_must_exist() -> None:
    module = on_meta(Net)
    with pytest.raises(ModuleMismatch, match=r"1 buffers on the meta device.*: scale.*include_buffers=False"):
        shard().into(module)
    with pytest.raises(ModuleMismatch, match="scale"):
        shard().into(module, strict=False)
    assert all_meta(module)


def test_prefix_and_rename_select_tensors() -> None:
    mine = shard()
    layer = on_meta(lambda: nn.Linear(4, 4))
    mine.into(layer, prefix="layers.0")
    assert layer.weight.data_ptr() == mine["layers.0.weight"].data_ptr()
    stack = on_meta(lambda: nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4, bias=False)}))
    mine.into(stack, prefix="layers.", rename={"0": "one", "1": "two"})
    assert stack["two"].weight.data_ptr() == mine["layers.1.weight"].data_ptr()
    with pytest.raises(ModuleMismatch, match=r"unexpected=1"):
        mine.into(on_meta(lambda: nn.Linear(4, 4, bias=False)), prefix="layers.0")
    kept = mine.into(
        on_meta(lambda: nn.Linear(4, 4, bias=False)),
        prefix="layers.0",
        rename=lambda name: None if name == "bias" else name,
    )
    assert kept.filled == 1


@pytest.mark.parametrize(("asked", "expected"), [(None, [True, False]), (False, [False, False]), (True, [True, True])])
def test_requires_grad_can_be_set_or_kept(asked: bool | None, expected: list[bool]) -> None:
    module = net()
    module.head.weight.requires_grad_(False)
    shard().into(module, requires_grad=asked)
    assert [module.embed.weight.requires_grad, module.head.weight.requires_grad] == expected


def test_integers_never_require_a_gradient() -> None:
    module = nn.Module()
    module.codes = nn.Parameter(torch.empty((), dtype=torch.int64, device="meta"), requires_grad=False)
    shard({"codes": np.array(3, np.int64)}).into(module, requires_grad=True)
    assert not module.codes.requires_grad


def test_vocabulary_padding_is_dropped_for_unpadded_modules() -> None:
    mine = shard({"weight": ARRAYS["embed.weight"]}, Layout(vocabulary_multiple=16), rules={"weight": "vocabulary"})
    assert mine["weight"].shape == (16, 4)
    exact, padded = on_meta(lambda: nn.Embedding(10, 4)), on_meta(lambda: nn.Embedding(16, 4))
    mine.into(exact)
    mine.into(padded)
    assert exact.weight.shape == (10, 4)
    assert exact.weight.data_ptr() == padded.weight.data_ptr() == mine["weight"].data_ptr()
    assert not padded.weight[10:].any()
    with pytest.raises(ModuleMismatch):
        mine.into(on_meta(lambda: nn.Embedding(12, 4)))


def test_only_models_of_transformers_can_be_converted() -> None:
    with pytest.raises(ConfigError, match="not for a Net"):
        shard().into(net(), convert=True)


def test_a_module_keeps_the_memory_until_it_is_deleted() -> None:
    model = store_arrays({"weight": ("F32", ARRAYS["layers.0.weight"])})
    plan = build_load_plan(model.index, Layout())
    mine = shard_of(plan, 0, list(model.files))
    module = on_meta(lambda: nn.Linear(4, 4, bias=False))
    mine.into(module)
    memory = weakref.ref(mine["weight"].untyped_storage())
    del mine
    gc.collect()
    assert memory() is not None
    assert np.array_equal(module.weight.detach().numpy(), ARRAYS["layers.0.weight"])
    del module
    gc.collect()
    assert memory() is None


def test_two_modules_of_one_shard_are_one_model() -> None:
    mine, one, other = shard(), net(), net()
    mine.into(one)
    mine.into(other)
    with torch.no_grad():
        one.head.weight.zero_()
    assert not other.head.weight.any()
    assert not mine["head.weight"].any()


def test_a_shard_reports_the_device_of_its_memory() -> None:
    assert shard().device == CpuDevice.name
