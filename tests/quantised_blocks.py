"""Quantised blocks for tests: any bytes, with scales that are finite.

`EXTREMES` are bytes at which packed codes, sub-block scales and minima are all smallest, largest or
alternating; `make_blocks` draws everything else at random.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.quantisation.formats import FORMATS, BlockFormat, BlockTensor

EXTREMES = (0x00, 0xFF, 0x7F, 0x80, 0x0F, 0xF0, 0x55)
# Where ggml's fp16 numbers lie in a block.
HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
}


def put_halves(blocks: np.ndarray, kind: str, values: np.ndarray) -> None:
    """Write fp16 numbers [number of fields, B] into blocks [B, block_bytes]."""
    for place, stored in zip(HALVES[kind], values.astype("<f2"), strict=True):
        blocks[:, place : place + 2] = stored.view(np.uint8).reshape(-1, 2)


def fill_blocks(
    num_blocks: int,
    block_bytes: int,
    kind: str,
    rng: np.random.Generator,
    *,
    fill: int | None,
    scale: float = 0.01,
) -> np.ndarray:
    """Return blocks of random bytes, or of one byte, under random scales."""
    blocks = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    if fill is not None:
        blocks[:] = fill
    put_halves(blocks, kind, rng.normal(0, scale, (len(HALVES[kind]), num_blocks)))
    return blocks


def make_blocks(
    name: str,
    rows: int,
    in_features: int,
    *,
    seed: int = 0,
    fill: int | None = None,
    scales: Sequence[float] | None = None,
) -> BlockTensor:
    """Return a tensor of random bytes, or of one byte, under random scales or some of these."""
    kind: BlockFormat = FORMATS[name]
    num_blocks = rows * in_features // kind.block_size
    rng = np.random.default_rng(seed)
    blocks = fill_blocks(num_blocks, kind.block_bytes, name, rng, fill=fill)
    if scales is not None:
        put_halves(blocks, name, rng.choice(scales, (len(HALVES[name]), num_blocks)))
    return BlockTensor(blocks.reshape(rows, -1), kind)
