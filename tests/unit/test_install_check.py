"""Packages that shadow `storage`, `cluster` and `actors` are found. Each case is a real process and folder."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from longshore.installation import PACKAGES, PROTOCOL_VERSION, PackageShadowed, check_packages, package_origins, probe

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter with `path` before our own packages, like a Ray job's working_dir."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=path[0],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def shadow(folder: Path, package: str, kind: str) -> Path:
    """Make a folder with something named `package` in it, and return that something."""
    if kind == "module":
        target = folder / f"{package}.py"
        target.write_text("")
        return target
    target = folder / package
    target.mkdir()
    if kind == "package":
        (target / "__init__.py").write_text("raise RuntimeError('somebody else was imported')")
    else:
        (target / "data.txt").write_text("")
    return target


def test_own_packages_pass() -> None:
    check_packages()
    assert package_origins() == {name: str(ROOT / name) for name in PACKAGES}


@pytest.mark.parametrize("kind", ["package", "module"])
@pytest.mark.parametrize("package", PACKAGES)
def test_a_shadowing_folder_is_named_and_never_imported(tmp_path: Path, package: str, kind: str) -> None:
    target = shadow(tmp_path, package, kind)
    done = run_python("import longshore.installation as c; c.check_packages()", tmp_path)
    assert done.returncode == 1
    assert "PackageShadowed" in done.stderr
    assert f"{package!r} would come from {target.resolve()}" in done.stderr
    assert "working_dir" in done.stderr
    assert "somebody else was imported" not in done.stderr
    for other in set(PACKAGES) - {package}:
        assert f"{other!r} would come" not in done.stderr


def test_a_plain_folder_shadows_an_editable_install(tmp_path: Path) -> None:
    # An editable install does this: a folder without __init__.py is found before our package is.
    target = shadow(tmp_path, "storage", "namespace")
    late = (
        "import sys, importlib.machinery as m\n"
        f"root = {str(ROOT)!r}\n"
        "sys.path.remove(root)\n"
        "class Late:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        return m.PathFinder.find_spec(name, [root]) if path is None else None\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in repr(f)] + [Late]\n"
        "import longshore.installation as c\n"
        "c.check_packages()\n"
    )
    done = run_python(late, tmp_path)
    assert f"'storage' would come from {target.resolve()}" in done.stderr


def test_a_plain_folder_behind_ours_is_harmless(tmp_path: Path) -> None:
    shadow(tmp_path, "storage", "namespace")
    done = run_python("import longshore.installation as c; c.check_packages()", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["storage", "actors"])
def test_importing_cluster_names_the_shadow_too(tmp_path: Path, package: str) -> None:
    shadow(tmp_path, package, "package")
    done = run_python("import cluster", tmp_path)
    assert done.returncode == 1
    assert f"PackageShadowed: not Longshore's own packages: {package!r} would come from" in done.stderr


@pytest.mark.parametrize("code", ["import longshore; longshore.load", "from longshore import load"])
def test_a_file_beside_the_script_is_named(tmp_path: Path, code: str) -> None:
    target = shadow(tmp_path, "cluster", "module")
    script = tmp_path / "train.py"
    script.write_text(f"{code}\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"PackageShadowed: not Longshore's own packages: 'cluster' would come from {target}" in done.stderr
    assert "Rename cluster.py" in done.stderr


def test_a_module_that_was_imported_before_is_named(tmp_path: Path) -> None:
    target = shadow(tmp_path, "cluster", "module")
    code = "import cluster, longshore\ntry:\n    longshore.load\nexcept longshore.PackageShadowed as e:\n    print(e)"
    done = run_python(code, tmp_path)
    assert f"'cluster' would come from {target}" in done.stdout, done.stderr


def test_a_script_that_is_called_cluster_is_named(tmp_path: Path) -> None:
    script = tmp_path / "cluster.py"
    script.write_text("import longshore\nlongshore.load\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60)
    assert f"'cluster' would come from {script}" in done.stderr
    assert "Rename cluster.py" in done.stderr


def test_serve_names_what_shadows_serving(tmp_path: Path) -> None:
    target = shadow(tmp_path, "serving", "module")
    done = run_python("import sys; from longshore.main import main; sys.exit(main(['serve']))", tmp_path)
    assert done.returncode == 7, done.stderr
    assert f"'serving' would come from {target}" in done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_the_command_reports_it_in_one_line(tmp_path: Path, package: str) -> None:
    shadow(tmp_path, package, "package")
    done = run_python("import sys; from longshore.main import main; sys.exit(main(['status']))", tmp_path)
    assert done.returncode == 7
    assert done.stderr.startswith("longshore: ")
    assert done.stderr.count("\n") == 1
    assert repr(package) in done.stderr


def test_probe_reports_instead_of_raising(tmp_path: Path) -> None:
    target = shadow(tmp_path, "actors", "package")
    done = run_python("import json; from longshore.installation import probe; print(json.dumps(probe()))", tmp_path)
    found = json.loads(done.stdout)
    assert found["origins"]["actors"] == str(target.resolve())
    assert "'actors' would come from" in found["problem"]


def test_probe_passes_on_a_valid_installation() -> None:
    found = probe()
    assert found["problem"] is None
    assert found["protocol"] == PROTOCOL_VERSION
    assert found["python"].startswith("3.")


def test_missing_packages_are_an_incomplete_installation(tmp_path: Path) -> None:
    copy = tmp_path / "longshore"
    copy.mkdir()
    for name in ("__init__.py", "installation.py"):
        (copy / name).write_text((ROOT / "longshore" / name).read_text())
    code = (
        "import sys\n"
        f"sys.path = [p for p in sys.path if p != {str(ROOT)!r} and 'site-packages' not in p]\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in repr(f)]\n"
        "import longshore.installation as c; c.check_packages()"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "'storage' is missing" in done.stderr
    assert "reinstall" in done.stderr


def test_the_error_pickles() -> None:
    error = PackageShadowed("not ours", hint="rename it", storage="somewhere/storage")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is PackageShadowed
    assert str(again) == str(error) == "not ours. rename it"
    assert again.details == {"storage": "somewhere/storage"}
    assert isinstance(again, ImportError)
