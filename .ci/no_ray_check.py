"""Longshore where neither ray nor torch is installed: run by CI with the interpreter of such an environment.

    python -I .ci/no_ray_check.py

Imports everything that must work there, publishes, plans and verifies a small checkpoint, and ends with 0.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import struct
import sys
import tempfile
from pathlib import Path

NEED_NO_RAY = (
    "actors.rank.executor",
    "cluster.command_line.cli",
    "cluster.client",
    "cluster.layouts.layout",
    "cluster.planning.make_plan",
    "cluster.scheduling.load_state",
    "cluster.scheduling.retry",
    "storage.arena.arena",
    "storage.arena.chunk_cache",
    "storage.checkpoints.manifest",
    "storage.stores.s3.store",
)


def write_checkpoint(folder: Path) -> None:
    """One safetensors file with one (8, 4) matrix."""
    header = {"weight": {"dtype": "F32", "shape": [8, 4], "data_offsets": [0, 128]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(128)))


def main() -> None:
    for name in ("ray", "torch"):
        if importlib.util.find_spec(name) is not None:
            sys.exit(f"{name} is installed here, so this shows nothing")
    import cluster

    for name in NEED_NO_RAY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder)
        published = cluster.publish(name)
        plan = cluster.plan(name, fsdp_size=4)
        if [rank.size_bytes for rank in plan.ranks] != [32, 32, 32, 32] or plan.verified != "blake3":
            sys.exit(f"not the plan it should be: {plan}")
        if not cluster.verify(name).ok or plan.revision != published.revision:
            sys.exit("published and verified do not agree")
        try:
            cluster.load(name, device="cpu")
        except cluster.PackageMissing as error:
            print(f"load: {error}")
        else:
            sys.exit("load did not say that ray is missing")
    print(f"longshore {cluster.__version__} from {Path(cluster.__file__).parent}: works without ray and torch")


if __name__ == "__main__":
    main()
