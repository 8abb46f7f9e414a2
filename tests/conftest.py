"""Fixtures that any test may use."""

pytest_plugins = ["tests.support.shared_memory"]
