"""Saves of one process: in the background, with a history, and what becomes of their errors."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cluster
from actors.saving import save as save_module
from actors.saving.loaded import _source_files
from actors.saving.save import SaveReport, _Save
from actors.saving.writer import CheckpointWriter
from cluster.errors import ConfigError, NoRoomToStage, SaveRefused
from cluster.publishing import list_saves
from storage.errors import InvalidState, LongshoreError
from storage.publishing.save_history import parse_history

pytestmark = pytest.mark.slow


def raise_interrupt(*given: object) -> None:
    raise KeyboardInterrupt


def state(value: float) -> dict[str, torch.Tensor]:
    weight = torch.full((3, 4), value)
    return {"module.a.weight": weight, "module.b.weight": weight}  # tied


def test_the_copy_is_saved_and_not_what_came_later(tmp_path: Path) -> None:
    tensors = state(1)
    handle = cluster.asave(tensors, tmp_path / "m")
    tensors["module.a.weight"].zero_()
    report = handle.result(timeout_s=60)
    assert report.tied == {"b.weight": "a.weight"}
    with cluster.safe_open(tmp_path / "m") as found:
        assert found.get_tensor("a.weight").eq(1).all()


@pytest.mark.parametrize("background", [False, True])
def test_tensors_of_a_training_state_keep_their_names(tmp_path: Path, background: bool) -> None:
    """Also where the names are those that wrappers add to the names of a model."""
    ema = {"_orig_mod.w": torch.ones(2), "w": torch.zeros(3), "module._fsdp_wrapped_module.w": torch.full((4,), 2.0)}
    if background:
        cluster.asave(state(1), tmp_path / "m", extra_state={"ema": ema}).result(timeout_s=60)
    else:
        cluster.save(state(1), tmp_path / "m", extra_state={"ema": ema})
    found = cluster.load_training_state(tmp_path / "m")["ema"]
    assert found.keys() == ema.keys()
    assert all(found[name].equal(ema[name]) for name in ema)
    with cluster.safe_open(tmp_path / "m") as stored:
        assert stored.keys() == ["a.weight"]


def test_extra_files_are_stored_as_they_are_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also: the manifest has the digests of the stored bytes when a file changes while the save runs."""
    file, uri = tmp_path / "trainer_state.json", tmp_path / "m"
    waits, real = threading.Event(), CheckpointWriter.commit

    def commit_later(self: CheckpointWriter, *args: Any, **options: Any) -> Any:
        waits.wait(60)
        file.unlink()
        return real(self, *args, **options)

    monkeypatch.setattr(CheckpointWriter, "commit", commit_later)
    for step in range(2):
        waits.clear()
        file.write_text(f"step {step}")
        handle = cluster.asave(state(step), uri, extra_files=[file])
        file.write_text("later")
        waits.set()
        handle.result(timeout_s=60)
        assert (uri / file.name).read_text() == f"step {step}"
    file.write_text("step 3")
    cluster.save(state(3), uri, extra_files={file.name: str(file)})
    assert (uri / file.name).read_text() == "step 3"
    assert cluster.verify(uri, progress=False).ok


