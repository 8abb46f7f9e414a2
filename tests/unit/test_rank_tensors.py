"""`plan(rank=...)` and `longshore plan --rank` show the part of each tensor on a rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.command_line.cli import main
from cluster.errors import ConfigError
from cluster.planning.plan_picture import TensorPart, show_ranges
from cluster.planning.preview import plan
from tests.support.planned_models import write_linear_llama


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_linear_llama(tmp_path / "llama")


def test_the_part_of_each_tensor_on_a_rank(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(model, tensor_parallel_size=4, rank=1)
    parts = {part.name: part for part in found.of_rank}
    assert sum(part.size_bytes for part in found.of_rank) == found.ranks[1].size_bytes
    up, down = (parts[f"model.layers.2.mlp.{name}_proj.weight"] for name in ("up", "down"))
    assert (up.rule, up.shape, up.ranges) == ("column", (512, 256), (((128, 256),), ((0, 256),)))
    assert (down.rule, down.ranges, down.dtype) == ("row", (((0, 256),), ((128, 256),)), "BF16")
    assert parts["model.norm.weight"].rule == "replicate"
    quantized = {part.name: part for part in plan(model, tensor_parallel_size=4, rank=1, quantization="fp8").of_rank}
    assert quantized[down.name].dtype == "F8_E4M3"
    assert quantized[f"{up.name}_scale"].shape == (512, 1)
    assert quantized[f"{up.name}_scale"].rule == "column"
    assert {part.rule for part in plan(model, fsdp_size=3, rank=2).of_rank} == {""}
    assert plan(model).of_rank == ()
    for wrong in (4, -1, "1", True):
        with pytest.raises(ConfigError, match="rank"):
            plan(model, tensor_parallel_size=4, rank=wrong)  # type: ignore[arg-type]
    assert main(["plan", str(model), "--tp", "4", "--rank", "1"]) == 0
    assert "512x256" in capsys.readouterr().out
    assert main(["plan", str(model), "--tp", "4", "--rank", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["of_rank"]) == len(found.of_rank)
    assert {"name": up.name, "ranges": [[[128, 256]], [[0, 256]]]}.items() <= next(
        part for part in document["of_rank"] if part["name"] == up.name
    ).items()
    assert main(["plan", str(model), "--rank", "7"]) == 2


@pytest.mark.parametrize(
    ("shape", "ranges", "padding", "said"),
    [
        ((4, 6), (((0, 4),), ((0, 6),)), 0, "all, all"),
        ((8, 6), (((0, 2), (4, 6)), ((0, 6),)), 0, "0:2 4:6, all"),
        ((7,), (((6, 7),),), 1, "6:7, and 1 of zeros"),
        ((5,), ((),), 0, "none"),
        ((0, 2), ((), ((0, 2),)), 0, "all, all"),
        ((), (), 0, ""),
    ],
)
def test_ranges_are_printed_for_people(
    shape: tuple[int, ...], ranges: tuple[tuple[tuple[int, int], ...], ...], padding: int, said: str
) -> None:
    assert show_ranges(TensorPart("w", "", shape, ranges, padding, "BF16", 0)) == said
