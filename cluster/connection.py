"""How a client reaches Ray and the coordinator: join, start a local cluster, find again after a loss.

connect(address)  -> Connection(coordinator, ...)     one per process and cluster
Connection.call() -> the coordinator's answer; waits for a restarted coordinator or head, ClusterLost at a deadline
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from cluster.config import Config
from cluster.errors import ClusterLost, PackageMissing
from cluster.joining.coordinator_line import CoordinatorLine, launch
from cluster.joining.head_watch import HeadWatch, lost_after_s
from cluster.joining.interrupts import sigterm_kept
from cluster.joining.patience import UNLIMITED, Patience
from cluster.joining.ray_join import address_of, end_local, import_ray, join
from cluster.joining.ray_private import started_here
from cluster.load_request import StoreAccess
from longshore.install_check import PackageShadowed
from storage.errors import LongshoreError

RENEWED_S = 2.0  # a call of the renewer is answered in that time, when anybody answers
LOCAL_HEAD_S = 1.0  # nobody starts the head of a local cluster again
CLOSE_TIMEOUT_S = 20.0

_LOG = logging.getLogger("longshore")
_lock = threading.Lock()
_connection: Connection | None = None


class Connection(CoordinatorLine):
    """This process's line to one coordinator, and the heartbeat that keeps its holds alive. Thread-safe."""

    def __init__(self, config: Config, gcs_address: str, *, local: bool) -> None:
        super().__init__(HeadWatch(gcs_address, lost_after_s(LOCAL_HEAD_S if local else config.cluster_lost_after_s)))
        self.client_id = uuid.uuid4().hex
        self.local = local  # we started the Ray cluster, so we end it
        self._told: list[str] = []  # settings of the running coordinator that the log has named
        self.address = gcs_address
        self._held: dict[str, int] = {}  # model id -> how often this process holds it
        self._access: dict[str, StoreAccess] = {}  # model id -> what a restarted coordinator is told again
        self._held_lock = threading.Lock()
        self._closed = threading.Event()
        self._renewer: threading.Thread | None = None
        self._holder_ttl_s = config.holder_ttl_s

    def find(self, config: Config, *, start: bool, any_version: bool = False, patience: Patience = UNLIMITED) -> bool:
        """Find the coordinator, or `start` one. False when there is none.

        Its settings are those of its node's environment, or this process's where this process started the Ray cluster.
        The log says which settings of this process have no effect. Raises VersionMismatch, ConfigError, ClusterLost...
        """
        self.head.wait(patience)  # without it Ray's own calls do not come back, and end the process
        coordinator = launch().find_coordinator()
        if coordinator is None:
            if not start:
                return False
            # Who started the cluster is its operator.
            coordinator = launch().ensure_coordinator(config if started_here() else None, patience)
        self._coordinator, self._refusal, self._any_version = coordinator, None, any_version
        hello = self.call("ping", patience=patience)
        self._check_version(hello)
        self._holder_ttl_s = float(hello["holder_ttl_s"])
        others = config.without_effect(hello.get("settings", {}))
        if others and others != self._told:
            self._told = others
            _LOG.warning(
                "the cluster has other settings than this process, and they stay in force: %s (they come from the "
                "environment in which its nodes were started)",
                ", ".join(others),
            )
        return True

    def hold(self, model_id: str, access: StoreAccess) -> None:
        """Renew this process's hold on the model from now on. `access`: with which the load was asked for."""
        with self._held_lock:
            self._access[model_id] = access
            self._held[model_id] = self._held.get(model_id, 0) + 1
            if self._renewer is None:
                self._renewer = threading.Thread(target=self._renew_loop, name="longshore-renew", daemon=True)
                self._renewer.start()

    def end_coordinator(self) -> None:
        """Kill the coordinator for good; it has freed what it had, so this process holds nothing any more."""
        super().end_coordinator()
        with self._held_lock:
            self._held.clear()
            self._access.clear()

    def drop(self, model_id: str) -> bool:
        """One hold less in this process. True when it was the last; False also when there was none."""
        with self._held_lock:
            if model_id not in self._held:
                return False
            self._held[model_id] -= 1
            if self._held[model_id]:
                return False
            del self._held[model_id], self._access[model_id]
            return True

    def drop_all(self, model_id: str) -> None:
        """Drop every hold of this process on the model."""
        with self._held_lock:
            self._held.pop(model_id, None)
            self._access.pop(model_id, None)

    def holds(self, model_id: str) -> bool:
        """Return whether this process holds the model."""
        with self._held_lock:
            return model_id in self._held

    def close(self) -> None:
        """Give back what this process holds; end the cluster when it is our own. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.head.close()
        with self._held_lock:
            held = list(self._held)
            self._held.clear()
        import ray

        if not ray.is_initialized():
            return

        def give_back() -> None:
            if self._renewer is not None:
                self._renewer.join(RENEWED_S)  # Ray may end next, and nobody should be inside it then
            with contextlib.suppress(LongshoreError, Exception):
                if self.local:
                    self.call("shutdown", timeout_s=CLOSE_TIMEOUT_S)
                    return
                for model_id in held:
                    self.call("release", model_id, self.client_id, timeout_s=5)

        if self._coordinator is not None:
            self._while_ray_lives(give_back)
        if self.local:
            with contextlib.suppress(Exception):
                end_local(ray)
            importlib.import_module("storage.arena.arena_files").sweep()

    def _while_ray_lives(self, work: Callable[[], None]) -> None:
        """Do it, unless Ray dies meanwhile: then its calls block for a minute, and end the process after that."""
        thread = threading.Thread(target=work, name="longshore-close", daemon=True)
        thread.start()
        give_up_s = time.monotonic() + CLOSE_TIMEOUT_S
        while thread.is_alive() and time.monotonic() < give_up_s and self.head.is_there():
            thread.join(0.1)

    def _renew_loop(self) -> None:
        while not self._closed.wait(self._holder_ttl_s / 4):
            with self._held_lock:
                held = list(self._held)
            if held and self._coordinator is not None:
                try:
                    self._renew(held)
                except LongshoreError as error:
                    _LOG.debug("holds were not renewed: %s", error)
                except Exception:  # without this thread every hold of the process would lapse
                    _LOG.exception("holds were not renewed")

    def _renew(self, held: list[str]) -> None:
        for model_id in self.call("renew", self.client_id, held):
            if (access := self._access.get(model_id)) is not None:
                with contextlib.suppress(LongshoreError):  # refused by the store: other models go on
                    self.call("supply", model_id, self.client_id, access)


def connect(
    address: str | None,
    config: Config,
    *,
    start: bool = True,
    any_version: bool = False,
    patience: Patience = UNLIMITED,
) -> Connection | None:
    """The process's connection; made at the first call. None when there is no coordinator and none is wanted.

    Joins the cluster of code that already uses Ray; else `address` or RAY_ADDRESS; else a cluster that runs on this
    machine; else, with `start`, a new local one that ends with this process.
    Raises ClusterLost when the address does not answer, PackageMissing where ray is not installed, LoadTimeout and
    LoadCancelled as `patience` says.
    """
    global _connection
    with patience.holding(_lock):
        ray = import_ray()
        if _connection is not None and ray.is_initialized() and _connection.address == address_of(ray):
            found = _connection.find(config, start=start, any_version=any_version, patience=patience)
            return _connection if found else None
        how = None
        if not ray.is_initialized():
            with sigterm_kept():
                how = join(ray, address, start=start)
            if how is None:
                return None
        local = how == "local"
        connection = Connection(config, address_of(ray), local=local)
        try:
            if not connection.find(config, start=start, any_version=any_version, patience=patience):
                connection.head.close()
                return None
        except BaseException as error:
            connection.head.close()
            if local:
                end_local(ray)
            elif how and isinstance(error, PackageMissing | PackageShadowed):
                ray.shutdown()  # so that the next call may name another cluster
            raise
        _connection = connection
        atexit.register(connection.close)
        return connection


def join_cluster(address: str | None) -> tuple[Any, Any]:
    """(ray, actors.launch) of a cluster that runs, whether or not a coordinator does. Raises ClusterLost."""
    ray = import_ray()
    if not ray.is_initialized():
        with sigterm_kept():
            if join(ray, address, start=False) is None:
                raise ClusterLost(
                    "no Ray cluster runs here", hint="--address or RAY_ADDRESS says which cluster is meant"
                )
    return ray, launch()


def joined(config: Config) -> Connection | None:
    """The connection that this process has already, if its coordinator runs; never joins anything."""
    if _connection is None or not import_ray().is_initialized():
        return None
    return connect(None, config, start=False)


def disconnect() -> None:
    """Release what this process holds and forget the connection; a local cluster that it started ends."""
    global _connection
    with _lock:
        connection, _connection = _connection, None
    if connection is not None:
        atexit.unregister(connection.close)
        connection.close()