@pytest.mark.parametrize("save", [cluster.save, cluster.asave])
def test_extra_files_are_checked_at_the_call(tmp_path: Path, save: Callable[..., object]) -> None:
    """Also of a save with a training state, of which nothing is written then."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(folder)
    two = [tmp_path / "a/config.json", tmp_path / "b/config.json"]
    for files, problem in (
        (two, "two files are called 'config.json'"),
        ([tmp_path / "none.txt"], "no such file"),
        ({"../a": b""}, "no relative path"),
        ({"a.json": b"", "a.json/b/c.json": b""}, "'a.json/b/c.json' is in a folder whose name is that of a file"),
        ({"longshore.manifest.json/a": b""}, "is in a folder whose name is that of a file"),
        ({"training/0123456789abcdef.json": b"{}"}, "a name that the save uses itself"),
        ({"training/0123456789abcdef/state.json": b"{}"}, "a name that the save uses itself"),
    ):
        for extra_state in (None, {"step": 1}):
            with pytest.raises(SaveRefused, match=problem):
                save(state(1), tmp_path / "m", extra_files=files, extra_state=extra_state)
    assert not (tmp_path / "m").exists()


def test_options_are_checked_before_the_copy(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="keep_lst"):
        cluster.asave(state(1), tmp_path / "m", keep_lst=2)
    with pytest.raises(ConfigError, match="asave: keep_last must be a whole number or None, not str"):
        cluster.asave(state(1), tmp_path / "m", keep_last="2")


def test_the_next_save_waits_and_reports_a_lost_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    failed = cluster.asave(state(1), tmp_path / "file")
    with caplog.at_level(logging.ERROR, "longshore.save"):
        cluster.save(state(2), tmp_path / "m")
    assert failed.done()
    assert "the save in the background to" in caplog.text
    with pytest.raises(LongshoreError):
        failed.result()


def test_a_failed_save_keeps_no_copy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    failed = cluster.asave({"a": torch.ones(37, 41)}, tmp_path / "file")
    with pytest.raises(LongshoreError):
        failed.result(timeout_s=60)
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == (37, 41)]


def test_an_error_is_reported_at_exit(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    script = "import sys, torch, cluster; cluster.asave({'a': torch.ones(3)}, sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "file"], capture_output=True, text=True, check=True)
    assert "the save in the background to" in done.stderr
    subprocess.run([sys.executable, "-c", script, tmp_path / "m"], check=True)
    with cluster.safe_open(tmp_path / "m") as found:  # the process waited for it
        assert found.keys() == ["a"]


def test_no_room_for_the_copy_says_how_much_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.saving.background.available_host_bytes", lambda: 100)
    with pytest.raises(NoRoomToStage, match="are missing") as caught:
        cluster.asave({"a": torch.ones(100)}, tmp_path / "m")
    assert caught.value.details["missing_bytes"] == 400 - 95
    assert not (tmp_path / "m").exists()


def test_only_the_last_revisions_stay(tmp_path: Path) -> None:
    uri = tmp_path / "m"
    reports = [
        cluster.save(state(step), uri, extra_state={"step": step}, keep_last=2 if step else None) for step in range(4)
    ]
    saved = {file.name.split("-")[1] for file in uri.glob("model-*.safetensors")}
    assert saved == {report.save_id for report in reports[2:]}
    assert len(list(uri.glob("training/*/longshore.manifest.json"))) == 2
    assert cluster.load_training_state(uri) == {"step": 3}
    assert cluster.verify(uri, progress=False).ok


def test_a_save_killed_before_it_is_in_the_history_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = tmp_path / "m"
    cluster.save(state(0), uri, extra_state={"step": 0}, keep_last=2)
    first = set(uri.glob("model-*.safetensors"))
    with monkeypatch.context() as patch:
        patch.setattr("actors.saving.writer.CheckpointWriter._clean_up", raise_interrupt)  # the manifest is written
        with pytest.raises(KeyboardInterrupt):
            cluster.save(state(1), uri, extra_state={"step": 1}, keep_last=2)
    second = set(uri.glob("model-*.safetensors")) - first
    cluster.save(state(2), uri, extra_state={"step": 2}, keep_last=2)
    assert second < set(uri.glob("model-*.safetensors"))
    assert len(list(uri.glob("training/*/longshore.manifest.json"))) == 2
    list_saves(uri, clean=True)
    assert second < set(uri.glob("model-*.safetensors"))


def raise_at(step: str, in_state: bool) -> Callable[[_Save, str], None]:
    """Return a step of a save that raises at one of the training state, or of the model."""
    real = _Save._step

    def check(self: _Save, name: str) -> None:
        if name == step and ("/training/" in self._given.uri) == in_state:
            raise RuntimeError("stopped")
        real(self, name)

    return check


@pytest.mark.parametrize("background", [False, True])
def test_an_interrupted_training_state_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Also: what is at the URI afterwards is one state, and nothing is left over."""
    uri, extra = tmp_path / "m", {"ema": torch.randn(6_000_000)}  # of 24 MB
    states: list[SaveReport] = []
    real = save_module.save_tensors

    def counted(*args: Any) -> SaveReport:
        report = real(*args)
        states.extend([report] if "/training/" in report.uri else [])
        return report

    def save() -> None:
        if background:
            cluster.asave(state(1), uri, extra_state=extra).result(timeout_s=60)
        else:
            cluster.save(state(1), uri, extra_state=extra)

    monkeypatch.setattr(save_module, "save_tensors", counted)
    for step, in_state in (("commit: shards", True), ("begin", False), ("commit: files", False)):
        with monkeypatch.context() as patch:
            patch.setattr(_Save, "_step", raise_at(step, in_state))
            with pytest.raises(RuntimeError, match="stopped"):
                save()
    save()
    size_bytes = states[0].size_bytes
    assert [one.written_bytes for one in states] == [0] * 3
    assert [one.reused_bytes for one in states] == [size_bytes, 0, 0]
    assert [one.copied_bytes for one in states] == [0, size_bytes, size_bytes]
    assert cluster.load_training_state(uri)["ema"].equal(extra["ema"])
    (first,) = uri.glob("training/*/longshore.manifest.json")
    assert len(list(first.parent.glob("*.safetensors"))) == 1
    assert not list_saves(uri).leftovers
    save()
    assert states[-1].written_bytes == size_bytes, "what is published stays as it is"
    assert len(list(uri.glob("training/*/longshore.manifest.json"))) == 2


