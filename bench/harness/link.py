"""A link that is the limit: a network namespace behind a veth pair and a token bucket. Needs root and iproute2.

    this namespace                        a namespace of its own
    ours ---- veth <==== tbf: RATE ====  veth ---- nginx

Namespace, veth pair and queue are gone at the end, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess

_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


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
        if os.geteuid() != 0:
            raise NoLink("a network namespace and a rate limit need root")
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

    @property
    def command_prefix(self) -> tuple[str, ...]:
        """Return a command that runs another one behind the link."""
        return ("ip", "netns", "exec", self.namespace)

    def limit(self, mbit_per_s: int) -> None:
        """Let the namespace send no faster than that from now on. Raises NoLink."""
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", self._far, "root", *token_bucket(mbit_per_s))

    def _remove(self) -> None:
        """Remove all that was made. The veth pair goes first: the kernel drops a namespace's devices late."""
        for what in (("link", "delete", self._near), ("netns", "delete", self.namespace)):
            with contextlib.suppress(NoLink):  # not made, or removed already
                _run("ip", *what)


def token_bucket(mbit_per_s: float) -> tuple[str, ...]:
    """Return the words for `tc` that let a device send no faster than that."""
    burst_bytes = max(256 << 10, int(mbit_per_s * 1e6 / 8 / 250))  # what one tick of a slow kernel clock sends
    return ("tbf", "rate", f"{round(mbit_per_s * 1e6)}bit", "burst", str(burst_bytes), "latency", "20ms")


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
