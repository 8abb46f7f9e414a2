"""The store of the benchmark says what it has sent."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from bench.range_server import NoRangeServer, RangeServer, find_nginx


@pytest.mark.slow
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

        assert server.served_bytes("/bench/model/") == 0
        got = [get("model", 0, 999), get("model", 50_000, 99_999), get("twin", 0, 9_999), get("model", 0, 9, "HEAD")]
        assert got == [1000, 50_000, 10_000, 0]
        assert server.served_bytes("/bench/model/") == 51_000
        assert server.served_bytes("/bench/twin/") == 10_000
        get("model", 0, 999)  # again: sent again
        assert server.served_bytes("/bench/model/") == 52_000
