"""The parts that all cases of a run share: a cluster that can lose nodes, a store, keys and folders."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray._private import auto_init_hook

import cluster
from cluster import client
from cluster.command_line.demo import write_llama_checkpoint
from cluster.fit.needs import min_slots
from storage.checkpoints.manifest import MANIFEST_KEY
from storage.stores.embedded_s3 import EmbeddedS3
from tests.chaos.cases import BUCKET, RANKS_PER_NODE, Case
from tests.chaos.proxy import CredentialsFile
from tests.chaos.strikes import NODES
from tests.support.losable_nodes import LosableNodes, losable_nodes
from tests.support.ray_clusters import CREDENTIALS_FILE, MIB, environment, eventually
from tests.support.s3_servers import s3_client

KV_HEADS = 2
CHUNK_BYTES = MIB
DISK_BYTES = 4 * MIB  # of a disk that is full: about a third of a model
# Deadlines short enough that every one of them strikes within a case.
SETTINGS: dict[str, Any] = {
    "read_timeout_s": 1.5,
    "lease_deadline_s": 5.0,
    "stuck_after_s": 8.0,
    "hedge_factor": 4.0,
    "hedge_after_s": 1.0,
    "holder_ttl_s": 8.0,
    "orphan_after_s": 15.0,
    "warm_workers_s": 600.0,
    "node_wait_s": 15.0,
    "cpu_ranks_per_node": RANKS_PER_NODE,
    "fetch_threads": 2,  # few, so that a load has a beginning, a middle and an end
}


class Bench:
    """The shared parts of a run. Make one with `bench()`."""

    def __init__(self, longshore: LosableNodes, server: EmbeddedS3, folder: Path, credentials: CredentialsFile) -> None:
        self.longshore, self.server, self.folder, self.credentials = longshore, server, folder, credentials
        self.keys = cluster.generate_key(folder / "signer")
        server.make_bucket(BUCKET)
        self._s3: Any = s3_client(server)

    def configure(self, case: Case, disk: Path) -> None:
        """A coordinator with the settings of the case; the last one where they are the same."""
        settings = dict(SETTINGS)
        settings["peer_port"] = 0 if case.peers else -1  # all nodes have one address
        if case.arena == "smallest":
            settings["arena_bytes"] = min_slots(RANKS_PER_NODE) * MIB
        if case.disk:
            settings |= {"disk_cache_dir": str(disk), "disk_cache_bytes": 64 * MIB}
        if case.disk == "full" and not os.path.ismount(disk):
            settings["disk_cache_bytes"] = DISK_BYTES
        self.longshore.configure(empty=case.other_version or case.peers_damage, **settings)
        if any(strike.name in ("coordinator killed", "node lost") for strike in case.strikes):
            # Idle workers are nobody's after it, and wait for `orphan_after_s`: so would every such case.
            client.release_warm(address=self.longshore.address)

    def kill_everything(self) -> None:
        """Coordinator, agents and workers die at once, and what they had in shared memory is gone."""
        self.longshore.kill_everything()
        eventually(self.longshore.swept, "arenas are left")
        self.longshore.end_longshore()

    @contextmanager
    def model(self, case: Case) -> Iterator[tuple[Path, int]]:
        """A checkpoint of about 11 MB that no other case has, in the bucket; its folder and its tensors' bytes."""
        folder = self.folder / str(case.seed)
        in_bucket = self.server.folder / BUCKET / str(case.seed)
        write_llama_checkpoint(
            folder, hidden=256, layers=2, intermediate=704, heads=8, kv_heads=KV_HEADS, vocab=8192, shards=2,
            seed=case.seed,
        )  # fmt: skip
        try:
            self._upload(case, folder, in_bucket)
            yield folder, sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        finally:
            shutil.rmtree(in_bucket, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            self.server.refresh()

    def options(self, case: Case, endpoint_url: str, layout: tuple[int, int, int]) -> dict[str, Any]:
        """Arguments of `cluster.load`, credentials apart."""
        tensor_parallel, fully_sharded, copies = layout
        return {
            "tensor_parallel_size": tensor_parallel,
            "fsdp_size": fully_sharded,
            "data_parallel_size": copies,
            "endpoint_url": endpoint_url,
            "region": self.server.region,
            "device": "cpu",
            "placement": case.placement,
            "address": self.longshore.address,
            "wait_for_resources_s": 30.0,  # idle worker groups and nodes that were lost may be in the way
            "trusted_keys": [self.keys.public_key] if case.proof == "signed" else None,
            "progress": False,  # a bar would be in the way of the lines that say what became of each load
        }

    def replace_objects(self, case: Case) -> None:
        """Other bytes of the same length, in both shards."""
        for path in (self.server.folder / BUCKET / str(case.seed)).glob("*.safetensors"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2 :] = bytes(byte ^ 0x5A for byte in data[len(data) // 2 :])
            fresh = path.with_suffix(".new")
            fresh.write_bytes(data)
            os.replace(fresh, path)
        self.server.refresh()

    @contextmanager
    def disk(self, case: Case) -> Iterator[Path]:
        """The folder of the disk tier; a small file system of its own for one that is full, where we may mount one."""
        folder = self.folder / f"disk-{case.seed}"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
        mounted = (
            case.disk == "full" and os.geteuid() == 0 and not subprocess.run(mount, capture_output=True).returncode
        )
        try:
            yield folder
        finally:
            if mounted:
                subprocess.run(["umount", "-l", str(folder)], check=True)
            shutil.rmtree(folder, ignore_errors=True)

    # -- inside ------------------------------------------------------------------------------------------------

    def _upload(self, case: Case, folder: Path, in_bucket: Path) -> None:
        if case.published:
            cluster.publish(
                str(folder),
                case.uri,
                chunk_bytes=CHUNK_BYTES,
                sign_key=self.keys.path if case.proof == "signed" else None,
                endpoint_url=self.server.endpoint_url,
                region=self.server.region,
                credentials=self.server.credentials(),
            )
        elif case.proof == "checksums":
            for path in sorted(folder.iterdir()):
                self._s3.put_object(
                    Bucket=BUCKET, Key=f"{case.seed}/{path.name}", Body=path.read_bytes(), ChecksumAlgorithm="CRC64NVME"
                )
        else:
            shutil.copytree(folder, in_bucket)
        if case.staying == "changed the manifest":
            with (in_bucket / MANIFEST_KEY).open("ab") as manifest:
                manifest.write(b"\n")
        self.server.refresh()


@contextmanager
def bench() -> Iterator[Bench]:
    """A head, two nodes that can be lost, and a store, for as long as the block."""
    with (
        tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        for part in ("bucket", "tmp/ray"):
            (folder / part).mkdir(parents=True)
        # No keys in the environment of the nodes, and a folder for temporary files that nobody else uses.
        ours = {
            "AWS_EC2_METADATA_DISABLED": "true",
            "TMPDIR": str(folder / "tmp"),
            "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # answers of workers that were asked while they were stopped
        }
        stack.enter_context(environment(ours, ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE")))
        stack.enter_context(_no_auto_connect())
        longshore = stack.enter_context(losable_nodes())
        server = stack.enter_context(EmbeddedS3(folder / "bucket"))
        longshore.want(NODES)
        there = Bench(longshore, server, folder, CredentialsFile(CREDENTIALS_FILE, server))
        stack.callback(CREDENTIALS_FILE.unlink, missing_ok=True)
        stack.callback(there.kill_everything)
        yield there


@contextmanager
def _no_auto_connect() -> Iterator[None]:
    """A load that outlives its cluster would have Ray join another one of this machine."""
    hook: Any = auto_init_hook
    before, hook.enable_auto_connect = hook.enable_auto_connect, False
    try:
        yield
    finally:
        hook.enable_auto_connect = before
