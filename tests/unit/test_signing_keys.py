"""Keys: public ones in every form that they are written in, private ones nowhere but in their file."""

from __future__ import annotations

import base64
import copy
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption
from cryptography.hazmat.primitives.serialization import PrivateFormat as Private
from cryptography.hazmat.primitives.serialization import PublicFormat as Public
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import InvalidKey
from storage.problems import install_hint
from storage.publishing.signing import SigningKey, is_signed_by, key_id, public_key


@given(st.binary(max_size=300))
def test_the_public_key_alone_verifies_signatures(data: bytes) -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    signature = key.sign(data)
    assert is_signed_by(key.public, signature, data)
    assert not is_signed_by(other.public, signature, data)
    assert not is_signed_by(key.public, signature, data + b"x")
    assert not is_signed_by(key.public, signature[:-1], data)


def test_a_saved_key_pair_reads_back_and_is_private_to_its_owner(tmp_path: Path) -> None:
    key = SigningKey.generate()
    public_path = Path(key.save(tmp_path / "key"))
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert SigningKey.read(tmp_path / "key").public == key.public
    assert public_key(public_path) == public_key(str(public_path)) == public_key(key.public) == key.public
    (tmp_path / "base64").write_text(f"{key.public}\n")
    assert public_key(tmp_path / "base64") == key.public
    assert len(base64.b64decode(key.public)) == 32
    assert len(key_id(key.public)) == 32


def test_no_key_is_overwritten(tmp_path: Path) -> None:
    SigningKey.generate().save(tmp_path / "key")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InvalidKey, match="already"):
        SigningKey.generate().save(tmp_path / "key")
    (tmp_path / "key").unlink()
    with pytest.raises(InvalidKey, match="already"):
        SigningKey.generate().save(tmp_path / "key")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"key.pub": before["key.pub"]}
    with pytest.raises(InvalidKey, match="cannot write"):
        SigningKey.generate().save(tmp_path / "nowhere" / "key")


def test_a_private_key_shows_nowhere_and_does_not_travel(tmp_path: Path) -> None:
    key = SigningKey.generate()
    key.save(tmp_path / "key")
    body = (tmp_path / "key").read_text().split("\n")[1]
    assert body not in repr(key)
    assert "redacted" in str(key)
    for travel in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            travel(key)
    with pytest.raises(InvalidKey, match="private key, but a public one") as refused:
        public_key(tmp_path / "key")
    assert body not in str(refused.value)


def test_invalid_private_keys_are_refused_and_not_quoted(tmp_path: Path) -> None:
    secret = "MC4CAQAwBQYDK2VwBCIEIHVtc2VjcmV0"
    elliptic = generate_private_key(SECP256R1())
    ours = SigningKey.generate()
    files = {
        "garbage": secret.encode(),
        "broken": f"-----BEGIN PRIVATE KEY-----\n{secret}\n-----END PRIVATE KEY-----\n".encode(),
        "elliptic": elliptic.private_bytes(Encoding.PEM, Private.PKCS8, NoEncryption()),
        "locked": elliptic.private_bytes(Encoding.PEM, Private.PKCS8, BestAvailableEncryption(b"x")),
        "public": ours.public.encode(),
        "huge": b"x" * (1 << 20),
        "empty": b"",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InvalidKey) as refused:
            SigningKey.read(tmp_path / name)
        assert secret not in f"{refused.value} {refused.value!r} {refused.value.__cause__!r}"
    for path in (tmp_path, tmp_path / "nowhere", "/dev/zero", "a\0b"):
        with pytest.raises(InvalidKey):
            SigningKey.read(path)


def test_invalid_public_keys_are_refused(tmp_path: Path) -> None:
    elliptic = generate_private_key(SECP256R1()).public_key()
    (tmp_path / "elliptic").write_bytes(elliptic.public_bytes(Encoding.PEM, Public.SubjectPublicKeyInfo))
    for source in ("", "nowhere", "AAAA", "A" * 44, tmp_path / "elliptic", tmp_path, "/dev/zero"):
        with pytest.raises(InvalidKey):
            public_key(source)


@given(st.text(max_size=60))
def test_any_text_is_a_key_or_an_invalid_one(text: str) -> None:
    try:
        key = public_key(text)
    except InvalidKey:
        return
    assert public_key(key) == key


def test_reading_public_keys_needs_no_package() -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from storage.publishing.signing import SigningKey, public_key\n"
        "from storage.errors import SigningUnavailable\n"
        f"print(public_key({SigningKey.generate().public!r}) != '')\n"
        "try:\n    SigningKey.generate()\nexcept SigningUnavailable as error:\n    print(error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"True\n{install_hint('signing')}\n"
