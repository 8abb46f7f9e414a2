"""The head of k8s/overlays/cpu-dev, as its manifest has it: user, read-only root, sizes, ports. Without Kubernetes."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from tests.support.kube_manifests import K8S, kustomize_missing, pods, render
from tests.support.pod_room import pod_room_missing, run_as_in_a_pod
from tests.support.pod_rules import quantity, settings

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
    manifests = render(K8S / "overlays/cpu-dev")
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
