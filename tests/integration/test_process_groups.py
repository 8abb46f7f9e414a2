"""Two processes over Gloo: FSDP2's models, and tensor- and expert-parallel ones of transformers, filled from slices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.shard import RankShard
from cluster.layouts.mesh import Layout
from tests.support.hf_models import FAMILIES, MOE_FAMILIES, SHARD_BYTES, make_tiny
from tests.support.ray_clusters import REPOSITORY, eventually
from tests.support.shards import shards_of

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


RANKS = 2
IDS = torch.arange(3, 19)[None]
# case -> (way of sharing a model, family, changes of its config)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fsdp-llama": ("fsdp", "llama", {"vocab_size": 97}),  # rows that two cannot share evenly
    "fsdp-gemma2": ("fsdp", "gemma2", {}),  # tied
    "tp-llama": ("tp", "llama", {"vocab_size": 97}),
    "tp-gemma2": ("tp", "gemma2", {}),
    "tp-mixtral": ("tp", "mixtral", {}),  # experts that transformers stacks
    "ep-mixtral": ("ep", "mixtral", {}),  # whole ones, half of them on each rank; attention as with tp
    "ep-qwen3_moe": ("ep", "qwen3_moe", {}),
}


def model_on_meta(family: str, folder: Path) -> Any:
    import transformers
    from transformers.initialization import no_tie_weights

    tiny = FAMILIES[family]
    config = getattr(transformers, tiny.config_class).from_pretrained(folder)
    with torch.device("meta"), no_tie_weights():  # as transformers' loader: tied when filled
        return getattr(transformers, tiny.model_class)._from_config(config).eval()


def fully_sharded(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: Any, *, ep_size: int = 1) -> Any:
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    config = DistributedConfig(tp_size=RANKS, ep_size=ep_size)
    _, mesh = initialize_distributed_mesh(config)
    return type(model).maybe_distribute_model(model, config, mesh)


def shared(model: Any, shard: RankShard) -> int:
    """Parameters whose local part is in the shard's memory."""
    own = {tensor.untyped_storage().data_ptr() for tensor in shard.values()}
    local = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
    return sum(tensor.untyped_storage().data_ptr() in own for tensor in local)


def run(rank: int, folder: Path, case: str) -> None:
    how, family, _ = CASES[case]
    model = model_on_meta(family, folder / case)
    if how == "fsdp":
        model, layout = fully_sharded(model), Layout(fsdp_size=RANKS)
    elif how == "tp":
        model, layout = tensor_parallel(model), Layout(tensor_parallel_size=RANKS)
    else:
        model = tensor_parallel(model, ep_size=RANKS)
        layout = Layout(tensor_parallel_size=RANKS, expert_parallel_size=RANKS)
    shard = shards_of(folder / case, layout)[rank]
    done = shard.into(model, convert=True)
    found = {"shared": shared(model, shard), "filled": done.filled, "copied": len(done.copied)}
    with torch.no_grad():
        torch.save({"logits": model(input_ids=IDS).logits, **found}, folder / f"{case}-{rank}.pt")


def main() -> None:
    """Run one of the two processes: RANK FOLDER. FOLDER/CASE is a checkpoint; FOLDER/CASE-RANK.pt gets the logits."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    for case in CASES:
        run(rank, folder, case)
    torch.distributed.destroy_process_group()


TIMEOUT_S = 300


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.Tensor, list[dict[str, Any]]]]:
    """Return for each case the logits of the model in one process, and the outputs of the two processes."""
    folder = tmp_path_factory.mktemp("gloo")
    expected = {}
    for case, (_, family, changes) in CASES.items():
        model = make_tiny(family, **changes).float()  # in 32 bits a sum in another order shows only in the last ones
        model.save_pretrained(folder / case, max_shard_size=2 * SHARD_BYTES)
        again = type(model).from_pretrained(folder / case).eval()
        with torch.no_grad():
            expected[case] = again(input_ids=IDS).logits
    run_ranks(folder)
    return {
        case: (expected[case], [torch.load(folder / f"{case}-{rank}.pt") for rank in range(RANKS)]) for case in CASES
    }


def run_ranks(folder: Path) -> None:
    """Run both ranks to their end, or until one fails: the other would wait for it."""
    ranks: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"rank-{rank}.log" for rank in range(RANKS)]

    def said(rank: int) -> str:
        return f"rank {rank} ({ranks[rank].poll()}): {logs[rank].read_text()[-3000:]}"

    def failed() -> list[int]:
        return [rank for rank in range(RANKS) if ranks[rank].poll()]

    try:
        for rank, log in enumerate(logs):
            with open(log, "wb") as out:
                command = [sys.executable, "-m", "tests.integration.test_process_groups", str(rank), str(folder)]
                ranks.append(subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=out))
        eventually(
            lambda: failed() or all(rank.poll() == 0 for rank in ranks),
            lambda: "\n".join(said(rank) for rank in range(RANKS)),
            TIMEOUT_S,
        )
        assert not failed(), "\n".join(said(rank) for rank in failed())
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


Outcomes = dict[str, tuple[torch.Tensor, list[dict[str, Any]]]]


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("fsdp")])
def test_fully_sharded_models_compute_the_same_bit_for_bit(outcomes: Outcomes, case: str) -> None:
    expected, ranks = outcomes[case]
    for found in ranks:
        assert torch.equal(found["logits"], expected)
        assert found["shared"] == found["filled"]


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("fsdp")])
def test_transformers_parallel_models_agree(outcomes: Outcomes, case: str) -> None:
    expected, ranks = outcomes[case]
    for found in ranks:
        torch.testing.assert_close(found["logits"], expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
        assert found["shared"] == found["filled"] - found["copied"]
        assert bool(found["copied"]) == (CASES[case][1] in MOE_FAMILIES)


if __name__ == "__main__":
    main()
