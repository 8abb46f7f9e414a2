"""XXH3 digests are forged in microseconds: no signature rests on them, and no store's chunks stand for another's."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors import hosting
from actors.hosting import host_rank
from cluster import publishing
from cluster.command_line.cli import main
from cluster.config import Config
from cluster.options import LoadOptions
from cluster.planning.preview import plan as plan_ahead
from cluster.publishing import generate_key, sign
from cluster.request import make_request
from storage.checkpoints.manifest import MANIFEST_KEY
from storage.checksum import digest_of
from storage.disk.files import SUBFOLDER
from storage.errors import WeakDigest
from storage.publishing.signing import SIGNATURE_KEY, SigningKey, sign_manifest
from storage.store_ref import Credentials, path_of
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import safetensors_bytes, write_tiny_llama
from tests.support.disk_chunks import chunks_in
from tests.support.forged_chunk import forged
from tests.support.local_node import LocalNode, local_node, plan_of
from tests.support.ray_clusters import eventually

KEY = "model.safetensors"
CHUNK_BYTES = 1 << 18
OURS, THEIRS = "ours", "theirs"  # identities of two stores


@pytest.fixture(scope="module")
def two_models() -> tuple[bytes, bytes]:
    """A file, and another with the same XXH3-128 digests: of the whole, and of each chunk."""
    honest = safetensors_bytes([("weight", "F32", (256, 1024))], seed=1)
    return honest, forged(honest, block=3)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    generate_key(tmp_path / "signer")
    return tmp_path / "signer"


@pytest.fixture
def weak(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path / "llama")
    publishing.publish(tmp_path / "llama", hash_name="xxh3_128")
    return tmp_path / "llama"


def load_from(node: LocalNode, content: bytes, identity: str, hash_name: str = "xxh3_128") -> tuple[bool, bool]:
    """(whether the rank has these very bytes, whether all came from the arena or the disk); else all from the store."""
    objects = {KEY: content}
    plan = plan_of(objects, (1, 1, 1), CHUNK_BYTES, hash_name=hash_name)
    (rank,), report = node.load(plan, MemoryStore(objects), identity)
    assert report.store_bytes in (0, report.needed_bytes)
    return rank.tensor_bytes()["weight"][1] == content[-(1 << 20) :], not report.store_bytes


def test_two_contents_with_one_digest(two_models: tuple[bytes, bytes]) -> None:
    honest, evil = two_models
    assert honest != evil
    assert digest_of("xxh3_128", honest) == digest_of("xxh3_128", evil)
    assert digest_of("blake3", honest) != digest_of("blake3", evil)


def test_a_forged_chunk_of_one_store_stays_out_of_anothers(shm_dir: Path, two_models: tuple[bytes, bytes]) -> None:
    honest, evil = two_models
    with local_node(shm_dir, 64) as node:
        assert load_from(node, evil, THEIRS) == (True, False)
        assert load_from(node, honest, OURS) == (True, False)
        assert load_from(node, honest, OURS) == (True, True)  # a store's own chunks are still cached


def test_a_forged_chunk_is_not_read_from_disk(shm_dir: Path, tmp_path: Path, two_models: tuple[bytes, bytes]) -> None:
    honest, evil = two_models
    settings = {"disk_cache_dir": str(tmp_path), "disk_cache_bytes": 1 << 24}
    chunks = (1 << 20) // CHUNK_BYTES  # the header is none of them
    for content, identity, kept, disk_chunks in (
        (evil, THEIRS, False, chunks),
        (honest, OURS, False, 2 * chunks),
        (honest, OURS, True, 2 * chunks),
    ):
        with local_node(shm_dir, 64, **settings) as node:  # its arena is empty
            assert load_from(node, content, identity) == (True, kept)
            eventually(
                lambda expected=disk_chunks: len(chunks_in(str(tmp_path / SUBFOLDER))) == expected,
                "the chunks did not come to disk",
            )


def test_chunks_with_blake3_are_shared_by_all_stores(shm_dir: Path, two_models: tuple[bytes, bytes]) -> None:
    honest, _ = two_models
    with local_node(shm_dir, 64) as node:
        assert load_from(node, honest, THEIRS, "blake3") == (True, False)
        assert load_from(node, honest, OURS, "blake3") == (True, True)


def test_a_store_is_identified_by_all_that_locates_it() -> None:
    def identity(uri: str = "az://models/llama", profile: str | None = None, **options: object) -> str:
        request = make_request(
            LoadOptions(uri, profile=profile, credentials=Credentials(fsspec_options=options) if options else None)
        )
        kept = request.store.without_credentials()  # as saved loads have it
        assert kept.ref.identity() == request.store.ref.identity()
        return kept.ref.identity()

    first, second = identity(account_name="first"), identity(account_name="second")
    assert len({identity(), first, second, identity(account_name="first", client={"host": "h"})}) == 4
    assert first == identity(account_name="first", account_key="secret") == identity(account_name="first", token="t")
    assert identity("s3://models/llama", "one") != identity("s3://models/llama", "two")  # it may name an endpoint


def test_publish_and_sign_refuse_digests_that_can_be_forged(tmp_path: Path, weak: Path, key: Path) -> None:
    write_tiny_llama(tmp_path / "other")
    with pytest.raises(WeakDigest, match="--hash blake3"):
        publishing.publish(tmp_path / "other", hash_name="xxh3_128", sign_key=key)
    assert not (tmp_path / "other" / MANIFEST_KEY).exists()
    with pytest.raises(WeakDigest, match="longshore publish URI --hash blake3 --sign-key FILE") as refused:
        sign(weak, key)
    assert refused.value.details["uri"] == weak.as_uri()
    assert not (weak / SIGNATURE_KEY).exists()
    assert publishing.publish(weak, sign_key=key).hash_name == "blake3"  # as the hint says


def test_trusted_keys_require_strong_digests(weak: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (weak / MANIFEST_KEY).read_bytes()
    (weak / SIGNATURE_KEY).write_bytes(sign_manifest(data, SigningKey.read(key), path_of(weak.as_uri())))
    public = f"{key}.pub"
    for verb in (publishing.verify, plan_ahead):
        verb(weak)  # without trusted keys, accidental damage is reported as always
        with pytest.raises(WeakDigest, match="publish the model again"):
            verb(weak, trusted_keys=[public])
    monkeypatch.setattr(hosting, "_settings_in_force", lambda given, patience: Config())  # there is no cluster
    with pytest.raises(WeakDigest), host_rank(weak, 0, device="cpu", trusted_keys=[public]):
        pass
    monkeypatch.setenv("LONGSHORE_TRUSTED_KEYS", public)
    assert main(["plan", str(weak), "--json"]) == 6
    assert main(["verify", str(weak)]) == 6
    assert main(["sign", str(weak), "--key", str(key)]) == 6
    assert main(["publish", str(weak), "--hash", "xxh3_128", "--sign-key", str(key)]) == 6
    assert main(["publish", str(weak), "--sign-key", str(key)]) == 0
    assert main(["verify", str(weak)]) == 0
