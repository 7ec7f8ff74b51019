"""Writing K/V without attending leaves in the pool what attention over the same rows leaves."""

from __future__ import annotations

import pytest
import torch

from forerun.attention import build_attention_backend
from forerun.attention.base import AttentionContext
from forerun.kernels import explain_kernels, find_kernels
from ragged_steps import RaggedStep, list_pools, make_layer

REQUESTS = [(0, 5), (7, 1), (30, 4), (0, 20), (15, 1)]


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("name", ["torch_ref", "native"])
def test_rows_written_are_those_attention_writes(name: str, kv_dtype: torch.dtype) -> None:
    if name == "native" and find_kernels() is None:
        pytest.skip(f"no native kernels: {explain_kernels()}")
    step = RaggedStep(REQUESTS, make_layer(index=1), kv_dtype=kv_dtype)
    backend = build_attention_backend(name)
    attended, written = step.build_store(unused=0), step.build_store(unused=0)
    step.run(backend, attended)
    metadata = backend.prepare(step.build_batch(), written)
    context = AttentionContext(backend=backend, kv_store=written, metadata=metadata)
    context.write(*step.new_rows(), 1)
    for expected, got in zip(list_pools(attended, 1), list_pools(written, 1), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert not any(pool.any() for pools in list_pools(written, 0) for pool in pools)


def test_a_fresh_block_is_cleared_before_a_padded_read_can_see_it() -> None:
    """What an earlier owner left, NaN here, must not outlive the first write to a block."""
    step = RaggedStep([(0, 5)], make_layer(), kv_block_size=4)
    store = step.build_store()
    backend = build_attention_backend("torch_ref")
    metadata = backend.prepare(step.build_batch(), store)
    key, value = step.new_rows()
    backend.write(key, value, index=0, kv_store=store, metadata=metadata)
    own = torch.from_numpy(step.tables[0].copy())
    assert bool(store.keys[0][own].isfinite().all())
    assert bool(store.values[0][own].isfinite().all())
