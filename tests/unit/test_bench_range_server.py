"""The store of the benchmark says what it has sent."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from bench.range_server import NoRangeServer, RangeServer, find_nginx
from tests.support.ray_clusters import eventually


@pytest.mark.slow
@pytest.mark.long
def test_what_left_the_store_is_counted_by_path(tmp_path: Path) -> None:
    try:
        find_nginx()
    except NoRangeServer as error:
        pytest.skip(str(error))
    for name in ("model", "twin"):
        (tmp_path / "www" / "bench" / name).mkdir(parents=True)
        (tmp_path / "www" / "bench" / name / "a").write_bytes(b"1" * 100_000)
    with RangeServer(tmp_path / "www", tmp_path / "nginx") as server:

        def get(name: str, first: int, last: int, method: str = "GET") -> int:
            headers = {"Range": f"bytes={first}-{last}"}
            request = urllib.request.Request(f"{server.endpoint}/bench/{name}/a", headers=headers, method=method)
            with urllib.request.urlopen(request) as answer:
                return len(answer.read())

        def wait_until_served(name: str, size_bytes: int) -> None:
            """An answer is in the log some time after it was sent: on a busy machine later than is waited there."""
            prefix = f"/bench/{name}/"
            eventually(lambda: server.served_bytes(prefix) == size_bytes, lambda: f"{server.served_bytes(prefix)}", 60)

        assert server.served_bytes("/bench/model/") == 0
        got = [get("model", 0, 999), get("model", 50_000, 99_999), get("twin", 0, 9_999), get("model", 0, 9, "HEAD")]
        assert got == [1000, 50_000, 10_000, 0]
        wait_until_served("model", 51_000)
        wait_until_served("twin", 10_000)
        get("model", 0, 999)  # again: sent again
        wait_until_served("model", 52_000)
