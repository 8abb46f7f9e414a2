"""The names by which actors find each other. All live in one Ray namespace, detached: nobody owns anybody."""

from cluster.telemetry.process_logs import LogProcess

NAMESPACE = "longshore"
COORDINATOR = "coordinator"


def agent_name(node_id: str) -> str:
    return f"agent-{node_id}"


def worker_name(gang_id: str, rank: int, incarnation: int) -> str:
    """A replacement has a name of its own, so a late message to its predecessor cannot reach it.

    A gang is the workers of one load, and of later ones that take them over: it has the id of the first.
    """
    return f"worker-{gang_id}-{rank}-{incarnation}"


def gang_of_worker(name: str) -> str | None:
    """The gang that a worker's name belongs to; None for other names."""
    parts = name.removeprefix("worker-").rsplit("-", 2)
    return parts[0] if name.startswith("worker-") and len(parts) == 3 else None


def group_name(gang_id: str) -> str:
    return f"group-{gang_id}"


def process_of(name: str) -> LogProcess | None:
    """What an actor of that name does; None for names that are not ours."""
    if name == COORDINATOR:
        return LogProcess("coordinator")
    if name.startswith(agent_name("")):
        return LogProcess("agent")
    gang_id = gang_of_worker(name)
    numbers = name.rsplit("-", 2)[1:]
    if gang_id is None or not all(number.isdecimal() for number in numbers):
        return None
    return LogProcess("worker", gang_id, int(numbers[0]), int(numbers[1]))
