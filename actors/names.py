"""The names by which actors find each other. All live in one Ray namespace, detached: nobody owns anybody."""

NAMESPACE = "longshore"
COORDINATOR = "coordinator"


def agent_name(node_id: str) -> str:
    return f"agent-{node_id}"


def worker_name(load_id: str, rank: int, incarnation: int) -> str:
    """A replacement has a name of its own, so a late message to its predecessor cannot reach it."""
    return f"worker-{load_id}-{rank}-{incarnation}"


def group_name(load_id: str) -> str:
    return f"group-{load_id}"
