"""The rules of the house, read from the source: who imports whom, how long a file is, what may not be there.

A module pattern is a path without `.py`, relative to the repository, in `fnmatch` style.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("storage", "cluster", "actors", "longshore")
MAX_LINES = 300

# what each room may import of ours
MAY_IMPORT = {
    "storage": {"storage"},
    "cluster": {"storage", "cluster", "longshore"},
    "actors": {"storage", "cluster", "actors", "longshore"},
    "longshore": {"longshore", "cluster"},
}
# modules that may import a heavy package; of those, the ones that may do it at module level
MAY_USE = {
    "ray": {
        "cluster/client*",
        "cluster/connection",
        "cluster/doctor*",
        "cluster/model",
        "cluster/demo*",
        "actors/coordinator*",
        "actors/node_agent*",
        "actors/gpu_worker*",
        "actors/launch",
        "actors/agent_link",
        "actors/load_run",
        "actors/nodes",
        "actors/spawn",
    },
    "torch": {"actors/device*", "actors/gpu_worker*", "cluster/model", "cluster/demo*"},
}
AT_MODULE_LEVEL = {
    "ray": {pattern for pattern in MAY_USE["ray"] if pattern.startswith("actors/")},
    "torch": set[str](),
}
# the one seam that points upward: these may name a module of `actors` in a string, in one function each
NAMES_ACTORS = {"cluster/client*", "cluster/connection", "cluster/demo*"}


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


def allowed(path: Path, patterns: set[str]) -> bool:
    return any(fnmatch(name_of(path), pattern) for pattern in patterns)


def imports(node: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """(top-level package, is it lazy) of every import that runs: not those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield alias.name.split(".")[0], inside
        elif isinstance(child, ast.ImportFrom):
            if child.level == 0 and child.module is not None:
                yield child.module.split(".")[0], inside
        elif isinstance(child, ast.Call) and "import_module" in ast.dump(child.func) and child.args:
            if isinstance(child.args[0], ast.Constant):
                yield str(child.args[0].value).split(".")[0], True
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield from imports(other, inside)
        else:
            lazy = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(child, lazy)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@pytest.fixture(params=modules(), ids=name_of)
def module(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_the_scanner_sees_what_it_should() -> None:
    tree = ast.parse(
        "import torch.nn\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import ray\n"
        "class A:\n    def f(self):\n        from actors import launch\n"
        "try:\n    import boto3\nexcept ImportError:\n    pass\n"
        "x = importlib.import_module('ray.util')\n"
    )
    assert list(imports(tree)) == [
        ("torch", False),
        ("typing", False),
        ("actors", True),
        ("boto3", False),
        ("ray", True),
    ]


def test_rooms_point_one_way(module: Path) -> None:
    room = name_of(module).split("/")[0]
    found = {package for package, _ in imports(parse(module)) if package in PACKAGES}
    if allowed(module, NAMES_ACTORS):
        found.discard("actors")  # in one function: the test below
    assert found <= MAY_IMPORT[room], f"{name_of(module)} imports {found - MAY_IMPORT[room]}"


def test_heavy_packages_stay_where_they_belong(module: Path) -> None:
    for package, lazy in imports(parse(module)):
        if package in MAY_USE:
            where = MAY_USE if lazy else AT_MODULE_LEVEL
            assert allowed(module, where[package]), f"{name_of(module)} imports {package} ({lazy=})"


def test_longshore_needs_the_standard_library_only() -> None:
    import sys

    for path in (ROOT / "longshore").glob("*.py"):
        for package, lazy in imports(parse(path)):
            known = package in sys.stdlib_module_names or package == "longshore"
            assert known or (lazy and package == "cluster"), f"{path.name} imports {package}"


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
        assert any(fnmatch(file, pattern) for pattern in NAMES_ACTORS), file
        assert len(functions) == 1, f"{file}: {functions}"


def test_files_stay_small(module: Path) -> None:
    lines = len(module.read_text().splitlines())
    assert lines <= MAX_LINES, f"{name_of(module)} has {lines} lines"


def test_no_assert_statements(module: Path) -> None:
    found = [node.lineno for node in ast.walk(parse(module)) if isinstance(node, ast.Assert)]
    assert not found, f"{name_of(module)}: assert in lines {found}; raise a typed error instead"


def test_no_pickle_in_storage() -> None:
    for path in (ROOT / "storage").rglob("*.py"):
        found = {package for package, _ in imports(parse(path))}
        assert not found & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}, name_of(path)


def test_no_folder_of_tests_is_called_like_a_package() -> None:
    folders = {path.name for path in (ROOT / "tests").rglob("*") if path.is_dir()}
    assert not folders & {*PACKAGES, "ray", "torch"}
