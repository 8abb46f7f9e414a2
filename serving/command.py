"""`longshore serve`: the application on the Ray Serve of a cluster, until the command is ended."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from cluster.config import Config
from cluster.errors import ClusterError, ClusterLost, PackageMissing
from cluster.joining.connection import connect
from longshore.installation import __version__
from serving.settings import ServingSettings
from storage.problems import install_hint

APPLICATION = "longshore"
ANSWER_S = 15.0
LOOK_S = 5.0
SILENT_S = 40.0  # an application that has not answered for so long is gone; at 60 Ray ends this process itself


def start(settings: ServingSettings, address: str | None = None) -> str:
    """Put the application on the cluster's Ray Serve; its URL. Joins the cluster, or starts a local one.

    Raises PackageMissing, ClusterLost; ClusterError when Serve runs there with other HTTP options, or cannot listen.
    """
    serve = _ray_serve()
    connect(address, Config.from_env())
    try:
        serve.start(http_options=serve.config.HTTPOptions(host=settings.host, port=settings.port))
    except Exception as error:  # Ray's own kinds do not tell this one from others
        if "Failed to bind" not in str(error):
            raise
        _end_if_idle(serve)  # else Serve would keep this port for whoever comes next
        raise ClusterError(
            f"nothing can listen at {settings.host}:{settings.port} of the cluster's nodes",
            hint="the port is taken there, or the address is none of theirs: --port and --host name others",
        ) from error
    from serving.app import build

    application = build(settings.model_dump())
    serve.run(application, name=APPLICATION, route_prefix="/", logging_config={"enable_access_log": False})
    url = url_of(settings)
    if not _answers(url):
        stop()
        raise ClusterError(
            "the application does not answer where it should",
            hint="Ray Serve has one host and port for the whole cluster, which its first application decides: name "
            "those (--host, --port), or end Serve with `serve shutdown`",
            url=url,
        )
    return url


def url_of(settings: ServingSettings) -> str:
    """Return the URL of the page, from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(settings.host, settings.host)
    return f"http://{host}:{settings.port}/"


def _answers(url: str) -> bool:
    give_up_s = time.monotonic() + ANSWER_S
    while time.monotonic() < give_up_s:
        try:
            with urllib.request.urlopen(f"{url}healthz", timeout=ANSWER_S) as answer:
                return bool(json.load(answer).get("version") == __version__)
        except (OSError, ValueError, http.client.HTTPException):
            time.sleep(0.2)
    return False


def _is_heard(url: str) -> bool:
    """Return whether a server answers there. A busy server, or one that limits the rate, is not gone."""
    give_up_s = time.monotonic() + SILENT_S
    while time.monotonic() < give_up_s:
        try:
            urllib.request.urlopen(f"{url}healthz", timeout=SILENT_S / 2).close()
            return True
        except urllib.error.HTTPError as error:
            error.close()
            return True
        except (OSError, http.client.HTTPException):
            time.sleep(min(LOOK_S, SILENT_S / 10))
    return False


def stop() -> None:
    """Take the application away; Serve too, when it has no other."""
    serve = _ray_serve()
    serve.delete(APPLICATION)
    _end_if_idle(serve)


def _end_if_idle(serve: Any) -> None:
    if not serve.status().applications:
        serve.shutdown()


def serve_until_interrupted(
    host: str | None, port: int | None, address: str | None, say: Callable[[str], None]
) -> None:
    """Serve for as long as this thread is not interrupted. `say(url)` when it answers. Raises as `start` does."""
    settings = ServingSettings.from_env(host=host, port=port)
    url = start(settings, address)
    try:
        say(url)
        while _is_heard(url):
            time.sleep(LOOK_S)
    except BaseException:
        stop()
        raise
    raise ClusterLost(
        f"the application has not answered for {SILENT_S:.0f} s",
        hint="`ray status` shows whether the cluster is there; start this command again when it is",
        url=url,
    )


def _ray_serve() -> Any:
    try:
        import fastapi  # noqa: F401
        from ray import serve
    except ImportError as error:
        raise PackageMissing(
            "the HTTP service's packages are not installed", hint=install_hint("serving"), package=error.name
        ) from error
    return serve
