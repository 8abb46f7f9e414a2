"""`storage.host.memory`: pages come at once, and keep what is in them."""

from __future__ import annotations

import mmap
import resource

from storage.host.memory import address_of, populate

SIZE = 8 << 20


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_populated_pages_are_there_and_unchanged() -> None:
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[100:103] = b"abc"
    assert populate(address_of(memory) + 1, SIZE - 1)
    before = faults()
    for position in range(0, SIZE, mmap.PAGESIZE):
        memory[position] = 1
    assert faults() - before < SIZE // mmap.PAGESIZE // 4
    assert memory[100:103] == b"abc"


def test_pages_that_cannot_be_populated_are_reported() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    assert populate(0, mmap.PAGESIZE) is False  # nothing is mapped at address 0
    assert populate(0, 0)
    memory.close()
