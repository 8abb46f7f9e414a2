"""Every metric: its name, kind, help and labels. `python -m cluster.telemetry.metrics` prints docs/metrics.md from it.

Names and units as Prometheus has them: seconds and bytes, counters end in `_total`. `node` is a host's name, `model`
the last part of the model's URI (at most `labels.MOST_MODELS`, then "other"). What a coordinator cannot know is not
there, rather than 0.
"""

from __future__ import annotations

import enum
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit


class Kind(enum.Enum):
    """As Prometheus calls them."""

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
BUCKETS_S = (0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0, 1800.0)  # of durations


def _family(kind: Kind, name: str, labels: str, text: str) -> Family:
    family = Family(f"longshore_{name}", kind, text, tuple(labels.split()))
    FAMILIES.append(family)
    return family


def _counter(name: str, labels: str, text: str) -> Family:
    return _family(Kind.COUNTER, f"{name}_total", labels, text)


def _gauge(name: str, labels: str, text: str) -> Family:
    return _family(Kind.GAUGE, name, labels, text)


# -- what loads did, by node and model -----------------------------------------------------------------------------

CHUNK_BYTES = _counter(
    "chunk_bytes",
    "node model source",
    "Bytes of needed chunks, by where the node had them from: store_via_arena, store_direct (past the arena, into a "
    "rank's memory), disk, arena. What was fetched again counts again.",
)
CHUNKS = _counter("chunks", "node model source", "Needed chunks, by where the node had them from.")
CHUNKS_VERIFIED = _counter("chunks_verified", "node model", "Chunks that were fetched and had the published digest.")
CHUNKS_CORRUPT = _counter(
    "chunks_corrupt", "node model", "Fetches that were thrown away because the chunk's digest was wrong."
)
RETRIES = _counter("retries", "node model cause", "Tries that failed and were repeated, by cause.")
LEASES_GRANTED = _counter("leases_granted", "node model", "Orders to fetch a chunk that ranks were given.")
LEASES_TAKEN_BACK = _counter(
    "leases_taken_back", "node model", "Of these, taken back because the rank died or its deadline passed."
)
HEDGES = _counter("hedges", "node model", "Fetches that were begun once more because the first was far too slow.")
HEDGES_WON = _counter("hedges_won", "node model", "Of these, how often the second brought the chunk.")
THROTTLES = _counter("throttles", "node model", "Answers of the store that asked for fewer requests (503, 429).")
STAGE_SECONDS = _counter(
    "stage_seconds",
    "node model stage",
    "Thread-seconds that ranks spent in a stage: fetch (the store's reads), verify, place (copying to the tensors), "
    "device (until the device had copied), disk (reading the disk tier).",
)
STALL_SECONDS = _counter(
    "stall_seconds",
    "node model reason",
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
RANK_PLACED = _gauge("rank_placed_bytes", "node rank model", "Bytes that the rank holds by now.")
RANK_REQUESTS = _gauge("rank_requests", "node rank model", "Requests of the rank that are in flight.")
RANK_ALLOWED_REQUESTS = _gauge(
    "rank_allowed_requests", "node rank model", "Requests that it may have in flight; found from throughput."
)
RANK_SILENT = _gauge(
    "rank_silent_seconds", "node rank model", "Since a rank that still has work last spoke to its agent."
)

# -- nodes -----------------------------------------------------------------------------------------------------------

CACHE_HITS = _counter("cache_hits", "node tier", "Needed chunks that were found in the tier: arena or disk.")
CACHE_MISSES = _counter("cache_misses", "node tier", "Needed chunks that were looked for there in vain.")
CACHE_EVICTIONS = _counter("cache_evictions", "node tier", "Chunks that were dropped from the tier to make room.")
CACHE_BYTES = _gauge("cache_bytes", "node tier", "Bytes of verified chunks in the tier.")
CACHE_LIMIT = _gauge("cache_limit_bytes", "node tier", "The most that the tier may hold.")
DISK_FILES = _gauge("disk_files", "node", "Chunks in the disk tier.")
DISK_WRITTEN = _counter("disk_chunks_written", "node", "Chunks that were written to the disk tier.")
DISK_UNKEPT = _counter(
    "disk_chunks_unkept", "node", "Chunks that should be on disk and are not: evicted too soon, no room, a fault."
)
SLOTS = _gauge(
    "slots",
    "node state",
    "Slots of the arena: free, leased, in_use (committed, and pinned or read), evictable (committed, kept as a cache), "
    "quarantined.",
)
SLOTS_QUARANTINED = _counter(
    "slots_quarantined", "node", "Slots that were fenced because their writer did not let go in time."
)
PROCESS_MEMORY = _gauge(
    "process_memory_bytes",
    "node process model",
    "Resident memory of a process, shared memory (the arena) not counted: coordinator, agent, or rank and its number.",
)
HOST_FREE = _gauge(
    "host_memory_free_bytes", "node", "Memory that can be taken: the host's, or of the tightest control group."
)
HOST_TOTAL = _gauge("host_memory_total_bytes", "node", "What that host or control group has in all.")
SHM_FREE = _gauge("shm_free_bytes", "node", "Free in the file system of the arena, /dev/shm.")
SHM_TOTAL = _gauge("shm_total_bytes", "node", "Its size.")
GPU_FREE = _gauge("gpu_memory_free_bytes", "node gpu", "Free memory of a GPU, in the order of the driver.")
GPU_TOTAL = _gauge("gpu_memory_total_bytes", "node gpu", "What it has in all.")
HEARTBEAT_AGE = _gauge("heartbeat_age_seconds", "node", "Since the coordinator last heard the node's agent.")
AGENT_RESTARTS = _counter("agent_restarts", "node", "Times that the node's agent was restarted by Ray.")
BUILD_INFO = _gauge("build_info", "version", "1; the version of Longshore that the coordinator runs.")


MOST_MODELS = 200  # distinct values of the label; each costs series on every node
MOST_PAIRS = (
    2048  # of node and model that have counters: some 50,000 series, half a second of the coordinator's a scrape
)
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
