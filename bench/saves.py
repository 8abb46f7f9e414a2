"""Checkpoints out of the ranks of a trainer, beside the alternatives: `python -m bench.saves`.

    saves     4 ranks of FSDP2 hold a Llama and write it as one Hugging Face checkpoint
    merges    files that such ranks left become one Hugging Face checkpoint, in one process

Every measurement forks its processes anew. The clock starts when all are ready and stops when all are done. Memory is
what no file backs, of all processes, sampled every 10 ms, beyond what they had when the clock started. So the tensors
of a save are not in it. "Written" counts every file that was made, also one that is gone at the end. The tensors of all
results are compared, outside the clock. Exit code 0; 1 when a program failed, and not when one is merely absent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import shutil
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Any

from bench.contenders import saving
from bench.contenders.saving import RANKS, Part
from bench.harness.contender import NotRunnable
from bench.harness.models import llama_shape
from bench.harness.report import markdown_table
from bench.harness.rounds import RunFailed
from bench.harness.run_folder import run_folder
from bench.options import new_parser, positive_int, size
from storage.checkpoints.safetensors_header import parse_header
from storage.checksum import digest_of

_LIBC = ctypes.CDLL(None)
HEADER_BYTES = 1 << 20  # more than the header of these files has
SAMPLE_S, FOLDER_S, TIMEOUT_S = 0.01, 0.1, 900.0
# What the programs use is imported before they are forked.
IMPORTS = ("accelerate", "cluster.client", "actors.saving.convert", "torch.distributed.checkpoint", "transformers")


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one run."""

    wall_s: float
    peak_bytes: int  # of all processes, at the same time
    largest_bytes: int  # the peak of that process which has the highest
    written_bytes: int


@dataclass(slots=True)
class Program:
    """A program, and what its runs cost."""

    title: str
    run: Callable[[Part], None]
    ranks: int = 1
    checks: str = "no"  # digest that the result has
    model_bytes: int = 0  # of the tensors of the result
    costs: list[Cost] = field(default_factory=list)
    absent: str = ""
    failure: str = ""


HEADINGS = (
    *("digests", "seconds (min-max)", "over ours", "memory beyond the tensors / model", "of the largest process"),
    "written / model",
)
SAVES = (
    (saving.save_longshore, "`cluster.save`", "BLAKE3"),
    (saving.save_dcp, "DCP, consolidated by rank 0", "no"),
    (saving.save_dcp_by_all, "DCP, consolidated by every rank", "no"),
    (saving.save_gathered, "gathered on rank 0, `save_pretrained`", "no"),
)
# Files of the trainer -> how they are written, and the program that merges them.
MERGES = {
    "verl": (saving.write_verl, saving.merge_as_verl, "verl's method, `save_pretrained`"),
    "Accelerate": (saving.write_accelerate, saving.merge_accelerate, "`merge_fsdp_weights`"),
    "ZeRO-3": (saving.write_deepspeed, saving.merge_deepspeed, "`zero_to_fp32`"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables. Returns the exit code."""
    parser = new_parser("bench.saves", __doc__)
    parser.add_argument("--size", type=size, default="2GB", help="bytes of the model in bf16")
    parser.add_argument("--rounds", type=positive_int, default=3, help="runs of each line")
    parser.add_argument("--folder", type=Path, default="/dev/shm", help="folder for the checkpoints")
    options = parser.parse_args(arguments)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for module in IMPORTS:
        importlib.import_module(module)
    make_conversions()
    gc.freeze()  # a collection in a forked process would copy all pages
    shape = llama_shape(options.size)
    saves = [Program(title, run, RANKS, checks) for run, title, checks in SAVES]
    every, tables = list(saves), []
    with run_folder(options.folder, "longshore-bench-") as folder:
        measure(saves, folder, shape, folder / "target", options.rounds)
        for kind, (write, merge, title) in MERGES.items():
            programs = [
                Program(f"{kind}: `longshore convert`", saving.convert_verified, 1, "BLAKE3, read back"),
                Program(f"{kind}: the same with `--no-verify`", saving.convert_unread, 1, "BLAKE3"),
                Program(f"{kind}: {title}", merge),
            ]
            source, writer = folder / "source", Program(kind, write, RANKS)
            attempt(writer, folder, shape, source)
            for program in programs:
                program.absent, program.failure = writer.absent, writer.failure
            measure(programs, source, shape, folder / "target", options.rounds)
            shutil.rmtree(source, ignore_errors=True)
            tables.append(table("1 process merges what 4 ranks left", programs).splitlines())
            every += programs
    print(f"\n{table('4 ranks save', saves)}\n")
    print("\n".join([*tables[0][:2], *(row for one in tables for row in one[2:])]), flush=True)
    return 1 if any(program.failure for program in every) else 0


def make_conversions() -> None:
    """Let transformers make its table of conversions, which a process has that called `from_pretrained`."""
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")


def measure(programs: Sequence[Program], source: Path, shape: Mapping[str, Any], target: Path, rounds: int) -> None:
    """Run every program once a round, the next round starting elsewhere. Compares the results."""
    expected: dict[str, str] = {}
    for number in range(rounds):
        first = number * len(programs) // rounds
        for program in [*programs[first:], *programs[:first]]:
            if cost := attempt(program, source, shape, target):
                program.model_bytes, found = digests(target)
                expected = expected or found
                names = [name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)]
                if names:
                    program.failure = f"{len(names)} tensors are not those of the others: {sorted(names)[:3]}"
                program.costs.append(cost)
                print(f"{number + 1}  {program.title:50} {cost}", flush=True)
            shutil.rmtree(target, ignore_errors=True)


def attempt(program: Program, source: Path, shape: Mapping[str, Any], target: Path) -> Cost | None:
    """Run a program, if it did not fail before. Notes why it did not run."""
    if not program.absent and not program.failure:
        try:
            return run_forked(program, source, shape, target)
        except NotRunnable as error:
            program.absent = str(error)
        except RunFailed as error:
            program.failure = str(error)
        print(f"{program.title}: {program.absent or program.failure}", flush=True)
    return None


def digests(folder: Path) -> tuple[int, dict[str, str]]:
    """Return the bytes of a checkpoint's tensors, and a digest of each with its dtype and shape, by name."""
    found, model_bytes = {}, 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            for tensor in parse_header(file.read(HEADER_BYTES), path.stat().st_size).tensors:
                file.seek(tensor.start)
                digest = digest_of("blake3", memoryview(file.read(tensor.end - tensor.start))).hex()
                found[tensor.name] = f"{tensor.dtype} {tensor.shape} {digest}"
                model_bytes += tensor.end - tensor.start
    return model_bytes, found


def table(head: str, programs: Sequence[Program]) -> str:
    """Return the medians in Markdown. The first program is ours, and the measure of the others' time."""
    ours = programs[0].costs
    rows: list[tuple[str, ...]] = []
    for program in programs:
        if reason := program.failure or program.absent:
            why = f"{'failed' if program.failure else 'not run'}: {reason}".replace("|", "/")
            rows.append((program.title, program.checks, why, *[""] * (len(HEADINGS) - 2)))
            continue
        times = [cost.wall_s for cost in program.costs]
        of_model = (
            statistics.median(getattr(cost, name) for cost in program.costs) / program.model_bytes
            for name in ("peak_bytes", "largest_bytes", "written_bytes")
        )
        rows.append(
            (
                program.title,
                program.checks,
                f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})",
                f"{statistics.median(times) / statistics.median(cost.wall_s for cost in ours):.2f}" if ours else "-",
                *(f"{one:.2f}" for one in of_model),
            )
        )
    return markdown_table((head, *HEADINGS), rows)


