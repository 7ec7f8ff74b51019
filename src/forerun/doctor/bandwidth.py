"""How fast all threads together read memory: what bounds a decoding step with few requests."""

from __future__ import annotations

import time

import torch

from forerun.cache.huge_pages import advise_huge_pages

# Far beyond any cache, yet written in about a tenth of a second.
BUFFER_BYTES = 256 * 2**20
_MIN_READS = 3


def measure_read_bandwidth(num_bytes: int = BUFFER_BYTES, budget_s: float = 0.5) -> float:
    """Return the best read speed of a few passes over a buffer, in bytes per second."""
    buffer = torch.empty(num_bytes // 4, dtype=torch.float32)
    # Like the weights and the KV pool: with small pages the same reads are up to a third slower.
    advise_huge_pages(buffer.data_ptr(), num_bytes)
    buffer.zero_()
    times_s: list[float] = []
    while len(times_s) < _MIN_READS or sum(times_s) < budget_s:
        started_s = time.perf_counter()
        # Of torch's reductions the one that keeps up with memory.
        torch.linalg.vector_norm(buffer)
        times_s.append(time.perf_counter() - started_s)
    return num_bytes / min(times_s)
