"""Pages mapped before they are used: one system call for many, instead of one trap for each."""

from __future__ import annotations

import ctypes
import mmap

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.11 has no name for it
_PAGE = mmap.PAGESIZE

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # releases the GIL, which mmap.madvise does not
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_madvise.restype = ctypes.c_int


def populate(address: int, size_bytes: int) -> bool:
    """Make the pages that hold `[address, address + size_bytes)` present and writable; what is in them stays.

    Every page of the range must belong to a writable mapping of the caller's. False where the kernel cannot: then
    nothing is lost but time. Releases the GIL.
    """
    if size_bytes <= 0:
        return True
    start = address - address % _PAGE
    end = -(-(address + size_bytes) // _PAGE) * _PAGE
    return bool(_madvise(start, end - start, _MADV_POPULATE_WRITE) == 0)


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Where a writable buffer begins in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
