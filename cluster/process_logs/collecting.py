"""Logs of a whole cluster, with a Ray task per node: no dashboard is needed, and no coordinator.

    LogCollector.collect --read_logs, a task per node--> LogPieces --LineReader--> lines by time

Files of a node that is gone went with it. What Ray has rotated away is not looked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config import Config
from cluster.connection import join_cluster
from cluster.errors import ClusterLost, ConfigError
from cluster.joining.head_watch import HeadWatch, lost_after_s
from cluster.joining.node_tasks import Node, living_nodes, on_every_node, why_no_answer
from cluster.joining.ray_join import address_of
from cluster.joining.ray_private import logs_folder
from cluster.process_logs.log_files import LogPiece, is_full, read_logs
from cluster.process_logs.log_lines import LineReader, LogFilter, LogLine, LogProcess, merged

MOST_ROUNDS = 64  # of answers, when there is more than one can hold
READ_S = 30.0  # a node's first task starts a Python process


class LogCollector:
    """Joins the cluster; each `collect` answers with what has been logged since the last one."""

    def __init__(self, address: str | None, wanted: LogFilter, host: str | None = None) -> None:
        """`host`: only of that node, by name, IP or the beginning of its Ray id. Raises ClusterLost."""
        self._ray, self._launch = join_cluster(address)
        patience_s = lost_after_s(Config.from_env().cluster_lost_after_s)
        self._head = HeadWatch(address_of(self._ray), patience_s)
        self._host = host
        self._reader = LineReader(wanted)
        self._seen: dict[str, int] = {}  # file -> bytes read; names are unique in a cluster
        self._heard = False  # there was a node to ask
        self.silent: dict[str, str] = {}  # host -> why the last collect had nothing of it

    def collect(self) -> list[LogLine]:
        """Lines by time. Raises ClusterLost when the head or the node that was named is gone, ConfigError for none."""
        self._head.wait()  # Ray's own calls do not come back without it
        nodes = [node for node in living_nodes(self._ray) if self._host is None or is_called(node, self._host)]
        if not nodes:
            if self._heard:
                raise ClusterLost("the node is gone, and its logs with it", node=self._host)
            raise ConfigError("no living node is called that", hint="`longshore status` lists hosts", node=self._host)
        self._heard = True
        self.silent = {}
        lines: list[LogLine] = []
        for _ in range(MOST_ROUNDS):
            found, nodes = self._round(nodes)
            lines += found
            if not nodes:
                break
        return merged(lines)

    def _round(self, nodes: Sequence[Node]) -> tuple[list[LogLine], list[Node]]:
        """Return the lines of one answer of each node, and the nodes to ask again: all that answered, if one has more.

        Nodes of one machine read the same files, and only the process's own node knows its name. So none is left out.
        """
        names: dict[tuple[str, int], LogProcess] = self._launch.processes()
        found: dict[str, tuple[Node, LogPiece]] = {}  # nodes of one machine may share the folder: each file once
        more = False
        answered = []
        for node, answer in on_every_node(self._ray, [(node, (self._seen,)) for node in nodes], read_here, READ_S):
            if isinstance(answer, BaseException):
                self.silent[node["NodeManagerHostname"]] = why_no_answer(answer)
                continue
            answered.append(node)
            more = more or is_full(answer)
            for piece in answer:
                if piece.file not in found or (node["NodeID"], piece.pid) in names:
                    found[piece.file] = node, piece
        lines: list[LogLine] = []
        for node, piece in found.values():
            self._seen[piece.file] = piece.end
            process = names.get((node["NodeID"], piece.pid))
            lines += self._reader.read(node["NodeManagerHostname"], piece, process)
        return lines, answered if more else []


def is_called(node: Node, name: str) -> bool:
    """Whether a node of `ray.nodes()` is meant by `name`."""
    return name in (node["NodeManagerHostname"], node["NodeManagerAddress"]) or (
        len(name) >= 6 and node["NodeID"].startswith(name)
    )


def read_here(seen: dict[str, int]) -> list[LogPiece]:
    """The task: on the node that it runs on."""
    return read_logs(logs_folder(), seen)
