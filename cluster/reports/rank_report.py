"""What one rank did in a load: its stages, its requests, its memory and processor time. Plain frozen data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


class Jsonable:
    """Adds `as_dict` to a dataclass."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings, ready for `json.dumps`."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True, slots=True)
class StageTimes(Jsonable):
    """Thread-seconds spent and bytes handled by the stages of one or more ranks."""

    fetch_s: float = 0.0  # inside the store's reads
    fetch_bytes: int = 0  # of reads that came to their end, those with a wrong digest included
    verify_s: float = 0.0  # hashing
    verify_bytes: int = 0
    place_s: float = 0.0  # copying from the arena to the device, and what `fresh_s` has
    place_bytes: int = 0
    place_fetching_s: float = 0.0  # of place_s: by threads that placed at once what they had fetched
    fresh_s: float = 0.0  # of place_s: until host memory that was never used was present
    device_s: float = 0.0  # after a copy, until the device had done it
    wait_chunk_s: float = 0.0  # placer idle: no committed chunk to copy
    disk_s: float = 0.0  # reading and checking chunks on the node's disk
    disk_bytes: int = 0
    # What the requests that a rank may have in flight did: seconds of the rank, divided among so many requests. The
    # rest of its load time there was nothing left to fetch.
    working_s: float = 0.0  # reading, verifying, and placing at once
    wait_slot_s: float = 0.0  # idle: every slot of the arena was in use
    wait_lease_s: float = 0.0  # idle: the agent had not answered yet
    wait_retry_s: float = 0.0  # waiting before another try

    def __add__(self, other: StageTimes) -> StageTimes:
        mine, theirs = asdict(self), asdict(other)
        return StageTimes(**{name: mine[name] + theirs[name] for name in mine})

    def __sub__(self, other: StageTimes) -> StageTimes:
        mine, theirs = asdict(self), asdict(other)
        return StageTimes(**{name: mine[name] - theirs[name] for name in mine})


@dataclass(frozen=True, slots=True)
class ProcessMemory(Jsonable):
    """One process's own memory in a load: what it holds apart from memory that it shares (the arena)."""

    role: str  # "coordinator", "planning", "agent" or "rank 3"
    host: str
    baseline_bytes: int  # before the load, everything imported
    peak_bytes: int
    destination_bytes: int = 0  # host memory of its tensors

    @property
    def beyond_bytes(self) -> int:
        """What the load took beyond its destination."""
        return max(0, self.peak_bytes - self.baseline_bytes - self.destination_bytes)


@dataclass(frozen=True, slots=True)
class RankStatus(Jsonable):
    """One rank of a load or of a resident model at a moment."""

    rank: int
    host: str  # "" before it has a place
    # "waiting": for its place or its worker; "starting": that comes up; "loading"; "ready"; "lost": to be replaced
    state: str
    incarnation: int  # 0 for the first worker of the rank, one more for each replacement
    placed_bytes: int  # as LoadProgress has them, of this rank
    total_bytes: int  # likewise; 0: not known
    own_bytes: int  # the worker's own memory, the arena not counted; 0: not known
    device: str  # "cpu" or "cuda"; which one, when it has everything


@dataclass(frozen=True, slots=True)
class RankReport(Jsonable):
    """One rank, when it has all its slices."""

    rank: int
    node: str  # node id
    host: str
    pid: int
    device: str  # "cpu" or "cuda:0"; "cuda:0+cpu+disk" with a device map
    incarnation: int  # 0 for the first worker of the rank, one more for each replacement
    size_bytes: int  # bytes of its slices
    device_bytes: int  # memory taken for them, alignment included
    stages: StageTimes
    peak_host_bytes: int  # the worker's own memory at its highest, the arena not counted
    start_s: float  # from the coordinator's order to the first chunk to fetch or to copy
    load_s: float  # from there to the last byte placed
    baseline_host_bytes: int = 0  # the worker's own memory before the load, everything imported
    cpu_s: float = 0.0  # processor seconds of the worker during load_s
    host_busy: float = 0.0  # part of the host's processor time in load_s that anybody used, 0 to 1
    cpus: int = 0  # processors that the worker may use
    requests: int = 0  # it ended with so many requests in flight
    peak_requests: int = 0
    throttles: int = 0  # answers of the store that asked for fewer
    converted_tensors: int = 0  # stored tensors that were cast or quantized on their way in
    converted_bytes: int = 0  # what was read for them
    peak_staging_bytes: int = 0  # of device memory beside the slices, for tensors that were still to be converted
    convert_s: float = 0.0  # until they were
    bytes_by_device: dict[str, int] = field(default_factory=dict)  # of device_bytes, with a device map

    @property
    def destination_host_bytes(self) -> int:
        """Host memory that the tensors take."""
        if self.bytes_by_device:
            return self.bytes_by_device.get("cpu", 0)
        return self.device_bytes if self.device == "cpu" else 0
