"""Saves of whole training runs by ranks: the model as `save_pretrained` writes it, and the optimizer's state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import cluster

pytest.importorskip("transformers")

from tests.support.gloo_ranks import run_ranks

pytestmark = pytest.mark.slow


def same_model(uri: Path) -> None:
    """Compare a save with what `save_pretrained` wrote of the same model."""
    found = {name: t for file in uri.glob("*.safetensors") for name, t in load_file(file).items()}
    folder = Path(f"{uri}.expected")
    expected = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((uri / name).read_text()) == json.loads((folder / name).read_text()), name


@pytest.mark.parametrize(
    ("family", "background", "saved", "loaded"),
    [
        ("llama", False, "fsdp2", ["fsdp2", "tp", "ddp"]),
        ("llama", True, "fsdp1", ["fsdp1", "fsdp2"]),
        ("qwen3_moe", True, "fsdp2", ["fsdp2"]),
    ],
)
def test_a_run_goes_on_with_other_ranks_and_layouts(
    tmp_path: Path, family: str, background: bool, saved: str, loaded: list[str]
) -> None:
    uri, how = tmp_path / "run", {"family": family, "background": background, "layout": saved}
    run_ranks(3, "tests.support.saving_ranks:save_run", str(uri), steps=2, **how)
    same_model(uri)
    assert cluster.verify(str(uri), progress=False).ok
    assert not list(uri.rglob("*.pt")), "no pickle"
    for layout in loaded:
        run_ranks(2, "tests.support.saving_ranks:load_run", str(uri), family=family, layout=layout)
