"""Another client of the cluster: loads what it is told, says so by lines, and waits to be killed.

python -m tests.chaos.client '{"uri": ..., "options": {...}, "keys": [access key, secret] or null}'
"""

from __future__ import annotations

import json
import sys

import cluster
from storage.store_ref import Credentials


def main() -> None:
    said = json.loads(sys.argv[1])
    keys = said["keys"]
    credentials = Credentials(access_key_id=keys[0], secret_access_key=keys[1]) if keys else None
    print("calling", flush=True)
    cluster.load(said["uri"], credentials=credentials, **said["options"])
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
