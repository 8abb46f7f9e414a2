"""The GPU case: files in tmpfs or page cache to one GPU, Longshore beside its peers: `python -m bench.gpu`.

Needs no Ray. Each load is a process of its own, settings are tried first, rounds are interleaved. `--device cpu` runs
everything but the CUDA calls. Exit code 0; 1 when a contender failed, and not when one is merely absent; 2 when there
is no such device or no room for the model.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence

from bench.contenders.on_device import Device
from bench.contenders.table import ON_DEVICE
from bench.harness.contender import NotRunnable
from bench.harness.models import NoRoom, make_models
from bench.harness.report import describe_versions, markdown_table
from bench.harness.results import Entry, entries_of, medians
from bench.harness.rounds import run_once, run_rounds
from bench.harness.run_folder import run_folder
from bench.options import add_model_options, new_parser, write_json
from cluster.command_line.demo import sandbox
from cluster.joining.patience import sigterm_interrupts

_HEADINGS = ("contender", "checks", "GB/s", "of the ceiling", "CPU s/GB", "host memory, GB", "setting")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit code."""
    parser = new_parser("bench.gpu", __doc__)
    add_model_options(parser, "8GB", 3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run")
    parser.add_argument("--only", help="names with commas, of " + ", ".join(ON_DEVICE))
    parser.add_argument("--no-tuning", action="store_true", help="take the first setting of each contender")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(ON_DEVICE)
    if unknown := set(names) - set(ON_DEVICE):
        parser.error(f"no contender {', '.join(sorted(unknown))}")
    entries = entries_of((ON_DEVICE[name] for name in names), "gpu")
    try:
        machine = Device(options.device).describe()
        with sigterm_interrupts(), run_folder(options.tmpfs, "longshore-gpu-") as folder, sandbox():
            spec = make_models(folder / "www", options.size).with_options(device=options.device)
            run = functools.partial(run_once, spec=spec)
            run_rounds(entries, options.rounds, run, tune=None if options.no_tuning else run)
    except (NotRunnable, NoRoom, ImportError) as error:
        print(f"bench.gpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(table(entries))
    about = {"machine": machine, "versions": describe_versions(), "model_bytes": spec.model_bytes}
    write_json(options.out / "gpu.json", {**about, "entries": [entry.as_dict() for entry in entries]})
    return 1 if any(entry.failure for entry in entries) else 0


def table(entries: Sequence[Entry]) -> str:
    """Return the medians in Markdown, each with its ratio to copies of pinned memory."""
    found = {entry.contender.name: medians(entry.runs) for entry in entries if entry.runs}
    ceiling = found.get("pinned_copy")
    rows = []
    for entry in entries:
        title, one = entry.contender.title, found.get(entry.contender.name)
        if one is None:
            rows.append((title, "", entry.absent or entry.failure, "", "", "", ""))
            continue
        checks = entry.contender.cases[0].checks or "no"
        ratio = f"{one['gb_per_s'] / ceiling['gb_per_s']:.2f}" if ceiling else "-"
        speed, cpu, peak = f"{one['gb_per_s']:.2f}", f"{one['cpu_s_per_gb']:.2f}", f"{one['peak_bytes'] / 1e9:.2f}"
        rows.append((title, checks, speed, ratio, cpu, peak, json.dumps(entry.setting)))
    return markdown_table(_HEADINGS, rows)


if __name__ == "__main__":
    sys.exit(main())
