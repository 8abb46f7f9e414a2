"""Every metric: its name, kind, help and labels. `python -m cluster.telemetry.metrics PAGE` prints the table in PAGE.

Names and units are Prometheus's: seconds and bytes, and counters end in `_total`. `node` is a host's name,
`incarnation` one life of its agent's process, `model` the last part of the model's URI (at most MOST_MODELS, then
"other"). A value that the coordinator cannot know is absent, rather than 0.
"""

from __future__ import annotations

import enum
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit


class Kind(enum.Enum):
    """The kinds of metrics, by Prometheus' names."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One metric. Compared by identity: there is one object of each."""

    name: str  # as it is exposed
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """Names that expressions may use."""
        if self.kind is not Kind.HISTOGRAM:
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))


FAMILIES: list[Family] = []
AGENT = "node incarnation"  # labels of every series that an agent reports
BUCKETS_S = (0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0, 1800.0)  # of durations


def _family(kind: Kind, name: str, labels: str, text: str) -> Family:
    family = Family(f"longshore_{name}", kind, text, tuple(labels.split()))
    FAMILIES.append(family)
    return family


def _counter(name: str, labels: str, text: str) -> Family:
    return _family(Kind.COUNTER, f"{name}_total", labels, text)


def _gauge(name: str, labels: str, text: str) -> Family:
    return _family(Kind.GAUGE, name, labels, text)


def _agent_counter(name: str, labels: str, text: str) -> Family:
    return _counter(name, f"{AGENT} {labels}", text)


def _agent_gauge(name: str, labels: str, text: str) -> Family:
    return _gauge(name, f"{AGENT} {labels}", text)


# -- loads, by agent and model -----------------------------------------------------------------------------

CHUNK_BYTES = _agent_counter(
    "chunk_bytes",
    "model source",
    "Bytes of needed chunks, by where the node had them from: store_via_arena, store_direct (past the arena, into a "
    "rank's memory), disk, arena, peer (another node). What was fetched again counts again.",
)
CHUNKS = _agent_counter("chunks", "model source", "Needed chunks, by where the node had them from.")
SENT_BYTES = _agent_counter(
    "sent_bytes",
    "model",
    "Bytes of chunks that other nodes have received from the node; no label says which nodes.",
)
CHUNKS_VERIFIED = _agent_counter("chunks_verified", "model", "Chunks that were fetched and had the published digest.")
CHUNKS_CORRUPT = _agent_counter(
    "chunks_corrupt", "model", "Fetches that were thrown away because the chunk's digest was wrong."
)
RETRIES = _agent_counter("retries", "model cause", "Tries that failed and were repeated, by cause.")
LEASES_GRANTED = _agent_counter("leases_granted", "model", "Orders to fetch a chunk that ranks were given.")
LEASES_TAKEN_BACK = _agent_counter(
    "leases_taken_back", "model", "Of these, taken back because the rank died or its deadline passed."
)
HEDGES = _agent_counter("hedges", "model", "Fetches that were begun once more because the first was far too slow.")
HEDGES_WON = _agent_counter("hedges_won", "model", "Of these, how often the second brought the chunk.")
THROTTLES = _agent_counter(
    "throttles", "model", "Answers of the store that asked for fewer requests, such as 503 and 429."
)
STAGE_SECONDS = _agent_counter(
    "stage_seconds",
    "model stage",
    "Thread-seconds that ranks spent in a stage: fetch (the store's reads), verify, place (copying to the tensors), "
    "device (until the device had copied), disk (reading the disk tier), cache (copying to and from kept slots).",
)
STALL_SECONDS = _agent_counter(
    "stall_seconds",
    "model reason",
    "Seconds of ranks in which a request that might have been in flight was not, shared among the requests: slot (the "
    "arena was full), lease (the agent had not answered), retry (waiting before another try); and chunk (the placing "
    "thread had nothing to copy).",
)

# -- loads -----------------------------------------------------------------------------------------------------------

