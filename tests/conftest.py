"""Fixtures that any test may use."""

from hypothesis import HealthCheck, settings

# Tests say nothing about speed: a loaded machine is no failure.
_quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("longshore", max_examples=40, **_quiet)
settings.register_profile("thorough", max_examples=400, **_quiet)  # pytest --hypothesis-profile=thorough
settings.load_profile("longshore")

pytest_plugins = [
    "tests.support.shared_memory",
    "tests.support.checkpoint_fixtures",
    "tests.support.s3_servers",
    "tests.support.stored_models",
    "tests.support.family_checkpoints",
    "tests.support.ray_clusters",
    "tests.support.losable_nodes",
    "tests.support.net_cluster",
]
