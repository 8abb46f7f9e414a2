"""Hosts on this machine: each with its own network, /dev/shm, /tmp, name and processes; and links that can be cut.

    with Network() as network:
        host = network.add_host("left")
        host.start(["ray", "start", ...], environ)
        host.cut()                  packets are lost from now on, both ways, and nobody is told
        host.heal()

A host is a set of Linux namespaces; a bridge of this machine is the switch, and the machine itself, at
`Network.address`, is on it too. Only root can make them, with iproute2 and util-linux: `why_not` says what is missing.
All ends with the block, and with this process however that dies, but for an empty bridge, which the next `Network`
removes.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

REPOSITORY = Path(__file__).parents[2]
_TOOLS = ("ip", "mount", "nsenter", "setpriv", "unshare")
_BRIDGE = "lsb"  # and the process id of who made it
_TEST_NETWORK = ipaddress.IPv4Network("198.18.0.0/15")  # for tests of networks, by RFC 2544
_SHM = "size=512m,mode=1777"
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")


def why_not() -> str:
    """What keeps this process from making hosts; empty when nothing does."""
    if os.geteuid() != 0:
        return "hosts of their own need root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"hosts of their own need {', '.join(missing)} (iproute2, util-linux)"
    tried = f"{_BRIDGE}t{os.getpid()}"
    commands = [["unshare", *_NAMESPACES, "--fork", "--mount-proc", "mount", "-t", "tmpfs", "shm", "/dev/shm"]]
    commands += [["ip", "link", "add", tried, "type", kind] for kind in ("bridge", "veth")]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return f"hosts of their own cannot be made here: {shlex.join(command)}: {done.stderr.strip()}"
        if command[0] == "ip":
            _ip("link", "delete", tried)
    return ""


class Host:
    """One host; `Network.add_host` makes it. Its first process does nothing but bury the others."""

    def __init__(self, name: str, address: str, prefix_length: int, bridge: str, shown: Sequence[Path]) -> None:
        self.name, self.address = name, address
        self._port = f"{bridge}p{address.rsplit('.', 1)[1]}"  # of the switch, where this host's cable ends
        self._started: list[subprocess.Popen[bytes]] = []
        # The death signal follows the main thread, which outlives every test.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        self._keeper = subprocess.Popen(
            [*command, "sh", "-c", _first_process(name, shown)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        try:
            said = self._keeper.stdout.readline() if self._keeper.stdout else b""
            if said != b"ready\n":
                raise RuntimeError(f"the host {name} did not come up: {said!r}")
            (self._init,) = psutil.Process(self._keeper.pid).children()
            self._ours = {self._init.pid, *(child.pid for child in self._init.children())}
            _ip("link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(self._init.pid))
            _ip("link", "set", self._port, "master", bridge, "up")
            self.run(["ip", "address", "add", f"{address}/{prefix_length}", "dev", "eth0"])
            self.run(["ip", "link", "set", "eth0", "up"])
        except BaseException:
            self.close()
            raise

    # -- its link ----------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Nothing passes any more; connections stay open, and their ends learn nothing."""
        _ip("link", "set", self._port, "down")

    def heal(self) -> None:
        """Packets pass again. What TCP holds back comes when its next try is due."""
        _ip("link", "set", self._port, "up")

    # -- what runs and lies there ------------------------------------------------------------------------------

    def run(self, command: Sequence[str]) -> str:
        """What a command says that runs there to its end. Raises CalledProcessError."""
        return subprocess.run([*self._enter(), *command], check=True, capture_output=True, text=True).stdout

    def start(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Leave a command running there, with its output in a file of this machine. Ended with the host, if not before.

        The handle is of the program that entered the host, and ends when the command does.
        """
        with log.open("ab") as said:
            process = subprocess.Popen(
                [*self._enter(), *command],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def processes(self) -> list[psutil.Process]:
        """All that runs there, but for what makes it a host."""
        space = os.readlink(f"/proc/{self._init.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if process.pid not in self._ours and os.readlink(f"/proc/{process.pid}/ns/pid") == space:
                    found.append(process)
        return found

    def shared_memory(self) -> list[str]:
        """Names of the files in its /dev/shm."""
        return sorted(os.listdir(f"/proc/{self._init.pid}/root/dev/shm"))

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Everything of it is gone: with their first process all others die."""
        with contextlib.suppress(RuntimeError):
            _ip("link", "delete", self._port)  # the kernel takes its time with what a namespace had
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._keeper.pid).children():
                child.kill()
        for process in (self._keeper, *self._started):
            process.kill()
            process.wait()
        if self._keeper.stdout is not None:
            self._keeper.stdout.close()

    def _enter(self) -> list[str]:
        return ["nsenter", f"--target={self._init.pid}", *_NAMESPACES, f"--wd={REPOSITORY}", "--"]