def test_a_training_state_is_not_copied_with_a_loaded_model(tmp_path: Path) -> None:
    uri = str(tmp_path / "m")
    report = cluster.save(state(1), uri, extra_state={"step": 1}, extra_files={"config.json": b"{}"})
    about = SimpleNamespace(
        uri=uri, revision=report.revision, quantization_config=None, precision=SimpleNamespace(dtype="auto")
    )
    names = set(_source_files(about, {}))
    assert "config.json" in names
    assert not [name for name in names if name.startswith("training/")]


@pytest.mark.parametrize("data", [b"", b"[]]", b'[["../x", ""]]', b'[["a"]]', b"[" * 100_000, b'[["a", ""]]' * 200_000])
def test_a_broken_history_is_none(data: bytes) -> None:
    assert parse_history(data) == ()


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/model.safetensors").write_bytes(b"older weights")
    for more in ({}, {"extra_state": {"step": 1}}):
        with pytest.raises(SaveRefused, match="has a model"):
            cluster.save(state(1), tmp_path / "other", **more)
        assert [path.name for path in (tmp_path / "other").iterdir()] == ["model.safetensors"]
    with pytest.raises(SaveRefused, match="names of a model"):
        cluster.save(state(1), tmp_path / "m", optimizer=torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))
    with pytest.raises(SaveRefused, match="only a pickle"):
        cluster.save(state(1), tmp_path / "m", extra_state={"path": tmp_path})
    with pytest.raises(SaveRefused, match="would be stored for"):
        cluster.save({"_orig_mod.a": torch.ones(2), "a": torch.ones(2)}, tmp_path / "m")
    with pytest.raises(SaveRefused, match="since is 'lates'; it must be \"latest\", None or the revision"):
        cluster.save(state(1), tmp_path / "m", since="lates")
    assert not (tmp_path / "m").exists()
    revision = cluster.save(state(1), tmp_path / "m").revision
    assert cluster.save(state(2), tmp_path / "m", since="0" * 64).copied_bytes == 0
    assert cluster.save(state(2), tmp_path / "m", since=revision).copied_bytes == 0, "another is published now"
    with pytest.raises(InvalidState, match="no state of a training run"):
        cluster.load_training_state(tmp_path / "m")
