"""`longshore serve` on a real Ray Serve: it answers, asks for its token, and leaves nothing when it is ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the HTTP service's packages are not installed (longshore[serving])")

from tests.support.free_ports import free_ports
from tests.support.ray_clusters import ENVIRONMENT, Longshore, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
TOKEN = "a-token-of-sufficient-length"


def ask(url: str, token: str = "") -> tuple[int, str]:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_it_serves_until_it_is_ended(longshore: Longshore, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "longshore", "serve", "--json", "--address", longshore.address, "--port"]
    environment = {**os.environ, **ENVIRONMENT, "LONGSHORE_HTTP_TOKEN": TOKEN}
    with socket.create_server(("127.0.0.1", 0)) as taken:  # a port in use is reported, and Serve does not keep it
        refused = subprocess.run(
            [*command, str(taken.getsockname()[1])],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert refused.returncode == 7, refused.stderr
    assert "nothing can listen at 127.0.0.1:" in refused.stderr
    (port,) = free_ports(1)
    out, said = tmp_path / "out", tmp_path / "said"  # not pipes, which somebody would have to read all the time
    with open(out, "w") as stdout, open(said, "w") as stderr:
        served = subprocess.Popen(
            [*command, str(port)], cwd=REPOSITORY, env=environment, stdout=stdout, stderr=stderr, text=True
        )
    try:
        eventually(lambda: "\n}\n" in out.read_text() or served.poll() is not None, said.read_text, 240)
        assert served.poll() is None, said.read_text()
        url = json.JSONDecoder().raw_decode(out.read_text())[0]["url"]
        assert url == f"http://127.0.0.1:{port}/"
        assert ask(f"{url}healthz")[0] == 200
        assert "<title>Longshore</title>" in ask(url)[1]
        assert ask(f"{url}v1/models")[0] == 401
        assert ask(f"{url}v1/models", "another-token-altogether")[0] == 401
        status, models = ask(f"{url}v1/models", TOKEN)
        assert (status, json.loads(models)) == (200, {"models": [], "ended": []})
        served.send_signal(signal.SIGINT)
        assert served.wait(120) == 130, said.read_text()
        assert TOKEN not in out.read_text() + said.read_text()
        eventually(lambda: not served_actors(), lambda: f"actors of Ray Serve are left: {served_actors()}", 60)
    finally:
        served.kill()
        served.wait()
        end_served_actors()


def served_actors() -> list[str]:
    import ray

    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == "serve"]


def end_served_actors() -> None:
    """End what a killed `longshore serve` left. The controller goes first, since it starts the others."""
    import ray

    def none_is_left() -> bool:
        for name in sorted(served_actors(), key=lambda name: (not name.startswith("SERVE_CONTROLLER"), name)):
            with contextlib.suppress(ValueError):  # gone by itself
                ray.kill(ray.get_actor(name, namespace="serve"))
        return not served_actors()

    eventually(none_is_left, lambda: f"actors of Ray Serve are left: {served_actors()}", 60)