# -- one run -------------------------------------------------------------------------------------------------------


def run_forked(program: Program, source: Path, shape: Mapping[str, Any], target: Path) -> Cost:
    """Run a program in processes of their own. Raises NotRunnable, RunFailed."""
    target.mkdir()
    children: dict[socket.socket, int] = {}
    try:
        for rank in range(program.ranks):
            here, there = socket.socketpair()
            child = os.fork()
            if child == 0:
                here.close()
                _run_child(program.run, there, partial(Part, rank, shape, source, target))
            there.close()
            children[here] = child
        return _watch(children, target)
    finally:
        for here, child in children.items():
            here.close()  # which ends it, if it is done
            os.kill(child, 9)
            os.waitpid(child, 0)
        Path(f"{target}.rendezvous").unlink(missing_ok=True)


def _run_child(run: Callable[[Part], None], parent: socket.socket, part: Callable[..., Part]) -> None:
    def start() -> None:
        gc.collect()
        _LIBC.malloc_trim(0)  # memory that was freed before must not hide a peak
        parent.sendall(b"r")
        parent.recv(1)

    try:
        run(part(start))
        parent.sendall(b"d")
        parent.recv(1)  # a rank that left would disturb the others
    except NotRunnable as error:
        parent.sendall(b"n" + str(error).encode())
    except BaseException as error:
        traceback.print_exc()
        parent.sendall(b"f" + f"{type(error).__name__}: {error}".encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _watch(children: Mapping[socket.socket, int], target: Path) -> Cost:
    """Start the clock when all are ready, and follow memory and files until all are done."""
    for child in children:
        _read(child, time.monotonic() + TIMEOUT_S)
    before = {pid: _anonymous_bytes(pid) for pid in children.values()}
    largest, peak, next_look_s, sizes, pending = 0, 0, 0.0, dict[int, int](), set(children)
    start_s = time.monotonic()
    for child in children:
        child.sendall(b"g")
    end_s = start_s
    while pending:
        ready, _, _ = select.select(list(pending), [], [], SAMPLE_S)
        end_s = time.monotonic()
        for child in ready:
            _read(child, end_s)
            pending.remove(child)
        beyond = [_anonymous_bytes(pid) - size for pid, size in before.items()]
        peak, largest = max(peak, sum(beyond)), max(largest, *beyond)
        if end_s > next_look_s or not pending:
            next_look_s = time.monotonic() + FOLDER_S
            for found in target.rglob("*"):
                with contextlib.suppress(FileNotFoundError):
                    stat = found.lstat()
                    if S_ISREG(stat.st_mode):
                        sizes[stat.st_ino] = max(sizes.get(stat.st_ino, 0), stat.st_size)
        if end_s - start_s > TIMEOUT_S:
            raise RunFailed(f"not done after {TIMEOUT_S:.0f} s")
    return Cost(end_s - start_s, peak, largest, sum(sizes.values()))


def _read(child: socket.socket, until_s: float) -> None:
    """Read what a process reports. Raises NotRunnable, RunFailed."""
    child.settimeout(max(0.1, until_s - time.monotonic()))
    try:
        report = child.recv(4096).decode()
    except TimeoutError:
        raise RunFailed(f"a process was not ready after {TIMEOUT_S:.0f} s") from None
    if report[:1] == "n":
        raise NotRunnable(report[1:])
    if report[:1] not in ("r", "d"):
        raise RunFailed(report[1:] or "a process died")


def _anonymous_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as lines:
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)


if __name__ == "__main__":
    raise SystemExit(main())
