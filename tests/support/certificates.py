"""A CA, and a certificate that it signed for a server that speaks TLS."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import pytest


def make_certificates(folder: Path, *names: str) -> tuple[Path, Path]:
    """Write and return (PEM of a CA, PEM of a key and its certificate for 127.0.0.1 and these host names)."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def name(text: str) -> object:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def builder(subject: str, public: object) -> object:
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("test CA"))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    ca = (
        builder("test CA", ca_key.public_key())  # type: ignore[attr-defined]
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    hosts = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), *map(x509.DNSName, names)]
    own = (
        builder("store", key.public_key())  # type: ignore[attr-defined]
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    (folder / "ca.pem").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / "own.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + own.public_bytes(serialization.Encoding.PEM)
    )
    return folder / "ca.pem", folder / "own.pem"
