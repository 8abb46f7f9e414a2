"""A place like a pod of ours, on this machine: Linux namespaces of its own, user 1000 without a capability, a root file
system that cannot be written, a small /dev/shm. It needs root, and changes nothing outside it.

    / read-only          /dev/shm tmpfs of the volume's size
    /tmp, /home tmpfs    network: lo only, so every port is free
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.kube_manifests import ROOT
from tests.support.pod_rules import USER

HIDDEN = ("/tmp", "/root", "/home")  # writable or closed elsewhere; what the tests need of them is bound in again
BEFORE = f"""
set -euo pipefail
mount --make-rprivate /
ip link set lo up
mount -t tmpfs tmpfs /mnt
{{keep}}
for folder in {" ".join(HIDDEN)}; do mount -t tmpfs -o mode=1777 tmpfs "$folder"; done
{{give_back}}
mount -t tmpfs -o size={{shm_bytes}},mode=1777 tmpfs /dev/shm
mkdir /home/ray /home/cache
chown {USER}:{USER} /home/ray
chown 0:{USER} /home/cache
chmod 2775 /home/cache
mount -o remount,ro,bind /
cd /home/ray
exec setpriv --reuid {USER} --regid {USER} --groups {USER} --no-new-privs --bounding-set -all --inh-caps -all \\
  bash -euo pipefail -c "$SCRIPT"
"""


def pod_room_missing() -> str | None:
    """Why there is no such place here; None when there is."""
    for program in ("unshare", "setpriv", "ip", "mount"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if os.geteuid() != 0:
        return "namespaces and mounts need root"
    tried = subprocess.run(["unshare", "-mpnf", "--mount-proc", "mount", "--make-rprivate", "/"], capture_output=True)
    return None if tried.returncode == 0 else "namespaces are not allowed here"


def run_as_in_a_pod(script: str, environ: dict[str, str], *, shm_bytes: int, timeout_s: float) -> str:
    """What a bash script says there, on both streams. Everything it started ends with it. Raises RuntimeError."""
    bound = _folders_in_hidden()
    keep = [f"mkdir /mnt/{n}; mount --rbind {shlex.quote(path)} /mnt/{n}" for n, path in enumerate(bound)]
    give_back = [
        f"mkdir -p {shlex.quote(path)}; mount --rbind /mnt/{n} {shlex.quote(path)}; "
        f"mount -o remount,ro,bind {shlex.quote(path)}"
        for n, path in enumerate(bound)
    ]
    before = BEFORE.format(keep="\n".join(keep), give_back="\n".join(give_back), shm_bytes=shm_bytes)
    done = subprocess.run(
        ["unshare", "-mpnf", "--mount-proc", "--kill-child", "bash", "-c", before],
        env={
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": "/home/ray",
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "SCRIPT": script,
            **environ,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}:\n{done.stdout}")
    return done.stdout


def _folders_in_hidden() -> list[str]:
    """Folders that Python needs and that would not be seen there, none inside another."""
    needed = {sys.prefix, sys.base_prefix, str(ROOT), *(path for path in sys.path if os.path.isdir(path))}
    needed |= {str(Path(sys.executable).parent / name) for name in ("ray", "longshore")}
    needed |= {os.path.realpath(path) for path in needed}
    needed = {path if os.path.isdir(path) else str(Path(path).parents[1]) for path in needed}
    inside = sorted(path for path in needed if path.startswith(tuple(f"{folder}/" for folder in HIDDEN)))
    return [path for path in inside if not any(path.startswith(f"{other}/") for other in inside)]
