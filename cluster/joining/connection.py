"""A client's connection to Ray and to the coordinator, through restarts of the coordinator and of the head.

connect(address)  -> Connection(coordinator, ...)     one per process and cluster
Connection.call() -> the coordinator's answer; waits for a restarted coordinator or head, ClusterLost at a deadline

call(method) -- answered ------------------------------------------> its result, or the error that it raised
             -- no answer, pings are answered ---------------------> it is busy: wait, as long as the caller wants to
             -- the actor died --> wait until Ray has restarted it, check its version, call again
             -- nothing for COORDINATOR_GONE_S, or the head is lost -> ClusterLost
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
from cluster.errors import ClusterLost, LoadCancelled, LoadTimeout, NoCoordinator, PackageMissing, VersionMismatch
from cluster.joining.node_tasks import unwrapped
from cluster.joining.patience import UNLIMITED, HeadWatch, Patience, lost_after_s, sigterm_kept
from cluster.joining.ray_join import address_of, end_local, import_ray, join
from cluster.joining.ray_private import started_here
from cluster.request import StoreAccess
from longshore.installation import PROTOCOL_VERSION, PackageShadowed, __version__
from storage.errors import LongshoreError

COORDINATOR_GONE_S = 60.0  # a coordinator that does not answer for this long while Ray lives counts as lost
PING_EVERY_S = 5.0  # while the client waits for an answer
LOOK_S = 1.0  # between checks of the head during a wait


class CoordinatorLine:
    """A client of one coordinator actor. Thread-safe."""

    def __init__(self, head: HeadWatch) -> None:
        self.head = head
        self._coordinator: Any = None
        self._refusal: LongshoreError | None = None  # why a coordinator that was found cannot be used
        self._any_version = False

    def call(
        self, method: str, *args: Any, patience: Patience = UNLIMITED, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        """Return one answer of the coordinator. If it is killed, Ray restarts it and the call is repeated.

        A coordinator that answers pings may take any time for the answer, limited by `timeout_s`.

        Raises what the coordinator raised. Raises ClusterLost when it answers nothing for COORDINATOR_GONE_S (or
        `timeout_s`), or when the head is away for too long, and LoadTimeout and LoadCancelled for `patience`.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

        give_up_s = time.monotonic() + COORDINATOR_GONE_S
        found_again = False
        while True:
            patience.check()
            try:
                if found_again and method != "ping":
                    self._check_version(self._ask("ping", (), {}, patience, timeout_s))
                return self._ask(method, args, kwargs, patience, timeout_s)
            except RayTaskError as error:
                raise unwrapped(error) from None
            except GetTimeoutError as error:
                raise ClusterLost("the coordinator does not answer", method=method) from error
            except RayActorError as error:
                lives = self.head.check()
                if not lives:
                    give_up_s = time.monotonic() + COORDINATOR_GONE_S  # it restarts after the head
                if time.monotonic() > give_up_s or not ray.is_initialized():
                    raise ClusterLost(
                        "the coordinator is gone and did not come back", cause=type(error).__name__
                    ) from error
                patience.sleep(0.5)
                if lives:  # without the head, Ray's own calls do not return
                    self._find_again()
                    found_again = True
            except RayError as error:
                raise ClusterLost("Ray cannot be reached", cause=str(error)[:300]) from error

    def _ask(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], patience: Patience, timeout_s: float | None
    ) -> Any:
        """Call once and return the answer. Raises as `ray.get` and `call` do."""
        import ray

        coordinator = self._coordinator
        if coordinator is None:
            raise self._refusal or NoCoordinator(
                "the coordinator of this process was shut down", hint="the next load starts another one"
            )
        reference = getattr(coordinator, method).remote(*args, **kwargs)
        pings = _Pings(coordinator) if timeout_s is None else None
        try:
            return self.answer(reference, timeout_s or COORDINATOR_GONE_S, patience=patience, pings=pings)
        except (LoadTimeout, LoadCancelled):
            with contextlib.suppress(Exception):
                ray.cancel(reference)  # the caller no longer waits for it
            raise

    def answer(
        self,
        reference: Any,
        timeout_s: float | None = None,
        *,
        patience: Patience = UNLIMITED,
        pings: _Pings | None = None,
    ) -> Any:
        """Return the result of a call to an actor. Raises as `ray.get` does, and ClusterLost when the head is lost.

        The time starts again with each of `pings` that the actor answers.
        """
        import ray

        timeout_s = math.inf if timeout_s is None else timeout_s
        give_up_s = time.monotonic() + timeout_s
        while not ray.wait([reference], timeout=patience.left_s(max(0.0, min(LOOK_S, give_up_s - time.monotonic()))))[
            0
        ]:
            patience.check()
            if not self.head.check() or (pings is not None and pings.answered()):
                give_up_s = time.monotonic() + timeout_s  # the actor may restart with the head
            elif time.monotonic() >= give_up_s:
                raise ray.exceptions.GetTimeoutError
        return ray.get(reference)

    def end_coordinator(self) -> None:
        """Kill the coordinator for good, after it has freed its resources."""
        import ray

        with contextlib.suppress(Exception):
            ray.kill(self._coordinator, no_restart=True)
        self._coordinator, self._refusal = None, None

    def _check_version(self, hello: dict[str, Any]) -> None:
        """Raise VersionMismatch when the coordinator runs another version. Later calls are refused too."""
        if self._any_version or (hello["version"], hello["protocol"]) == (__version__, PROTOCOL_VERSION):
            return
        self._coordinator, self._refusal = (
            None,
            VersionMismatch(
                f"this client is longshore {__version__} (protocol {PROTOCOL_VERSION}), the cluster runs "
                f"{hello['version']} (protocol {hello['protocol']})",
                hint="install the cluster's version here, or install yours on every node and end the old one with "
                "`longshore release --shutdown`",
            ),
        )
        raise self._refusal

    def _find_again(self) -> None:
        with contextlib.suppress(Exception):
            self._coordinator = launch().find_coordinator() or self._coordinator


