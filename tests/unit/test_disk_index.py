"""The index against a plain list: LRU, and never more than the budget."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from storage.disk.tier import DiskIndex

BUDGET_BYTES = 100
KEYS = [bytes([number]) for number in range(8)]
SIZES = st.integers(1, 120)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = DiskIndex(BUDGET_BYTES)
        self.chunks: list[tuple[bytes, int]] = []  # least recently used first
        self.reserved: dict[str, int] = {}

    def taken_bytes(self) -> int:
        return sum(size for _, size in self.chunks) + sum(self.reserved.values())

    def forget(self, key: bytes) -> None:
        self.chunks = [chunk for chunk in self.chunks if chunk[0] != key]

    @rule(number=st.integers(0, 3), size=SIZES)
    def reserve(self, number: int, size: int) -> None:
        name = f"part-{number}"
        if name in self.reserved:
            return
        gone = self.index.make_room(size)
        if sum(self.reserved.values()) + size > BUDGET_BYTES:
            assert gone is None
            return
        expected = []
        while self.taken_bytes() + size > BUDGET_BYTES:
            expected.append(self.chunks.pop(0)[0])
        assert gone == expected
        self.index.reserve(name, size)
        self.reserved[name] = size

    @rule(number=st.integers(0, 3), key=st.sampled_from(KEYS))
    def finish(self, number: int, key: bytes) -> None:
        size = self.reserved.pop(f"part-{number}", None)
        if size is None:
            return
        self.index.release(f"part-{number}")
        self.index.add(key, size)
        self.forget(key)
        self.chunks.append((key, size))

    @rule(number=st.integers(0, 3))
    def cancel(self, number: int) -> None:
        self.index.release(f"part-{number}")
        self.reserved.pop(f"part-{number}", None)

    @rule(key=st.sampled_from(KEYS))
    def touch(self, key: bytes) -> None:
        self.index.touch(key)
        found = [chunk for chunk in self.chunks if chunk[0] == key]
        self.forget(key)
        self.chunks += found

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: bytes) -> None:
        self.index.remove(key)
        self.forget(key)

    @rule()
    def look_again(self) -> None:
        self.index.replace(list(self.chunks), self.reserved.items())

    @invariant()
    def agrees(self) -> None:
        assert self.index.keys == tuple(key for key, _ in self.chunks)
        assert self.index.used_bytes == self.taken_bytes() <= BUDGET_BYTES
        assert all((key in self.index) == (key in dict(self.chunks)) for key in KEYS)


TestDiskIndex = Machine.TestCase
