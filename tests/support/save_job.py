"""Jobs whose ranks save one checkpoint together: the script of the ranks, and what a test needs to start it.

`die_at`: the rank kills itself when its save comes to that step. `raise_at`: it raises instead. `all_die_at`: it kills
all ranks of the job. `store_dies_at`: it kills the process `store_pid`. Steps are named as `step_name` has them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import cluster
from storage.store_ref import Credentials
from tests.support.free_ports import free_ports
from tests.support.ray_clusters import REPOSITORY

WORLD = 4
FIRST_ROUND, LAST_ROUND = "first round", "last round"


def full_tensors(seed: int = 0, scale: int = 1) -> dict[str, torch.Tensor]:
    """Return the tensors of the case "mixed" as the checkpoint has them."""
    random = torch.Generator().manual_seed(seed)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    return {
        "whole": make(900, 1200),
        "rows": make(1025 * scale, 1501),
        "columns": make(700, 1999, dtype=torch.bfloat16),
        "both": make(1023, 1301),
        "strided": make(1027, 1100),
        "replicated.rows": make(1000, 1000),
        "experts": make(5, 130, 1030, dtype=torch.float16),
        "few_rows": make(2, 3),
        "none": make(0, 4),
        "scalar": make(),
        "transposed": make(301, 403),
        "boxes": make(1001, 700),
        "small": make(7),
    }


def small_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the tensors of the case "small", of 5.5 MB each: a file and a part for each."""
    random = torch.Generator().manual_seed(seed)
    return {f"rows.{number}": torch.randn(917, 1501, generator=random) for number in range(4)}


def small_files(seed: int) -> dict[str, bytes]:
    """Return the extra files of the case "small", which differ between two seeds."""
    return {"config.json": b'{"seed": %d}' % seed, "tokenizer.json": b"[" + b"1," * seed + b"1]", "same.txt": b"same"}


