"""Addresses are looked at before Ray is asked, as Ray would wait for a dead one for many minutes."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import ClusterLost, ConfigError
from cluster.joining import ray_join
from cluster.joining.patience import check_head, check_ray_address
from cluster.joining.ray_join import join


@pytest.mark.parametrize("address", [None, "", "auto", "local"])
def test_special_ray_addresses_are_accepted(address: str | None) -> None:
    check_ray_address(address)


def test_an_open_address_passes_and_a_closed_one_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_ray_address(f"127.0.0.1:{port}")
    with pytest.raises(ClusterLost, match=f"address=127.0.0.1:{port}"):
        check_ray_address(f"127.0.0.1:{port}")


def test_ipv6() -> None:
    with pytest.raises(ClusterLost, match="no Ray cluster answers"):
        check_ray_address("[::1]:1")


@pytest.mark.parametrize(
    "address", ["ray://head:10001", "http://head:8265", "head", "head:port", ":6379", "head:0", "head:99999", "head:²"]
)
def test_invalid_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="address="):
        check_ray_address(address)


def test_a_head_that_takes_connections_and_is_silent_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ClusterLost, match="answers nothing"):
            check_head(address, timeout_s=0.1)
        answering = threading.Thread(target=lambda: [server.accept()[0].close() for _ in range(4)])
        answering.start()  # (the first two are those of the check above)
        check_head(address)
        answering.join()


def test_a_missing_token_is_a_typed_error_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    class AuthenticationError(Exception):
        """Ray's; no ConnectionError."""

    def init(**_: Any) -> None:
        raise AuthenticationError("Token authentication is enabled but ...")

    monkeypatch.setattr(ray_join, "check_head", lambda address: None)
    ray = SimpleNamespace(init=init, exceptions=SimpleNamespace(AuthenticationError=AuthenticationError))
    with pytest.raises(ClusterLost, match=r"no valid token.*RAY_AUTH_MODE"):
        join(ray, "head:6379", start=False)
    older = SimpleNamespace(init=init, exceptions=SimpleNamespace())  # whose errors are what they were
    with pytest.raises(AuthenticationError):
        join(older, "head:6379", start=False)
