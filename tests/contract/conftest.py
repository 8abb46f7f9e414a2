"""Ceph's gateway for the tests of this folder; they are skipped where it is not installed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.ceph_server import CephServer, missing_programs


@pytest.fixture(scope="session")
def ceph() -> Iterator[CephServer]:
    """Ceph's radosgw. Its folder is short, since the paths of Unix sockets must be."""
    if missing := missing_programs():
        pytest.skip(f"Ceph is not installed: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="ceph-") as folder, CephServer(Path(folder)) as server:
        yield server
