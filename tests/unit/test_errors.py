"""Every error survives pickling with all its details, in every package."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
from collections.abc import Iterator

import pytest

import actors
import cluster
import storage
from storage.errors import LongshoreError


def _import_all() -> None:
    """Import every error module, so that no subclass is missed; they need neither ray nor torch."""
    for package in (storage, cluster, actors):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            if module.name.rpartition(".")[2].endswith("errors"):
                importlib.import_module(module.name)


def _tree(root: type[LongshoreError]) -> Iterator[type[LongshoreError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _tree(kind)


_import_all()
KINDS = sorted(set(_tree(LongshoreError)), key=lambda kind: (kind.__module__, kind.__name__))


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_every_error_survives_pickling(kind: type[LongshoreError]) -> None:
    error = kind("what", hint="do this", shard="a.safetensors", chunk=7, missing=None)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.message, again.hint, again.details) == (error.message, error.hint, error.details)
    assert str(again) == str(error) == "what (shard=a.safetensors, chunk=7). do this"


def test_with_details_keeps_known_details() -> None:
    error = LongshoreError("what", key="inner").with_details(key="outer", chunk=1)
    assert error.details == {"key": "inner", "chunk": 1}


def test_the_drawn_tree_names_every_class() -> None:
    """The drawing at the top of each errors module names every class of that module."""
    for kind in KINDS:
        module = importlib.import_module(kind.__module__)
        assert kind.__name__ in (module.__doc__ or ""), f"{kind.__name__} is not in the drawing of {kind.__module__}"
