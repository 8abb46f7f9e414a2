"""Fixtures that any test may use."""

import gc
import signal

from hypothesis import HealthCheck, settings

# Tests say nothing about speed: a loaded machine is no failure.
_quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("longshore", max_examples=40, **_quiet)
settings.register_profile("thorough", max_examples=400, **_quiet)  # pytest --hypothesis-profile=thorough
settings.load_profile("longshore")

# Whoever starts the tests in the background of a shell has Ctrl-C ignored, and so would all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = [
    "tests.support.ray_clusters",  # before those that import it, which pytest would complain of
    "tests.support.shared_memory",
    "tests.support.s3_servers",
    "tests.support.emulators",
    "tests.support.stored_models",
    "tests.support.family_checkpoints",
    "tests.support.trainer_checkpoints",
    "tests.support.fsdp_checkpoints",
    "tests.support.last_words",
    "tests.support.last_exit",
]


def pytest_collection_finish() -> None:
    """Leave what was imported out of every collection of garbage to come: each looked through it for half a second."""
    gc.collect()
    gc.freeze()
