"""Hosts on this machine, for a cluster on a network: Linux namespaces on a switch. Needs root and iproute2.

with Network() as network:
    host = network.add_host("left")
    host.limit(200)                          # Mbit/s each way, with a token bucket at either end of its cable
    start_ray_node(host, head_address, os.environ, log)

this machine ---- bridge ==== tbf ==== veth ---- a host: network, /dev/shm, /tmp, name and processes of its own
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from bench.harness.link import token_bucket
from bench.harness.rounds import REPOSITORY

_TOOLS = ("ip", "tc", "mount", "nsenter", "setpriv", "unshare")
_BRIDGE = "lsb"  # and the process id of who made it
_TEST_NETWORK = ipaddress.IPv4Network("198.18.0.0/15")  # for tests of networks, by RFC 2544
SHM_BYTES = 512 << 20  # limit of a host's /dev/shm; it takes what is written there
_NOBODY = "02:00:00:00:00:01"  # an Ethernet address that no host has
_NOWHERE = "192.0.2.1"  # nor has one this address, of RFC 5737
_CLONE_NEWNET = 0x40000000  # <sched.h>
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")


def why_not() -> str:
    """Return what keeps this process from making hosts; empty when nothing does."""
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
    """A host on this machine: Linux namespaces with a network, /dev/shm, /tmp, name and processes of their own.

    `Network.add_host` makes it. `cut` loses packets both ways and notifies nobody; `heal` ends that. The first process
    only reaps the others. All of them end with this process, however it dies.
    """

    def __init__(
        self, name: str, address: str, prefix_length: int, bridge: str, shown: Sequence[Path], shm_bytes: int
    ) -> None:
        self.name, self.address = name, address
        self._port = f"{bridge}p{address.rsplit('.', 1)[1]}"  # of the switch, where this host's cable ends
        self._started: list[subprocess.Popen[bytes]] = []
        # The death signal follows the main thread, which outlives every test.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        self._keeper = subprocess.Popen(
            [*command, "sh", "-c", _first_process(name, shown, shm_bytes)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
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
        """Drop all packets. Connections stay open, and their ends do not notice."""
        _ip("link", "set", self._port, "down")

    def heal(self) -> None:
        """Packets pass again. What TCP holds back comes when its next try is due."""
        _ip("link", "set", self._port, "up")

    def limit(self, mbit_per_s: float) -> None:
        """Send and receive no faster than that from now on."""
        bucket = ["qdisc", "replace", "dev", "eth0", "root", *token_bucket(mbit_per_s)]
        self.run(["tc", *bucket])
        bucket[3] = self._port
        _run("tc", *bucket)

    def part_from(self, other: Host) -> None:
        """Lose what goes from here to the other host, until `meet`. Nobody is notified, and all other traffic goes on.

        The packets go to an Ethernet address that nobody has.
        """
        self.run(["ip", "neighbour", "replace", other.address, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent"])

    def meet(self, other: Host) -> None:
        """End `part_from`."""
        self.run(["ip", "neighbour", "delete", other.address, "dev", "eth0"])

    def close_port(self, port: int) -> None:
        """Lose what goes from here to this TCP port of all others, as a firewall does, until `open_port`."""
        self.run(["ip", "neighbour", "replace", _NOWHERE, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent"])
        table = ["table", str(port)]
        self.run(["ip", "route", "replace", "default", "via", _NOWHERE, "dev", "eth0", "onlink", *table])
        self.run(["ip", "rule", "add", "ipproto", "tcp", "dport", str(port), *table])

    def open_port(self, port: int) -> None:
        """End `close_port`."""
        self.run(["ip", "rule", "delete", "ipproto", "tcp", "dport", str(port), "table", str(port)])

    @property
    def sent_bytes(self) -> int:
        """Bytes that have come out of its cable, with the heads of packets: some tenths of a percent."""
        return int(Path(f"/sys/class/net/{self._port}/statistics/rx_bytes").read_text())

    # -- what runs and lies there ------------------------------------------------------------------------------

    def run(self, command: Sequence[str]) -> str:
        """Run a command on the host to its end and return its output. Raises CalledProcessError."""
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

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """This thread is on the host's network inside, and what it starts stays there. Files are this machine's."""
        with (
            open("/proc/thread-self/ns/net", "rb") as own,
            open(f"/proc/{self._init.pid}/ns/net", "rb") as there,
        ):
            _enter_network(there.fileno())
            try:
                yield
            finally:
                _enter_network(own.fileno())

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

    def add_host(self, name: str, shown: Sequence[Path] = (), shm_bytes: int = SHM_BYTES) -> Host:
        """One more host on the switch, which sees these folders of this machine's /tmp too."""
        address = str(self._subnet[len(self.hosts) + 2])
        host = Host(name, address, self._subnet.prefixlen, self._bridge, shown, shm_bytes)
        self.hosts.append(host)
        return host

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        _ip("link", "delete", self._bridge)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _first_process(name: str, shown: Sequence[Path], shm_bytes: int) -> str:
    """Its shell script: what this host has for itself, and what it sees of this machine's /tmp."""
    lines = ["set -e", f"hostname {shlex.quote(name)}", "ip link set lo up"]
    lines += [f"mount -t tmpfs -o size={shm_bytes},mode=1777 shm /dev/shm"]
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
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _enter_network(descriptor: int) -> None:
    """Move this thread to a network. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _addresses() -> Iterator[str]:
    """IPv4 addresses of this machine, with the lengths of their prefixes."""
    for line in _ip("-4", "-oneline", "address", "show").splitlines():
        yield line.split()[3]


def _remove_stale_bridges() -> None:
    """Remove the bridges of test runs that were killed."""
    for line in _ip("-oneline", "link", "show", "type", "bridge").splitlines():
        name = line.split()[1].rstrip(":")
        number = name.removeprefix(_BRIDGE)
        if name.startswith(_BRIDGE) and number.isdecimal() and not psutil.pid_exists(int(number)):
            with contextlib.suppress(RuntimeError):
                _ip("link", "delete", name)


def start_ray_node(
    host: Host, head: str, environ: Mapping[str, str], log: Path, resources: Mapping[str, float], store_bytes: int
) -> subprocess.Popen[bytes]:
    """Start Ray's processes on the host, as a node of the cluster at `head`. Returns at once.

    `store_bytes`: of Ray's object store. The handle is that of `Host.start`.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={head}", "--block"]
    command += [f"--node-ip-address={host.address}", f"--object-store-memory={store_bytes}"]
    command += ["--num-cpus=2", "--num-gpus=0", f"--resources={json.dumps(dict(resources))}"]
    return host.start(command, environ, log)