def small_state(seed: int) -> dict[str, Any]:
    """Return one rank's state dict of the case "small"."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    line = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return {name: distribute_tensor(tensor, line, [Shard(0)]) for name, tensor in small_tensors(seed).items()}


def mixed_state(rank: int, seed: int, scale: int) -> dict[str, Any]:
    """Return one rank's state dict of the case "mixed": the same tensors, each cut in another way."""
    from torch.distributed._shard.sharded_tensor import Shard as Box
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    full = full_tensors(seed, scale)
    line = init_device_mesh("cpu", (WORLD,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    state: dict[str, Any] = dict(full)
    state["transposed"] = full["transposed"].t().contiguous().t()
    for name, mesh, placements in (
        ("rows", line, [Shard(0)]),
        ("columns", line, [Shard(1)]),
        ("both", grid, [Shard(0), Shard(1)]),
        ("replicated.rows", grid, [Replicate(), Shard(0)]),
        ("experts", grid, [Shard(0), Shard(2)]),
        ("few_rows", line, [Shard(0)]),
        ("none", line, [Shard(0)]),
    ):
        state[name] = distribute_tensor(full[name], mesh, placements)
    # What fully_shard makes of a tensor that is cut in dim 0 already.
    by_tp = full["strided"].chunk(2)[rank % 2]
    state["strided"] = DTensor.from_local(
        by_tp.chunk(2)[rank // 2].clone(),
        grid,
        [_StridedShard(0, split_factor=2), Shard(0)],
        run_check=False,
        shape=full["strided"].shape,
        stride=full["strided"].stride(),
    )
    chunks = full["boxes"].chunk(WORLD)
    begin = sum(len(chunk) for chunk in chunks[:rank])
    box = Box.from_tensor_and_offsets(chunks[rank].clone(), [begin, 0], rank)
    state["boxes"] = init_from_local_shards([box], full["boxes"].size())
    state["tied"] = state["rows"]
    return state


def llama_state() -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the state dict of a tiny Llama under FSDP2 and tensor parallelism, and its config."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, config = llama()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for layer in model.model.layers:
        parts = {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
        parts |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        parts |= {"mlp.down_proj": RowwiseParallel(), "self_attn.o_proj": RowwiseParallel()}
        parallelize_module(layer, grid["tp"], parts)
        fully_shard(layer, mesh=grid["fsdp"])
    fully_shard(model, mesh=grid["fsdp"])
    return dict(model.state_dict()), {"config.json": config}


def llama() -> tuple[Any, bytes]:
    """Return a tiny Llama with numbers that two ranks cannot share evenly, and its config.json."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=70,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    config.architectures = ["LlamaForCausalLM"]
    return model, config.to_json_string().encode()


@dataclass(frozen=True)
class Ended:
    """The end of one rank: its exit code, and the document that it printed."""

    code: int
    document: dict[str, Any]
    log: str

    @property
    def error(self) -> str:
        return str(self.document.get("error", ""))


def run_jobs(
    folder: Path, jobs: Sequence[Mapping[str, Any]], *, at_once: int = 1, timeout_s: float = 300
) -> list[list[Ended]]:
    """Run jobs, so many at a time, each to its end. One process imports torch, and forks the ranks of all of them.

    A job: `uri`, and what `run_rank` reads. `only`: arguments by rank, in addition. `folder`: for what ranks print.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ports = free_ports(len(jobs))
    for number, (job, port) in enumerate(zip(jobs, ports, strict=True)):
        (folder / f"{number}.json").write_text(json.dumps({"world": WORLD, "case": "mixed", "port": port, **job}))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.save_job", str(folder), str(len(jobs)), str(at_once)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-6000:])
    return [
        [_ended(folder / f"{number}.{rank}") for rank in range(job.get("world", WORLD))]
        for number, job in enumerate(jobs)
    ]


def run_job(folder: Path, uri: str, **more: Any) -> list[Ended]:
    """Run one job."""
    return run_jobs(folder, [{"uri": uri, **more}])[0]


def _ended(base: Path) -> Ended:
    lines = Path(f"{base}.out").read_text().strip().splitlines()
    document = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    code = int(Path(f"{base}.code").read_text())
    return Ended(code, document, Path(f"{base}.err").read_text()[-6000:])


def step_name(step: str) -> str:
    """Return the name of a step of a save, without the number of rounds for the first and the last one."""
    match step.split():
        case ["round", number, "of", count] if number == count:
            return LAST_ROUND
        case ["round", "1", "of", _]:
            return FIRST_ROUND
    return step


def _install_death(job: Mapping[str, Any]) -> None:
    from actors.saving import save

    step = save._Save._step

    def die(self: Any, name: str) -> None:
        name = step_name(name)
        if name == job.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if name == job.get("all_die_at"):
            os.killpg(0, signal.SIGKILL)
        if name == job.get("store_dies_at"):
            os.kill(job["store_pid"], signal.SIGKILL)
        if name == job.get("raise_at"):
            raise RuntimeError("the disk of this rank is full")
        step(self, name)

    save._Save._step = die  # type: ignore[method-assign]


def _count_parts() -> dict[str, list[int]]:
    """Return the numbers of the parts that this rank sends to S3 from now on, by key."""
    from storage.stores.s3.store import S3Store

    sent: dict[str, list[int]] = {}
    real = S3Store.put_part

    def counted(self: S3Store, key: str, upload: str, number: int, *more: Any) -> str:
        sent.setdefault(key, []).append(number)
        return real(self, key, upload, number, *more)

    S3Store.put_part = counted  # type: ignore[method-assign]
    return sent


def _save_in_background(*args: Any, **options: Any) -> cluster.SaveReport:
    return cluster.asave(*args, **options).result(timeout_s=120)


def run_rank(job: Mapping[str, Any], rank: int) -> int:
    """Save as one rank, print a document, and return the exit code."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{job['port']}", rank=rank, world_size=job["world"])
    files: dict[str, Any] = {"config.json": b"{}"}
    state: dict[str, Any]
    if job["case"] == "mixed":
        state = mixed_state(rank, job.get("seed", 0), job.get("scale", 1))
    elif job["case"] == "small":
        from actors.saving import save
        from storage.publishing import saves

        save.ROUNDS_PER_GATHER, saves.MIN_PAUSE_S, saves.PAUSE_PER_WRITE = 1, 0.0, 0.0  # each round is in the journal
        state, files = small_state(job["seed"]), small_files(job["seed"])
    elif job["case"] == "partial":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial

        mesh = init_device_mesh("cpu", (job["world"],))
        state = {"sum": DTensor.from_local(torch.ones(3), mesh, [Partial()]), "x": torch.ones(3 + rank % 2)}
        if rank == 1:
            conj, sparse = torch.ones(2, dtype=torch.complex64).conj(), torch.eye(3).to_sparse()
            state |= {"y": "text", "conj": conj, "meta": torch.empty(2, device="meta"), "sparse": sparse}
    else:
        state, files = llama_state()
    _install_death(job)
    sent = _count_parts()
    code, began_s = 0, time.monotonic()
    try:
        report = (_save_in_background if job.get("background") else cluster.save)(
            state,
            job["uri"],
            extra_files=files,
            endpoint_url=job.get("endpoint_url"),
            region="us-east-1" if job.get("endpoint_url") else None,
            credentials=Credentials(*job["keys"]) if "keys" in job else None,
            max_shard_bytes=job.get("max_shard_bytes", 20_000_000),
            chunk_bytes=1 << 20,
            save_timeout_s=job.get("save_timeout_s", 60.0),
            slots=job.get("slots", 4),
        )
        print(json.dumps({**report.as_dict(), "sent": sent}), flush=True)
    except cluster.LongshoreError as error:
        kind = type(error).__name__
        told = {"message": str(error), "rank": error.details.get("rank"), "took_s": time.monotonic() - began_s}
        print(json.dumps({"error": kind, **told}), flush=True)
        code = 3
    except RuntimeError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
        code = 4
    if code == 0:
        dist.barrier()
        dist.destroy_process_group()
    return code


def _fork(job: Mapping[str, Any], rank: int, base: Path, group: int) -> int:
    """Start a rank in the process group of its job; 0: it is the first."""
    child = os.fork()
    if child:
        with contextlib.suppress(OSError):  # it has done so itself, or is dead
            os.setpgid(child, group)
        return child
    with contextlib.suppress(OSError):
        os.setpgid(0, group)
    code = 70
    try:
        for number, suffix in ((1, "out"), (2, "err")):
            file = os.open(f"{base}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, number)
        code = run_rank({**job, **job.get("only", {}).get(str(rank), {})}, rank)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads of gloo may still wait for a rank that is gone


def main(folder: Path, count: int, at_once: int) -> None:
    """Run the jobs whose files are in the folder."""
    import transformers

    assert cluster.save
    assert transformers
    waiting = list(range(count))
    running: dict[int, Path] = {}  # the file for the code of each process
    jobs: dict[Path, set[int]] = {}  # processes of each running job
    while waiting or running:
        while waiting and len(jobs) < at_once:
            number = waiting.pop(0)
            file = folder / f"{number}.json"
            job, first = json.loads(file.read_text()), 0
            for rank in range(job["world"]):
                base = folder / f"{number}.{rank}"
                child = _fork(job, rank, base, first)
                first = first or child
                running[child] = Path(f"{base}.code")
                jobs.setdefault(file, set()).add(child)
        child, status = os.waitpid(-1, 0)
        running.pop(child).write_text(str(os.waitstatus_to_exitcode(status)))
        jobs = {file: left for file, children in jobs.items() if (left := children - {child})}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
