"""The store of a case: its faults, and credentials that end and are renewed in a file of the nodes."""

from __future__ import annotations

import threading
from pathlib import Path

from storage.stores.embedded_s3 import EmbeddedS3
from tests.support.counting_proxy import Request, s3_refusal
from tests.support.fault_proxy import FaultProxy
from tests.support.s3_servers import write_credentials


class ChaosProxy(FaultProxy):
    """`expired`: requests that were refused because their credentials had ended."""

    def __init__(self, upstream_url: str) -> None:
        self.expired = 0
        self._token = ""
        self._counting = threading.Lock()
        super().__init__(upstream_url)

    def require(self, token: str) -> None:
        """Require this session token on all reads from now on."""
        self._token = token

    def forget(self) -> None:
        """Count anew: what was asked for until now was another load."""
        with self._guard:
            self._asked.clear()
            self.struck.clear()
            self._number = self._passed_bytes = 0

    def refusal(self, request: Request) -> bytes | None:
        if self._token and request.method == "GET" and request.fields.get("x-amz-security-token") != self._token:
            with self._counting:
                self.expired += 1
            return s3_refusal(403, "ExpiredToken")
        return super().refusal(request)


class CredentialsFile:
    """The file from which all processes read the store's keys. Each `renew` writes another session token."""

    def __init__(self, path: Path, server: EmbeddedS3) -> None:
        self.path, self._server = path, server
        self._number = 0
        self.renew()

    @property
    def token(self) -> str:
        return f"token-{self._number}"

    def renew(self) -> str:
        """The token that counts from now on."""
        self._number += 1
        write_credentials(self.path, self._server.access_key_id, self._server.secret_access_key, self.token)
        return self.token
