"""The GPU case: files in tmpfs or page cache to one GPU, ours beside its peers. `python -m bench.gpu`; needs no Ray.

Each contender in a process of its own, settings tried first, rounds interleaved, medians. `--device cpu` runs all of it
but the CUDA calls, to see that it works where there is no GPU. Exit code 0; 1 when a contender failed, and not when one
is merely absent; 2 when there is no such device or no room for the model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.accelerator import open_accelerator
from bench.arguments import output_folder, positive_int, size, writable_folder
from bench.contender import EXIT_NOT_RUNNABLE, Case, NotRunnable
from bench.gpu_case import CONTENDERS
from bench.one_run import REPOSITORY, RunFailed
from bench.results import Line, Run
from bench.run_folder import run_folder
from bench.sample import NoRoom, make_models
from bench.spec import Spec
from bench.tuning import find_best
from cluster.command_line.demo import sandbox
from cluster.joining.patience import sigterm_interrupts

_TIMEOUT_S = 300.0
_CEILING = "pinned_copy"
_PACKAGES = ("torch", "safetensors", "runai-model-streamer", "fastsafetensors")


class _Over(Exception):
    """A line that has no runs any more."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run (default: cuda)")
    parser.add_argument("--size", type=size, default="8GB", help="of the model (default: %(default)s)")
    parser.add_argument("--rounds", type=positive_int, default=3, help="runs of each contender (default: %(default)s)")
    parser.add_argument("--only", help="names with commas, of " + ", ".join(CONTENDERS))
    parser.add_argument("--no-tuning", action="store_true", help="take the first setting of each contender")
    parser.add_argument(
        "--folder", type=writable_folder, default="/dev/shm", help="where the model is made (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=output_folder, default=str(REPOSITORY / "bench" / "out"), help="folder for gpu.json"
    )
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(CONTENDERS)
    if unknown := set(names) - set(CONTENDERS):
        parser.error(f"no contender {', '.join(sorted(unknown))}")
    try:
        machine = open_accelerator(options.device).describe()
        with sigterm_interrupts(), run_folder(options.folder, "longshore-gpu-") as folder, sandbox():
            spec = make_models(folder / "www", options.size).spec("file").with_options(device=options.device)
            lines = [_line(name) for name in names]
            _measure(lines, spec, options.rounds, tune=not options.no_tuning)
    except (NotRunnable, NoRoom, ImportError) as error:
        print(f"bench.gpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(table(lines))
    found = {
        "machine": machine,
        "versions": _versions(),
        "model_bytes": spec.model_bytes,
        "lines": [line.as_dict() for line in lines],
    }
    (options.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(line.failure for line in lines) else 0


def table(lines: Sequence[Line]) -> str:
    """In Markdown: medians, and each as a ratio to copies of pinned memory."""
    ceiling = next((line for line in lines if line.contender == _CEILING and line.runs), None)
    rows = ["| contender | checks | GB/s | of the ceiling | CPU s/GB | host memory, GB | setting |"]
    rows.append("|---|---|---|---|---|---|---|")
    for line in lines:
        if not line.runs:
            rows.append(f"| {line.title} | | {line.absent or line.failure} | | | | |")
            continue
        ratio = f"{line.gb_per_s / ceiling.gb_per_s:.2f}" if ceiling else "-"
        peak = max(run.peak_bytes for run in line.runs) / 1e9
        stats = [f"{line.gb_per_s:.2f}", ratio, f"{line.cpu_s_per_gb:.2f}", f"{peak:.2f}", json.dumps(line.setting)]
        rows.append(f"| {line.title} | {'yes' if line.case.checks else 'no'} | {' | '.join(stats)} |")
    return "\n".join(rows)


def _line(name: str) -> Line:
    contender = CONTENDERS[name]
    case = Case("", "", contender.checks, True, "none", ("file",))
    return Line(name, contender.title, case, "file", contender.settings, contender.settings[0])


def _measure(lines: Sequence[Line], spec: Spec, rounds: int, *, tune: bool) -> None:
    """Settings first, then all in each round, the next one starting where this one did not."""
    for line in lines if tune else ():
        _find_setting(line, spec)
    for number in range(rounds):
        first = number % len(lines)
        for line in [*lines[first:], *lines[:first]]:
            run = _attempt(line, line.setting, spec)
            if run is not None:
                line.runs.append(run)
                print(f"{number + 1}  {line.title:38} {run.gb_per_s:7.2f} GB/s  {run.cpu_s_per_gb:5.2f} CPU s/GB")
                sys.stdout.flush()


def _find_setting(line: Line, spec: Spec) -> None:
    def gb_per_s(setting: Mapping[str, Any]) -> float:
        run = _attempt(line, setting, spec)
        if run is None:
            raise _Over
        return run.gb_per_s

    try:
        line.setting, line.tried = find_best(line.settings, gb_per_s)
    except _Over:
        return


def _attempt(line: Line, setting: Mapping[str, Any], spec: Spec) -> Run | None:
    """One run; None, and no more of that line, when it cannot be or failed."""
    if line.absent or line.failure:
        return None
    try:
        return _run_once(line.contender, spec.with_options(**setting))
    except NotRunnable as error:
        line.absent = str(error)
    except RunFailed as error:
        line.failure = str(error)
    print(f"{line.title}: {line.absent or line.failure}", flush=True)
    return None


def _run_once(name: str, spec: Spec) -> Run:
    """Raises NotRunnable, RunFailed."""
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        path = Path(folder) / "spec.json"
        spec.write(path)
        command = [sys.executable, "-m", "bench.gpu_case", name, str(path)]
        try:  # what takes too long is killed, and has no processes of its own
            done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"not done after {_TIMEOUT_S:.0f} s") from None
    complaints = [text.strip() for text in done.stderr.splitlines() if text.strip()] or ["it gives no reason"]
    if done.returncode == EXIT_NOT_RUNNABLE:
        raise NotRunnable(complaints[-1])
    if done.returncode:
        raise RunFailed(f"exit code {done.returncode}: {complaints[-1]}")
    stats = [text for text in done.stdout.splitlines() if text.startswith("{")]
    if not stats:
        raise RunFailed("it printed no stats")
    return Run(**json.loads(stats[-1]))


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    sys.exit(main())
