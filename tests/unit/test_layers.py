"""The rules of the house, read from the source: who imports whom, and what may not be there.

A module is named by its path without `.py`, relative to the repository.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("storage", "cluster", "actors", "engines", "serving", "longshore")

# modules of ours that each package may import
MAY_IMPORT = {
    "storage": {"storage"},
    "cluster": {"storage", "cluster", "longshore"},
    "actors": {"storage", "cluster", "actors", "longshore"},
    "engines": {"storage", "cluster", "actors", "engines", "longshore"},
    "serving": {"storage", "cluster", "serving", "longshore"},
    "longshore": {"longshore", "cluster", "engines"},
}
# The modules that may import a heavy package: at module level, where there is nothing without it, or in functions.
AT_MODULE_LEVEL = {
    "ray": {
        "actors/coordination/agent_watch",
        "actors/coordinator",
        "actors/coordination/worker_groups",
        "actors/hosting",
        "actors/launch",
        "actors/coordination/load_run",
        "actors/coordination/nodes",
        "actors/coordination/placing",
        "actors/coordination/planner",
        "actors/coordination/jobs",
        "actors/coordination/spawn",
    },
    "torch": {  # imported by those below, when there are tensors
        "actors/devices/convert",
        "actors/devices/cuda_device",
        "actors/handover/modules",
        "actors/handover/module_places",
        "actors/reader/lazy_tensor",
        "engines/filling",
        "engines/resident_weights",
        "engines/written_weights",
        "engines/vllm_updates",
        "engines/sglang",
        "actors/saving/background",
        "actors/saving/boxed",
        "engines/dcp",
        "actors/saving/exchange",
        "actors/saving/held",
        "actors/saving/hf_names",
        "actors/saving/save",
        "actors/saving/training_state",
        "engines/transformers",
        "engines/vllm",
    },
}
IN_FUNCTIONS = {
    "ray": {
        "actors/agent_actor",
        "actors/links",
        "actors/saving/loaded",
        "actors/saving/reporting",
        "serving/app",
        "serving/command",
        "cluster/joining/connection",
        "cluster/doctor/doctor",
        "cluster/model",
        "cluster/user_values",
        "cluster/joining/node_tasks",
        "cluster/joining/ray_join",
    },
    "torch": {
        "actors/devices/cpu_device",
        "actors/saving/conversion",
        "actors/devices/mapped_device",
        "actors/gpu_worker",
        "actors/reader/open_model",
        "actors/saving/loaded",
        "cluster/command_line/demo",
        "cluster/planning/meta_estimate",
        "cluster/user_values",
    },
}
PRIVATE_NAMES = {"storage/stores/s3/botocore_private", "cluster/joining/ray_private"}
UNDOCUMENTED = {
    "auth",
    "awsrequest",
    "client",
    "compat",
    "endpoint",
    "handlers",
    "hooks",
    "httpsession",
    "parsers",
    "retries",
    "signers",
    "utils",
}  # modules of botocore
# the two interfaces that point upward: each may name a module of that package in a string, in one function
UPWARD = {"cluster/joining/connection": "actors", "cluster/command_line/cluster_commands": "serving"}
# their imports; without these, no import cycles
SEAMS = {
    ("cluster/joining/connection", "actors/launch"),
    ("cluster/command_line/cluster_commands", "serving/command"),
}


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


def imports(node: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Return (dotted name, is it lazy) of every import that runs, not those for type checkers.

    `from a.b import c` is "a.b.c", whether c is a module or a name in one.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield alias.name, inside
        elif isinstance(child, ast.ImportFrom):
            if child.level == 0 and child.module is not None:
                for alias in child.names:
                    yield f"{child.module}.{alias.name}", inside
        elif isinstance(child, ast.Call) and "import_module" in ast.dump(child.func) and child.args:
            if isinstance(child.args[0], ast.Constant):
                yield str(child.args[0].value), True
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from imports(ast.Module(child.orelse, []), inside)
        else:
            lazy = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(child, lazy)


@cache
def imports_of(path: Path) -> list[tuple[str, bool]]:
    return list(imports(parse(path)))


def packages(path: Path) -> set[tuple[str, bool]]:
    """Return (top-level package, is it lazy) of every import of a module."""
    return {(name.split(".")[0], lazy) for name, lazy in imports_of(path)}


def import_graph() -> dict[str, set[str]]:
    """Return the modules of ours that each module imports, in functions too, without the upward interfaces."""
    names = {name_of(path) for path in modules()}
    graph: dict[str, set[str]] = {}
    for path in modules():
        found = {target for name, _ in imports_of(path) if (target := module_of(name, names)) is not None}
        graph[name_of(path)] = {target for target in found if (name_of(path), target) not in SEAMS}
    return graph


def module_of(dotted: str, names: Collection[str]) -> str | None:
    """Return the module that `dotted` is, or is in; None when it is not ours."""
    place = dotted.replace(".", "/")
    candidates = (place, f"{place}/__init__", place.rpartition("/")[0], f"{place.rpartition('/')[0]}/__init__")
    return next((candidate for candidate in candidates if candidate in names), None)


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Return sets of modules, each of which imports all others of its set, directly or not."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = list(graph[start])
        while ahead:
            if (name := ahead.pop()) not in seen:
                seen.add(name)
                ahead += graph[name]
        return seen

    reach = {name: reached(name) for name in graph}
    tied = {name: frozenset(other for other in reach[name] if name in reach[other]) for name in graph}
    return [set(circle) for circle in set(tied.values()) if circle]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def test_the_scanner_finds_every_kind_of_import() -> None:
    tree = ast.parse(
        "import torch.nn\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import ray\nelse:\n    def g():\n        import serving\n"
        "class A:\n    def f(self):\n        from actors import launch\n"
        "try:\n    import boto3\nexcept ImportError:\n    pass\n"
        "x = importlib.import_module('ray.util')\n"
    )
    assert list(imports(tree)) == [
        ("torch.nn", False),
        ("typing.TYPE_CHECKING", False),
        ("serving", True),
        ("actors.launch", True),
        ("boto3", False),
        ("ray.util", True),
    ]


def test_the_search_for_import_cycles_finds_them() -> None:
    names = {"a/b", "a/__init__", "a/c"}
    assert [module_of(name, names) for name in ("a.b", "a.b.f", "a", "a.f", "x.y")] == [
        "a/b",
        "a/b",
        "a/__init__",
        "a/__init__",
        None,
    ]
    found = circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"f", "a"}})
    assert sorted(map(sorted, found)) == [["a", "b", "c"], ["f"]]


@pytest.mark.slow
def test_there_are_no_import_cycles() -> None:
    assert not circles(import_graph())


def test_packages_import_in_one_direction() -> None:
    wrong = {}
    for path in modules():
        found = {package for package, _ in packages(path) if package in (*PACKAGES, "bench")}
        found.discard(UPWARD.get(name_of(path), ""))  # in one function: the test below
        if too_many := found - MAY_IMPORT[name_of(path).split("/")[0]]:
            wrong[name_of(path)] = too_many
    assert not wrong


def test_heavy_packages_are_imported_only_where_allowed() -> None:
    wrong = [
        (name_of(path), package, lazy)
        for path in modules()
        for package, lazy in packages(path)
        if package in AT_MODULE_LEVEL
        and name_of(path) not in AT_MODULE_LEVEL[package]
        and not (lazy and name_of(path) in IN_FUNCTIONS[package])
    ]
    assert not wrong


def test_private_names_of_libraries_are_in_one_module_each() -> None:
    """storage/private_names.py gives the reasons. Names in that module are looked up, so no import shows them."""
    wrong = {}
    for path in modules():
        if name_of(path) in PRIVATE_NAMES:
            continue
        found = {name for name, _ in imports_of(path) if is_private(name)}
        if name_of(path).startswith("storage/stores/s3/"):
            found |= {
                ast.unparse(node)
                for node in ast.walk(parse(path))
                if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr) and not is_own(node.value)
            }
        if found:
            wrong[name_of(path)] = found
    assert not wrong, f"these belong to {PRIVATE_NAMES}"


def is_private(name: str) -> bool:
    package, *parts = name.split(".")
    if package == "botocore" and parts and parts[0] in UNDOCUMENTED:
        return True
    return package in ("botocore", "ray") and any(part.startswith("_") for part in parts)


def is_own(owner: ast.expr) -> bool:
    """Return whether an attribute's owner is the object itself, its class or its base."""
    return (isinstance(owner, ast.Name) and owner.id in ("self", "cls")) or (
        isinstance(owner, ast.Call) and ast.unparse(owner.func) == "super"
    )


