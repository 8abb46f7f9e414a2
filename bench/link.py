"""Ours over a link that is the limit: `make bench-link` or `python -m bench.link`, as root.

    this namespace                        a namespace of its own
    ours ---- veth <==== tbf: RATE ====  veth ---- nginx

Loads the same model verified with BLAKE3, verified with XXH3-128 and not verified, in turn, over a link of each rate,
and prints medians, their ratio to the unverified load and what each costs in CPU. Namespace, veth pair, queue and nginx
are gone at the end, however it ends. Exit code 0; 1 when a load failed; 2 when no link can be made here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.arguments import output_folder, positive_int, size, writable_folder
from bench.contender import NotRunnable, read_contender
from bench.one_run import REPOSITORY, RunFailed, run_once
from bench.range_server import NoRangeServer, RangeServer
from bench.results import Line
from bench.run_folder import NGINX, run_folder
from bench.sample import NoRoom, make_models
from bench.spec import Spec

RATES_MBIT = (1000, 2000)
WANTED_RATIO = 0.98
_TIMEOUT_S = 300.0  # of one load
_TOOLS = ("ip", "tc", "nginx")
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_UNVERIFIED = "direct_fresh_unverified"
_OURS = ("direct_fresh", "direct_fresh_xxh3", _UNVERIFIED)  # cases of longshore_load
_RAW = {"processes": 1, "connections": 2, "piece_bytes": 1 << 20}


class NoLink(Exception):
    """A rate-limited link cannot be made on this machine; the message says why."""


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
        """Make it, not limited yet. Raises NoLink."""
        try:
            _ip("netns", "add", self.namespace)
            _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self.namespace)
            _ip("address", "add", f"{self._near_address}/30", "dev", self._near)
            _ip("link", "set", self._near, "up")
            _ip("-n", self.namespace, "address", "add", f"{self.address}/30", "dev", self._far)
            _ip("-n", self.namespace, "link", "set", self._far, "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def limit(self, mbit_per_s: int) -> None:
        """From now on the namespace sends no faster than that. Raises NoLink."""
        burst_bytes = max(256 << 10, mbit_per_s * 1_000_000 // 8 // 250)  # what one tick of a slow kernel clock sends
        token_bucket = ["tbf", "rate", f"{mbit_per_s}mbit", "burst", str(burst_bytes), "latency", "20ms"]
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", self._far, "root", *token_bucket)

    def _remove(self) -> None:
        """All that was made. The veth pair goes first: the kernel takes its time to drop a namespace's devices."""
        for what in (("link", "delete", self._near), ("netns", "delete", self.namespace)):
            with contextlib.suppress(NoLink):  # not made, or gone already
                _ip(*what)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.link", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=size, default="1GB", help="of the model (default: %(default)s)")
    parser.add_argument("--rounds", type=positive_int, default=3, help="loads of each kind at each rate (default: 3)")
    parser.add_argument(
        "--mbit", type=positive_int, nargs="+", default=RATES_MBIT, help="rates of the link (default: 1000 2000)"
    )
    parser.add_argument(
        "--tmpfs", type=writable_folder, default="/dev/shm", help="where the model is made (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=output_folder, default=str(REPOSITORY / "bench" / "out"), help="folder for link.json"
    )
    options = parser.parse_args(arguments)
    try:
        with _ended_in_order():
            check_tools()
            lines = _measure(options.size, options.rounds, options.mbit, options.tmpfs)
    except (NoLink, NoRangeServer, NoRoom) as error:
        print(f"bench-link: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(table(lines))
    found = {str(rate): [line.as_dict() for line in at_rate] for rate, at_rate in lines.items()}
    (options.out / "link.json").write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(line.failure for at_rate in lines.values() for line in at_rate) else 0


def check_tools() -> None:
    """Raises NoLink unless this process may make namespaces and has the programs for it."""
    if os.geteuid() != 0:
        raise NoLink("a network namespace and a rate limit need root")
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    if missing:
        raise NoLink(f"not installed: {', '.join(missing)} (Debian: apt-get install iproute2 nginx-light)")


def table(lines: dict[int, list[Line]]) -> str:
    """In Markdown: medians, and each as a ratio to the load that was not verified."""
    rows = [
        "| link | load | Gbit/s of payload, call to READY | ratio to unverified | while streaming | CPU s/GB |",
        "|---|---|---|---|---|---|",
    ]
    for rate, at_rate in lines.items():
        plain = next((line for line in at_rate if line.case.name == _UNVERIFIED and line.runs), None)
        for line in at_rate:
            if not line.runs:
                rows.append(f"| {rate} Mbit/s | {line.title} | {line.absent or line.failure} | | | |")
                continue
            ratio = f"{line.gb_per_s / plain.gb_per_s:.3f}" if plain else "-"
            stream = f"{line.stream_gb_per_s * 8:.3f}" if line.stream_gb_per_s else "-"
            stats = [f"{line.gb_per_s * 8:.3f}", ratio, stream, f"{line.cpu_s_per_gb:.2f}"]
            rows.append(f"| {rate} Mbit/s | {line.title} | {' | '.join(stats)} |")
    return "\n".join(rows) + f"\n\nwanted: verified over unverified at least {WANTED_RATIO}"


def _measure(size_bytes: int, rounds: int, rates: Sequence[int], tmpfs: Path) -> dict[int, list[Line]]:
    with run_folder(tmpfs, "longshore-link-") as folder, RateLimitedLink() as link:
        models = make_models(folder / "www", size_bytes)
        prefix = ["ip", "netns", "exec", link.namespace]
        with RangeServer(folder / "www", folder / NGINX, host=link.address, command_prefix=prefix) as server:
            spec = models.spec("http", server.endpoint)
            found = {}
            for rate in rates:
                link.limit(rate)
                found[rate] = _rounds(rate, spec, rounds)
            return found


def _rounds(rate: int, spec: Spec, rounds: int) -> list[Line]:
    """Interleaved: all kinds in each round, the next one starting where this one did not."""
    lines = make_lines()
    for number in range(rounds):
        first = number % len(lines)
        for line in [*lines[first:], *lines[:first]]:
            if line.absent or line.failure:
                continue
            try:
                run = run_once(line, line.setting, spec, _TIMEOUT_S)
            except NotRunnable as error:
                line.absent = str(error)
            except RunFailed as error:
                line.failure = str(error)
            else:
                line.runs.append(run)
                print(
                    f"{rate} Mbit/s  {line.title:40} {run.gb_per_s * 8:6.3f} Gbit/s  {run.cpu_s_per_gb:5.2f} CPU s/GB"
                )
                sys.stdout.flush()
    return lines


def make_lines() -> list[Line]:
    """The raw reader, and ours as the contender's own module describes it: verified by each hash and not verified."""
    raw, ours = read_contender("ceiling_raw"), read_contender("longshore_load")
    cases = {case.name: case for case in ours.cases}
    return [
        Line(raw.name, raw.title, raw.cases[0], "http", (_RAW,), _RAW),
        *(Line(ours.name, ours.title, cases[name], "http", ours.settings, ours.settings[0]) for name in _OURS),
    ]


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP end it as Ctrl-C does: with everything removed."""

    def interrupt(number: int, _: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(program: str, *arguments: str) -> None:
    """In a session of its own: Ctrl-C is for this process, which removes what was made. Raises NoLink."""
    try:
        done = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": _PATH},
            start_new_session=True,
        )
    except OSError as error:
        raise NoLink(f"{program}: {error.strerror}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise NoLink(f"`{program} {' '.join(arguments)}`: {said[-1]}")


if __name__ == "__main__":
    sys.exit(main())
