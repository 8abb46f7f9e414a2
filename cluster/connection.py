"""How a client reaches Ray and the coordinator: join, start a local cluster, find again after a loss.

connect(address)  -> Connection(coordinator, ...)     one per process and cluster
Connection.call() -> the coordinator's answer; waits for a restarted coordinator or head, ClusterLost at a deadline
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from cluster.config import Config
from cluster.errors import ClusterLost, VersionMismatch
from cluster.joining.head_watch import HeadWatch, lost_after_s
from cluster.joining.interrupts import sigterm_kept
from cluster.joining.ray_join import address_of, import_ray, join
from cluster.joining.remote_errors import unwrapped
from longshore.version import PROTOCOL_VERSION, __version__
from storage.errors import LongshoreError
from storage.store_ref import Credentials

RENEWED_S = 2.0  # a call of the renewer is answered in that time, when anybody answers
COORDINATOR_GONE_S = 60.0  # a coordinator that has not come back after this long, while Ray lives, is taken for lost
LOCAL_HEAD_S = 1.0  # nobody starts the head of a local cluster again
LOOK_S = 1.0  # at the head, while an answer does not come
CLOSE_TIMEOUT_S = 20.0

_LOG = logging.getLogger("longshore")
_lock = threading.Lock()
_connection: Connection | None = None


class Connection:
    """This process's line to one coordinator, and the heartbeat that keeps its holds alive. Thread-safe."""

    def __init__(self, config: Config, gcs_address: str, *, local: bool) -> None:
        self.client_id = uuid.uuid4().hex
        self.local = local  # we started the Ray cluster, so we end it
        self._told: list[str] = []  # settings of the running coordinator that the log has named
        self.address = gcs_address
        self.head = HeadWatch(gcs_address, lost_after_s(LOCAL_HEAD_S if local else config.cluster_lost_after_s))
        self._coordinator: Any = None
        self._held: dict[str, int] = {}  # model id -> how often this process holds it
        self._credentials: dict[str, Credentials] = {}  # model id -> what a restarted coordinator must be told again
        self._held_lock = threading.Lock()
        self._closed = threading.Event()
        self._renewer: threading.Thread | None = None
        self._holder_ttl_s = config.holder_ttl_s

    def find(self, config: Config, *, start: bool, any_version: bool = False) -> bool:
        """Find the coordinator, or `start` one with these settings. False when there is none. One that runs keeps its
        own: the log says which differ. Raises VersionMismatch, ClusterLost...
        """
        self.head.wait()  # without it Ray's own calls do not come back, and end the process
        launch = _launch()
        coordinator = launch.find_coordinator()
        if coordinator is None:
            if not start:
                return False
            coordinator = launch.ensure_coordinator(config)
        self._coordinator = coordinator
        hello = self.call("ping")
        if not any_version and (hello["version"], hello["protocol"]) != (__version__, PROTOCOL_VERSION):
            self._coordinator = None
            raise VersionMismatch(
                f"this client is longshore {__version__} (protocol {PROTOCOL_VERSION}), the cluster runs "
                f"{hello['version']} (protocol {hello['protocol']})",
                hint="install the cluster's version here, or install yours on every node and end the old one with "
                "`longshore release --shutdown`",
            )
        self._holder_ttl_s = float(hello["holder_ttl_s"])
        # Those of the cluster's own environment are no news.
        others = config.differences(hello.get("settings", {})) if config != Config.from_env() else []
        if others and others != self._told:
            self._told = others
            _LOG.warning(
                "the cluster was started with other settings, which stay in force: %s "
                "(`longshore release --shutdown` ends it; the next load starts it with its own)",
                ", ".join(others),
            )
        return True

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """One answer of the coordinator. A killed one is restarted by Ray: the call is made again until then.

        Raises what the coordinator raised; ClusterLost when nobody answers for COORDINATOR_GONE_S (or `timeout_s`), or
        when the head is away for too long.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

        give_up_s = time.monotonic() + COORDINATOR_GONE_S
        while True:
            try:
                return self.answer(
                    getattr(self._coordinator, method).remote(*args, **kwargs), timeout_s or COORDINATOR_GONE_S
                )
            except RayTaskError as error:
                raise unwrapped(error) from None
            except GetTimeoutError as error:
                raise ClusterLost("the coordinator does not answer", method=method) from error
            except RayActorError as error:
                lives = self.head.check()
                if not lives:
                    give_up_s = time.monotonic() + COORDINATOR_GONE_S  # it comes back after the head does
                if time.monotonic() > give_up_s or not ray.is_initialized():
                    raise ClusterLost(
                        "the coordinator is gone and did not come back", cause=type(error).__name__
                    ) from error
                time.sleep(0.5)
                if lives:  # Ray's own calls do not come back while it does not
                    self._find_again()
            except RayError as error:
                raise ClusterLost("Ray cannot be reached", cause=str(error)[:300]) from error

    def answer(self, reference: Any, timeout_s: float | None = None) -> Any:
        """What a call to an actor returned. Raises what `ray.get` does; ClusterLost when the head is lost meanwhile."""
        import ray

        timeout_s = math.inf if timeout_s is None else timeout_s
        give_up_s = time.monotonic() + timeout_s
        while not ray.wait([reference], timeout=max(0.0, min(LOOK_S, give_up_s - time.monotonic())))[0]:
            if not self.head.check():
                give_up_s = time.monotonic() + timeout_s  # whoever is asked may come back with the head
            elif time.monotonic() >= give_up_s:
                raise ray.exceptions.GetTimeoutError
        return ray.get(reference)

    def end_coordinator(self) -> None:
        """Kill the coordinator for good; it has freed what it had."""
        import ray

        with contextlib.suppress(Exception):
            ray.kill(self._coordinator, no_restart=True)
        self._coordinator = None

    def hold(self, model_id: str, credentials: Credentials | None = None) -> None:
        """Renew this process's hold on the model from now on. `credentials`: those the load was asked for with."""
        with self._held_lock:
            if credentials is not None:
                self._credentials[model_id] = credentials
            self._held[model_id] = self._held.get(model_id, 0) + 1
            if self._renewer is None:
                self._renewer = threading.Thread(target=self._renew_loop, name="longshore-renew", daemon=True)
                self._renewer.start()

    def drop(self, model_id: str) -> bool:
        """One hold less in this process. True when it was the last."""
        with self._held_lock:
            left = self._held.get(model_id, 0) - 1
            if left > 0:
                self._held[model_id] = left
            else:
                self._held.pop(model_id, None)
                self._credentials.pop(model_id, None)
            return left <= 0

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

        if not ray.is_initialized() or self._coordinator is None:
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

        self._while_ray_lives(give_back)
        if self.local:
            with contextlib.suppress(Exception):
                ray.shutdown()
            importlib.import_module("storage.arena.arena_files").sweep()

    def _while_ray_lives(self, work: Callable[[], None]) -> None:
        """Do it, unless Ray dies meanwhile: then its calls block for a minute, and end the process after that."""
        thread = threading.Thread(target=work, name="longshore-close", daemon=True)
        thread.start()
        give_up_s = time.monotonic() + CLOSE_TIMEOUT_S
        while thread.is_alive() and time.monotonic() < give_up_s and self.head.is_there():
            thread.join(0.1)

    def _find_again(self) -> None:
        launch = _launch()
        with contextlib.suppress(Exception):
            self._coordinator = launch.find_coordinator() or self._coordinator

    def _renew_loop(self) -> None:
        while not self._closed.wait(self._holder_ttl_s / 4):
            with self._held_lock:
                held = list(self._held)
            if held:
                with contextlib.suppress(LongshoreError):
                    for model_id in self.call("renew", self.client_id, held):
                        if (credentials := self._credentials.get(model_id)) is not None:
                            self.call("supply", model_id, credentials)


def connect(address: str | None, config: Config, *, start: bool = True, any_version: bool = False) -> Connection | None:
    """The process's connection; made at the first call. None when there is no coordinator and none is wanted.

    Joins the cluster of code that already uses Ray; else `address` or RAY_ADDRESS; else a cluster that runs on this
    machine; else, with `start`, a new local one that ends with this process.
    Raises ClusterLost when the address does not answer, PackageMissing where ray is not installed.
    """
    global _connection
    with _lock:
        ray = import_ray()
        if _connection is not None and ray.is_initialized() and _connection.address == address_of(ray):
            return _connection if _connection.find(config, start=start, any_version=any_version) else None
        local = False
        if not ray.is_initialized():
            with sigterm_kept():
                joined = join(ray, address, start=start)
            if joined is None:
                return None
            local = joined == "local"
        connection = Connection(config, address_of(ray), local=local)
        try:
            if not connection.find(config, start=start, any_version=any_version):
                connection.head.close()
                return None
        except BaseException:
            connection.head.close()
            if local:
                ray.shutdown()
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
    return ray, _launch()


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


def _launch() -> Any:
    """`actors.launch`: the one seam that points upward, by name."""
    return importlib.import_module("actors.launch")
