"""`import cluster` offers its public names, and loads nothing heavy."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import cluster
import cluster.errors
import longshore
import storage.errors

PACKAGE = Path(cluster.__file__).parent
VERBS = ("load", "plan", "publish", "verify", "status", "release")


@pytest.mark.parametrize("name", cluster.__all__)
def test_every_public_name_is_there(name: str) -> None:
    value = getattr(cluster, name)
    home = cluster._HOME_OF[name]
    assert value is getattr(importlib.import_module(home), name)


def test_verbs_have_async_twins_with_the_same_parameters() -> None:
    for verb in VERBS:
        plain, twin = getattr(cluster, verb), getattr(cluster, f"a{verb}")
        assert inspect.iscoroutinefunction(inspect.unwrap(twin, stop=inspect.iscoroutinefunction))
        assert list(inspect.signature(plain).parameters) == list(inspect.signature(twin).parameters), verb


def test_type_checkers_see_the_same_names() -> None:
    seen = {
        alias.asname: node.module
        for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None
    }
    assert seen == cluster._HOME_OF


@pytest.mark.parametrize("module", [storage.errors, cluster.errors])
def test_every_error_class_is_public(module: object) -> None:
    kinds = {n for n, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert kinds <= set(cluster.__all__)


def test_no_module_of_the_package_hides_a_public_name() -> None:
    # importing cluster.load would set the attribute `load` of the package to that module
    assert not {path.stem for path in PACKAGE.glob("*.py")} & set(cluster.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        cluster.lode  # noqa: B018


def test_longshore_offers_the_same_names() -> None:
    assert longshore.__all__ == cluster.__all__
    for name in cluster.__all__:
        assert getattr(longshore, name) is getattr(cluster, name)
    assert set(cluster.__all__) <= set(dir(longshore))
    assert not {path.stem for path in Path(longshore.__file__).parent.glob("*.py")} & set(cluster.__all__)
    with pytest.raises(AttributeError, match="module 'longshore' has no attribute 'lode'"):
        longshore.lode  # noqa: B018


def test_type_checkers_see_the_names_of_longshore() -> None:
    # They follow the star to the names that `cluster` imports for them, unless it has an `__all__` they cannot read.
    tree = ast.parse(Path(longshore.__file__).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    assert [ast.unparse(line) for block in blocks for line in block.body] == ["from cluster import *"]
    assert not [
        node
        for node in ast.parse((PACKAGE / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]


def test_import_longshore_loads_only_the_standard_library() -> None:
    code = (
        "import sys, longshore\n"
        "print(*sorted({'cluster', 'storage', 'ray', 'torch'} & set(sys.modules)))\n"
        "longshore.load, longshore.plan, longshore.StoreError\n"
        "print(*sorted({'ray', 'torch'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout.split(), done.stderr) == ([], "")


def test_import_and_planning_modules_load_nothing_heavy() -> None:
    code = (
        "import sys, cluster, cluster.planning.plan, cluster.telemetry.report, cluster.errors\n"
        "dir(cluster)\n"
        "print(*sorted({'ray', 'torch', 'boto3', 'botocore', 'fsspec', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout.split(), done.stderr) == ([], "")


@pytest.mark.parametrize("module", ["actors.coordinator", "actors.node_agent", "actors.gpu_worker"])
def test_processes_of_a_load_start_without_torch(module: str) -> None:
    """The import takes a second of each process, so a worker delays it until tensors are requested."""
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"
