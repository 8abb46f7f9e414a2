"""The options of a load are the same in every signature, on the command line and in the HTTP schema."""

from __future__ import annotations

import argparse
import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

import cluster
from cluster.command_line.cli import build_parser
from cluster.errors import ConfigError
from cluster.options import HOST_RANK, LOAD, PLAN, SAFE_OPEN, LoadOptions, QuantizationName, about, options_of
from cluster.planning.preview import PlanOptions
from cluster.precision.recipes import DTYPES, SCHEMES
from cluster.request import StoreOptions
from cluster.updating import UpdateOptions

# Arguments of a call that say nothing about the model.
OF_THE_CALL = {
    LOAD: {"address", "progress", "timeout_s", "config"},
    PLAN: {*(one.name for one in fields(PlanOptions)), "config"},
    HOST_RANK: {"rank", "group", "timeout_s", "config"},
    SAFE_OPEN: {"framework", "device", "group", "member", "members", "cache", "config"},
}
OF_THE_VERB = {LOAD: {"address", "timeout"}, PLAN: {one.name for one in fields(PlanOptions)}}
OF_THE_BODY = {LOAD: {"timeout_s"}, PLAN: {"memory", "host_memory", "ranks_per_node", "store_rate"}}
HINTS = {**get_type_hints(PlanOptions), **get_type_hints(LoadOptions)}
DEFAULTS = {one.name: one.default for one in (*fields(PlanOptions), *fields(LoadOptions))}
JSON_TYPES = {
    bool: {"boolean"},
    int: {"integer"},
    float: {"number", "integer"},
    str: {"string"},
    NoneType: {"null"},
    Mapping: {"object"},
    Sequence: {"array"},
}


def names_of(function: str) -> set[str]:
    return {one.name for one in options_of(function)}


@pytest.mark.parametrize("function", [LOAD, PLAN, HOST_RANK, SAFE_OPEN])
def test_signatures_are_those_of_the_options(function: str) -> None:
    public = getattr(cluster, function)
    parameters = dict(inspect.signature(public).parameters)
    hints = get_type_hints(inspect.unwrap(public))
    if function == SAFE_OPEN:  # its first parameter is called as that of safetensors
        parameters["model_uri"], hints["model_uri"] = parameters.pop("filename"), hints.pop("filename")
    assert set(parameters) == {"model_uri"} | names_of(function) | OF_THE_CALL[function]
    for name in {"model_uri", *parameters} & {one.name for one in (*fields(LoadOptions), *fields(PlanOptions))}:
        if (name == "rank" and function == HOST_RANK) or (name == "device" and function == SAFE_OPEN):
            continue
        default = parameters[name].default
        assert (MISSING if default is inspect.Parameter.empty else default) == DEFAULTS[name], name
        assert hints[name] == HINTS[name], name


@pytest.mark.parametrize("verb", [LOAD, PLAN])
def test_the_command_line_is_that_of_the_options(verb: str) -> None:
    (verbs,) = (one for one in build_parser()._actions if isinstance(one, argparse._SubParsersAction))
    actions = {one.dest: one for one in verbs.choices[verb]._actions}
    options = {one.name: one for one in options_of(verb) if about(one).command}
    assert set(actions) == {"help", "json", "debug", "uri", *options, *OF_THE_VERB[verb]}
    for name, one in options.items():
        told = about(one)
        assert told.help in str(actions[name].help), name
        assert tuple(actions[name].choices or ()) == told.choices, name
        assert actions[name].default == (one.default if told.command_default is None else told.command_default), name
    assert not [one.name for one in options_of(verb) if not about(one).command and about(one).metavar]


