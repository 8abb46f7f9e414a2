"""Whether the head of the Ray cluster can be reached, and since when it cannot.

Ray ends a process that has not reached the head for `RAY_gcs_rpc_server_reconnect_timeout_s`, without a word to the
code that runs in it. So a client looks for itself, from its first moment on, and says ClusterLost before that.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from cluster.errors import ClusterLost
from cluster.joining.patience import UNLIMITED, Patience
from cluster.joining.ray_address import check_ray_address

RAY_LIMIT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
RAY_LIMIT_S = 60.0  # Ray's default
SHARE_OF_RAYS_LIMIT = 0.75
SHORTEST_LOOK_S, LONGEST_LOOK_S = 1.0, 5.0  # between two looks
CONNECT_TIMEOUT_S = 1.0
LOOK_AGAIN_S = 0.5  # by somebody who waits for it


def lost_after_s(setting_s: float) -> float:
    """How long the head may be away: the setting, or when it is 0 a share of the time that Ray itself waits."""
    if setting_s:
        return setting_s
    try:
        limit_s = float(os.environ.get(RAY_LIMIT_VARIABLE, RAY_LIMIT_S))
    except ValueError:
        limit_s = RAY_LIMIT_S
    return SHARE_OF_RAYS_LIMIT * max(1.0, limit_s)


class HeadWatch:
    """Looks now and then, in a thread of its own, until `close`. Thread-safe."""

    def __init__(self, address: str, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`patience_s`: away for longer, the head is lost."""
        self._address = address
        self._patience_s = patience_s
        self._clock = clock
        self._away_since_s: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="longshore-watch", daemon=True)
        self._thread.start()

    def is_there(self) -> bool:
        """Look now."""
        looked_s = self._clock()
        try:
            check_ray_address(self._address, timeout_s=CONNECT_TIMEOUT_S)
        except ClusterLost:
            if self._away_since_s is None:
                self._away_since_s = looked_s
            return False
        self._away_since_s = None
        return True

    def check(self) -> bool:
        """Look now; False while the head is away. Raises ClusterLost when it has been for too long."""
        if self.is_there():
            return True
        now_s = self._clock()
        away_s = now_s - (now_s if self._away_since_s is None else self._away_since_s)
        if away_s <= self._patience_s:
            return False
        raise ClusterLost(
            "the head of the Ray cluster is gone and did not come back",
            hint="only with Ray's GCS fault tolerance does a head come back with its models; "
            "LONGSHORE_CLUSTER_LOST_AFTER_S says how long clients wait. Ray itself soon ends this process",
            address=self._address,
            away_s=round(away_s, 1),
        )

    def wait(self, patience: Patience = UNLIMITED) -> None:
        """Returns when the head is there. Raises ClusterLost when it does not come, and as `Patience.check` does."""
        while not self.check():
            patience.sleep(LOOK_AGAIN_S)

    def close(self) -> None:
        self._closed.set()

    def _look_on(self) -> None:
        while not self._closed.wait(min(LONGEST_LOOK_S, max(SHORTEST_LOOK_S, self._patience_s / 4))):
            self.is_there()
