"""ray-cluster.yaml as `ray up` reads it: Ray's schema, EC2's parameters, sizes and names that are those of the code."""

from __future__ import annotations

import copy
import shlex
import tomllib
from typing import Any

import boto3
import pytest
import yaml
from botocore.validate import ParamValidator
from jsonschema import ValidationError

from cluster.config import ENV_PREFIX, Config
from cluster.units import parse_bytes
from tests.support.kube_manifests import ROOT

GIB = 1 << 30


@pytest.fixture
def written() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "ray-cluster.yaml").read_text()))


def as_ray_up_takes_it(written: dict[str, Any]) -> dict[str, Any]:
    """Return the file as `ray up` prepares it before it calls the cloud. Raises what `ray up` raises."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(copy.deepcopy(written))
    validate_config(prepared)
    return dict(prepared)


def instance_problems(node_config: dict[str, Any]) -> str:
    """Return the problems that EC2's own description finds in a node's parameters."""
    operation = boto3.client("ec2", region_name="us-east-1").meta.service_model.operation_model("RunInstances")
    asked = {**node_config, "MinCount": 1, "MaxCount": 1}
    return str(ParamValidator().validate(asked, operation.input_shape).generate_report())


def test_ray_up_accepts_the_file(written: dict[str, Any]) -> None:
    prepared = as_ray_up_takes_it(written)
    assert prepared["head_node_type"] == "head"
    assert prepared["available_node_types"]["head"]["max_workers"] == 0


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("idle_timeout",), 10),
        (("docker", "shm_size"), "8g"),
        (("provider", "region"), 3),
        (("available_node_types", "gpu", "max_worker"), 4),
        (("available_node_types", "gpu", "min_workers"), 17),  # more than max_workers of all
        (("head_node_type",), "leader"),
    ],
)
def test_ray_up_refuses_slips(path: tuple[str, ...], value: Any, written: dict[str, Any]) -> None:
    node: dict[str, Any] = written
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    with pytest.raises((ValidationError, ValueError)):
        as_ray_up_takes_it(written)


def test_ec2_accepts_the_nodes(written: dict[str, Any]) -> None:
    for node_type in written["available_node_types"].values():
        assert instance_problems(node_type["node_config"]) == ""
    slip = written["available_node_types"]["gpu-spot"]["node_config"] | {"InstanceMarketOption": {"MarketType": "spot"}}
    assert "InstanceMarketOption" in instance_problems(slip)


def test_head_has_no_gpu_and_spot_workers_are_spot(written: dict[str, Any]) -> None:
    types = written["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 0}
    assert "--num-cpus=0" in written["head_start_ray_commands"][-1]
    assert types["gpu"]["resources"]["GPU"] == types["gpu-spot"]["resources"]["GPU"] == 8
    assert _variables(written["docker"]["worker_run_options"]) == {"NVIDIA_VISIBLE_DEVICES": "all"}  # not the image's
    assert types["gpu-spot"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    profiles = {name: types[name]["node_config"]["IamInstanceProfile"]["Arn"].rpartition("/")[2] for name in types}
    assert profiles == {"head": "longshore-head", "gpu": "longshore-read", "gpu-spot": "longshore-read"}
    guide = (ROOT / "docs" / "deploy.md").read_text()
    assert all(f"`{profile}`" in guide for profile in profiles.values())


def test_settings_are_those_of_the_code(written: dict[str, Any]) -> None:
    given = _variables(written["docker"]["run_options"])
    ours = {name: value for name, value in given.items() if name.startswith(ENV_PREFIX)}
    assert not Config.unknown_variables(ours)
    assert Config.from_env(ours).disk_cache_dir.startswith(f"{_mounted(written)}/")  # a folder in it can be our own


def test_workers_run_with_normal_priority(written: dict[str, Any]) -> None:
    assert _variables(written["docker"]["run_options"])["RAY_worker_niceness"] == "0"


def test_shared_memory_is_large_enough(written: dict[str, Any]) -> None:
    docker = written["docker"]
    arena = parse_bytes(_variables(docker["run_options"])["LONGSHORE_ARENA_BYTES"])
    head, worker = (_shm_bytes(docker[f"{role}_run_options"]) for role in ("head", "worker"))
    assert worker >= arena + _object_store(written["worker_start_ray_commands"])
    assert head >= _object_store(written["head_start_ray_commands"])


def test_image_is_this_version(written: dict[str, Any]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert written["docker"]["image"].rpartition(":")[2] == f"{version}-cu130"


def test_start_commands_are_valid_for_ray(written: dict[str, Any]) -> None:
    from ray.scripts.scripts import start

    known = {option for parameter in start.params for option in parameter.opts}
    for command in (written["head_start_ray_commands"][-1], written["worker_start_ray_commands"][-1]):
        used = {word.partition("=")[0] for word in shlex.split(command) if word.startswith("--")}
        assert used
        assert used <= known


def _variables(options: list[str]) -> dict[str, str]:
    pairs = (option.removeprefix("-e ").partition("=") for option in options if option.startswith("-e "))
    return {name: value for name, _, value in pairs}


def _mounted(written: dict[str, Any]) -> str:
    (volume,) = (option for option in written["docker"]["run_options"] if option.startswith("-v "))
    return str(volume.rpartition(":")[2])


def _shm_bytes(options: list[str]) -> int:
    (size,) = (option.removeprefix("--shm-size=") for option in options if option.startswith("--shm-size="))
    return int(size.removesuffix("g")) * GIB


def _object_store(commands: list[str]) -> int:
    return int(commands[-1].partition("--object-store-memory=")[2].split()[0])