def test_modules_allowed_a_heavy_package_import_it() -> None:
    for lazily, listed in ((False, AT_MODULE_LEVEL), (True, IN_FUNCTIONS)):
        for package, names in listed.items():
            idle = {name for name in names if (package, lazily) not in packages(ROOT / f"{name}.py")}
            assert not idle, f"{package} {lazily=}: no need to list {idle}"


def test_longshore_needs_the_standard_library_only() -> None:
    import sys

    for path in (ROOT / "longshore").glob("*.py"):
        for package, lazy in packages(path):
            known = package in sys.stdlib_module_names or package == "longshore"
            assert known or (lazy and package in ("cluster", "engines")), f"{path.name} imports {package}"


def test_cluster_names_actors_in_one_function_only() -> None:
    places = [
        (name_of(path), function.name)
        for path in (ROOT / "cluster").rglob("*.py")
        for function in ast.walk(parse(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for constant in ast.walk(function)
        if isinstance(constant, ast.Constant)
        and isinstance(constant.value, str)
        and constant.value.startswith("actors.")
    ]
    by_file: dict[str, set[str]] = {}
    for file, function in places:
        by_file.setdefault(file, set()).add(function)
    for file, functions in by_file.items():
        assert file in UPWARD
        assert len(functions) == 1, f"{file}: {functions}"


def test_no_assert_statements() -> None:
    """A typed error explains the problem, and is also raised under `python -O`."""
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in [*modules(), *(ROOT / "bench").rglob("*.py")]
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Assert)
    ]
    assert not found


def test_no_pickle_in_storage() -> None:
    for path in (ROOT / "storage").rglob("*.py"):
        found = {package for package, _ in packages(path)}
        assert not found & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}, name_of(path)


def test_no_folder_of_tests_is_named_like_a_package() -> None:
    folders = {path.name for path in (ROOT / "tests").rglob("*") if path.is_dir()}
    assert not folders & {*PACKAGES, "ray", "torch"}
