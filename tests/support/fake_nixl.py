"""NIXL's agents within one process: they register, describe themselves and READ as those of NIXL 1.5.1 do."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

NETWORK: dict[str, FakeAgent] = {}


@dataclass
class FakeAgent:
    """The methods of `nixl.nixl_agent` that Longshore calls. `state`: what every READ comes to."""

    name: str
    state: str = "DONE"
    memory: list[tuple[int, int]] = field(default_factory=list)  # address, size in bytes
    known: list[str] = field(default_factory=list)
    metadata: bytes | None = None
    reads: list[tuple[int, int, int]] = field(default_factory=list)  # where from, where to, size in bytes
    refuses: str = ""  # name of a method that raises

    def __post_init__(self) -> None:
        NETWORK[self.name] = self

    def _check(self, method: str) -> None:
        if self.refuses == method:
            raise RuntimeError("NIXL_ERR_BACKEND")

    def register_memory(self, described: list[tuple[int, int, int, str]], kind: str) -> object:
        self._check("register_memory")
        assert kind == "DRAM"
        self.memory += [(address, size_bytes) for address, size_bytes, _, _ in described]
        return described

    def deregister_memory(self, described: list[tuple[int, int, int, str]]) -> None:
        for address, size_bytes, _, _ in described:
            self.memory.remove((address, size_bytes))

    def get_agent_metadata(self) -> bytes:
        return self.name.encode() if self.metadata is None else self.metadata

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self._check("add_remote_agent")
        self.known.append(metadata.decode())
        return metadata

    def get_xfer_descs(self, described: list[tuple[int, int, int]], kind: str) -> list[tuple[int, int, int]]:
        assert kind == "DRAM"
        return described

    def initialize_xfer(self, operation: str, ours: Any, theirs: Any, name: str) -> tuple[int, int, int]:
        assert operation == "READ"
        assert name in self.known
        (to, size_bytes, _), (source, as_many, _) = ours[0], theirs[0]
        assert as_many == size_bytes
        for agent, at in ((self, to), (NETWORK[name], source)):
            if not any(start <= at <= at + size_bytes <= start + whole for start, whole in agent.memory):
                raise RuntimeError("NIXL_ERR_NOT_FOUND")
        return source, to, size_bytes

    def transfer(self, handle: tuple[int, int, int]) -> str:
        self._check("transfer")
        self.reads.append(handle)
        return "PROC"

    def check_xfer_state(self, handle: tuple[int, int, int]) -> str:
        if self.state == "DONE":
            source, to, size_bytes = handle
            ctypes.memmove(to, source, size_bytes)
        return self.state

    def release_xfer_handle(self, handle: object) -> None:
        pass

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}
