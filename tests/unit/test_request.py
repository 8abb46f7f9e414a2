"""Arguments that cannot be meant are refused before anything happens, and requests that can share a model are equal."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cluster
from cluster.errors import ConfigError, PlanError
from cluster.fit.search import steps_of_auto
from cluster.options import LoadOptions
from cluster.request import (
    LoadRequest,
    StoreAccess,
    StoreOptions,
    UpdateRequest,
    is_nested,
    make_request,
    open_destination,
    open_uri,
)
from cluster.updating import UpdateOptions
from storage.errors import InvalidUri, LongshoreError, StoreError, UnsupportedStore
from storage.store_ref import Credentials

SIZES = ("tensor_parallel_size", "fsdp_size", "data_parallel_size")


def request(uri: str = "s3://bucket/model", sizes: tuple[int, int, int] = (1, 1, 1), **other: Any) -> LoadRequest:
    return make_request(LoadOptions(uri, **dict(zip(SIZES, sizes, strict=True)), **{"region": "eu-1", **other}))


def test_a_request_normalises_its_arguments():
    made = request("s3://bucket/models/llama/", (4, 2, 3), device="cuda", keep=True, wait_for_resources_s=5)
    assert made.uri == "s3://bucket/models/llama"
    assert made.world_size == 24
    assert (made.store.ref.bucket, made.store.ref.prefix) == ("bucket", "models/llama")
    assert (made.device, made.keep, made.wait_for_resources_s, made.only_key) == ("cuda", True, 5.0, None)


def test_one_file_can_be_named():
    made = request("s3://bucket/models/a.safetensors")
    assert made.only_key == "a.safetensors"
    assert made.uri == "s3://bucket/models/a.safetensors"
    assert made.identity() != request("s3://bucket/models").identity()


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -1, 1), (1, 1, 0), (True, 1.5, 1)])
def test_sizes_that_no_layout_has(sizes: Any):
    with pytest.raises((ConfigError, PlanError)):
        request(sizes=sizes)


@pytest.mark.parametrize(
    "other",
    [
        {"device": "tpu"},
        {"wait_for_resources_s": -1},
        {"wait_for_resources_s": float("nan")},
        {"wait_for_resources_s": float("inf")},
        {"layout_rules": {".*": "sideways"}},
    ],
)
def test_invalid_arguments_are_refused(other: dict[str, Any]):
    with pytest.raises(LongshoreError):
        request(**other)


def test_reserved_memory_must_be_of_the_ranks_device() -> None:
    share = {"gpu_memory_utilization": 0.9}
    for options in ({"device": "cpu"}, {"device_map": "cpu"}):
        with pytest.raises(ConfigError, match="gpu_memory_utilization is about GPUs"):
            request(**share, **options)
    assert request(**share, device="cuda").fit.gpu_memory_utilization == 0.9
    # It changes nothing of what a strict load holds, so it is shared; what auto takes may depend on it.
    assert request(**share).identity() == request().identity()
    fits: tuple[dict[str, Any], ...] = ({}, {"fit": "auto"}, {"fit": "auto", "gpu_memory_utilization": 0.5})
    assert len({request(**fit).identity() for fit in fits}) == 3


@pytest.mark.parametrize("uri", ["", "s3://", "s3://bucket/../other", "s3://b/a/../../c"])
def test_uris_that_no_store_can_have(uri: str):
    with pytest.raises(LongshoreError):
        request(uri)


def test_identity_is_what_decides_the_result_and_nothing_else():
    base = request(device="cpu")
    same = request(
        "s3a://bucket/model/", device="cpu", keep=True, wait_for_resources_s=9, credentials=Credentials("id", "secret")
    )
    assert same.identity() == base.identity()
    assert replace(base, client_id="another").identity() == base.identity()
    different = [
        request("s3://bucket/other", device="cpu"),
        request(sizes=(2, 1, 1), device="cpu"),
        request(sizes=(1, 2, 1), device="cpu"),
        request(sizes=(1, 1, 2), device="cpu"),
        request(device="cuda"),
        request(device="cpu", layout_rules={"a": "row"}),
        request(device="cpu", endpoint_url="http://127.0.0.1:1"),
    ]
    identities = {made.identity() for made in different}
    assert len(identities) == len(different)
    assert base.identity() not in identities


def test_secrets_travel_and_never_show():
    secret = Credentials("AKID-visible-nowhere", "the-secret", "the-token")
    made = request(credentials=secret)
    assert pickle.loads(pickle.dumps(made)).store.credentials.secret_access_key == "the-secret"
    for text in (repr(made), str(made), repr(made.store), made.identity()):
        assert "the-secret" not in text
        assert "the-token" not in text
        assert "AKID" not in text
    assert made.store.without_credentials() == StoreAccess(made.store.ref)


def test_open_uri_opens_a_folder(tmp_path: Any):
    store, only_key = open_uri(str(tmp_path), StoreOptions(), None, 5.0)
    with pytest.raises(StoreError):
        store.stat("nothing")
    store.close()
    assert only_key is None


@pytest.mark.parametrize(
    ("outer", "inner", "nested"),
    [
        ("s3://bb/m", "s3://bb/m/copy", True),
        ("s3://bb", "s3://bb/m", True),
        ("s3://bb/m", "s3://bb/m", False),
        ("s3://bb/m", "s3://bb/m2", False),
        ("s3://bb/m/copy", "s3://bb/m", False),
        ("s3://bb/m", "s3://cc/m/copy", False),
        ("s3://bb/m", "gs://bb/m/copy", False),
        ("/m", "/m/copy", True),
        ("/", "/m", True),
    ],
)
def test_places_inside_others(outer: str, inner: str, nested: bool):
    assert is_nested(StoreOptions().place(outer), StoreOptions().place(inner)) == nested


def test_a_folder_is_inside_another_under_any_name(tmp_path: Any):
    (tmp_path / "model" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to("model")
    assert is_nested(StoreOptions().place(tmp_path / "model"), StoreOptions().place(tmp_path / "link" / "sub" / "new"))
    assert not is_nested(StoreOptions().place(tmp_path / "model"), StoreOptions().place(tmp_path / "link"))


@pytest.mark.parametrize("uri", ["", "\t ", "s3://", "s3://b/..", "a\0b"])
def test_invalid_uris_are_refused(uri: str):
    with pytest.raises(InvalidUri):
        StoreOptions().resolve(uri)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("s3:/models/x", "s3://models/x"),
        ("s3:models/x", "s3://models/x"),
        ("S3:/models/x/model.safetensors", "s3://models/x"),
        ("gs:/models/x", "gs://models/x"),
        ("file:srv/x", "file://{here}/srv/x"),
        ("hf:meta-llama/Llama-3-8B", "hf://meta-llama/Llama-3-8B"),
        ("meta-llama/Llama-3-8B", "hf://meta-llama/Llama-3-8B"),
        ("meta-llama/Llama-3-8B/", "hf://meta-llama/Llama-3-8B"),
    ],
)
def test_uris_are_not_mistaken_for_local_folders(
    written: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for verb in (cluster.load, cluster.plan, cluster.verify, cluster.publish):
        with pytest.raises(InvalidUri, match=r"no such file or folder here|no local file of that name") as caught:
            verb(written)
        assert meant.format(here=tmp_path) in caught.value.hint
    Path(written.rpartition(".safetensors")[0].rpartition("/")[0] or written).mkdir(parents=True)
    assert StoreOptions().resolve(written)[0].scheme == "file"


def test_the_hub_is_not_suggested_below_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(cluster.ObjectNotFound):
        cluster.plan("runs/last")


@pytest.mark.parametrize("written", ["s3:/models/x?X-Amz-Signature=hush", "s3:/key:hush@models/x"])
def test_a_misspelled_uri_shows_no_secret(written: str):
    with pytest.raises(InvalidUri) as caught:
        StoreOptions().resolve(written)
    assert "hush" not in str(caught.value)


def test_a_new_folder_is_made_but_not_for_a_misspelled_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    open_destination("models/copy", "s3://models/m", StoreOptions(), None, 5.0).close()
    assert (tmp_path / "models" / "copy").is_dir()
    with pytest.raises(InvalidUri, match="no local file of that name"):
        open_destination("s3:/models/copy", "s3://models/m", StoreOptions(), None, 5.0)
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


@pytest.mark.parametrize("written", ["../m", "./../m", "../../b/m", "..//m/"])
def test_a_relative_path_may_begin_above(written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "b" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "b" / "a")
    assert StoreOptions().place(written).prefix == str(tmp_path / "b" / "m")
    assert StoreOptions().resolve("../model.safetensors")[0].prefix == str(tmp_path / "b")


@pytest.mark.parametrize("written", ["m/../n", "../m/../n", "../%2e%2e/m", "..\\m", "/a/../m", "s3://b/../m"])
def test_other_uris_may_not_contain_parent_folders(written: str):
    with pytest.raises(InvalidUri, match=r"'\.\.' in"):
        StoreOptions().place(written)


def test_unsupported_schemes_are_an_error_of_their_own():
    with pytest.raises(UnsupportedStore):
        StoreOptions().resolve("simplecache::s3://b/m")


def test_skip_quantization_is_allowed_with_fit_auto() -> None:
    skip = ("default", "**.down_proj.weight")
    with pytest.raises(ConfigError, match="there is no quantization"):
        request(skip_quantization=skip)
    asked = request(skip_quantization=skip, fit="auto")
    steps = [step.request.precision for step in steps_of_auto(asked)]
    assert {step.skip for step in steps} == {skip}
    assert [step.quantization for step in steps] == ["", "", "fp8", "int8", "int4"]


@pytest.mark.parametrize(
    ("uri", "options", "direct", "received", "reason"),
    [
        ("s3://bucket/model", {}, False, False, "each node can keep its share"),
        ("s3://bucket/model", {}, True, True, "a node cannot keep its share"),
        ("s3://bucket/model", {}, True, False, "no rank alone had a whole chunk to fetch"),
        ("s3://bucket/model", {"placement": "direct"}, True, True, "as asked"),
        ("s3://bucket/model", {"placement": "direct", "device": "cuda"}, False, False, "a GPU's memory cannot receive"),
        ("/models/llama", {}, True, True, "the kernel's page cache keeps local files"),
        ("/models/llama", {"placement": "via_arena"}, False, False, "as asked"),
    ],
)
def test_the_reason_of_a_placement(
    uri: str, options: dict[str, str], direct: bool, received: bool, reason: str
) -> None:
    made = make_request(LoadOptions(uri, **options))  # type: ignore[arg-type]
    assert made.placement_reason(direct=direct, received=received) == reason
    assert made.is_local == uri.startswith("/")
    assert made.node_placement == ("via_arena" if made.device == "cuda" else options.get("placement", "auto"))


def asked(now: LoadRequest, uri: str | None = None, **given: Any) -> UpdateRequest:
    """Return the request of an update with these options of the store, of a model that was loaded so."""
    credentials = given.pop("credentials", None)
    options = UpdateOptions(uri, store=StoreOptions(**given), credentials=credentials)
    return (options.at(now) if options.names_place else options).request("me", now.store)


KEYS = Credentials("AKIAEXAMPLE", "secret")


@pytest.mark.parametrize("only", ["", "/a.safetensors"])
def test_an_update_without_a_uri_takes_options_of_the_store(only: str) -> None:
    now = request(f"s3://bucket/models{only}", signed_name="llama", endpoint_url="http://old:9000")
    made = asked(now, endpoint_url="http://new:9000", credentials=KEYS)
    expected = replace(now.store.ref, endpoint_url="http://new:9000")
    assert (made.uri, made.only_key, made.signed_name) == (now.uri, now.only_key, "llama")
    assert made.store == StoreAccess(expected, KEYS)
    target = made.target(now)
    assert (target.uri, target.store, target.signed_name) == (now.uri, made.store, "llama")
    assert asked(now).store is None
    assert replace(asked(now), signed_name="other").target(now).signed_name == "other"


@pytest.mark.parametrize("uri", [None, "s3://private/step-1"])
@pytest.mark.parametrize(
    ("given", "anonymous"),
    [
        ({"region": "eu-2"}, True),
        ({"credentials": KEYS}, False),
        ({"profile": "work"}, False),
        ({"anonymous": False}, False),
        ({"anonymous": True, "profile": "work"}, True),
    ],
)
def test_credentials_of_an_update_end_unsigned_requests(uri: str | None, given: Any, anonymous: bool) -> None:
    made = asked(request("s3://public/base", anonymous=True), uri, **given)
    assert made.store is not None
    assert made.store.ref.anonymous is anonymous
    assert made.store.credentials == given.get("credentials")
