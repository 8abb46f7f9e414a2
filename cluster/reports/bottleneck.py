"""Which stage a load spent its time on: the one that has to get faster if the load is to. Pure.

    start-up   planning and starting workers took longer than moving bytes
    store      requests waited for the store's bytes, or before another try
    disk       reading chunks of the disk tier, and checking them
    verify     hashing
    memory     making host memory present that tensors are the first to use
    place      copying to where tensors live; also when fetching waits because placing keeps the slots
    device     the device's own copies, likewise
    slots      fetching waited for slots of the arena though nothing keeps them for long: the arena is small
    control    fetching waited for the agent to hand out leases
    cpu        all of these wanted more processor than there is

Streaming stages overlap, so the limit is the one that is busy for the largest part of the ranks' load time; the
others wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.reports.rank_report import RankReport, StageTimes
from cluster.units import show_bytes, show_rate

MUCH = 0.25  # of the load time waited for slots: what keeps them is looked for
BUSY = 0.6  # of the load time at work while slots were waited for: that is what keeps them
FULL = 0.9  # of the host's processor time in use
OURS = 0.4  # of it in use by the load's own ranks

_DOING = {
    "store": "reading",
    "disk": "reading from disk",
    "verify": "hashing",
    "memory": "mapping fresh memory",
    "place": "placing",
}


@dataclass(frozen=True, slots=True)
class LoadLimit:
    """The limit of one load."""

    stage: str  # see the module; "resident" for a load that moved nothing
    share: float  # of the load time that stage was busy; of the whole time for "start-up"; of all processors for "cpu"
    sentence: str  # for people
    shares: dict[str, float] = field(default_factory=dict)  # of every streaming stage, in the ranks' load time


def find_limit(
    ranks: Sequence[RankReport],
    *,
    connect_s: float = 0.0,
    plan_s: float,
    start_s: float,
    load_s: float,
    total_s: float,
    resident: bool,
) -> LoadLimit:
    """What limited a load of these ranks; the times are those of `LoadReport`."""
    if resident:
        return LoadLimit("resident", 0.0, "the model was there already: nothing had to move")
    shares = stage_shares(ranks)
    before_s = connect_s + plan_s + start_s
    if before_s > load_s:
        said = (
            f"start-up: {before_s:.2f} of {total_s:.2f} s had passed before bytes moved "
            f"(cluster {connect_s:.2f} s, planning {plan_s:.2f} s, workers {start_s:.2f} s)"
        )
        return LoadLimit("start-up", min(1.0, before_s / total_s), said, shares)
    host_busy, ours = _processors(ranks)
    stages = sum((rank.stages for rank in ranks), start=StageTimes())
    if host_busy >= FULL and ours >= OURS:
        largest = max(_DOING, key=lambda stage: shares[stage])
        doing = _DOING[largest]
        said = (
            f"cpu: the processors were {host_busy:.0%} busy, {ours:.0%} with this load's ranks; "
            f"the largest part of their time went into {doing} ({shares[largest]:.0%})"
        )
        return LoadLimit("cpu", host_busy, said, shares)
    stage = _busiest(shares)
    return LoadLimit(stage, shares[stage], _sentence(stage, shares, stages, ranks), shares)


def stage_shares(ranks: Sequence[RankReport]) -> dict[str, float]:
    """Part of the ranks' load time that each stage was busy, 0 to 1; stages overlap."""
    stages = sum((rank.stages for rank in ranks), start=StageTimes())
    wall_s = sum(rank.load_s for rank in ranks)
    # What requests work on, divided as their threads' time is; the thread that only places is one of its own.
    streaming_s = stages.fetch_s + stages.disk_s + stages.verify_s + stages.place_fetching_s
    on_disk = stages.disk_s / streaming_s if streaming_s else 0.0
    verifying = stages.verify_s / streaming_s if streaming_s else 0.0
    placing = stages.place_fetching_s / streaming_s if streaming_s else 0.0
    placing_s = stages.working_s * placing + max(0.0, stages.place_s - stages.place_fetching_s)
    fresh = min(1.0, stages.fresh_s / stages.place_s) if stages.place_s else 0.0
    seconds = {
        "store": stages.working_s * (1 - on_disk - verifying - placing) + stages.wait_retry_s,
        "disk": stages.working_s * on_disk,
        "verify": stages.working_s * verifying,
        "memory": placing_s * fresh,
        "place": placing_s * (1 - fresh),
        "device": stages.device_s,
        "slots": stages.wait_slot_s,
        "control": stages.wait_lease_s,
    }
    return {stage: min(1.0, max(0.0, spent_s / wall_s)) if wall_s else 0.0 for stage, spent_s in seconds.items()}


def _busiest(shares: dict[str, float]) -> str:
    if shares["slots"] >= MUCH:
        keepers = ("device", "place", "memory")
        if sum(shares[keeper] for keeper in keepers) >= BUSY:
            return max(keepers, key=lambda keeper: shares[keeper])
    return max(shares, key=lambda stage: shares[stage])


def _processors(ranks: Sequence[RankReport]) -> tuple[float, float]:
    """(part of the processors that was busy, and with the ranks), on the host where that was most."""
    found = [(0.0, 0.0)]
    for host in {rank.host for rank in ranks}:
        there = [rank for rank in ranks if rank.host == host and rank.cpus and rank.load_s]
        if there:
            ours = sum(rank.cpu_s / rank.load_s for rank in there) / max(rank.cpus for rank in there)
            found.append((max(rank.host_busy for rank in there), min(1.0, ours)))
    return max(found)


def _sentence(stage: str, shares: dict[str, float], stages: StageTimes, ranks: Sequence[RankReport]) -> str:
    share = f"{shares[stage]:.0%} of the load time"
    if stage == "store":
        requests = sum(rank.requests for rank in ranks)
        throttles = sum(rank.throttles for rank in ranks)
        refused = f"; it asked for fewer requests {throttles} times" if throttles else ""
        rate = show_rate(stages.fetch_bytes, max((rank.load_s for rank in ranks), default=0.0))
        return f"store: requests waited for its bytes in {share}, {rate} with {requests} requests in flight{refused}"
    if stage == "disk":
        return f"disk: reading and checking chunks there took {share}, {show_bytes(stages.disk_bytes)} in all"
    if stage == "verify":
        return f"verify: hashing took {share}, {show_rate(stages.verify_bytes, stages.verify_s)} per thread"
    if stage == "place":
        return f"place: copying to the tensors' memory took {share}, {show_rate(stages.place_bytes, stages.place_s)}"
    if stage == "memory":
        return (
            f"memory: mapping fresh host memory took {share}; workers that are kept warm reuse theirs "
            "(LONGSHORE_WARM_WORKERS_S)"
        )
    if stage == "device":
        return f"device: its copies took {share}, {show_bytes(stages.place_bytes)} in all"
    if stage == "slots":
        return f"slots: fetching waited for a free slot in {share}; a larger arena helps (LONGSHORE_ARENA_BYTES)"
    return f"control: fetching waited for leases from the node's agent in {share}"
