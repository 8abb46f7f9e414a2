"""Ranks of torch.distributed (gloo) as processes of their own, each of which calls one function of a test script.

    run_ranks(4, "tests.support.saving_ranks:write_parts", folder, family="llama")

calls `write_parts(folder, family="llama")` in four processes, with a process group. A pytest process that has used Ray
or threads must not fork, so each is started anew.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TIMEOUT_S = 240.0


def run_ranks(
    world_size: int, function: str, *args: str, env: dict[str, str] | None = None, **kwargs: Any
) -> list[Any]:
    """Return what the function returned on each rank, through JSON. Raises AssertionError with a failed rank's end."""
    with tempfile.TemporaryDirectory() as scratch:
        call = json.dumps([function, list(map(str, args)), kwargs])
        processes = []
        for rank in range(world_size):
            command = [sys.executable, "-m", "tests.support.gloo_ranks", scratch, str(rank), str(world_size), call]
            with (Path(scratch) / f"{rank}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})},
                    )
                )
        try:
            codes = [process.wait(TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, code in enumerate(codes):
            assert code == 0, f"rank {rank} ended with {code}:\n{(Path(scratch) / f'{rank}.log').read_text()[-6000:]}"
        return [json.loads((Path(scratch) / f"{rank}.json").read_text()) for rank in range(world_size)]


def _main(scratch: str, rank: str, world_size: str, call: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{scratch}/group", rank=int(rank), world_size=int(world_size)
    )  # fmt: skip
    function, args, kwargs = json.loads(call)
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(*args, **kwargs)
    (Path(scratch) / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
