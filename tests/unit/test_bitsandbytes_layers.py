"""A rank's NF4 weights in layers of bitsandbytes: its own slice, without a copy, refused where it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from actors.shard import RankShard
from cluster.errors import ModuleMismatch
from cluster.layouts.mesh import Layout
from cluster.precision.recipes import make_precision
from tests.support.hf_models import save_tiny
from tests.support.reference_quantized import nf4, restored_nf4
from tests.support.shards import files_of, plan_of, shard_of

WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
MLP = "model.layers.0.mlp"


@pytest.fixture
def layers() -> Any:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes, whose layers are filled, is not installed")
    import bitsandbytes.nn

    return bitsandbytes.nn


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path / "stored", **WIDE)


def shards(stored: Path, ranks: int = 1) -> list[RankShard]:
    plan = plan_of(stored, Layout(ranks), precision=make_precision("auto", "nf4", None))
    return [shard_of(plan, rank, files_of(plan, stored)) for rank in range(ranks)]


def whole(stored: Path, name: str) -> torch.Tensor:
    from safetensors.torch import load_file

    return next(tensors[name] for path in stored.glob("*.safetensors") if name in (tensors := load_file(path)))


class OneLayer(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.proj = layer


def of(name: str) -> Any:
    """Return the tensors of one layer, named as those of `proj`."""
    return lambda stored: f"proj{stored.removeprefix(name)}" if stored.startswith(f"{name}.") else None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("layer", "dim"), [("up_proj", 0), ("down_proj", 1)])
def test_a_rank_fills_a_layer_of_its_slice(layers: Any, stored: Path, ranks: int, layer: str, dim: int) -> None:
    """The layer restores the rank's slice of the restored whole weight, for columns and for rows."""
    name = f"{MLP}.{layer}"
    weight = restored_nf4(nf4(whole(stored, f"{name}.weight")))
    sizes = [128, 128]
    sizes[dim] //= ranks
    for rank, shard in enumerate(shards(stored, ranks)):
        with torch.device("meta"):
            module = OneLayer(layers.Linear4bit(sizes[1], sizes[0], bias=False, quant_type="nf4"))
        filled = shard.into(module, rename=of(name))
        assert (filled.filled, filled.copied) == (1, ())
        parameter = module.proj.weight
        assert isinstance(parameter, layers.Params4bit)
        assert parameter.data_ptr() == shard[f"{name}.weight"].data_ptr()
        assert parameter.quant_state.absmax.data_ptr() == shard[f"{name}.weight.absmax"].data_ptr()
        assert module.proj.quant_state is parameter.quant_state
        expected = weight.chunk(ranks, dim)[rank]
        import bitsandbytes.functional

        assert torch.equal(bitsandbytes.functional.dequantize_4bit(parameter.data, parameter.quant_state), expected)
        # The layer saves the tensors it was made from.
        saved = module.state_dict()
        assert {f"{name}{key.removeprefix('proj')}" for key in saved} == {key for key in shard if key.startswith(name)}
        for key, tensor in saved.items():
            assert torch.equal(tensor, shard[f"{name}{key.removeprefix('proj')}"]), key


def test_layers_of_another_size_or_kind_are_refused(layers: Any, stored: Path) -> None:
    (shard,) = shards(stored)
    name = f"{MLP}.up_proj"
    with torch.device("meta"):
        wide = OneLayer(layers.Linear4bit(256, 128, bias=False))
        plain = OneLayer(torch.nn.Linear(128, 128, bias=False))
        head = OneLayer(layers.Linear4bit(128, len(shard["lm_head.weight"]), bias=False))
    for module, of_what, says in (
        (wide, name, r"expected a 4-bit tensor of shape \(128, 256\), got shape \(128, 128\)"),
        (plain, name, r"3 tensors have no place in the module.*the rank's weights are quantized"),
        (head, "lm_head", "expected a 4-bit tensor of bitsandbytes, got torch.bfloat16"),
    ):
        before = module.proj.weight
        with pytest.raises(ModuleMismatch, match=says):
            shard.into(module, rename=of(of_what))
        assert module.proj.weight is before
        assert getattr(module.proj, "quant_state", None) is None


def test_a_state_that_cannot_be_read_is_refused(layers: Any, stored: Path) -> None:
    (shard,) = shards(stored)
    name = f"{MLP}.up_proj"
    shard[f"{name}.weight.quant_state.bitsandbytes__nf4"].fill_(0)
    with torch.device("meta"):
        module = OneLayer(layers.Linear4bit(128, 128, bias=False))
    with pytest.raises(ModuleMismatch, match=r"cannot read the tensors stored with proj\.weight"):
        shard.into(module, rename=of(name))


def test_a_flat_weight_cannot_become_a_dtensor(stored: Path) -> None:
    (shard,) = shards(stored)
    mesh: Any = None  # the library is not called
    with pytest.raises(ModuleMismatch, match="stored flat"):
        shard.dtensor(f"{MLP}.up_proj.weight", mesh, [Shard(0)])
