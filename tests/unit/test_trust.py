"""Whom a cluster and a request trust together, in plans, in settings and on the command line."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import client
from cluster.command_line.cli import main
from cluster.config import Config
from cluster.doctor.store_checks import check_store
from cluster.errors import ConfigError
from cluster.layouts.mesh import Layout
from cluster.load_request import LoadRequest
from cluster.plans.prepare import prepare_plan, still_current
from cluster.preview import plan_ahead
from cluster.request import StoreOptions, make_request
from cluster.signing import generate_key, sign
from cluster.trust import TrustPolicy
from storage.checkpoints.manifest import MANIFEST_KEY
from storage.errors import BadSignature, InvalidKey, ManifestUnsigned, ObjectNotFound, SourceRefused, UnknownSigner
from storage.publishing.signature import SIGNATURE_KEY
from storage.publishing.signing_keys import SigningKey
from storage.source_rules import SourceRules
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
    report = client.publish(tmp_path / "llama", sign_key=key)
    assert report.signed_by is not None
    return tmp_path / "llama"


def request(uri: Path, trusted: tuple[Any, ...] = ()) -> LoadRequest:
    return make_request(
        uri,
        layout=Layout(),
        store_options=StoreOptions(),
        credentials=None,
        layout_rules=None,
        trusted_keys=trusted,
    )


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
    for verb in (client.load, plan_ahead.plan, client.publish, client.verify):
        with pytest.raises(SourceRefused):
            verb(model, config=config)
    with pytest.raises(SourceRefused):
        sign(model, model.parent / "signer", config=config)
    with pytest.raises(SourceRefused):
        client.publish("s3://bucket/model", model / "copy", config=Config(allowed_schemes="file"))


def test_the_doctor_says_what_is_not_allowed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSHORE_ALLOWED_SCHEMES", "s3")
    with pytest.raises(SourceRefused):
        list(check_store(str(model), {}))


def test_settings_say_whom_and_where_to_trust(key: Path) -> None:
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
        ("TRUSTED_KEYS", f"{KEYS[0]},"),
        ("ALLOWED_SCHEMES", ""),
        ("ALLOWED_ENDPOINTS", "store"),
        ("ALLOWED_BUCKETS", "a,,b"),
    ],
)
def test_settings_that_cannot_be_meant_are_errors_and_never_open_the_door(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"LONGSHORE_{name}"):
        Config.from_env({f"LONGSHORE_{name}": value})


def test_the_verbs_want_signatures(model: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = f"{key}.pub"
    assert client.verify(model, trusted_keys=[public]).ok
    revision = plan_ahead.plan(model, trusted_keys=[public]).revision
    monkeypatch.setenv("LONGSHORE_TRUSTED_KEYS", KEYS[0])
    for verb in (client.verify, plan_ahead.plan):
        with pytest.raises(UnknownSigner):
            verb(model)
    monkeypatch.setenv("LONGSHORE_TRUSTED_KEYS", public)
    assert client.verify(model).ok
    (model / SIGNATURE_KEY).unlink()
    for verb in (client.verify, plan_ahead.plan):
        with pytest.raises(ManifestUnsigned):
            verb(model)
    assert sign(model, key).revision == revision
    assert plan_ahead.plan(model).revision == revision
    (model / MANIFEST_KEY).write_bytes((model / MANIFEST_KEY).read_bytes() + b" ")
    with pytest.raises(BadSignature):
        plan_ahead.plan(model)
    with pytest.raises(ConfigError):
        plan_ahead.plan(model, trusted_keys=public)  # type: ignore[arg-type]
    with pytest.raises(InvalidKey):
        plan_ahead.plan(model, trusted_keys=[key])


def test_what_was_never_published_cannot_be_signed(tmp_path: Path, key: Path) -> None:
    write_tiny_llama(tmp_path / "bare")
    with pytest.raises(ObjectNotFound):
        sign(tmp_path / "bare", key)
    assert not (tmp_path / "bare" / SIGNATURE_KEY).exists()
    with pytest.raises(InvalidKey):
        client.publish(tmp_path / "bare", sign_key=f"{key}.pub")
    assert not (tmp_path / "bare" / MANIFEST_KEY).exists()


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
