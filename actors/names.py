"""The names by which actors find each other. All live in one Ray namespace, detached: nobody owns anybody."""

NAMESPACE = "longshore"
COORDINATOR = "coordinator"


def agent_name(node_id: str) -> str:
    return f"agent-{node_id}"


def worker_name(load_id: str, rank: int, incarnation: int) -> str:
    """A replacement has a name of its own, so a late message to its predecessor cannot reach it."""
    return f"worker-{load_id}-{rank}-{incarnation}"


def load_of_worker(name: str) -> str | None:
    """The load that a worker's name belongs to; None for other names."""
    parts = name.removeprefix("worker-").rsplit("-", 2)
    return parts[0] if name.startswith("worker-") and len(parts) == 3 else None


def group_name(load_id: str) -> str:
    return f"group-{load_id}"
