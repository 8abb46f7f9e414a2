"""The rate-limited link: its refusals and, as root, the removal of all that it made."""

from __future__ import annotations

import os
import subprocess

import pytest

from bench.harness import link
from bench.harness.link import NoLink, RateLimitedLink


def test_without_root_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoLink, match="need root"):
        RateLimitedLink().__enter__()


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(link, "_PATH", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoLink, match="ip: No such file or directory"):
        RateLimitedLink().__enter__()


@pytest.mark.slow
@pytest.mark.long
def test_no_part_of_a_link_is_left() -> None:
    try:
        with RateLimitedLink() as made:
            made.limit(1000)
            assert made.namespace in _said("ip", "netns")
            assert "tbf" in _said("tc", "-n", made.namespace, "qdisc")
            raise RuntimeError("a load failed")
    except NoLink as error:
        pytest.skip(str(error))
    except RuntimeError:
        pass
    assert made.namespace not in _said("ip", "netns")
    assert made._near not in _said("ip", "link")


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
