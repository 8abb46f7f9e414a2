"""Emulators of object stores: S3 with what rclone lacks, Google's and Azure's.

They pin other packages than Longshore, so they are no dependencies. `tests/emulators.sh` installs them into an
environment of their own, whose programs must be on PATH. Tests that need one are skipped without.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from storage.store_ref import Credentials
from tests.support.free_ports import free_ports

START_TIMEOUT_S = 60.0


class Emulator:
    """A server in a child process. `{port}` in its arguments and variables becomes its port."""

    def __init__(self, folder: Path, program: str, *arguments: str, **variables: str) -> None:
        found = shutil.which(program)
        if found is None:
            pytest.skip(f"{program} is not installed")
        (self._port,) = free_ports(1)
        self.endpoint_url = f"http://127.0.0.1:{self._port}"
        self._name = program
        with open(folder / f"{program}.log", "wb") as log:
            self._child = subprocess.Popen(
                [found, *(argument.format(port=self._port) for argument in arguments)],
                env={**os.environ, **{name: value.format(port=self._port) for name, value in variables.items()}},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Self:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self._child.poll() is None and time.monotonic() < deadline_s:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return self
            except OSError:
                time.sleep(0.1)
        self.__exit__()
        raise RuntimeError(f"{self._name} did not start")

    def __exit__(self, *_: object) -> None:
        self._child.terminate()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


class MinistackServer(Emulator):
    """An S3 emulator that keeps composite checksums and tells the parts of an object; it accepts any keys."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "ministack", BIND_HOST="127.0.0.1", GATEWAY_PORT="{port}")
        self.access_key_id, self.secret_access_key = "anybody", "any-secret"

    def credentials(self) -> Credentials:
        return Credentials(self.access_key_id, self.secret_access_key)


class GoogleServer(Emulator):
    """An emulator of Google Cloud Storage. It accepts anybody."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "gcp-storage-emulator", "start", "--host=127.0.0.1", "--port={port}", "--in-memory")

    def credentials(self) -> Credentials:
        return Credentials(fsspec_options={"token": "anon"})

    def variables(self) -> dict[str, str]:
        """Return what names this server to processes that are given a URI alone."""
        # gcsfs would ask a server beside this one of which kind the bucket is.
        return {"STORAGE_EMULATOR_HOST": self.endpoint_url, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}

    def make_bucket(self, bucket: str) -> str:
        """Make a bucket, and return its URI."""
        import gcsfs

        options = {"endpoint_url": self.endpoint_url, "token": "anon", "project": "test"}
        gcsfs.GCSFileSystem(**options, skip_instance_cache=True).mkdir(bucket)
        return f"gs://{bucket}"


class AzureServer(Emulator):
    """Azurite, Microsoft's emulator of Azure Blob Storage, with the account and key that it always has."""

    ACCOUNT = "devstoreaccount1"
    KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def __init__(self, folder: Path) -> None:
        more = ("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry")
        super().__init__(folder, "azurite-blob", "--blobHost", "127.0.0.1", "--blobPort", "{port}", *more)

    def credentials(self) -> Credentials:
        place = f"{self.endpoint_url}/{self.ACCOUNT}"
        text = f"DefaultEndpointsProtocol=http;AccountName={self.ACCOUNT};AccountKey={self.KEY};BlobEndpoint={place};"
        return Credentials(fsspec_options={"connection_string": text})

    def variables(self) -> dict[str, str]:
        """Return what names this server to processes that are given a URI alone."""
        return {"AZURE_STORAGE_CONNECTION_STRING": self.credentials().fsspec_options["connection_string"]}

    def make_bucket(self, bucket: str) -> str:
        """Make a container, and return its URI."""
        import adlfs

        adlfs.AzureBlobFileSystem(**self.credentials().fsspec_options, skip_instance_cache=True).mkdir(bucket)
        return f"az://{bucket}"


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MinistackServer]:
    with MinistackServer(tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture(scope="session")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoogleServer]:
    with GoogleServer(tmp_path_factory.mktemp("google")) as server:
        yield server


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    with AzureServer(tmp_path_factory.mktemp("azure")) as server:
        yield server
