"""This Longshore: its version, the version of its messages, and where its packages are imported from.

The names are generic. A Ray job whose working_dir holds a folder `storage/` puts that folder first on the
path of the driver and of every actor the job starts; the actor would then run somebody else's code, or fail
with an ImportError that explains nothing. A file `cluster.py` beside a script does the same to the script. All three
must live beside this package; `check_packages` says so when they do not.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PROTOCOL_VERSION = 12  # of the messages between client, coordinator, agents and workers; +1 when a field changes


def _installed_version() -> str:
    try:
        return version("longshore")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0+unknown"


__version__ = _installed_version()

# What two processes say first. Always a number and a text, so that every version can read it.
VERSION = (PROTOCOL_VERSION, __version__)


PACKAGES = ("storage", "cluster", "actors")


class PackageShadowed(ImportError):
    """A package of ours would be imported from elsewhere; says which, from where and what to do. Pickles."""

    def __init__(self, message: str, *, hint: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details  # package name -> the folder found instead of ours

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.message, self.hint, self.details)


def _rebuild(message: str, hint: str, details: dict[str, Any]) -> PackageShadowed:
    return PackageShadowed(message, hint=hint, **details)


def package_origins(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Folder or file of each package as an import would find it now, links resolved; "" where there is none."""
    return {name: _origin(name) for name in packages}


def check_packages(*also: str) -> None:
    """Raise PackageShadowed unless our packages, and those of `also`, lie in the folder that this one lies in."""
    home = _home()
    origins = package_origins((*PACKAGES, *also))
    elsewhere = {name: origin for name, origin in origins.items() if origin != os.path.join(home, name)}
    if not elsewhere:
        return
    found = "; ".join(
        f"{name!r} would come from {origin}" if origin else f"{name!r} is missing" for name, origin in elsewhere.items()
    )
    if all(elsewhere.values()):
        names = " and ".join(dict.fromkeys(os.path.basename(origin) for origin in elsewhere.values()))
        hint = (
            f"Rename {names}: beside a script, in the current folder, in a Ray job's working_dir or on PYTHONPATH "
            "that name comes before Longshore's package"
        )
    else:
        hint = "The installation is incomplete: reinstall it, from the checkout or the wheel"
    raise PackageShadowed(f"not Longshore's own packages: {found} (ours: {home})", hint=hint, **elsewhere)


def probe() -> dict[str, Any]:
    """Return what this process would run: versions, origins, and the problem if there is one. Never raises.

    `longshore doctor` runs it as a task on every node. Plain values only.
    """
    try:
        check_packages()
        problem = None
    except PackageShadowed as error:
        problem = str(error)
    return {
        "host": socket.gethostname(),
        "version": __version__,
        "protocol": PROTOCOL_VERSION,
        "python": platform.python_version(),
        "ray": _version_of("ray"),
        "origins": package_origins(),
        "problem": problem,
    }


def _home() -> str:
    return os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def _origin(name: str) -> str:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: something in sys.modules under that name has no __spec__
        return ""
    if spec is None:
        return ""
    if spec.origin is not None and spec.submodule_search_locations is None:
        return os.path.realpath(spec.origin)  # a single module, `storage.py`
    # a namespace package (a folder without __init__.py) has no origin, and shadows an editable install too
    folders = list(spec.submodule_search_locations or ())
    return os.path.realpath(folders[0]) if folders else ""


def _version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
