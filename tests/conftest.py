"""Fixtures that any test may use."""

from hypothesis import HealthCheck, settings

# Tests say nothing about speed: a loaded machine is no failure.
settings.register_profile("longshore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("longshore")

pytest_plugins = [
    "tests.support.shared_memory",
    "tests.support.checkpoint_fixtures",
    "tests.support.s3_servers",
    "tests.support.stored_models",
    "tests.support.ray_clusters",
]
