"""Folders with the small files of a model: what is fetched, what is not, and how a loader finds the weights."""

from __future__ import annotations

import itertools
import json
import os
import struct
import threading
import time
from pathlib import Path

import pytest
import safetensors

import cluster
from cluster import small_files
from cluster.command_line.cli import main
from cluster.errors import ConfigError, ModelConfigError
from cluster.small_files import SOURCE_KEY, ModelSource, read_source
from storage.checkpoints.checkpoint_files import HEADERS_KEY
from storage.errors import IntegrityError, ManifestMismatch
from tests.support.checkpoints import write_tiny_llama

OTHERS = {
    "generation_config.json": "{}",
    "tokenizer.json": '{"a": 1}',
    "tokenizer.model": "m",
    "merges.txt": "t",
    "chat_template.jinja": "j",
    "modeling_own.py": "raise SystemExit",
    "pytorch_model.bin": "pickle",
    "pytorch_model.bin.index.json": "{}",
    "picture.png": "p",
    "1_Pooling/config.json": '{"pool": 1}',
    "2_Dense/model.safetensors": "small",
}


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "llama"
    write_tiny_llama(folder)
    for name, text in OTHERS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def files_of(folder: str | Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()}


def test_small_files_are_fetched_and_weights_are_not(llama: Path):
    cluster.publish(llama)
    made = cluster.config_folder(llama)
    expected = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "merges.txt"}
    expected |= {"chat_template.jinja", "1_Pooling/config.json", "2_Dense/model.safetensors", HEADERS_KEY, SOURCE_KEY}
    assert files_of(made) == expected
    assert Path(made, "tokenizer.json").read_text() == '{"a": 1}'
    source = read_source(made)
    assert source is not None
    assert source.model_uri == f"file://{llama}"
    with cluster.safe_open(source.model_uri, revision=source.revision, **source.options) as weights:
        assert len(weights) > 0


def test_headers_alone_are_fetched_too(llama: Path):
    made = Path(cluster.config_folder(llama), HEADERS_KEY)
    data = made.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    assert len(data) == 8 + size
    said = {name: (about["dtype"], about["shape"]) for name, about in json.loads(data[8:]).items()}
    with cluster.safe_open(llama) as weights:
        slices = {name: weights.get_slice(name) for name in weights.offset_keys()}
        assert said == {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    with pytest.raises(Exception, match=r"(?i)incomplete"):
        safetensors.safe_open(made, "np")


def test_weights_left_in_the_store_are_named(llama: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(small_files, "MAX_FILE_BYTES", 1000)
    (llama / "whisper").mkdir()
    (llama / "whisper" / "model.safetensors").write_bytes(bytes(1001))
    made = cluster.config_folder(llama)
    assert "2_Dense/model.safetensors" in files_of(made)
    assert "whisper/model.safetensors" not in files_of(made)
    (record,) = [record for record in caplog.records if "left in the store" in record.getMessage()]
    assert "whisper/model.safetensors" in record.getMessage()


def test_code_is_fetched_on_request_only(llama: Path, tmp_path: Path):
    made = cluster.config_folder(llama, tmp_path / "with code", code=True)
    assert "modeling_own.py" in files_of(made)


def test_a_folder_is_made_once(llama: Path):
    made = cluster.config_folder(llama)
    Path(made, "config.json").write_text("changed here")
    assert cluster.config_folder(llama) == made
    assert Path(made, "config.json").read_text() == "changed here"
    (llama / "tokenizer.json").write_text("another")
    cluster.publish(llama)
    assert cluster.config_folder(llama) != made  # another revision


def test_several_processes_make_one_folder(llama: Path, monkeypatch: pytest.MonkeyPatch):
    found: list[str] = []
    exists, looks = os.path.exists, itertools.count()

    def looks_late(path: str) -> bool:  # others finish between a look and what follows from it
        there = exists(path)
        if not there and path.endswith(SOURCE_KEY):
            time.sleep(0.1 * next(looks))
        return there

    monkeypatch.setattr(os.path, "exists", looks_late)
    threads = [threading.Thread(target=lambda: found.append(cluster.config_folder(llama))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert [name for name in os.listdir(Path(found[0]).parent) if name.startswith(".")] == []


def test_options_are_kept_and_no_secrets(llama: Path, tmp_path: Path):
    made = cluster.config_folder(llama, tmp_path / "made", region="eu-west-1", anonymous=True)
    source = read_source(made)
    assert source == ModelSource(f"file://{llama}", source.revision, {"region": "eu-west-1", "anonymous": True})


def test_keys_are_kept_and_not_their_files(llama: Path, tmp_path: Path):
    """An engine may run where there are no such files."""
    keys = cluster.generate_key(tmp_path / "key")
    cluster.publish(llama, sign_key=keys.path)
    source = read_source(cluster.config_folder(llama, tmp_path / "made", trusted_keys=[keys.public_path]))
    assert source.options == {"trusted_keys": [keys.public_key]}
    Path(keys.public_path).unlink()
    with cluster.safe_open(source.model_uri, revision=source.revision, **source.options) as weights:
        assert len(weights) > 0


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_changed_files_are_refused(llama: Path, tmp_path: Path, name: str):
    cluster.publish(llama)
    data = (llama / name).read_bytes()
    (llama / name).write_bytes(data[:-1] + b"?")
    with pytest.raises(IntegrityError, match=name):
        cluster.config_folder(llama, tmp_path / "made")
    (llama / name).write_bytes(data + b" ")
    with pytest.raises(ManifestMismatch, match=name):
        cluster.config_folder(llama, tmp_path / "made")
    assert not (tmp_path / "made").exists()
    assert not list(tmp_path.glob(".longshore-*"))


def test_a_model_without_config_is_refused(llama: Path):
    (llama / "config.json").unlink()
    with pytest.raises(ModelConfigError, match=r"no config\.json"):
        cluster.config_folder(llama)


def test_a_folder_with_files_is_not_touched(llama: Path, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(ConfigError, match="files already"):
        cluster.config_folder(llama, tmp_path / "full")
    assert files_of(tmp_path / "full") == {"mine"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps({"model_uri": 1, "revision": "r", "options": {}}),
        json.dumps({"model_uri": "u", "revision": "r", "options": {"credentials": "x"}}),
        json.dumps({"model_uri": "u", "revision": "r", "options": {}}) + " " * 70_000,
    ],
)
def test_a_broken_source_is_an_error(tmp_path: Path, text: str):
    (tmp_path / SOURCE_KEY).write_text(text)
    with pytest.raises(ConfigError):
        read_source(tmp_path)


def test_other_folders_have_no_source(tmp_path: Path):
    assert read_source(tmp_path) is None


def test_the_command_prints_the_path_alone(llama: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["config-folder", str(llama)]) == 0
    out = capsys.readouterr().out
    assert out == f"{cluster.config_folder(llama)}\n"
    assert main(["config-folder", str(llama), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": out.strip()}