@pytest.mark.parametrize(("function", "body"), [(LOAD, "LoadBody"), (PLAN, "PlanBody")])
def test_the_http_schema_is_that_of_the_options(function: str, body: str) -> None:
    pytest.importorskip("fastapi", reason="the HTTP service's packages are not installed (longshore[serving])")
    from serving import schemas

    schema = getattr(schemas, body).model_json_schema()
    options = {one.name: one for one in options_of(function) if about(one).http}
    assert set(schema["properties"]) == {"uri", *options, *OF_THE_BODY[function]}
    for name, found in schema["properties"].items():
        if name not in ("uri", "timeout_s"):
            assert found["default"] == DEFAULTS[name], name
            assert set(json_types(found)) <= set(types_of(HINTS[name])), name
            assert found["description"] if name in options else True, name
        choices = about(options[name]).choices if name in options and name != "quantization" else ()
        assert tuple(found.get("enum", ())) == choices, name


def test_the_http_schema_of_updates_is_that_of_the_options() -> None:
    pytest.importorskip("fastapi", reason="the HTTP service's packages are not installed (longshore[serving])")
    from serving.schemas import UpdateBody

    kinds: tuple[type, ...] = (UpdateOptions, StoreOptions)
    known = {one.name: get_type_hints(kind)[one.name] for kind in kinds for one in fields(kind)}
    schema = UpdateBody.model_json_schema()["properties"]
    assert set(schema) == known.keys() - {"store", "credentials", "profile"}  # the nodes have their own
    for name, found in schema.items():
        assert found["default"] in (None, False), name
        assert set(json_types(found)) <= set(types_of(known[name])), name
        assert found["description"], name
    body = UpdateBody(uri="s3://b/m", revision="a" * 64, streaming=True, signed_name="m", region="r", anonymous=True)
    store = StoreOptions(region="r", anonymous=True)
    assert body.options() == UpdateOptions("s3://b/m", "a" * 64, True, "m", store)


def json_types(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the JSON types that a schema accepts."""
    for one in found.get("anyOf", [found]):
        yield one["type"]


def types_of(hint: Any) -> Iterator[str]:
    """Yield the JSON types of values that an annotation accepts."""
    if get_origin(hint) in (Union, UnionType):
        for one in get_args(hint):
            yield from types_of(one)
    yield from JSON_TYPES.get(get_origin(hint) or hint, ())


def test_choices_are_those_that_the_code_accepts() -> None:
    assert get_args(QuantizationName) == tuple(SCHEMES)
    for one in fields(LoadOptions):
        for choice in about(one).choices if one.metadata else ():
            LoadOptions("/model", **{one.name: choice})
    assert set(DTYPES) <= set(next(about(one).choices for one in fields(LoadOptions) if one.name == "dtype"))


def test_options_are_frozen_and_can_be_pickled() -> None:
    keys = ["key"]
    options = LoadOptions("/model", trusted_keys=keys, max_memory={0: "1GB"}, device_map="auto")
    keys.append("another")
    assert options.trusted_keys == ("key",)
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(AttributeError):
        options.keep = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"keep": 1}, "keep must be True or False, not int"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be a whole number from 1 to 65536, not 0"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, not 'tpu'"),
        ({"placement": "x"}, "placement must be one of auto, via_arena, direct, not 'x'"),
        ({"fit": "maybe"}, "fit must be one of strict, auto, not 'maybe'"),
        ({"dtype": "int8"}, "dtype must be one of auto, bfloat16"),
        ({"quantization": "int3"}, "quantization must be one of fp8"),
        ({"wait_for_resources_s": -1}, "wait_for_resources_s must be 0 or more seconds"),
        ({"revision": "5f0c"}, "a revision is 64 hex digits"),
        ({"signed_name": "a\nb"}, "signed_name is one line"),
        ({"device_map": "auto", "fsdp_size": 2}, "device_map is for one rank"),
    ],
)
def test_wrong_options_are_refused_when_they_are_made(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LoadOptions("/model", **wrong)


def test_the_options_import_nothing_heavy() -> None:
    code = (
        "import sys, cluster.options\n"
        "print(*{'ray', 'torch', 'pydantic', 'numpy', 'boto3', 'rich'} & {name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout.split(), done.stderr) == ([], "")
