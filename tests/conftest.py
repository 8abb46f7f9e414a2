"""Fixtures that any test may use."""

pytest_plugins = ["tests.support.shared_memory", "tests.support.checkpoint_fixtures", "tests.support.s3_servers"]
