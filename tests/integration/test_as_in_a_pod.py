"""The head of k8s/overlays/cpu-dev, as its manifest has it: user, read-only root, sizes, ports. Without Kubernetes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.kube_manifests import ROOT, USER, kustomize_missing, pods, quantity, render, settings

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
    """Run a bash script in Linux namespaces that are like a pod of ours; return its output. Raises RuntimeError.

    User 1000 without a capability; / cannot be written; /dev/shm is a tmpfs of `shm_bytes`; /tmp and /home are tmpfs;
    the network is lo only, so every port is free. Needs root, and changes nothing outside.
    """
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


SCRIPT = """
grep CapEff: /proc/self/status
! touch /usr/written 2> /dev/null && ! touch "$PYTHONPATH/written" 2> /dev/null && echo "root is read-only as $(id -u)"
python -c "
from cluster.command_line.demo import write_llama_checkpoint as write
write('model', hidden=256, layers=4, intermediate=688, heads=8, kv_heads=4, vocab=4096, shards=2, seed=1)"
ray start --head --block --node-ip-address=127.0.0.1 --metrics-export-port={ray_metrics} {start} > /tmp/start.log 2>&1 &
probe() {{ python -c "
from urllib.request import urlopen
print(urlopen('http://127.0.0.1:$1', timeout=30).read().decode())"; }}
for second in $(seq 300); do probe {health} > /tmp/probe 2> /dev/null && break; sleep 1; done
echo "probe: $(cat /tmp/probe)"
echo "of a service's workers: $(probe {kuberay_health})"
submit() {{ ray job submit --address http://127.0.0.1:8265 -- "$@" &> /tmp/job; }}
for try in 1 2 3 4 5 6; do submit longshore load file:///home/ray/model --device cpu --tp 2 && break; sleep 3; done
grep -q succeeded /tmp/job || cat /tmp/job /tmp/start.log
echo "Ray's own stats: $(probe {ray_metrics}/metrics | grep -c ^ray_)"
longshore status --json --address 127.0.0.1:6379
probe {metrics}/metrics | grep -c ^longshore_
find /home/cache/chunks -type f | wc -l
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(kustomize_missing() is not None, reason=str(kustomize_missing()))
@pytest.mark.skipif(pod_room_missing() is not None, reason=str(pod_room_missing()))
def test_head_runs_with_the_rights_and_sizes_of_its_manifest() -> None:
    manifests = render("overlays/cpu-dev")
    head = next(pod for pod in pods(manifests) if pod.where.endswith(" head"))
    probe: dict[str, Any] = head.main["readinessProbe"]["httpGet"]
    (shm,) = (volume["emptyDir"] for volume in head.spec["volumes"] if volume["name"] == "shm")
    given = settings(manifests)
    script = SCRIPT.format(
        start=shlex.join(f"--{name}={value}" for name, value in (head.ray_start or {}).items()),
        health=f"{probe['port']}{probe['path']}",
        kuberay_health=f"{probe['port']}/api/local_raylet_healthz",
        ray_metrics=next(port["containerPort"] for port in head.main["ports"] if port["name"] == "metrics"),
        metrics=given["LONGSHORE_METRICS_PORT"],
    )
    environ = {
        **given,
        "LONGSHORE_ALLOWED_SCHEMES": "file",  # no store is reached from there
        "LONGSHORE_DISK_CACHE_DIR": "/home/cache/chunks",  # no folder can be made in /
        "LONGSHORE_HTTP_TOKEN": "a" * 64,
        "RAY_AUTH_MODE": "token",  # as KubeRay sets it; the probe has none
        "RAY_AUTH_TOKEN": "b" * 64,
    }
    said = run_as_in_a_pod(script, environ, shm_bytes=int(quantity(shm["sizeLimit"])), timeout_s=1100)
    assert re.search(r"CapEff:\s+0000000000000000\n", said)
    assert "root is read-only as 1000\n" in said
    assert "probe: raylet: success" in said
    assert "of a service's workers: success" in said
    assert int(said.partition("Ray's own stats: ")[2].split()[0]) > 10  # no token is asked of Prometheus
    status = json.loads(said[said.index("\n{") : said.rindex("}") + 1])
    (model,) = status["models"]
    assert model["progress"]["state"] == "ready"
    stats, chunks_on_disk = map(int, said.split()[-2:])
    assert stats > 10
    assert chunks_on_disk > 0