RANKS_LOST = _counter("ranks_lost", "model", "Workers that died, stuck ones that were ended, ranks of lost nodes.")
LOADS_FINISHED = _counter(
    "loads_finished",
    "model outcome",
    "Loads that ended: ready, failed, cancelled (nobody wanted it any more); and lost: models that failed after they "
    "had been ready.",
)
LOAD_FAILURES = _counter("load_failures", "model error", "Loads and models that ended with an error, by its type.")
LOAD_DURATION = _family(
    Kind.HISTOGRAM,
    "load_duration_seconds",
    "model outcome",
    "From the request until the load was ready, failed or cancelled.",
)
LOAD_STATE_DURATION = _family(
    Kind.HISTOGRAM,
    "load_state_duration_seconds",
    "state",
    "How long loads stayed in a state that is not the last: planning, waiting, starting, loading, degraded.",
)
CHANGES = _gauge(
    "changes",
    "model state",
    "Changes of resident models that run, by state: planning, staging, streaming, exchanging (updates in place), "
    "scaling (changes of the number of replicas).",
)
UPDATES_FINISHED = _counter(
    "updates_finished",
    "model outcome",
    "Updates in place that ended: done, failed (every rank has the old revision), broken (a streaming update failed).",
)
UPDATE_CHANGED_BYTES = _counter(
    "update_changed_bytes", "model", "Bytes of changed chunks in updates that are done, each counted once."
)
SAVES_FINISHED = _counter(
    "saves_finished",
    "model outcome",
    "Saves and conversions that ended: published, failed, lost (rank 0 reported nothing more). Of those whose rank 0 "
    "is connected to the Ray cluster, as all that follow.",
)
SAVE_FAILURES = _counter("save_failures", "model error", "Saves that failed or were lost, by the type of the error.")
SAVE_DURATION = _family(
    Kind.HISTOGRAM, "save_duration_seconds", "model outcome", "From the call until the save was published or failed."
)
SAVE_BYTES = _counter(
    "save_bytes",
    "model source",
    "Bytes of saved files, by how they came into the store: written, copied (by the store, from the revision before), "
    "reused (skipped, as an interrupted save had written them).",
)
SAVES = _gauge("saves", "model state", "Saves that run, by state: planning, writing, publishing, verifying.")
SAVE_SIZE = _gauge("save_size_bytes", "model", "Bytes of all files of the saves that run, once planned.")
SAVE_DONE = _gauge("save_done_bytes", "model", "Of these, in the store by now.")
SAVE_IDLE = _gauge(
    "save_idle_seconds", "model", "The longest time for which a save has brought no byte and changed no state."
)
SAVE_FOREIGN = _gauge(
    "save_peak_foreign_bytes",
    "model",
    "Most bytes of other ranks that one rank held at a time, in saves that run or ended lately.",
)
LOADS = _gauge("loads", "model state", "Loads and resident models, by state; see docs/load_states.md.")
LOAD_ELAPSED = _gauge(
    "load_elapsed_seconds", "model state", "How long the oldest load has been in a state in which it is not usable."
)
LOAD_IDLE = _gauge(
    "load_idle_seconds",
    "model state",
    "The longest time for which a load that is not usable has placed no byte and changed no state.",
)
MODEL_SIZE = _gauge("model_size_bytes", "model", "Bytes that all ranks of the model's loads will hold, once planned.")
MODEL_PLACED = _gauge("model_placed_bytes", "model", "Of these, placed by now.")
RANKS = _gauge("ranks", "node model state", "Ranks that have a place: loading, ready, lost (to be replaced).")
RANK_PLACED = _agent_gauge("rank_placed_bytes", "rank model", "Bytes that the rank holds by now.")
RANK_REQUESTS = _agent_gauge("rank_requests", "rank model", "Requests of the rank that are in flight.")
RANK_ALLOWED_REQUESTS = _agent_gauge(
    "rank_allowed_requests", "rank model", "Requests that it may have in flight; found from throughput."
)
RANK_SILENT = _agent_gauge(
    "rank_silent_seconds", "rank model", "Since a rank that still has work last spoke to its agent."
)

# -- nodes -----------------------------------------------------------------------------------------------------------

