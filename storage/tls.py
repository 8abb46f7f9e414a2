"""Whom to trust: the TLS settings of every connection that we open ourselves."""

from __future__ import annotations

import ssl

from storage.errors import StoreError


def tls_context(ca_bundle: str | None, uri: str) -> ssl.SSLContext:
    """Trusts the CAs of that PEM file, or the system's. `uri` is for the StoreError when it cannot be read."""
    try:
        return ssl.create_default_context(cafile=ca_bundle)
    except (OSError, ssl.SSLError) as error:
        raise StoreError("the CA bundle cannot be read", ca_bundle=ca_bundle, uri=uri) from error
