"""`into` refuses missing buffers, other names, quantized weights and lazy modules, and says why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from actors.handover.module_places import likely_prefix
from actors.handover.modules import Filled, fill_module
from cluster.errors import ConfigError, ModuleMismatch

WEIGHTS = {"weight": torch.randn(4, 4), "bias": torch.randn(4)}


def fill(module: nn.Module, tensors: Mapping[str, torch.Tensor] = WEIGHTS, **options: Any) -> Filled:
    return fill_module(module, tensors, {}, device="cpu", **options)


def refused(module: nn.Module, tensors: Mapping[str, torch.Tensor], **options: Any) -> ModuleMismatch:
    with pytest.raises(ModuleMismatch) as error:
        fill(module, tensors, **options)
    return error.value


def linear() -> nn.Linear:
    return nn.Linear(4, 4, device="meta")


def test_a_module_that_is_there_for_real() -> None:
    module = nn.Linear(4, 4)
    assert fill(module).filled == 2
    assert module.weight.data_ptr() == WEIGHTS["weight"].data_ptr()


def test_buffers_that_a_model_of_transformers_does_not_make() -> None:
    """Their memory is never handed over as it was found."""
    transformers = pytest.importorskip("transformers")

    class Model(transformers.PreTrainedModel):  # type: ignore[misc, name-defined, unused-ignore]
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.linear = nn.Linear(4, 4)
            self.register_buffer("made", torch.arange(3), persistent=False)
            self.register_buffer("table", torch.arange(8.0), persistent=False)
            self.register_buffer("none", torch.zeros(0), persistent=False)
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            if module is self:
                self.made.copy_(torch.arange(3))

    with torch.device("meta"):
        model = Model(transformers.PretrainedConfig())
    tensors = {f"linear.{name}": tensor for name, tensor in WEIGHTS.items()}
    assert "1 buffers on the meta device are in no checkpoint: table" in refused(model, tensors).message
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.table = torch.arange(8.0)  # as the error says
    fill(model, tensors)
    assert model.made.tolist() == [0, 1, 2]
    assert model.table.tolist() == list(range(8))


def test_one_buffer_of_two_modules_stays_one() -> None:
    module, shared = nn.ModuleDict({"one": nn.Module(), "two": nn.Module()}), torch.ones(3)
    for part in module.values():
        part.register_buffer("table", shared, persistent=False)
    fill_module(module, {}, {}, device="meta")  # moves them
    assert module["one"].table.is_meta
    assert module["one"].table is module["two"].table


def test_a_lazy_module() -> None:
    assert "bias: a lazy module" in refused(nn.LazyLinear(4), WEIGHTS).message


def test_a_prefix_that_was_forgotten() -> None:
    below = {f"model.{name}": tensor for name, tensor in WEIGHTS.items()}
    assert "prefix='model' would fit most names" in refused(linear(), below).hint
    assert fill(linear(), below, prefix="model").filled == 2
    module = nn.ModuleDict({"model": linear()})
    assert "rename=lambda name: 'model.' + name would fit most names" in refused(module, WEIGHTS).hint
    assert fill(module, rename=lambda name: "model." + name).filled == 2
    assert "a pipeline stage" in refused(linear(), below, prefix="modle").hint


def test_likely_prefixes() -> None:
    layers = [f"layers.{number}.weight" for number in range(9)]
    below = [f"model.language.{name}" for name in layers]
    assert likely_prefix(layers, [*below, "lm_head.weight"]) == "prefix='model.language'"
    assert likely_prefix([*below, "lm_head.weight"], layers) == "rename=lambda name: 'model.language.' + name"
    assert likely_prefix(layers, below[:3]) == ""
    assert likely_prefix([], below) == likely_prefix(layers, []) == ""


@pytest.mark.parametrize(
    "tensors",
    [
        {"weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "weight_scale": torch.zeros(4, 1)},
        {"weight_packed": torch.zeros(4, 1, dtype=torch.int32), "weight_scale": torch.zeros(4, 1)},
        {"qweight": torch.zeros(4, 1, dtype=torch.int32), "scales": torch.zeros(4, 1)},
    ],
)
def test_quantized_weights_need_a_quantized_module(tensors: dict[str, torch.Tensor]) -> None:
    error = refused(linear(), {**tensors, "bias": WEIGHTS["bias"]})
    assert "weights are quantized: make the module for them" in error.hint
    assert "dtype" not in error.hint
    assert "pipeline" not in error.hint


@pytest.mark.parametrize(
    ("module", "options", "said"),
    [
        (5, {}, "fills a torch module, not 5"),
        (None, {}, "fills a torch module, not None"),
        (nn.Linear, {}, "not the class Linear"),
        (None, {"convert": True}, "fills a torch module"),
        ("linear", {"prefix": 5}, "prefix must be"),
        ("linear", {"prefix": None}, "prefix must be"),
        ("linear", {"rename": 5}, "rename must be a function or a mapping"),
        ("linear", {"rename": lambda name: 5}, "must return a name or None"),
        ("linear", {"rename": {"weight": 5}}, "must return a name or None"),
        ("linear", {"requires_grad": "yes"}, "requires_grad must be"),
    ],
)
def test_invalid_arguments_are_refused(module: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fill(linear() if module == "linear" else module, **options)
