"""`cluster.convert`: another format's checkpoint becomes a published one in safetensors, without gathering it anywhere.

SOURCE --recognise, restricted unpickler--> places of all numbers --plan_conversion--> every problem, or a plan
plan --run_conversion--> parts in bounded memory --> commit --> verify
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace

from actors.saving.conversion import FLOATS, ConvertReport, Place, plan_conversion, report_of, run_conversion
from actors.saving.on_cluster import ClusterParts
from actors.saving.reporting import SaveReporter
from actors.saving.writer import check_extra_files, has_other_weights
from cluster.argument_types import Dtype, checks_arguments
from cluster.command_line.progress import byte_counter, shown_progress
from cluster.config import Config
from cluster.converting.formats import find_source
from cluster.errors import ConfigError, ConvertError
from cluster.model import in_thread
from cluster.request import StoreOptions, check_destination, open_destination
from cluster.saving.shards import DEFAULT_SHARD_BYTES, MIN_SHARD_BYTES
from cluster.telemetry.saves import VERIFYING
from storage.checkpoints.checkpoint_files import SINGLE_KEY
from storage.checksum import MANIFEST_HASH_NAMES
from storage.errors import IntegrityError
from storage.publishing.saves import writes_parts
from storage.publishing.verify import verify as verify_store
from storage.store_ref import Credentials, StoreRef
from storage.stores.requests import RetryPolicy

MAX_WORKERS = 256
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_PICKLES = (".bin", ".pt", ".pth")


@checks_arguments
def convert(
    uri_or_path: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    dtype: Dtype | None = None,
    workers: int | None = None,
    on_cluster: bool = False,
    address: str | None = None,
    dry_run: bool = False,
    verify: bool = True,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    hash_name: str = "blake3",
    chunk_bytes: int | None = None,
    progress: bool | Callable[..., None] | None = None,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    anonymous: bool = False,
    credentials: Credentials | None = None,
    config: Config | None = None,
) -> ConvertReport:
    """Write a checkpoint of another format as a published one in safetensors, and verify it.

    The format is recognised by the files. No code in them is run. A conversion that was interrupted continues when it
    is called again. A revision that is at `dest` stays loadable until the new one is complete.

    Args:
        uri_or_path: Folder of the checkpoint, or one file: FSDP and verl ranks, torch DCP, DeepSpeed, Megatron-Core,
            `.bin` and `.pt` state dicts, safetensors. Config and tokenizer files of a folder are copied.
        dest: Folder for the result. It may not be the source, inside it or around it.
        dtype: Dtype that floating-point tensors of 16 to 64 bits get: "bfloat16", "float16", "float32" or torch's own.
            None: all keep theirs.
        workers: Number of processes that read and write. None: 1, or one for each node of the cluster. With 1 this
            process does it. With more on this machine, a script needs `if __name__ == "__main__":` around the call, as
            for `multiprocessing`.
        on_cluster: The workers are actors on the nodes of a running Ray cluster. Source and result must be in an
            object store or in folders that all nodes share. The parts of a node that is lost are made by another.
        address: HOST:PORT of the cluster's head, for `on_cluster`. None: RAY_ADDRESS, else a cluster that runs on
            this machine.
        dry_run: Check all and report the plan, but write nothing.
        verify: Read the result back and compare its digests.
        max_shard_bytes: Most bytes of tensors in a file.
        hash_name: Digest of the chunks: "blake3" or "xxh3_128".
        chunk_bytes: Size of chunks in bytes, 1 MiB to 16 MiB. None: as the settings say, 8 MiB.
        progress: As for `load`; a function is called with an object that has `done_bytes`, `total_bytes` and `key`.
        endpoint_url: URL of an S3-compatible server, for both URIs. None: as the AWS configuration says, else the
            provider's own.
        region: Region of the bucket. None: as the environment says.
        profile: Name of a profile in the AWS configuration.
        anonymous: Send unsigned requests, for public buckets.
        credentials: Keys for the store, a `storage.store_ref.Credentials`. None: those that the environment provides.
        config: Settings. None: read from the `LONGSHORE_*` variables of the environment.

    Returns:
        What was read and written.

    Raises:
        ConfigError: An argument is wrong. `dest` is the source, or has a model.safetensors.
        ConvertError: The source is not whole, or of no known format, or its optimizer has weights that are NaN. It
            lists every problem; nothing was published.
        UnsafePickle: A file names code that no checkpoint needs. Nothing of it was run.
        SaveConflict: Another save or publish wrote to `dest` meanwhile.
        SaveError: A worker process died, or the same part was lost with several nodes.
        ClusterLost: There is no Ray cluster, or its head does not answer.
        PackageMissing, VersionMismatch: A node of the cluster cannot run the conversion.
        IntegrityError: The result reads otherwise than it was written.
        StoreError: A store cannot be read or written.

    Example:
        ```python
        report = cluster.convert("/runs/7/checkpoint", "s3://models/run-7")
        print(report.format, report.revision)
        ```
    """
    if hash_name not in MANIFEST_HASH_NAMES:
        raise ConfigError(f"hash_name can be {' or '.join(MANIFEST_HASH_NAMES)}, not {hash_name!r}")
    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise ConfigError(f"workers can be 1 to {MAX_WORKERS}, not {workers}")
    if max_shard_bytes < MIN_SHARD_BYTES:
        raise ConfigError(f"max_shard_bytes is at least {MIN_SHARD_BYTES}, not {max_shard_bytes}")
    if address is not None and not on_cluster:
        raise ConfigError("address names a Ray cluster, which on_cluster=True uses", address=address)
    started_s = time.monotonic()
    config = (config or Config.from_env()).changed(chunk_bytes=chunk_bytes)
    options, rules = StoreOptions(endpoint_url, region, profile, anonymous), config.source_rules()
    folder, only_key = _split(uri_or_path)
    ref, safetensors_key = options.resolve(folder)
    rules.check(ref, credentials)
    origin = folder if only_key is None else uri_or_path
    target = Place(check_destination(dest, origin, options, credentials, rules), credentials, config.read_timeout_s)
    _check_target(target, ref)
    if target.ref.scheme == "memory" and (on_cluster or (workers or 1) > 1):
        raise ConfigError("memory:// is in this process only, so its only worker is this one", dest=target.ref.uri)
    source = Place(ref, credentials, config.read_timeout_s)
    wanted = None if dtype is None else _stored_name(dtype)
    with contextlib.closing(source.open()) as store:
        found, listing = find_source(store, only_key or safetensors_key)
    keep = {name for name in found.extra_files if not check_extra_files([name]) and not name.endswith(".index.json")}
    found = replace(found, extra_files={name: key for name, key in found.extra_files.items() if name in keep})
    plan = plan_conversion(
        found, listing, dtype=wanted, max_shard_bytes=max_shard_bytes, chunk_bytes=config.chunk_bytes
    )
    if dry_run:
        return report_of(source, target, found, plan, workers=workers or 1)
    parts = ClusterParts(address, workers, config) if on_cluster else None
    store = open_destination(dest, origin, options, credentials, config.read_timeout_s, rules)
    number = parts.workers if parts else workers or 1
    shown = shown_progress(progress, lambda display: byte_counter(display, "convert"))
    reported = SaveReporter(target.ref.uri, 0, number, started_s, source=source.ref.uri)
    with contextlib.closing(store), shown as show, reported as reporter:
        report = run_conversion(
            source,
            target,
            found,
            plan,
            hash_name=hash_name,
            chunk_bytes=config.chunk_bytes,
            workers=number,
            run_parts=parts,
            progress=show,
            reporter=reporter,
        )
        if verify:
            compared = {"verified_bytes": 0}
            reporter.enter(VERIFYING, lambda: dict(compared))
            checked = verify_store(
                store,
                progress=lambda moment: compared.update(verified_bytes=moment.done_bytes),
                revision=report.revision,
            )
            if not checked.ok:
                raise IntegrityError(
                    "the result reads otherwise than it was written",
                    hint="longshore verify lists what differs; convert again",
                    uri=store.uri,
                )
            report = replace(report, verified=True)
        reporter.published(revision=report.revision)
    return report


def _check_target(target: Place, source: StoreRef) -> None:
    """Raise ConfigError for a folder where the result would be mixed with other weights. Nothing is written there."""
    real = [replace(ref, prefix=os.path.realpath(ref.prefix)) for ref in (target.ref, source) if ref.scheme == "file"]
    if target.ref == source or (len(real) == 2 and real[0] == real[1]):
        raise ConfigError("source and destination are the same folder", hint="name another folder", dest=target.ref.uri)
    with contextlib.closing(target.open()) as store:
        writes_parts(store)
        if has_other_weights(store, RetryPolicy()):
            raise ConfigError(
                f"the destination has a {SINGLE_KEY}, which transformers would load in the place of the result",
                hint="name a new folder",
                dest=target.ref.uri,
            )


def _stored_name(dtype: Dtype) -> str:
    """Return safetensors' name of a dtype that tensors are cast to. Raises ConfigError for another one."""
    name = str(dtype).removeprefix("torch.")
    name = _SHORT.get(name, name)
    for stored, torch_name in FLOATS.items():
        if name == torch_name and stored != "F64":
            return stored
    raise ConfigError(f"dtype can be bfloat16, float16 or float32, not {dtype}")


aconvert = in_thread(convert)


def _split(uri: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Return the folder, and the file of `torch.save` that the URI names, or None."""
    text = os.fspath(uri)
    folder, slash, name = text.rpartition("/")
    if not name.endswith(_PICKLES) or os.path.isdir(text):
        return text, None
    if not slash:
        return ".", name
    if folder.endswith("/"):
        raise ConvertError(f"{text!r} is a bucket, not a file", hint="add a slash at its end to name all of it")
    return folder or "/", name
