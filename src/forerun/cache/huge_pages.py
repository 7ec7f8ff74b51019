"""Ask the system for huge pages behind a range of memory. A no-op where that is not possible."""

from __future__ import annotations

import ctypes
import mmap

_HUGE_PAGE_BYTES = 2 * 2**20


def advise_huge_pages(address: int, num_bytes: int) -> bool:
    """Advise huge pages for the aligned part of a range; return whether the system took it."""
    start = -(-address // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    stop = (address + num_bytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or start >= stop:
        return False
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError):
        return False
    return bool(madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice) == 0)
