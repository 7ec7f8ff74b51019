"""Stored blocks for tests: random bytes with sane scales, or the extremes of what they can hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.quantisation.formats import FORMATS, BlockTensor

FILLS = ("random", "lowest", "highest")
# Where a block has fp16 numbers.
_FACTORS = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def make_blocks(
    name: str,
    shape: tuple[int, int],
    *,
    seed: int = 0,
    fill: str = "random",
    factors: Sequence[float] | None = None,
) -> BlockTensor:
    """Return a tensor [N, K] of a format; `factors` are what its fp16 numbers may be."""
    kind = FORMATS[name]
    num_rows, in_features = shape
    num_blocks = in_features // kind.block_size
    generator = np.random.default_rng(seed)
    size = (num_rows, num_blocks, kind.block_bytes)
    filled = {"lowest": 0, "highest": 255}
    blocks = np.full(size, filled.get(fill, 0), dtype=np.uint8)
    if fill == "random":
        blocks = generator.integers(0, 256, size, dtype=np.uint8)
    for offset in _FACTORS[name]:
        numbers = generator.standard_normal(size[:2]) * 0.01
        if factors is not None:
            numbers = generator.choice(factors, size[:2])
        halves = numbers.astype("<f2")[..., None].view(np.uint8)
        blocks[..., offset : offset + 2] = halves
    return BlockTensor(blocks.reshape(num_rows, -1), kind)
