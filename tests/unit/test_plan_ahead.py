"""`cluster.plan`: memory, rates and pictures on top of what would go where; contradictions are one clear error each."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cluster.command_line.cli import main
from cluster.command_line.tables import console_on, plan_table
from cluster.config import Config
from cluster.errors import ConfigError, DoesNotFit, LayoutError
from cluster.layouts.mesh import Layout
from cluster.options import LoadOptions
from cluster.planning import preview
from cluster.planning.plan_summary import PlanSummary
from cluster.planning.preview import draw, plan
from cluster.request import make_request
from storage.errors import NotACheckpoint
from storage.host.memory import GpuMemory
from tests.support.checkpoints import safetensors_bytes
from tests.support.planned_models import write_linear_llama

CONFIG = Config(device_reserve_bytes=0, chunk_bytes=1 << 20)
SCREEN_LINES = 40  # of a terminal of 160 columns, for four ranks


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_linear_llama(tmp_path / "llama")


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "gpu_memory", lambda: ())


def whole(model: Path) -> int:
    return plan(model, config=CONFIG).ranks[0].device_bytes


def test_a_plan_without_memory_has_no_verdict(model: Path) -> None:
    found = plan(model)
    assert found.fit is not None
    assert (found.fit.fits, found.expected, found.estimated) == (None, None, False)


def test_the_model_is_spread_over_what_is_given(model: Path) -> None:
    full = whole(model)
    found = plan(model, memory=[full // 2] * 4, config=CONFIG)
    assert found.layout == Layout(4)
    assert found.fit is not None
    assert found.fit.fits
    assert [device.have_bytes for device in found.fit.devices] == [full // 2] * 4
    assert plan(model, memory=f"4x{full}", pipeline_parallel_size=2, config=CONFIG).layout.ranks == 2  # as it was said
    assert plan(model, memory=f"{full}", config=CONFIG).layout == Layout()


def test_layers_are_spread_where_tensors_cannot_be_split(model: Path) -> None:
    assert plan(model, memory="3x24GB").layout == Layout(pipeline_parallel_size=3)
    assert plan(model, memory="5x24GB").layout == Layout(fsdp_size=5)  # it has four layers


def test_auto_returns_the_plan_that_it_chose(model: Path) -> None:
    full = whole(model)
    strict = plan(model, memory=str(full * 8 // 10), config=CONFIG)
    taken = plan(model, memory=str(full * 8 // 10), fit="auto", config=CONFIG)
    assert strict.fit is not None
    assert strict.fit.fits is False
    assert strict.device_bytes == full
    assert taken.fit is not None
    assert taken.fit.fits
    assert taken.device_bytes < full * 8 // 10
    assert taken.ranks[0].bytes_by_dtype.keys() > {"BF16"}
    offloaded = plan(model, memory=str(full * 3 // 10), host_memory="1GB", fit="auto", config=CONFIG)
    assert offloaded.fit is not None
    assert offloaded.fit.fits
    assert offloaded.device_map is not None


def test_gpus_of_this_machine_are_seen(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = whole(model)
    monkeypatch.setattr(preview, "gpu_memory", lambda: (GpuMemory(4 * full, full // 2), GpuMemory(4 * full, 2 * full)))
    found = plan(model, config=CONFIG).fit
    assert found is not None
    assert (found.fits, found.memory) == (True, "seen on this machine")
    assert found.devices[0].free_bytes == 2 * full
    assert plan(model, reserve_bytes=full + 1, config=CONFIG).fit.fits is False  # type: ignore[union-attr]
    assert plan(model, gpu_memory_utilization=0.75, config=CONFIG).fit.fits  # type: ignore[union-attr]
    assert not plan(model, gpu_memory_utilization=0.74, config=CONFIG).fit.fits  # type: ignore[union-attr]
    assert plan(model, fsdp_size=4, config=CONFIG).fit.fits is None  # type: ignore[union-attr]


def test_expected_time_from_given_and_measured_rates(model: Path, tmp_path: Path) -> None:
    report = {
        "load_s": 1.0,
        "plan_s": 0.25,
        "start_s": 0.25,
        "ranks": [{}],
        "placed_bytes": 10**6,
        "bytes_by_source": {"store_via_arena": 10**6, "store_direct": 0},
        "limit": {"shares": {"store": 1.0, "place": 0.5}},
    }
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    for measured in (report, path, str(path)):
        found = plan(model, store_rate="1MB/s", measured=measured)
        assert found.expected is not None
        assert found.expected.limit == "store"
        assert found.expected.stages_s["store"] == pytest.approx(found.needed_bytes / 1e6)
        assert found.expected.stages_s["place"] == pytest.approx(found.ranks[0].size_bytes / 2e6)
        assert found.expected.total_s == pytest.approx(found.needed_bytes / 1e6 + 0.5)
        assert found.bytes_by_source == {"store": found.needed_bytes, "arena": 0, "disk": 0}
        assert (found.cluster, found.resident) == ("", "")


@pytest.mark.parametrize("document", ["[]", "5", "null", '"text"', "[1"])
def test_a_file_that_is_no_report_is_one_clear_error(model: Path, tmp_path: Path, document: str) -> None:
    (tmp_path / "report.json").write_text(document)
    with pytest.raises(ConfigError, match="not the report of a load"):
        plan(model, measured=tmp_path / "report.json")


def test_a_device_map_has_the_host_memory_that_is_given(model: Path) -> None:
    full = plan(model).device_bytes
    found = plan(model, device_map="auto", memory=[full // 2], host_memory=full)
    assert found.ranks[0].bytes_by_device["cpu"] > 0
    kept = plan(model, device_map="auto", memory=[full], host_memory=full)  # as on a node, a single GPU keeps a tenth
    assert kept.ranks[0].bytes_by_device.get("cuda:0", 0) <= full * 0.9


def test_a_plan_without_gpu_tensors_says_so(model: Path) -> None:
    """It does not say that ranks need 0 B, or that there is nothing to hold."""
    for memory in (None, "24GB"):
        found = plan(model, device_map={"": "cpu"}, memory=memory)
        assert found.fit is not None
        assert "no tensor is on a GPU" in found.fit.sentence


@pytest.mark.parametrize(
    ("limits", "folder", "said"),
    [
        ({0: "1MB", "cpu": 0}, None, "raise max_memory, or set offload_folder"),
        ({0: "1MB", "cpu": 0, "disk": "1MB"}, "/scratch/llama", "raise max_memory, also of the disk"),
    ],
)
def test_hints_suggest_only_options_that_help(
    model: Path, limits: dict[int | str, str | int], folder: str | None, said: str
) -> None:
    with pytest.raises(DoesNotFit) as refused:
        plan(model, device_map="auto", max_memory=limits, offload_folder=folder)
    assert said in refused.value.hint
    assert folder is None or "offload_folder" not in refused.value.hint
    with pytest.raises(DoesNotFit) as refused:
        plan(model, device_map="auto", memory="2MB", host_memory="1MB")
    assert "max_memory" not in refused.value.hint


def test_matrices_whose_rows_do_not_suit_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {
        "a.weight": (64, 256),
        "b.weight": (64, 192),
        "c.weight": (64, 320),
        "norm.weight": (64,),
        "gate.weight": (4, 8),
    }
    tensors = [(name, "BF16", shape) for name, shape in shapes.items()]
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    said = "int4 does not quantize 2 of 3 weight matrices: their rows of 192, 320 are not a multiple of 128"
    assert plan(tmp_path, quantization="int4").notes[1:] == (said,)
    assert plan(tmp_path, quantization="int4", skip_quantization=["default", "b.*", "c.*"]).notes[1:] == ()
    for scheme in ("nf4", "fp8"):
        assert plan(tmp_path, quantization=scheme).notes[1:] == ()
    assert main(["plan", str(tmp_path), "--quantization", "int4"]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["plan", str(tmp_path), "--quantization", "int4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"][1:] == [said]


def test_the_picture_is_written(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.svg"
    found = plan(model, memory="2x24GB", picture=target)
    root = ElementTree.fromstring(target.read_bytes())
    bars = [bar for bar in root.iter("{http://www.w3.org/2000/svg}rect") if bar.get("class") == "rank"]
    assert [int(bar.attrib["data-bytes"]) for bar in bars] == [rank.size_bytes for rank in found.ranks]
    assert len([line for line in root.iter("{http://www.w3.org/2000/svg}line") if line.get("class") == "have"]) == 2


def test_the_picture_of_a_request_is_that_of_its_plan(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    plan(model, tensor_parallel_size=2, picture=path, config=CONFIG)
    request = make_request(LoadOptions(str(model), tensor_parallel_size=2))
    assert draw(request, CONFIG) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fit": "loose"}, "fit must be one of"),
        ({"memory": "24GB", "address": "auto"}, "leave one of"),
        ({"memory": "2x24GB", "tensor_parallel_size": 4}, "4 ranks, but memory names 2 devices"),
        ({"memory": "lots"}, "not a device's memory"),
        ({"store_rate": "quick"}, "not a rate"),
        ({"gpu_memory_utilization": 90}, "above 0 and at most 1"),
        ({"reserve_bytes": -1}, "reserve_bytes"),
        ({"host_memory": "plenty"}, "not a size"),
        ({"host_memory": 6e10}, "host_memory must be a str, a whole number or None, not float"),
        ({"host_memory": -1}, "host_memory must be bytes"),
        ({"host_memory": True}, "host_memory must be .* not bool"),
        ({"picture": "plan.png"}, "SVG"),
        ({"picture": "/no/such/folder/plan.svg"}, "no folder"),
        ({"measured": "/no/such/report.json"}, "not the report of a load"),
        ({"measured": {}}, "not the report of a load"),
        ({"measured": 5}, "measured must be a LoadReport, a dict, a str, a path or None, not int"),
        ({"measured": [1]}, "measured must be .* not list of int"),
        ({"picture": 5}, "picture must be a str, a path or None, not int"),
        ({"ranks_per_node": "2"}, "ranks_per_node must be a whole number"),
        ({"ranks_per_node": 1.5}, "ranks_per_node must be a whole number"),
        ({"ranks_per_node": True}, "ranks_per_node must be a whole number"),
        ({"memory": "4x24"}, "24 bytes"),
        ({"trusted_keys": 5}, "trusted_keys must be a list .* not int"),
        ({"trusted_keys": [5]}, "trusted_keys must be a list .* not list of int"),
        ({"layout_rules": ""}, "layout_rules is an empty string"),
        ({"quantization": 0}, "quantization must be a str or None, not int"),
        ({"quantization": False}, "quantization must be a str or None, not bool"),
        ({"quantization": "fp8", "skip_quantization": {"a": 1}}, "skip_quantization must be a list .* not dict"),
        ({"quantization": "fp8", "dtype": "float32"}, "contradict"),
        ({"device_map": "auto", "offload_folder": 5}, "offload_folder must be a str, a path or None, not int"),
        ({"offload_folder": "/tmp/x"}, "needs max_memory where no cluster says"),
        ({"max_memory": {0: "2GB"}, "tensor_parallel_size": 2}, "max_memory is for one rank"),
        (
            {"quantization": "fp8", "skip_quantization": ["default", "down_proj", "**.dwn_proj.*"]},
            "'down_proj', '\\*\\*.dwn",
        ),
        ({"fit": "auto", "memory": "24GB", "skip_quantization": ["**.layers.9.*"]}, "names no tensor.*layers.9"),
    ],
)
def test_invalid_arguments_are_one_clear_error(model: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(model, **options)


def test_max_memory_alone_limits_each_device(model: Path) -> None:
    half = whole(model) * 2 // 3
    found = plan(model, max_memory={0: half, "cpu": "1GB"}, config=CONFIG)
    assert found == plan(model, device_map="auto", max_memory={0: half, "cpu": "1GB"}, config=CONFIG)
    assert found.device_map is not None
    assert set(found.device_map.values()) == {0, "cpu"}
    assert found.ranks[0].bytes_by_device["cuda:0"] <= half


def test_an_impossible_size_is_refused_with_the_possible_ones(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tp, said in ((3, "2, 4, 1 or 8"), (6, "4, 8, 2 or 1"), (1000, "8, 4, 2 or 1")):
        assert main(["plan", str(model), "--tp", str(tp)]) == 3
        assert f"tensor_parallel_size can be {said}" in capsys.readouterr().err
    for size in (1, 2, 4, 8):
        plan(model, tensor_parallel_size=size)
    assert main(["plan", str(model), "--pp", "99"]) == 3
    assert "pipeline_parallel_size can be 1 to 4" in capsys.readouterr().err


def test_tensors_that_do_not_fit_are_red_on_a_terminal_only(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    tight = plan(model, memory="4x1MB", config=CONFIG)
    roomy = plan(model, memory="4x24GB", config=CONFIG)

    def printed(stream: io.StringIO, found: PlanSummary) -> str:
        console_on(stream).print(plan_table(found))
        return stream.getvalue()

    assert "\x1b[1;31mdoes not fit" in printed(Terminal(), tight)
    assert "\x1b[1;31m#" in printed(Terminal(), tight)
    assert "\x1b[32mfits" in printed(Terminal(), roomy)
    assert "\x1b[1;31m" not in printed(Terminal(), roomy)
    assert "\x1b[" not in printed(io.StringIO(), tight)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in printed(Terminal(), tight)


def test_modules_of_a_device_map_are_those_of_the_model(model: Path) -> None:
    layers = {"model": 0, "lm_head": 0}
    with pytest.raises(LayoutError, match=r"names 2 modules that the model does not have: 'nope', 'model.layers.4'"):
        plan(model, device_map={**layers, "nope": 3, "model.layers.4": 1, "model.layers.3": 1})
    for fine in ("model.rotary_emb", "model.dropout", "score", "model.layers.3.mlp.act_fn", "model.norm.weight"):
        found = plan(model, device_map={**layers, fine: 0})
        assert found.device_map == {**layers, fine: 0}


def test_a_model_that_no_layout_spreads(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes([("w", "F4", (2, 1))]))
    with pytest.raises(LayoutError, match="cannot be spread over 2 devices"):
        plan(tmp_path, memory="2x24GB")


def test_a_folder_without_weights_or_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(NotACheckpoint):
        plan(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotACheckpoint):  # a file that is named must be there
        plan(tmp_path / "model.safetensors")


def test_the_command_fits_one_screen_and_exits_as_the_load_would(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plan", str(model), "--memory", "4x600MB", "--store-rate", "1GB/s", "--reserve", "599500kB"]) == 3
    said = capsys.readouterr().out
    assert len(said.splitlines()) <= SCREEN_LINES
    assert said.startswith("does not fit: ranks 0, 1, 2, 3 need")
    (whole_rank,) = [line for line in said.splitlines() if "whole rank" in line]
    assert whole_rank.startswith("ranks 0-3 ")
    assert ", has 500 kB, " in whole_rank
    assert whole_rank.rstrip().endswith(" too much")
    (layers,) = [line for line in said.splitlines() if "model.layers.0-3 (4)" in line]
    assert " 4 x " in layers
    assert "500 kB" in said
    assert "expected time" in said
    assert main(["plan", str(model), "--memory", "4x24GB", "--picture", str(tmp_path / "a.svg"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fit"]["fits"] is True
    assert document["fit"]["devices"][3]["have_bytes"] == 24 * 10**9 - (512 << 20)
    assert document["layers"]["columns"][0]["bytes_by_dtype"][0].keys() == {"BF16"}
    assert (tmp_path / "a.svg").exists()
    assert main(["plan", str(model), "--memory", "some"]) == 2
