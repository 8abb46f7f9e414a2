"""What converting on the way in costs: `python -m bench.precision --size 2GB` prints a table, `--json FILE` writes it.

A Llama-shaped bfloat16 checkpoint in tmpfs, more than nine tenths of it in linear layers, is loaded into host memory
once per precision, each time by one rank in a process of its own. Memory is the process's own, without the arena, above
what it had when everything was imported: tensors, staging, and all else that the load takes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from cluster.command_line.demo import write_llama_checkpoint
from cluster.units import parse_bytes, show_bytes

PRECISIONS = (
    ("auto", ""),
    ("float16", ""),
    ("auto", "fp8"),
    ("auto", "fp8_tensor"),
    ("auto", "int8"),
    ("auto", "nf4"),
    ("auto", "int4"),
)
INT4_PART = 0.45  # of the bfloat16 size: the most that loading int4 may take beside the arena
ARENA_BYTES = 128 << 20
_SIZES: dict[str, Any] = {"hidden": 2048, "intermediate": 5632, "heads": 16, "kv_heads": 4, "vocab": 8000}
_LAYER_BYTES = 2 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 5632 * 2048)
_SAMPLE_S = 0.002


def main() -> int:
    """All precisions, each in a child; 1 when int4 takes more than it may."""
    parser = argparse.ArgumentParser(prog="python -m bench.precision", description=__doc__)
    parser.add_argument("--size", type=parse_bytes, default=1 << 30, help="of the bfloat16 checkpoint (default: 1GiB)")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="for the checkpoint (default: /dev/shm)")
    parser.add_argument("--json", type=Path, help="write the stats there")
    parser.add_argument("--one", nargs=3, metavar=("FOLDER", "DTYPE", "QUANTIZATION"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="longshore-bench-") as folder:
        layers = max(8, round(args.size / _LAYER_BYTES))
        write_llama_checkpoint(folder, layers=layers, shards=2, seed=1, **_SIZES)
        for dtype, quantization in PRECISIONS:
            command = [sys.executable, "-m", "bench.precision", "--one", folder, dtype, quantization]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            print(_line(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return int(rows[-1]["part_of_stored"] >= INT4_PART)


def measure(folder: str, dtype: str, quantization: str) -> dict[str, Any]:
    """One load in this process."""
    import torch  # noqa: F401  # before the baseline, for loads that convert nothing too

    import actors.devices.convert  # noqa: F401
    from bench.local_rank import load_rank, node_agent
    from cluster.config import Config
    from cluster.precision.recipes import Precision
    from storage.host.memory import own_bytes

    config = Config(arena_bytes=ARENA_BYTES)
    precision = Precision(dtype, quantization)
    stored_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    over = threading.Event()
    with node_agent(config) as agent:
        baseline_bytes = peak_bytes = own_bytes()

        def watch() -> None:
            nonlocal peak_bytes
            while not over.wait(_SAMPLE_S):
                peak_bytes = max(peak_bytes, own_bytes())

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        begun_s, begun_cpu_s = time.monotonic(), time.process_time()
        tensors, report = load_rank(agent, config, folder, "cpu", "via_arena", precision)
        took_s, cpu_s = time.monotonic() - begun_s, time.process_time() - begun_cpu_s
        over.set()
        watcher.join()
        held_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return {
        "precision": str(precision),
        "stored_bytes": stored_bytes,
        "held_bytes": held_bytes,
        "device_bytes": report.device_bytes,
        "peak_bytes": peak_bytes - baseline_bytes,
        "part_of_stored": (peak_bytes - baseline_bytes) / stored_bytes,
        "peak_staging_bytes": report.peak_staging_bytes,
        "converted_tensors": report.converted_tensors,
        "convert_s": report.convert_s,
        "load_s": took_s,
        "cpu_s": cpu_s,
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['precision']:<12} held {show_bytes(row['held_bytes']):>9}  peak {show_bytes(row['peak_bytes']):>9} "
        f"({row['part_of_stored']:.2f} of what is stored)  staged {show_bytes(row['peak_staging_bytes']):>9}  "
        f"load {row['load_s']:.2f} s, {row['cpu_s']:.2f} CPU s, of it converting {row['convert_s']:.2f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