class _Pings:
    """Pings of an actor that is working on a call."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._asked: Any = None
        self._next_s = time.monotonic() + PING_EVERY_S

    def answered(self) -> bool:
        """Return True once for each ping that was answered; never blocks."""
        import ray

        if self._asked is None:
            if time.monotonic() >= self._next_s:
                self._asked = self._actor.ping.remote()
            return False
        if not ray.wait([self._asked], timeout=0)[0]:
            return False
        asked, self._asked, self._next_s = self._asked, None, time.monotonic() + PING_EVERY_S
        with contextlib.suppress(ray.exceptions.RayError):  # the actor died, so the call itself fails too
            ray.get(asked)
            return True
        return False


def launch() -> Any:
    """Return `actors.launch`. It is the only import of an upper layer, so it is by name."""
    return importlib.import_module("actors.launch")


RENEWED_S = 2.0  # a living coordinator answers a renewal within this time
LOCAL_HEAD_S = 1.0  # nobody starts the head of a local cluster again
CLOSE_TIMEOUT_S = 20.0

_LOG = logging.getLogger("longshore")
_lock = threading.Lock()
_connection: Connection | None = None


class Connection(CoordinatorLine):
    """This process's connection to one coordinator, and the heartbeat that renews its holds. Thread-safe."""

    def __init__(self, config: Config, gcs_address: str, *, local: bool) -> None:
        super().__init__(HeadWatch(gcs_address, lost_after_s(LOCAL_HEAD_S if local else config.cluster_lost_after_s)))
        self.client_id = uuid.uuid4().hex
        self.local = local  # we started the Ray cluster, so we end it
        self._told: list[str] = []  # settings of the running coordinator that were logged
        self.address = gcs_address
        self._held: dict[str, int] = {}  # model id -> number of this process's holds
        self._access: dict[str, StoreAccess] = {}  # model id -> access to send again to a restarted coordinator
        self._held_lock = threading.Lock()
        self._closed = threading.Event()
        self._renewer: threading.Thread | None = None
        self._holder_ttl_s = config.holder_ttl_s

    def find(self, config: Config, *, start: bool, any_version: bool = False, patience: Patience = UNLIMITED) -> bool:
        """Find the coordinator, or `start` one. Return False when there is none.

        Its settings are those of its node's environment, or this process's where this process started the Ray cluster.
        The log says which settings of this process have no effect. Raises VersionMismatch, ConfigError, ClusterLost...
        """
        self.head.wait(patience)  # without the head, Ray's own calls block, and then end the process
        coordinator = launch().find_coordinator()
        if coordinator is None:
            if not start:
                return False
            # The settings of the process that started the cluster apply.
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
        """Renew this process's hold on the model from now on. `access` is that of its load."""
        with self._held_lock:
            self._access[model_id] = access
            self._held[model_id] = self._held.get(model_id, 0) + 1
            if self._renewer is None:
                self._renewer = threading.Thread(target=self._renew_loop, name="longshore-renew", daemon=True)
                self._renewer.start()

    def end_coordinator(self) -> None:
        """Kill the coordinator for good, after it has freed its resources. This process then holds nothing."""
        super().end_coordinator()
        with self._held_lock:
            self._held.clear()
            self._access.clear()

    def drop(self, model_id: str) -> bool:
        """Remove one hold of this process. Return whether it was the last; False also when there was none."""
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

    def access_of(self, model_id: str) -> StoreAccess | None:
        """Return this process's access to a model that it holds; None when it holds none."""
        with self._held_lock:
            return self._access.get(model_id)

    def read_with(self, model_id: str, access: StoreAccess) -> None:
        """Note that a model which this process holds is read so from now on."""
        with self._held_lock:
            if model_id in self._access:
                self._access[model_id] = access

    def holds(self, model_id: str) -> bool:
        """Return whether this process holds the model."""
        with self._held_lock:
            return model_id in self._held

    def close(self) -> None:
        """Release all holds of this process, and end the cluster if this process started it. Idempotent."""
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
                self._renewer.join(RENEWED_S)  # Ray may end next, so the thread must not be inside a call of Ray
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
        """Run `work`, unless Ray dies meanwhile. Ray's calls would block for a minute and then end the process."""
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
                except Exception:  # the thread must go on, or every hold of the process would lapse
                    _LOG.exception("holds were not renewed")

    def _renew(self, held: list[str]) -> None:
        for model_id in self.call("renew", self.client_id, held):
            if (access := self._access.get(model_id)) is not None:
                with contextlib.suppress(LongshoreError):  # the store refused the access; go on with other models
                    self.call("supply", model_id, self.client_id, access)


def connect(
    address: str | None,
    config: Config,
    *,
    start: bool = True,
    any_version: bool = False,
    patience: Patience = UNLIMITED,
) -> Connection | None:
    """Return the process's connection, made at the first call. None if there is no coordinator and `start` is False.

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
    """Return (ray, actors.launch) of a running cluster, with or without a coordinator. Raises ClusterLost."""
    ray = import_ray()
    if not ray.is_initialized():
        with sigterm_kept():
            if join(ray, address, start=False) is None:
                raise ClusterLost(
                    "no Ray cluster runs here", hint="--address or RAY_ADDRESS says which cluster is meant"
                )
    return ray, launch()


def joined(config: Config) -> Connection | None:
    """Return this process's existing connection if its coordinator runs. Never joins a cluster."""
    if _connection is None or not import_ray().is_initialized():
        return None
    return connect(None, config, start=False)


def disconnect() -> None:
    """Release all holds of this process and close the connection. A local cluster that it started ends."""
    global _connection
    with _lock:
        connection, _connection = _connection, None
    if connection is not None:
        atexit.unregister(connection.close)
        connection.close()
