"""Errors of remote calls come back as the typed errors that they were."""

from __future__ import annotations

import pickle

import pytest

from cluster.errors import ClusterError, ModelNotFound
from cluster.joining.node_tasks import unwrapped


def test_the_error_inside_rays_wrapper():
    exceptions = pytest.importorskip("ray.exceptions")
    error = ModelNotFound("no such model", hint="look", model="m")
    wrapper = exceptions.RayTaskError("f", "a traceback", error).as_instanceof_cause()
    assert isinstance(wrapper, ModelNotFound)
    found = unwrapped(wrapper)
    assert type(found) is ModelNotFound
    assert str(pickle.loads(pickle.dumps(found))) == str(error)


def test_a_typed_error_is_itself_and_a_foreign_one_is_named():
    error = ModelNotFound("no such model")
    assert unwrapped(error) is error
    assert type(unwrapped(ValueError("odd"))) is ClusterError
    assert "ValueError: odd" in str(unwrapped(ValueError("odd")))
