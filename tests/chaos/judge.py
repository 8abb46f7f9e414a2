"""Judges which errors the faults of a case justify, and how many bytes may be fetched again. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from actors.node.node_load import MAX_BATCH
from cluster.telemetry.report import LoadReport
from cluster.telemetry.stats import NodeReport
from tests.chaos.cases import DAMAGING, Case, world
from tests.support.fault_proxy import (
    Asked,
    Cut,
    Delay,
    Drop,
    Fault,
    Flip,
    Instead,
    Refuse,
    Rewrite,
    Shorten,
    Stall,
    Trickle,
)

EXACT, REFUSED, WRONG, HUNG, LEAKED = "byte-exact", "correctly refused", "WRONG", "HUNG", "LEAKED"
KINDS = (EXACT, REFUSED, WRONG, HUNG, LEAKED)
BAD = (WRONG, HUNG, LEAKED)

# Errors that may end a load for a fault of the store that stays.
STAYING_ERRORS = {
    "refuses one chunk": ("ChunkFailed StoreUnavailable",),
    "throttles one chunk": ("ChunkFailed Throttled",),
    "denies from now on": ("ChunkFailed AccessDenied", "ChunkFailed CredentialsExpired"),
    "has lost one chunk": ("ChunkFailed ObjectNotFound",),
    "damages one chunk": ("IntegrityError",),
    # The read's own timeout, the end of its lease, or what is left of it when the last try began.
    "stalls one chunk": ("ChunkFailed StoreUnavailable", "ChunkFailed ReadEnded", "ChunkFailed lease_expired"),
    "replaced the object": ("ChunkFailed ObjectChanged", "IntegrityError", "ObjectChanged"),
    "changed the manifest": ("BadSignature",),
}
# Errors that a client may get for an abandoned load.
GIVEN_UP_ERRORS = {"released": ("LoadCancelled",), "timed out": ("LoadTimeout",), "cancelled": ("cancelled",)}


def justifies(case: Case, error: str) -> bool:
    """Return whether this error (its class and, if any, its cause) may end a load under these faults."""
    if case.staying and error in STAYING_ERRORS[case.staying]:
        return True
    if case.given_up and error in GIVEN_UP_ERRORS[case.given_up]:
        return True
    if error == "VersionMismatch":
        return case.other_version
    if error == "IntegrityError":  # without digests damage is found when all has come, too late for another try
        return not case.published and bool(set(DAMAGING) & set(case.passing))
    killed = {"agent" if strike.who == "node" else strike.who for strike in case.strikes if not strike.stopped_s}
    if error == "NodeLost":
        return not case.replaced and any(strike.who == "node" for strike in case.strikes)
    early = any(strike.who == "coordinator" and strike.at < 0 for strike in case.strikes)
    # The coordinator alone knows a load until it has notified the agents.
    return error == "ClusterLost" and (early or {"coordinator", "agent"} <= killed)


def wasted_bytes(struck: Iterable[tuple[Asked, Fault]], chunk_bytes: int) -> int:
    """Return the most bytes that faults of single answers may have wasted.

    Answers that broke off are none of them: the read goes on where it was. What was damaged is fetched again whole,
    and of an answer that was refused by its head, reset or given up for its slowness all of it may have been sent.
    """
    total = 0
    for asked, fault in struck:
        if isinstance(fault, Flip | Instead):
            total += chunk_bytes
        elif isinstance(fault, Rewrite | Shorten | Trickle) or (isinstance(fault, Cut) and fault.reset):
            total += asked.size_bytes
    return total


def kind_of(fault: Fault) -> str:
    """Return which kind of `PASSING` or `DAMAGING` this fault is; "" for neither."""
    match fault:
        case Refuse(status=status):
            return str(status)
        case Drop(reset=reset):
            return "drop-reset" if reset else "drop"
        case Cut(reset=reset):
            return "reset" if reset else "cut"
        case Trickle(bytes_per_s=speed):
            return "throttle" if speed >= 1e6 else "trickle"
    names = {Delay: "delay", Stall: "stall", Flip: "flip", Instead: "zeros", Shorten: "shorten", Rewrite: "wrong-range"}
    return names.get(type(fault), "")


def in_flight_bytes(
    case: Case, struck: Mapping[str, int], fetch_threads: int, chunk_bytes: int, size_bytes: int
) -> int:
    """Bytes that struck processes may have had in flight, of what is fetched through the arena.

    A request of theirs is being read, or has been and the agent does not know. The reads of a worker that dies are
    in the report (`bytes_again`), unless the agent dies too. A rank whose agent dies goes on with all its leases
    until Ray says so, and the next agent knows nothing of them. `struck`: how often, by name.
    """
    ranks = world(case.layouts[0])
    each = fetch_threads * chunk_bytes
    in_hand = min(size_bytes, ranks * (fetch_threads + MAX_BATCH) * chunk_bytes)
    lost = struck.get("node lost", 0) * size_bytes  # and what its arena had
    workers = struck.get("worker killed", 0) + struck.get("worker stopped", 0)
    agents = struck.get("agent killed", 0) + struck.get("agent stopped", 0)
    if case.arena == "smallest":
        each += size_bytes  # what a replaced worker had placed, its arena has long given to other chunks
    return lost + workers * each + agents * in_hand


def needed_of_store(case: Case, nodes: Iterable[NodeReport], chunk_bytes: int, size_bytes: int) -> int:
    """Return the bytes that have to leave the store for what a load's nodes say they had from elsewhere.

    Where nothing befell nodes that feed each other, that is each chunk once, and again if one no longer had it.
    """
    needed, retries, shares = 0, Counter[str](), case.peers and not (case.strikes or case.disk or case.host)
    for node in nodes:
        shares = shares and not node.direct
        needed += node.needed_bytes - node.disk_bytes - max(0, node.peer_bytes - node.refetched_bytes)
        retries.update(node.retries)
    if not shares or {"peer_unavailable", "peer_damaged", "peer_slow"} & retries.keys():
        return needed
    return min(needed, size_bytes + retries["peer_without_chunk"] * chunk_bytes)


def bytes_again(report: LoadReport, chunk_bytes: int) -> int:
    """Return the bytes that the report counts twice: hedges, and leases that ended before their reads."""
    ended = sum(report.retries.get(cause, 0) for cause in ("lease_expired", "worker_died"))
    return (report.hedges + ended) * chunk_bytes