class Network:
    """A switch of hosts, and this machine on it."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        _remove_stale_bridges()
        taken = {ipaddress.IPv4Interface(word).network for word in _addresses()}
        subnets = _TEST_NETWORK.subnets(new_prefix=24)
        self._subnet = next(subnet for subnet in subnets if not any(subnet.overlaps(other) for other in taken))
        self._bridge = f"{_BRIDGE}{os.getpid()}"
        self.address = str(self._subnet[1])
        _ip("link", "add", self._bridge, "type", "bridge")
        try:
            _ip("address", "add", f"{self.address}/{self._subnet.prefixlen}", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
        except BaseException:
            self.close()
            raise

    def add_host(self, name: str, shown: Sequence[Path] = ()) -> Host:
        """One more host on the switch, which sees these folders of this machine's /tmp too."""
        host = Host(name, str(self._subnet[len(self.hosts) + 2]), self._subnet.prefixlen, self._bridge, shown)
        self.hosts.append(host)
        return host

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        _ip("link", "delete", self._bridge)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _first_process(name: str, shown: Sequence[Path]) -> str:
    """Its shell script: what this host has for itself, and what it sees of this machine's /tmp."""
    lines = ["set -e", f"hostname {shlex.quote(name)}", "ip link set lo up", f"mount -t tmpfs -o {_SHM} shm /dev/shm"]
    lines += ["mkdir -p /dev/shm/tmp", "mount -t tmpfs -o mode=1777 tmp /dev/shm/tmp"]
    for path in _seen_of_tmp(shown):
        there = shlex.quote(f"/dev/shm{path}")
        lines += [f"mkdir -p {there}", f"mount --rbind {shlex.quote(path)} {there}"]
    lines += ["mount --move /dev/shm/tmp /tmp", "rmdir /dev/shm/tmp"]
    lines += ["sleep infinity >/dev/null &", "echo ready", "exec >/dev/null", "wait"]
    return "\n".join(lines)


def _seen_of_tmp(shown: Sequence[Path]) -> list[str]:
    """Folders under /tmp that are seen there: those without which no program of ours runs, and what was asked for."""
    wanted = {*map(str, shown), str(REPOSITORY), sys.prefix, sys.base_prefix}
    wanted |= {os.path.abspath(path) for path in sys.path if path}
    found: list[str] = []
    for path in sorted(path for path in wanted if path.startswith("/tmp/") and os.path.isdir(path)):
        if not any(path.startswith(f"{other}/") for other in found):
            found.append(path)
    return found


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {shlex.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _addresses() -> Iterator[str]:
    """IPv4 addresses of this machine, with the lengths of their prefixes."""
    for line in _ip("-4", "-oneline", "address", "show").splitlines():
        yield line.split()[3]


def _remove_stale_bridges() -> None:
    """Of test runs that were killed."""
    for line in _ip("-oneline", "link", "show", "type", "bridge").splitlines():
        name = line.split()[1].rstrip(":")
        number = name.removeprefix(_BRIDGE)
        if name.startswith(_BRIDGE) and number.isdecimal() and not psutil.pid_exists(int(number)):
            with contextlib.suppress(RuntimeError):
                _ip("link", "delete", name)
