"""Longshore over a link that is the limit: `make bench-link` or `python -m bench.link`, as root.

    this namespace                        a namespace of its own
    ours ---- veth <==== tbf: RATE ====  veth ---- nginx

Loads the same model verified with BLAKE3, verified with XXH3-128 and not verified, in turn, over a link of each rate,
and prints medians, their ratio to the unverified load and what each costs in CPU. Namespace, veth pair, queue and nginx
are gone at the end, however it ends. Exit code 0; 1 when a load failed; 2 when no link can be made here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.contenders.table import CONTENDERS
from bench.harness.models import NoRoom, make_models
from bench.harness.report import markdown_table
from bench.harness.results import Line, line_id, lines_of
from bench.harness.rounds import run_once, run_rounds
from bench.harness.run_folder import NGINX, run_folder
from bench.harness.store import NoRangeServer, RangeServer
from bench.options import add_model_options, new_parser, positive_int, write_json

RATES_MBIT = (1000, 2000)
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_UNVERIFIED = "direct_fresh_unverified"
_OURS = ("direct_fresh", "direct_fresh_xxh3", _UNVERIFIED)  # modes of longshore_load
_RAW = {"processes": 1, "connections": 2, "piece_bytes": 1 << 20}
_HEADINGS = ("link", "load", "Gbit/s of payload, call to READY", "ratio to unverified", "while streaming", "CPU s/GB")


class NoLink(Exception):
    """Raised when a rate-limited link cannot be made on this machine. The message says why."""


class RateLimitedLink:
    """A network namespace behind a veth pair, whose answers come at no more than a given rate."""

    def __init__(self) -> None:
        number = os.getpid() % 16384
        self.namespace = f"longshore-{os.getpid()}"
        self._near, self._far = f"lsn{number}", f"lsf{number}"
        # 198.18.0.0/15 is set aside for measuring networks: nobody's route goes there
        net = number * 4
        self._near_address = f"198.18.{net >> 8}.{(net & 255) + 1}"
        self.address = f"198.18.{net >> 8}.{(net & 255) + 2}"

    def __enter__(self) -> RateLimitedLink:
        """Make the link, without a limit. Raises NoLink."""
        try:
            _run("ip", "netns", "add", self.namespace)
            _run("ip", "link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self.namespace)
            _run("ip", "address", "add", f"{self._near_address}/30", "dev", self._near)
            _run("ip", "link", "set", self._near, "up")
            _run("ip", "-n", self.namespace, "address", "add", f"{self.address}/30", "dev", self._far)
            _run("ip", "-n", self.namespace, "link", "set", self._far, "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def limit(self, mbit_per_s: int) -> None:
        """Let the namespace send no faster than that from now on. Raises NoLink."""
        burst_bytes = max(256 << 10, mbit_per_s * 1_000_000 // 8 // 250)  # what one tick of a slow kernel clock sends
        token_bucket = ["tbf", "rate", f"{mbit_per_s}mbit", "burst", str(burst_bytes), "latency", "20ms"]
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", self._far, "root", *token_bucket)

    def _remove(self) -> None:
        """Remove all that was made. The veth pair goes first: the kernel drops a namespace's devices late."""
        for what in (("link", "delete", self._near), ("netns", "delete", self.namespace)):
            with contextlib.suppress(NoLink):  # not made, or removed already
                _run("ip", *what)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit code."""
    parser = new_parser("bench.link", __doc__, json_option=False)
    add_model_options(parser, "1GB", 3)
    parser.add_argument("--mbit", type=positive_int, nargs="+", default=RATES_MBIT, help="rates of the link")
    options = parser.parse_args(arguments)
    try:
        if os.geteuid() != 0:
            raise NoLink("a network namespace and a rate limit need root")
        for number in (signal.SIGTERM, signal.SIGHUP):  # they end it as Ctrl-C does: with everything removed
            signal.signal(number, signal.default_int_handler)
        lines = _measure(options.size, options.rounds, options.mbit, options.tmpfs)
    except (NoLink, NoRangeServer, NoRoom) as error:
        print(f"bench-link: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(table(lines))
    found = {str(rate): [line.as_dict() for line in at_rate] for rate, at_rate in lines.items()}
    write_json(options.out / "link.json", found)
    return 1 if any(line.failure for at_rate in lines.values() for line in at_rate) else 0


def table(lines: dict[int, list[Line]]) -> str:
    """Return the medians in Markdown, each with its ratio to the load that was not verified."""
    rows = []
    for rate, at_rate in lines.items():
        plain = next((line for line in at_rate if line.case.name == _UNVERIFIED and line.runs), None)
        for line in at_rate:
            head = (f"{rate} Mbit/s", line.title)
            if not line.runs:
                rows.append((*head, line.absent or line.failure, "", "", ""))
                continue
            ratio = f"{line.gb_per_s / plain.gb_per_s:.3f}" if plain else "-"
            stream = f"{line.stream_gb_per_s * 8:.3f}" if line.stream_gb_per_s else "-"
            rows.append((*head, f"{line.gb_per_s * 8:.3f}", ratio, stream, f"{line.cpu_s_per_gb:.2f}"))
    return markdown_table(_HEADINGS, rows)


def _measure(size_bytes: int, rounds: int, rates: Sequence[int], tmpfs: Path) -> dict[int, list[Line]]:
    with run_folder(tmpfs, "longshore-link-") as folder, RateLimitedLink() as link:
        models = make_models(folder / "www", size_bytes)
        prefix = ["ip", "netns", "exec", link.namespace]
        with RangeServer(folder / "www", folder / NGINX, host=link.address, command_prefix=prefix) as server:
            spec = replace(models, source="http", endpoint=server.endpoint)
            run = functools.partial(run_once, spec=spec)
            found = {}
            for rate in rates:
                print(f"{rate} Mbit/s", flush=True)
                link.limit(rate)
                found[rate] = make_lines()
                run_rounds(found[rate], rounds, run)
            return found


def make_lines() -> list[Line]:
    """Return the lines of the raw reader, and of ours: verified by each hash and not verified."""
    lines = {line.id: line for line in lines_of(CONTENDERS.values(), ("http",))}
    raw = lines[line_id("ceiling_raw", "", "http")]
    raw.setting = _RAW
    return [raw, *(lines[line_id("longshore_load", name, "http")] for name in _OURS)]


def _run(program: str, *arguments: str) -> None:
    """Run in a session of its own: Ctrl-C is for this process, which removes the link. Raises NoLink."""
    try:
        done = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": _PATH},
            start_new_session=True,
        )
    except OSError as error:
        raise NoLink(f"{program}: {error.strerror} (Debian: apt-get install iproute2)") from error
    if done.returncode:
        reasons = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise NoLink(f"`{program} {' '.join(arguments)}`: {reasons[-1]}")


if __name__ == "__main__":
    sys.exit(main())
