"""S3 clients that download: obstore and awscrt. They check nothing. The server checks no signature: any keys do."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.contenders.buffers import file_ranges, in_threads
from bench.harness.contender import Spec

ACCESS_KEY = SECRET_KEY = "bench"
REGION = "us-east-1"


def set_s3_environment(spec: Spec) -> None:
    """Set endpoint, keys and region for clients that read the environment, instead of those of the user."""
    os.environ.update(
        AWS_ENDPOINT_URL=spec.endpoint,
        AWS_ACCESS_KEY_ID=ACCESS_KEY,
        AWS_SECRET_ACCESS_KEY=SECRET_KEY,
        AWS_REGION=REGION,
        AWS_DEFAULT_REGION=REGION,
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
    )
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        os.environ.pop(name, None)
    if spec.ca_bundle:
        os.environ["AWS_CA_BUNDLE"] = spec.ca_bundle


def obstore_store(spec: Spec) -> Any:
    """Return the store of obstore (Rust's object_store) that has the model."""
    from obstore.store import S3Store

    set_s3_environment(spec)
    client_options: Any = {"allow_http": True}
    if spec.ca_bundle:
        # Its TLS takes no self-signed certificate. Checking one costs nothing beside the weights.
        client_options["allow_invalid_certificates"] = True
    return S3Store(spec.bucket, virtual_hosted_style_request=False, client_options=client_options)


def download_obstore(spec: Spec, folder: Path) -> None:
    """Download every file with range requests of obstore. The pages of files that are there are used again."""
    import obstore

    store, options = obstore_store(spec), spec.options
    files = [os.open(folder / Path(file.path).name, os.O_RDWR | os.O_CREAT, 0o600) for file in spec.files]
    todo = iter(file_ranges(spec, options["range_mib"] << 20))  # next() of a list's iterator is atomic under the GIL

    def work() -> None:
        for one in todo:
            data = obstore.get_range(store, spec.files[one.file].key, start=one.start, end=one.end)
            os.pwrite(files[one.file], memoryview(data), one.start)

    in_threads(options["tasks"], work)
    for file in files:
        os.close(file)


def download_crt(spec: Spec, folder: Path) -> None:
    """Let the S3 client of AWS' common runtime write every object into a file, without Python."""
    from awscrt.http import HttpHeaders, HttpRequest
    from awscrt.s3 import S3RequestType

    client = _crt_client(spec)
    host = urlsplit(spec.endpoint).netloc
    free = threading.BoundedSemaphore(spec.options["files"])
    running = []
    for file in spec.files:
        free.acquire()
        request = HttpRequest("GET", f"/{spec.bucket}/{file.key}", HttpHeaders([("host", host)]))
        done = client.make_request(
            type=S3RequestType.GET_OBJECT,
            request=request,
            on_done=lambda **_: free.release(),
            recv_filepath=str(folder / Path(file.path).name),
        )
        running.append(done)
    for done in running:
        done.finished_future.result()


def _crt_client(spec: Spec) -> Any:
    from awscrt.auth import AwsCredentialsProvider
    from awscrt.io import ClientBootstrap, DefaultHostResolver, EventLoopGroup
    from awscrt.s3 import S3Client, S3RequestTlsMode, create_default_s3_signing_config

    options = spec.options
    loops = EventLoopGroup(options.get("threads", 0))  # 0: awscrt decides
    keys = AwsCredentialsProvider.new_static(ACCESS_KEY, SECRET_KEY)
    return S3Client(
        bootstrap=ClientBootstrap(loops, DefaultHostResolver(loops)),
        region=REGION,
        tls_mode=S3RequestTlsMode.DISABLED,
        signing_config=create_default_s3_signing_config(region=REGION, credential_provider=keys),
        part_size=options["part_mib"] << 20,
        throughput_target_gbps=float(options["gbps"]),
        max_active_connections_override=options["connections"] or None,
    )
