"""Options of a device map: reading, checks and refusals, and their effect on a plan."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.command_line.arguments import load_options
from cluster.command_line.cli import build_parser
from cluster.errors import ConfigError, DoesNotFit, LayoutError
from cluster.fit.device_map import DeviceMap
from cluster.fit.needs import gpu_bytes, host_bytes
from cluster.fit.options import DeviceMapOptions, parse_device_map
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig
from cluster.options import LoadOptions
from cluster.planning.make_plan import build_load_plan
from cluster.planning.packed_plan import rank_facts
from cluster.planning.plan import LoadPlan
from cluster.planning.plan_summary import summarize_plan
from cluster.precision.recipes import Precision
from cluster.request import make_request
from tests.support.plan_oracle import check_plan
from tests.support.planned_models import as_bf16, carry_out, llama_shapes, random_arrays, store_arrays

ARRAYS = random_arrays(llama_shapes(3, 32, 48, 4, 2, 40))
LAYER_BYTES = sum(array.nbytes for name, array in ARRAYS.items() if name.startswith("model.layers.0."))
BYTES = sum(array.nbytes for array in ARRAYS.values())


def options(device_map: Any, max_memory: Any = None, folder: Any = None, **changes: Any) -> DeviceMapOptions | None:
    return parse_device_map(
        device_map, max_memory, folder, Layout(**changes.pop("layout", {})), **{"device": "auto"} | changes
    )


def test_device_map_options_are_read() -> None:
    assert options(None) is None
    assert options("auto") == DeviceMapOptions("auto")
    assert options("cuda:1") == options(1) == options({"": "1"}) == DeviceMapOptions("", (("", 1),))
    given = options(
        {"a": "cuda", "b.c": "CPU", "d": "disk"}, {"cpu": "2GiB", 0: 10, "cuda:1": 3.0}, Path("/scratch/x/")
    )
    assert given == DeviceMapOptions(
        "", (("a", 0), ("b.c", "cpu"), ("d", "disk")), ((0, 10), (1, 3), ("cpu", 2 << 30)), "/scratch/x"
    )
    assert given.gpus == 1
    assert list(given.memory) == [0, 1, "cpu"]
    assert [asked.gpus for asked in (options("auto"), options("auto", {3: 1}), options("cpu")) if asked] == [None, 4, 0]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (dict(device_map="tpu"), "unknown device 'tpu'"),
        (dict(device_map="meta"), "unknown device"),
        (dict(device_map={"a": True}), "unknown device"),
        (dict(device_map={"a": 64}), "unknown device"),
        (dict(device_map={"a": "cuda:9999999999"}), "unknown device"),
        (dict(device_map={}), "device_map is empty"),
        (dict(device_map={1: "cpu"}), "dotted names"),
        (dict(device_map=[0]), "a word or a dictionary"),
        (dict(device_map={"": "disk"}), "there is no offload_folder"),
        (dict(device_map="auto", max_memory={}), "max_memory must be a dictionary"),
        (dict(device_map="auto", max_memory="20GB"), "max_memory must be a dictionary"),
        (dict(device_map="auto", max_memory={"gpu": 1}), "unknown device 'gpu'"),
        (dict(device_map="auto", max_memory={0: "lots"}), "not a size"),
        (dict(device_map="auto", max_memory={0: -1}), "must be bytes or a size"),
        (dict(device_map="auto", max_memory={0: 1, "cuda:0": 1}), "twice"),
        (dict(device_map="auto", folder="relative"), "absolute path"),
        (dict(device_map="auto", folder="/"), "a folder of its own"),
        (dict(device_map=None, max_memory={}), "max_memory must be a dictionary"),
        (dict(device_map=None, max_memory={0: 1}, layout={"tensor_parallel_size": 2}), "max_memory is for one rank"),
        (dict(device_map=None, folder="/x", layout={"fsdp_size": 2}), "offload_folder is for one rank"),
        (dict(device_map=None, max_memory={0: 1}, device="cpu"), "device='cpu' has no GPUs"),
        (dict(device_map="auto", layout={"tensor_parallel_size": 2}), "the layout has 2 ranks"),
        (dict(device_map="auto", layout={"data_parallel_size": 3}), "the layout has 3 ranks"),
        (dict(device_map={"": 0}, device="cpu"), "device='cpu' has no GPUs"),
        (dict(device_map="cpu", device="cuda"), "names no GPU"),
    ],
)
def test_impossible_options_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        options(**arguments)


def test_limits_alone_are_limits_of_the_usual_map() -> None:
    limits = {0: 10, "cpu": "2GiB"}
    assert options(None, limits) == options("auto", limits)
    assert options(None, {"cpu": 5}, "/x") == options("auto", {"cpu": 5}, "/x")
    assert options(None, None, "/x") == options("auto", None, "/x")


def planned(device_map: Any, max_memory: Any = None, folder: Any = None, config: ModelConfig | None = None) -> LoadPlan:
    stored = store_arrays(as_bf16(ARRAYS), shards=2, chunk_bytes=900)
    plan = build_load_plan(stored.index, Layout(), config=config, device_map=options(device_map, max_memory, folder))
    assert check_plan(plan) == []
    tensors, _ = carry_out(plan, plan.ranks[0], stored.files)
    assert {name: data.tobytes() for name, data in tensors.items()} == {n: a.tobytes() for n, a in ARRAYS.items()}
    return plan


def test_a_plan_has_each_tensor_on_its_device() -> None:
    plan = planned("sequential", {0: LAYER_BYTES * 3, "cpu": LAYER_BYTES * 2 + 1500, "disk": BYTES}, "/scratch/x")
    rank = plan.ranks[0]
    assert rank.device_map is not None
    wanted = rank.device_map.devices_of(piece.name for piece in rank.slices)
    assert [rank.segment_devices[piece.segment] for piece in rank.slices] == wanted
    assert set(wanted) == {0, "cpu", "disk"}
    for number, device in enumerate(rank.segment_devices):
        inside = [piece for piece in rank.slices if piece.segment == number]
        if device == "disk":
            assert [(piece.segment_offset, piece.size_bytes) for piece in inside] == [(0, rank.segment_bytes[number])]
    (facts,) = rank_facts(plan.cut)
    assert facts.device_bytes == rank.device_bytes == sum(rank.bytes_by_device.values())
    assert gpu_bytes(facts, "cuda") == {0: rank.bytes_by_device["cuda:0"]}
    assert host_bytes(facts, "cuda") == rank.bytes_by_device["cpu"]
    for device, limit in ((0, LAYER_BYTES * 3), ("cpu", LAYER_BYTES * 2 + 1500)):
        assert dict(facts.devices)[device] <= limit
    assert pickle.loads(pickle.dumps(rank.device_map)) == rank.device_map
    summary = summarize_plan(plan)
    assert summary.device_map == rank.device_map.as_dict()
    assert summary.ranks[0].bytes_by_device == rank.bytes_by_device


def test_tensors_that_the_map_does_not_name_are_all_listed() -> None:
    with pytest.raises(LayoutError) as unnamed:
        planned({"model.layers": "cpu", "model.norm.weight": 0})
    assert "2 tensors: 'model.embed_tokens.weight', 'lm_head.weight'" in unnamed.value.message or (
        "2 tensors: 'lm_head.weight', 'model.embed_tokens.weight'" in unnamed.value.message
    )
    with pytest.raises(LayoutError, match="for 28 tensors"):
        planned({"model.layer": 0, "odel.layers.0": 0, "model.layers.0.": 0, "model.norm": 0, "lm_head": 0})
    assert planned({"": "cpu", "model.rotary_emb": 0}).ranks[0].bytes_by_device.keys() == {"cpu"}


def test_a_map_without_room_is_refused_with_need_and_have() -> None:
    with pytest.raises(DoesNotFit, match="have no room on any device") as left_over:
        planned("auto", {0: LAYER_BYTES * 2, "cpu": 0})
    assert "cuda:0" in left_over.value.message
    assert left_over.value.details["have_bytes"] == LAYER_BYTES * 2
    assert left_over.value.details["need_bytes"] >= BYTES
    with pytest.raises(DoesNotFit, match=r"cpu needs .* kB, has 1\.00 kB; cuda:0 needs .*, has 2\.00 kB"):
        planned({"model": 0, "lm_head": "cpu"}, {0: "2kB", "cpu": "1kB"})
    with pytest.raises(DoesNotFit, match=r"disk needs .*, has 10 B"):
        planned("auto", {"cpu": 0, "disk": 10}, "/scratch/x")
    with pytest.raises(ConfigError, match="needs max_memory"):
        planned("auto")


def test_node_limits_are_the_default_limits() -> None:
    asked = options("auto")
    assert asked is not None
    assert asked.on_node([100, 100], 50).max_memory == ((0, 100), (1, 100), ("cpu", 50))
    assert asked.on_node([100], -5).max_memory == ((0, 90), ("cpu", 0)), "a GPU alone keeps a tenth for activations"
    given = options("auto", {0: 7})
    assert given is not None
    assert given.on_node([100], 50) == given


@pytest.mark.parametrize("policy", ["auto", "sequential", "balanced_low_0"])
@pytest.mark.parametrize("precision", [Precision("float32"), Precision(quantization="fp8")])
def test_a_full_node_leaves_room_to_convert(policy: str, precision: Precision) -> None:
    """The load must still fit: each device converts tensors beside the others."""
    index = store_arrays(as_bf16(random_arrays(llama_shapes(4, 128, 256, 4, 2, 500))), chunk_bytes=20_000).index
    (whole,) = rank_facts(build_load_plan(index, Layout(), precision=precision).cut, index.chunks.largest_bytes)
    for share in range(2, 6):
        limit = whole.device_bytes // share
        for gpus in (1, 2):
            asked = parse_device_map(policy, None, "/scratch/x", Layout(), "cuda")
            assert asked is not None
            node = asked.on_node([limit] * gpus, limit)
            plan = build_load_plan(index, Layout(), precision=precision, device_map=node)
            (facts,) = rank_facts(plan.cut, plan.chunks.largest_bytes)
            assert facts.staging_bytes > index.chunks.largest_bytes
            assert max(0, *gpu_bytes(facts, "cuda").values(), host_bytes(facts, "cuda")) <= limit


def test_a_tied_head_is_on_the_device_of_its_embedding() -> None:
    tied = ModelConfig(tie_word_embeddings=True)
    whole = build_load_plan(store_arrays(as_bf16(ARRAYS)).index, Layout()).ranks[0].size_bytes
    for first in range(0, whole, whole // 7):
        devices = planned("sequential", {0: first, "cpu": 10 * whole}, config=tied).ranks[0].device_map
        assert devices is not None
        embedding, head = devices.devices_of(["model.embed_tokens.weight", "lm_head.weight"])
        assert embedding == head
    without = {name: array for name, array in ARRAYS.items() if name != "lm_head.weight"}
    index = store_arrays(as_bf16(without)).index
    spread = options("sequential", {0: whole // 2, "cpu": whole})
    plan = build_load_plan(index, Layout(), config=tied, device_map=spread)
    assert plan.ranks[0].device_map is not None
    assert plan.ranks[0].device_map.as_dict()["lm_head"] == 0, "whoever runs the model looks for it"


def request(**changes: Any) -> Any:
    return make_request(LoadOptions("/models/llama", **changes))


def test_requests_take_device_and_gpus_from_the_map() -> None:
    mapped = request(device_map="auto", max_memory={0: "1GB", 1: "1GB", "cpu": "1GB"})
    assert (mapped.device, mapped.gpus_per_rank) == ("cuda", 2)
    assert request(device_map="cpu").device == "cpu"
    assert (request(device_map="auto").device, request(device_map="auto").gpus_per_rank) == ("auto", 1)
    plain, auto = request(), request(device_map="auto")
    assert len({each.identity() for each in (mapped, plain, auto, request(device_map="sequential"))}) == 4

    settled = replace(auto, node_memory=((0, 5), (1, 5), ("cpu", 5)))
    assert settled.identity() == auto.identity(), "what the node has is not what was asked"
    assert (settled.gpus_per_rank, settled.mapping.max_memory) == (2, ((0, 5), (1, 5), ("cpu", 5)))
    assert pickle.loads(pickle.dumps(settled)) == settled
    assert settled.mapping.beside(2).max_memory == ((0, 3), (1, 3), ("cpu", 3))
    assert replace(mapped, node_memory=((0, 5),)).mapping.beside(2).max_memory == ((0, 5),), "that was given"


def arguments(*argv: str) -> dict[str, Any]:
    options = load_options(build_parser().parse_args(["load", "/model", *argv]))
    return {name: getattr(options, name) for name in ("device_map", "max_memory", "offload_folder")}


def test_the_command_accepts_device_maps(tmp_path: Path) -> None:
    assert arguments() == {"device_map": None, "max_memory": None, "offload_folder": None}
    assert arguments("--device-map", "auto", "--max-memory", "0=20GB, cpu=60GB", "--offload-folder", "/x") == {
        "device_map": "auto",
        "max_memory": {"0": "20GB", "cpu": "60GB"},
        "offload_folder": "/x",
    }
    assert arguments("--device-map", "model=0,lm_head=cpu")["device_map"] == {"model": "0", "lm_head": "cpu"}
    file = tmp_path / "map.json"
    file.write_text('{"model": 0, "lm_head": "cpu"}')
    assert arguments("--device-map", str(file))["device_map"] == {"model": 0, "lm_head": "cpu"}
    for wrong in ("[1]", "{", '{"a": [1]}'):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="--device-map"):
            arguments("--device-map", str(file))
    with pytest.raises(ConfigError, match="not NAME=VALUE"):
        arguments("--max-memory", "20GB")
    with pytest.raises(ConfigError, match="twice"):
        arguments("--max-memory", "0=1,0=2")
    with pytest.raises(ConfigError, match="cannot read"):
        arguments("--device-map", "/no/such.json")


def test_a_map_finds_devices_by_the_longest_prefix() -> None:
    found = DeviceMap((("a", 1), ("a.b", "cpu"), ("c.weight", 0)))
    assert found.devices == (0, 1, "cpu")
    assert found.devices_of(["a.x", "a.b.x", "a.bc", "c.weight", "c.bias", "ab"]) == [1, "cpu", 1, 0, None, None]
