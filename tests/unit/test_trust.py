"""A cluster and a request combine their trusted keys and names, in plans, settings and commands."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import hosting
from actors.hosting import host_rank
from cluster import client, publishing
from cluster.command_line.cli import main
from cluster.config import Config, TrustPolicy
from cluster.doctor.host_checks import check_store
from cluster.errors import ConfigError
from cluster.options import LoadOptions
from cluster.planning import preview
from cluster.planning.make_plan import prepare_plan, still_current
from cluster.publishing import generate_key, sign
from cluster.request import LoadRequest, make_request
from storage.checkpoints.manifest import MANIFEST_KEY
from storage.errors import (
    BadSignature,
    InvalidKey,
    ManifestUnsigned,
    ObjectNotFound,
    RevisionMismatch,
    SignedNameMismatch,
    SourceRefused,
    UnknownSigner,
)
from storage.publishing.signing import SIGNATURE_KEY, SigningKey
from storage.store_ref import SourceRules
from tests.support.checkpoints import write_tiny_llama

KEYS = [SigningKey.generate().public for _ in range(4)]
MIB = 1 << 20


@pytest.fixture
def key(tmp_path: Path) -> Path:
    generate_key(tmp_path / "signer")
    return tmp_path / "signer"


@pytest.fixture
def model(tmp_path: Path, key: Path) -> Path:
    """Published and signed."""
    write_tiny_llama(tmp_path / "llama")
    report = publishing.publish(tmp_path / "llama", sign_key=key)
    assert report.signed_by is not None
    return tmp_path / "llama"


def request(uri: Path, trusted: tuple[Any, ...] = ()) -> LoadRequest:
    return make_request(LoadOptions(uri, trusted_keys=trusted))


def planned(wanted: LoadRequest, trust: TrustPolicy) -> str:
    return prepare_plan(wanted, chunk_bytes=MIB, read_timeout_s=5, trust=trust)[0].revision


@given(st.lists(st.sampled_from(KEYS), unique=True), st.lists(st.sampled_from(KEYS), unique=True))
def test_a_request_narrows_and_never_widens(own: list[str], asked: list[str]) -> None:
    policy = TrustPolicy(keys=tuple(own))
    if own and asked and not set(own) & set(asked):
        with pytest.raises(UnknownSigner):
            policy.keys_for(asked)
        return
    keys = set(policy.keys_for(asked))
    assert bool(keys) == bool(own or asked)  # "no key" would mean "no signature needed"
    assert not own or keys <= set(own)
    assert not asked or keys <= set(asked)


def test_a_plan_wants_the_signature_that_either_side_asks_for(model: Path, key: Path) -> None:
    public, other = Path(f"{key}.pub"), KEYS[0]
    ours = TrustPolicy(keys=request(model, (public,)).trusted_keys)
    revision = planned(request(model), TrustPolicy())
    assert planned(request(model, (public,)), TrustPolicy()) == revision
    assert planned(request(model), ours) == planned(request(model, (other, public)), ours) == revision
    for wanted, trust in [
        (request(model, (other,)), TrustPolicy()),
        (request(model), TrustPolicy(keys=(other,))),
        (request(model, (other,)), ours),
        (request(model, (public,)), TrustPolicy(keys=(other,))),
    ]:
        with pytest.raises(UnknownSigner):
            planned(wanted, trust)


def test_requests_that_trust_others_share_no_model(model: Path) -> None:
    assert request(model, tuple(KEYS[:2])).identity() == request(model, (KEYS[1], KEYS[0])).identity()
    identities = {request(model, trusted).identity() for trusted in ((), (KEYS[0],), (KEYS[1],), tuple(KEYS))}
    assert len(identities) == 4


def test_a_place_that_is_not_allowed_is_never_opened(model: Path) -> None:
    trust = TrustPolicy(SourceRules.parse("s3", "any", "any"))
    with pytest.raises(SourceRefused):
        planned(request(model), trust)
    with pytest.raises(SourceRefused):
        still_current(request(model), "0" * 64, 5, trust)
    config = Config(allowed_schemes="s3")
    for verb in (client.load, preview.plan, publishing.publish, publishing.verify):
        with pytest.raises(SourceRefused):
            verb(model, config=config)
    with pytest.raises(SourceRefused):
        sign(model, model.parent / "signer", config=config)
    with pytest.raises(SourceRefused):
        publishing.publish("s3://bucket/model", model / "copy", config=Config(allowed_schemes="file"))


def test_the_doctor_reports_what_is_not_allowed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSHORE_ALLOWED_SCHEMES", "s3")
    with pytest.raises(SourceRefused):
        list(check_store(str(model), {}))


def test_settings_list_trusted_keys_and_places(key: Path) -> None:
    public = Path(f"{key}.pub")
    config = Config.from_env(
        {
            "LONGSHORE_TRUSTED_KEYS": f"{public}, {KEYS[0]}",
            "LONGSHORE_ALLOWED_SCHEMES": "s3,file",
            "LONGSHORE_ALLOWED_ENDPOINTS": "https://store.example",
        }
    )
    public.unlink()  # read once: where the settings travel to, there is no such file
    assert config.changed(fetch_threads=2).public_keys() == config.public_keys()
    assert config.public_keys()[1] == KEYS[0]
    assert TrustPolicy.of(config) == TrustPolicy(config.source_rules(), config.public_keys())
    assert TrustPolicy.of(Config()) == TrustPolicy()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TRUSTED_KEYS", ""),
        ("TRUSTED_KEYS", "no-such-file"),
        pytest.param("TRUSTED_KEYS", f"{KEYS[0]},", id="TRUSTED_KEYS-a key and nothing"),  # keys are made anew
        ("ALLOWED_SCHEMES", ""),
        ("ALLOWED_ENDPOINTS", "store"),
        ("ALLOWED_BUCKETS", "a,,b"),
    ],
)
def test_invalid_trust_settings_are_errors_and_allow_nothing(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"LONGSHORE_{name}"):
        Config.from_env({f"LONGSHORE_{name}": value})


def test_verify_and_plan_require_signatures(model: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = f"{key}.pub"
    assert publishing.verify(model, trusted_keys=[public]).ok
    revision = preview.plan(model, trusted_keys=[public]).revision
    monkeypatch.setenv("LONGSHORE_TRUSTED_KEYS", KEYS[0])
    for verb in (publishing.verify, preview.plan):
        with pytest.raises(UnknownSigner):
            verb(model)
    monkeypatch.setenv("LONGSHORE_TRUSTED_KEYS", public)
    assert publishing.verify(model).ok
    (model / SIGNATURE_KEY).unlink()
    for verb in (publishing.verify, preview.plan):
        with pytest.raises(ManifestUnsigned):
            verb(model)
    assert sign(model, key).revision == revision
    assert preview.plan(model).revision == revision
    (model / MANIFEST_KEY).write_bytes((model / MANIFEST_KEY).read_bytes() + b" ")
    with pytest.raises(BadSignature):
        preview.plan(model)
    with pytest.raises(ConfigError):
        preview.plan(model, trusted_keys=public)  # type: ignore[arg-type]
    with pytest.raises(InvalidKey):
        preview.plan(model, trusted_keys=[key])


def test_names_of_two_lists_of_keys_must_both_match() -> None:
    team, own = f"{KEYS[0]}:team/*", TrustPolicy(keys=(f"{KEYS[0]}:*/llama", KEYS[1]))
    assert own.keys_for([team]) == (f"{KEYS[0]}:*/llama:team/*",)
    assert own.keys_for([KEYS[0], KEYS[1]]) == (f"{KEYS[0]}:*/llama", KEYS[1])
    assert TrustPolicy(keys=(KEYS[0],)).keys_for([team]) == (team,)
    assert TrustPolicy().keys_for([team]) == (team,)
    with pytest.raises(UnknownSigner):
        own.keys_for([KEYS[2]])


def test_a_model_loads_only_under_its_signed_name(model: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "_settings_in_force", lambda given, patience: Config())  # there is no cluster
    public, here = f"{key}.pub", str(model).strip("/")
    for verb in (publishing.verify, preview.plan):
        verb(model, trusted_keys=[public])
        verb(model, trusted_keys=[public], signed_name=here)
        verb(model, signed_name="whatever")  # who trusts no key checks no signature
        with pytest.raises(SignedNameMismatch):
            verb(model, trusted_keys=[public], signed_name="llama")
        with pytest.raises(ConfigError, match="signed_name is one line"):
            verb(model, signed_name="a\nb")
    with pytest.raises(SignedNameMismatch), host_rank(model, 0, device="cpu", trusted_keys=[public], signed_name="x"):
        pass
    assert sign(model, key, signed_name="llama").name == "llama"
    monkeypatch.setenv("LONGSHORE_TRUSTED_KEYS", f"{public}:llama")
    for verb in (publishing.verify, preview.plan):
        verb(model, signed_name="llama")
        with pytest.raises(SignedNameMismatch):
            verb(model)
    monkeypatch.setenv("LONGSHORE_TRUSTED_KEYS", f"{public}:team-b/*")
    assert main(["plan", str(model), "--signed-name", "llama"]) == 6
    assert main(["sign", str(model), "--key", str(key), "--signed-name", "team-b/llama"]) == 0
    assert main(["verify", str(model), "--signed-name", "team-b/llama"]) == 0
    assert main(["publish", str(model), "--sign-key", str(key), "--signed-name", "llama"]) == 0
    assert main(["publish", str(model), "--signed-name", "llama"]) == 2  # nobody signs
    assert main(["verify", str(model), "--signed-name", "llama", "--trusted-key", public]) == 0


def test_requests_for_other_names_share_no_model(model: Path) -> None:
    one, other = request(model, (KEYS[0],)), replace(request(model, (KEYS[0],)), signed_name="llama")
    assert one.identity() != other.identity()


def test_only_the_revision_that_is_asked_for(
    model: Path, key: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "_settings_in_force", lambda given, patience: Config())  # there is no cluster
    first = preview.plan(model).revision
    signed_before = {name: (model / name).read_bytes() for name in (MANIFEST_KEY, SIGNATURE_KEY)}
    for name in ("model.safetensors.index.json", *[path.name for path in model.glob("*.safetensors")]):
        (model / name).unlink()
    write_tiny_llama(model, seed=1)
    second = publishing.publish(model, sign_key=key).revision
    for verb in (publishing.verify, preview.plan):
        assert verb(model, revision=second).revision == second
        with pytest.raises(RevisionMismatch) as refused:
            verb(model, revision=first)
        assert (refused.value.details["expected"], refused.value.details["found"]) == (first, second)
        with pytest.raises(ConfigError, match="64 hex digits"):
            verb(model, revision=second[:12])
    with pytest.raises(RevisionMismatch), host_rank(model, 0, device="cpu", revision=first):
        pass
    for name, data in signed_before.items():  # a writer to the bucket puts the old ones back
        (model / name).write_bytes(data)
    for verb in (publishing.verify, preview.plan):
        with pytest.raises(RevisionMismatch):
            verb(model, trusted_keys=[f"{key}.pub"], revision=second)
    assert main(["plan", str(model), "--revision", second]) == 6
    assert "the stored revision of the model is not the one" in capsys.readouterr().err


def test_one_file_and_an_unpublished_model_have_a_revision_too(model: Path) -> None:
    file = next(model.glob("*.safetensors"))
    whole, one = publishing.verify(model).revision, publishing.verify(file).revision
    assert whole != one
    assert preview.plan(file, revision=one).revision == publishing.verify(file, revision=one).revision == one
    for verb in (publishing.verify, preview.plan):
        with pytest.raises(RevisionMismatch):
            verb(file, revision=whole)
    (model / MANIFEST_KEY).unlink()
    bare = preview.plan(model).revision
    assert preview.plan(model, revision=bare).revision == bare
    with pytest.raises(RevisionMismatch):
        preview.plan(model, revision=whole)
    with pytest.raises(RevisionMismatch, match="not published"):
        publishing.verify(model, revision=bare)


def test_an_unpublished_model_cannot_be_signed(tmp_path: Path, key: Path) -> None:
    write_tiny_llama(tmp_path / "bare")
    with pytest.raises(ObjectNotFound):
        sign(tmp_path / "bare", key)
    assert not (tmp_path / "bare" / SIGNATURE_KEY).exists()
    with pytest.raises(InvalidKey):
        publishing.publish(tmp_path / "bare", sign_key=f"{key}.pub")
    assert not (tmp_path / "bare" / MANIFEST_KEY).exists()


def test_signatures_work_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_llama(tmp_path / "llama")
    model, key = str(tmp_path / "llama"), str(tmp_path / "signer")
    assert main(["keygen", key, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert stat.S_IMODE(Path(key).stat().st_mode) == 0o600
    secret = Path(key).read_text().split("\n")[1]
    assert secret not in json.dumps(made)
    assert main(["keygen", key]) == 2  # nothing is overwritten
    assert main(["publish", model]) == 0
    assert main(["verify", model, "--trusted-key", made["public_key"]]) == 6
    assert main(["sign", model, "--key", key]) == 0
    assert main(["verify", model, "--trusted-key", f"{key}.pub"]) == 0
    assert main(["plan", model, "--trusted-key", KEYS[0]]) == 6
    assert main(["plan", model, "--trusted-key", KEYS[0], "--trusted-key", made["public_key"]]) == 0
    assert main(["publish", model, "--sign-key", key, "--force", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out[captured.out.rindex("\n{") :])["signed_by"] == made["key_id"]
    assert secret not in captured.out + captured.err
