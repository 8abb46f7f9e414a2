"""Real checkpoints of DeepSpeed and Megatron-Core, and what the pieces of a source add up to.

Both packages are in an environment of their own (`tests/engine_environments/make.sh trainers`), which is made if it is
not there. The checkpoints are written once in a session, by ranks of their own processes.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.converting.reshaping import strides_of
from cluster.converting.source import SourceTensor
from storage.checkpoints.safetensors_header import DTYPE_BITS
from tests.support.engines import REPOSITORY, python_of

_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


@pytest.fixture(scope="session")
def deepspeed_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make_deepspeed_checkpoints.py` fills."""
    folder = tmp_path_factory.mktemp("deepspeed")
    for ranks in ("2", "4"):
        _run("make_deepspeed_checkpoints.py", str(folder), ranks)
    return folder


@pytest.fixture(scope="session")
def megatron_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make_megatron_checkpoints.py` fills."""
    folder = tmp_path_factory.mktemp("megatron")
    _run("make_megatron_checkpoints.py", str(folder))
    return folder


def _run(script: str, *arguments: str) -> None:
    python = python_of("trainers")
    command = [python, "-W", "ignore", REPOSITORY / "tests/support" / script, *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def assemble(folder: Path, tensor: SourceTensor) -> NDArray[Any]:
    """Return the bits of a tensor from its pieces, each element of which must be there exactly once."""
    dtype = np.dtype(_UNSIGNED[DTYPE_BITS[tensor.dtype]])
    whole, seen = np.zeros(tensor.shape, dtype), np.zeros(tensor.shape, np.uint8)
    for piece in tensor.pieces:
        file = np.memmap(folder / piece.file, np.uint8, "r")
        strides = tuple(one * dtype.itemsize for one in strides_of(piece))
        stored = np.ndarray(piece.shape, dtype, file.data, piece.offset_bytes, strides)
        place = tuple(slice(one, one + size) for one, size in zip(piece.start, piece.shape, strict=True))
        (whole.reshape(-1) if piece.flat else whole)[place] = stored
        (seen.reshape(-1) if piece.flat else seen)[place] += 1
    assert (seen == 1).all(), f"{tensor.name}: elements are missing or there more than once"
    return whole
