"""A process's line to the coordinator: one answer per call, through restarts of the coordinator and of the head.

call(method) -- answered ------------------------------------------> its result, or the error that it raised
             -- no answer, pings are answered ---------------------> it is at work: wait, as long as the caller wants to
             -- the actor died --> wait until Ray has restarted it, check its version, call again
             -- nothing for COORDINATOR_GONE_S, or the head is lost -> ClusterLost
"""

from __future__ import annotations

import contextlib
import importlib
import math
import time
from typing import Any

from cluster.errors import ClusterLost, LoadCancelled, LoadTimeout, NoCoordinator, VersionMismatch
from cluster.joining.head_watch import HeadWatch
from cluster.joining.patience import UNLIMITED, Patience
from cluster.joining.remote_errors import unwrapped
from longshore.version import PROTOCOL_VERSION, __version__
from storage.errors import LongshoreError

COORDINATOR_GONE_S = 60.0  # one that answers nothing, or is not back, for this long while Ray lives is taken for lost
PING_EVERY_S = 5.0  # while an answer does not come
LOOK_S = 1.0  # at the head, while an answer does not come


class CoordinatorLine:
    """Calls one coordinator actor. Thread-safe."""

    def __init__(self, head: HeadWatch) -> None:
        self.head = head
        self._coordinator: Any = None
        self._refusal: LongshoreError | None = None  # why there is none, when one was found that cannot be used
        self._any_version = False

    def call(
        self, method: str, *args: Any, patience: Patience = UNLIMITED, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        """One answer of the coordinator. A killed one is restarted by Ray: the call is made again until then.

        A coordinator that answers pings is waited for, however long the answer takes; `timeout_s` limits that.

        Raises what the coordinator raised; ClusterLost when it answers nothing for COORDINATOR_GONE_S (or `timeout_s`),
        or when the head is away for too long; LoadTimeout and LoadCancelled as `patience` says.
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
                    give_up_s = time.monotonic() + COORDINATOR_GONE_S  # it comes back after the head does
                if time.monotonic() > give_up_s or not ray.is_initialized():
                    raise ClusterLost(
                        "the coordinator is gone and did not come back", cause=type(error).__name__
                    ) from error
                patience.sleep(0.5)
                if lives:  # Ray's own calls do not come back while it does not
                    self._find_again()
                    found_again = True
            except RayError as error:
                raise ClusterLost("Ray cannot be reached", cause=str(error)[:300]) from error

    def _ask(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], patience: Patience, timeout_s: float | None
    ) -> Any:
        """One call and its answer. Raises what `ray.get` does, and as `call` says."""
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
                ray.cancel(reference)  # nobody waits for it
            raise

    def answer(
        self,
        reference: Any,
        timeout_s: float | None = None,
        *,
        patience: Patience = UNLIMITED,
        pings: _Pings | None = None,
    ) -> Any:
        """What a call to an actor returned. Raises what `ray.get` does; ClusterLost when the head is lost meanwhile.

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
                give_up_s = time.monotonic() + timeout_s  # whoever is asked may come back with the head
            elif time.monotonic() >= give_up_s:
                raise ray.exceptions.GetTimeoutError
        return ray.get(reference)

    def end_coordinator(self) -> None:
        """Kill the coordinator for good; it has freed what it had."""
        import ray

        with contextlib.suppress(Exception):
            ray.kill(self._coordinator, no_restart=True)
        self._coordinator, self._refusal = None, None

    def _check_version(self, hello: dict[str, Any]) -> None:
        """Raises VersionMismatch when the coordinator runs other code; it is not called again then."""
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
    """Asks an actor now and then whether it is there, while it works on a call."""

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
        with contextlib.suppress(ray.exceptions.RayError):  # it died: the call itself fails too
            ray.get(asked)
            return True
        return False


def launch() -> Any:
    """Return `actors.launch`: the one seam that points upward, by name."""
    return importlib.import_module("actors.launch")
