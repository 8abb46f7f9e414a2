"""Another client of the cluster: loads as ordered, prints a line for each load, and waits to be killed.

python -m tests.chaos.client '{"uri": ..., "options": {...}, "keys": [access key, secret] or null}'

With "host" it loads rank 0 for itself and compares it with the checkpoint in "folder"; with "leaderless" it does so
after its first thread has ended.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from typing import Any

import cluster
from storage.store_ref import Credentials
from tests.support.reference_slices import shard_differs
from tests.support.stored_models import KV_HEADS


def host(said: dict[str, Any], credentials: Credentials | None) -> None:
    import ray

    ray.init(address=said["address"], log_to_driver=False)
    options = {**said["options"], "credentials": credentials}
    print("calling", flush=True)
    with cluster.host_rank(said["uri"], 0, group="chaos", **options) as shard:
        layout = options["tensor_parallel_size"], options["fsdp_size"]
        print(json.dumps(shard_differs(shard, said["folder"], *layout, KV_HEADS)), flush=True)
        sys.stdin.read()


def main() -> None:
    said = json.loads(sys.argv[1])
    keys = said["keys"]
    credentials = Credentials(access_key_id=keys[0], secret_access_key=keys[1]) if keys else None
    if said.get("host"):
        work = threading.Thread(target=host, args=(said, credentials))
        work.start()
        if said["leaderless"]:
            ctypes.CDLL(None).pthread_exit(None)
        work.join()
        return
    print("calling", flush=True)
    cluster.load(said["uri"], credentials=credentials, **said["options"])
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
