"""The application for Ray Serve: `serve run serving.deployment:build`, an `import_path`, or `longshore serve`.

The token is read where the application is built, and only its digest goes to the replicas.
"""

from __future__ import annotations

from typing import Any

from ray import serve

from serving.settings import ServingSettings

NAME = "longshore"
CONCURRENT = 448  # requests of one replica, beside its open streams
QUEUED = 200  # more than that wait for no place: Ray Serve says 503


def build(args: dict[str, Any] | None = None) -> Any:
    """The Serve application: settings of the environment, then `args`, by their names. Raises ConfigError."""
    settings = ServingSettings.from_env(**(args or {}))

    def make() -> Any:  # in each replica
        from serving.app import make_app
        from serving.service import Service

        return make_app(Service(settings))

    make_deployment: Any = serve.deployment(
        name=NAME,
        max_ongoing_requests=CONCURRENT + settings.streams,
        max_queued_requests=QUEUED,
        ray_actor_options={"num_cpus": 0},
    )
    return make_deployment(serve.ingress(make)()).bind()
