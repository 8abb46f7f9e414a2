"""The cost of converting while loading: `python -m bench.precision [--size 2GB]`.

A Llama-shaped bfloat16 checkpoint in tmpfs, more than nine tenths of it in linear layers, is loaded into host memory
once per precision, each time by one rank in a process of its own. Memory is the process's own, without the arena, above
what it had when everything was imported: tensors, staging, and everything else.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bench.harness.report import markdown_table
from bench.harness.run_folder import run_folder
from bench.options import new_parser, size
from cluster.command_line.demo import write_llama_checkpoint
from cluster.units import show_bytes

PRECISIONS = (("auto", ""), ("float16", ""), *(("auto", to) for to in ("fp8", "fp8_tensor", "int8", "nf4", "int4")))
_SIZES: dict[str, Any] = {"hidden": 2048, "intermediate": 5632, "heads": 16, "kv_heads": 4, "vocab": 8000}
_LAYER_BYTES = 2 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 5632 * 2048)
_SAMPLE_S = 0.002


def main() -> None:
    """Measure every precision, each in a child, and print the table."""
    parser = new_parser("bench.precision", __doc__)
    parser.add_argument("--size", type=size, default="1GiB", help="of the bfloat16 checkpoint")
    parser.add_argument("--folder", type=Path, default="/dev/shm", help="for the checkpoint")
    args = parser.parse_args()
    rows = []
    with run_folder(args.folder, "longshore-bench-") as folder:
        layers = max(8, round(args.size / _LAYER_BYTES))
        write_llama_checkpoint(folder, layers=layers, shards=2, seed=1, **_SIZES)
        for dtype, quantization in PRECISIONS:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                rows.append(pool.submit(measure, folder, dtype, quantization).result())
            print(f"{rows[-1]['precision']}: {rows[-1]['load_s']:.1f} s", flush=True)
    print(table(rows))


def measure(folder: Path, dtype: str, quantization: str) -> dict[str, Any]:
    """Load once in this process."""
    import torch  # noqa: F401  # before the baseline, for loads that convert nothing too

    import actors.devices.convert  # noqa: F401
    from bench.contenders.ours import load_rank, node_agent
    from cluster.config import Config
    from cluster.precision.recipes import Precision
    from storage.host.memory import own_bytes

    config = Config()
    precision = Precision(dtype, quantization)
    stored_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
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
        tensors, report = load_rank(agent, config, str(folder), "cpu", "via_arena", precision)
        took_s, cpu_s = time.monotonic() - begun_s, time.process_time() - begun_cpu_s
        over.set()
        watcher.join()
        held_bytes = sum(tensor.nbytes for tensor in tensors.values())
    names = ("device_bytes", "peak_staging_bytes", "converted_tensors", "convert_s")
    return {
        "precision": str(precision),
        "stored_bytes": stored_bytes,
        "held_bytes": held_bytes,
        "peak_bytes": peak_bytes - baseline_bytes,
        "part_of_stored": (peak_bytes - baseline_bytes) / stored_bytes,
        **{name: getattr(report, name) for name in names},
        "load_s": took_s,
        "cpu_s": cpu_s,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the measurements in Markdown."""
    head = ("precision", "held", "peak", "peak over stored", "staged", "seconds", "CPU s", "of it converting")
    shown = []
    for row in rows:
        sizes = (show_bytes(row["held_bytes"]), show_bytes(row["peak_bytes"]), f"{row['part_of_stored']:.2f}")
        times = (f"{row[name]:.2f}" for name in ("load_s", "cpu_s", "convert_s"))
        shown.append((row["precision"], *sizes, show_bytes(row["peak_staging_bytes"]), *times))
    return markdown_table(head, shown)


if __name__ == "__main__":
    main()