CACHE_HITS = _agent_counter("cache_hits", "tier", "Needed chunks that were found in the tier: arena or disk.")
CACHE_MISSES = _agent_counter("cache_misses", "tier", "Needed chunks that were looked for there in vain.")
CACHE_EVICTIONS = _agent_counter("cache_evictions", "tier", "Chunks that were dropped from the tier to make room.")
CACHE_BYTES = _agent_gauge("cache_bytes", "tier", "Bytes of verified chunks in the tier.")
CACHE_LIMIT = _agent_gauge("cache_limit_bytes", "tier", "The most that the tier may hold.")
ARENA_BYTES = _agent_gauge(
    "arena_bytes",
    "region",
    "Memory that the arena takes now: window (loads work in it; taken once), kept (chunks for later loads).",
)
DISK_FILES = _agent_gauge("disk_files", "", "Chunks in the disk tier.")
DISK_WRITTEN = _agent_counter("disk_chunks_written", "", "Chunks that were written to the disk tier.")
DISK_UNKEPT = _agent_counter(
    "disk_chunks_unkept", "", "Chunks that should be on disk and are not: evicted too soon, no room, a fault."
)
SLOTS = _agent_gauge(
    "slots",
    "state",
    "Slots of the arena's window: free, leased, in_use (committed, and pinned or read), evictable (committed, kept as "
    "a cache), quarantined.",
)
SLOTS_QUARANTINED = _agent_counter(
    "slots_quarantined", "", "Slots that were fenced because their writer did not let go in time."
)
PROCESS_MEMORY = _agent_gauge(
    "process_memory_bytes",
    "process model",
    "Resident memory of a process, shared memory (the arena) not counted: coordinator, agent, or rank and its number.",
)
HOST_FREE = _agent_gauge(
    "host_memory_free_bytes", "", "Memory that can be taken: the host's, or of the tightest control group."
)
HOST_TOTAL = _agent_gauge("host_memory_total_bytes", "", "What that host or control group has in all.")
SHM_FREE = _agent_gauge("shm_free_bytes", "", "Free in the file system of the arena, /dev/shm.")
SHM_TOTAL = _agent_gauge("shm_total_bytes", "", "Its size.")
GPU_FREE = _agent_gauge("gpu_memory_free_bytes", "gpu", "Free memory of a GPU, in the order of the driver.")
GPU_TOTAL = _agent_gauge("gpu_memory_total_bytes", "gpu", "What it has in all.")
HEARTBEAT_AGE = _agent_gauge(
    "heartbeat_age_seconds", "", "Since the coordinator last received a heartbeat of the node's agent."
)
AGENT_RESTARTS = _counter("agent_restarts", "node", "Times that the node's agent was restarted by Ray.")
BUILD_INFO = _gauge("build_info", "version", "1; the version of Longshore that the coordinator runs.")


MOST_MODELS = 200  # distinct values of the label that an agent counts by, or the coordinator
# Pairs of agent and model on a page: some 50,000 series, half a second of the coordinator's at each scrape
MOST_PAIRS = 2048
OTHER = "other"
_LONGEST = 64
_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")


def model_label(uri: str) -> str:
    """The last part of the URI, plain: no query, in which there may be a secret, and nothing of who may read it."""
    try:
        path = urlsplit(uri).path or urlsplit(uri).netloc.rpartition("@")[2]
    except ValueError:  # not a URI
        path = uri.partition("?")[0].partition("#")[0]
    last = path.rstrip("/").rpartition("/")[2]
    return _PLAIN.sub("-", last).strip("-.")[:_LONGEST] or "model"


class BoundedLabels:
    """The first `most` values are themselves, all others "other"."""

    def __init__(self, most: int = MOST_MODELS) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        if value not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(value)
        return value


BEGIN, END = "<!-- printed by cluster.telemetry.metrics -->", "<!-- end of what is printed -->"


def metrics_table() -> str:
    """One row per metric."""
    rows = ["| metric | labels | what it says |", "|---|---|---|"]
    rows += [f"| `{family.name}` | {', '.join(family.labels) or '-'} | {family.help} |" for family in FAMILIES]
    return "\n".join(rows)


def render_page(page: str) -> str:
    """The page with the table as it is now. Raises ValueError when it has no place for it."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{metrics_table()}\n\n{END}{after}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(render_page(Path(name).read_text()))
