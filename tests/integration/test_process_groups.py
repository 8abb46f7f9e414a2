"""Two processes over Gloo: FSDP2's models, and tensor- and expert-parallel ones of transformers, filled from slices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gloo_rank import CASES, IDS, RANKS
from tests.support.hf_models import MOE_FAMILIES, SHARD_BYTES, make_tiny
from tests.support.ray_clusters import REPOSITORY, eventually

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

TIMEOUT_S = 300


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.Tensor, list[dict[str, Any]]]]:
    """Of each case: the logits of the model in one process, and what each of the two wrote."""
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
    """Until both have ended, or one with an error: the other would wait for it."""
    ranks: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"rank-{rank}.log" for rank in range(RANKS)]

    def said(rank: int) -> str:
        return f"rank {rank} ({ranks[rank].poll()}): {logs[rank].read_text()[-3000:]}"

    def failed() -> list[int]:
        return [rank for rank in range(RANKS) if ranks[rank].poll()]

    try:
        for rank, log in enumerate(logs):
            with open(log, "wb") as out:
                command = [sys.executable, "-m", "tests.support.gloo_rank", str(rank), str(folder)]
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
