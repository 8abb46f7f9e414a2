"""URIs that carry a secret: every public function refuses them at the door, and prints nothing of the secret."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

import cluster
from actors.hosting import host_rank
from cluster.command_line.cli import main
from cluster.config import Config
from cluster.errors import ConfigError
from serving.settings import ServingSettings
from storage.errors import InvalidUri, StoreError
from storage.store_ref import parse_uri
from storage.stores.fsspec_store import FsspecStore

URIS = [
    "az://container/llama?sv=2024&sig=SECRET",
    "az://container:SECRET@account/llama",
    "az://container/llama?sig=SECRET.safetensors",
    "az://container@account:SECRET/llama",
    "gs://bucket/llama#SECRET",
    "hf://org/model?token=SECRET",
    "s3://AKIA:SECRET@bucket/llama",
    "s3://bucket/llama?X-Amz-Signature=SECRET",
    "https://host/llama?sig=SECRET",
    "memory://llama?sig=SECRET",
    "file:///srv/llama?sig=SECRET",
    "custom://place/llama?sig=SECRET",
    "host.example/llama?sig=SECRET",
    "s3:/bucket/llama?sig=SECRET",
]


def hosted(uri: str) -> None:
    with host_rank(uri, rank=0):
        pass


VERBS: dict[str, Callable[[str], object]] = {
    "load": cluster.load,
    "plan": cluster.plan,
    "verify": cluster.verify,
    "publish": cluster.publish,
    "publish to": lambda uri: cluster.publish(Path(__file__).parent, uri),
    "host_rank": hosted,
}


@pytest.mark.parametrize("uri", URIS)
@pytest.mark.parametrize("verb", VERBS)
def test_the_python_api_refuses_secret_uris(verb: str, uri: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(InvalidUri, match="not contain a user, password, query") as caught,
    ):
        VERBS[verb](uri)
    assert "SECRET" not in "".join(traceback.format_exception(caught.value)) + caplog.text
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert "llama" in str(caught.value) or "model" in str(caught.value)  # it says which


def test_sign_refuses_secret_uris(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    cluster.generate_key(tmp_path / "key.pem")
    for uri in URIS:
        with pytest.raises(InvalidUri) as caught:
            cluster.sign(uri, tmp_path / "key.pem")
        assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("uri", URIS)
@pytest.mark.parametrize("words", [["load"], ["plan"], ["verify"], ["publish"], ["doctor"], ["publish", "."]])
def test_the_command_line_refuses_secret_uris(words: list[str], uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--json"], ["--debug"]):
        assert main([*words, uri, *options]) == 2
        said = capfd.readouterr()
        assert "SECRET" not in said.out + said.err
        assert "query" in said.err


@pytest.mark.parametrize("uri", URIS)
def test_misplaced_arguments_are_not_repeated(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "s3://bucket/x", uri, "--json"]) == 2
    assert main(["plan", f"--tp={uri}", "s3://bucket/x", "--json"]) == 2
    said = capfd.readouterr()
    assert "SECRET" not in said.out + said.err


@pytest.mark.parametrize("endpoint", ["http://me:SECRET@h:1", "https://h?key=SECRET", "https://h/#SECRET", "http://h?"])
@pytest.mark.parametrize("uri", ["s3://bucket/llama", "az://container/llama"])
def test_endpoints_with_secrets_are_refused(endpoint: str, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidUri, match="endpoint URL must not contain a user") as caught:
        cluster.plan(uri, endpoint_url=endpoint)
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))
    for made in (
        lambda: Config.from_env({"LONGSHORE_ALLOWED_ENDPOINTS": endpoint}),
        lambda: ServingSettings.from_env({"LONGSHORE_HTTP_ENDPOINTS": endpoint}),
    ):
        with pytest.raises(ConfigError, match="not a server") as refused:
            made()
        assert "SECRET" not in "".join(traceback.format_exception(refused.value))


def test_library_messages_are_quoted_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore(parse_uri("memory://quoting"))

    url = f"https://account.blob/c/x?sv=1&sig={'SECRET'}"  # not in a line that the traceback quotes

    def info(path: str, **_: object) -> None:
        raise OSError(f"403 for url='{url}', message='no'")

    monkeypatch.setattr(store._fs, "info", info)
    with pytest.raises(StoreError) as caught:
        store.stat("x")
    text = "".join(traceback.format_exception(caught.value))
    assert "OSError: 403 for url='https://account.blob/c/x', message='no'" in text
    assert "SECRET" not in text


def test_a_local_path_may_have_a_question_mark(tmp_path: Path) -> None:
    folder = tmp_path / "what? #1"
    folder.mkdir()
    assert parse_uri(str(folder)).prefix == str(folder)
    assert parse_uri(f"file://{tmp_path}/what%3F%20%231").prefix == str(folder)
