"""Private names of other packages, looked up one by one, because any version may rename them.

For each package one module has all of its private names: `storage/stores/s3/botocore_private.py` and
`cluster/joining/ray_private.py`. pyproject.toml allows exactly the versions of TESTED.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from storage.errors import DependencyChanged

TESTED = {"botocore": ">=1.40,<1.45", "ray": ">=2.49,<2.61"}  # same as in pyproject.toml; a test compares them


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A private or undocumented name of a package."""

    module: str
    name: str  # in the module; "Class.method" for a name inside a class
    needed_for: str

    def find(self) -> Any:
        """Return the object with that name. Raises DependencyChanged if there is none."""
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise self.gone() from error
        return found

    def gone(self) -> DependencyChanged:
        """Return the error for a version of the package without this name."""
        package = self.module.partition(".")[0]
        try:
            installed: str | None = version(package)
        except PackageNotFoundError:
            installed = None
        return DependencyChanged(
            f"{package} has no {self.module}.{self.name}, which {self.needed_for} needs",
            hint=f"install a version that was tested: pip install '{package}{TESTED.get(package, '')}'",
            installed=installed,
        )


def attribute(owner: object, module: str, name: str, needed_for: str) -> Any:
    """Return an attribute of an object of a package. Raises DependencyChanged if `owner` has none.

    Args:
        owner: the object.
        module: the module of its class, for the message.
        name: "Class.attribute"; the part after the last dot is looked up.
        needed_for: the feature that does not work without it.
    """
    try:
        return getattr(owner, name.rpartition(".")[2])
    except AttributeError as error:
        raise PrivateName(module, name, needed_for).gone() from error


def missing(names: Iterable[PrivateName]) -> list[DependencyChanged]:
    """Return an error for each name that is missing."""
    errors = []
    for name in names:
        try:
            name.find()
        except DependencyChanged as error:
            errors.append(error)
    return errors
