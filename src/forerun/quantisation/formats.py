"""Block formats that are computed as they are stored, and tensors held in them. No torch.

A row of K numbers is a run of blocks; a block holds its numbers as small integers, with scales in
front, between or behind them. Sizes and type ids are ggml's, codes those of the native kernels.
Shapes: N rows (out_features), K numbers per row (in_features).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Numbers that share one scale while multiplying, in every format; K must be a multiple.
GROUP_SIZE = 32


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One way of storing numbers; `code` is its number in the kernels (0 is no block format)."""

    name: str
    type_id: int
    code: int
    block_size: int
    block_bytes: int

    def row_bytes(self, in_features: int) -> int:
        """Return the bytes of a row of so many numbers, a multiple of block_size."""
        assert in_features % self.block_size == 0, f"{in_features} numbers in {self.name}"
        return in_features // self.block_size * self.block_bytes


Q8_0 = BlockFormat("Q8_0", 8, 1, 32, 34)
Q4_0 = BlockFormat("Q4_0", 2, 2, 32, 18)
Q4_1 = BlockFormat("Q4_1", 3, 3, 32, 20)
Q5_0 = BlockFormat("Q5_0", 6, 4, 32, 22)
Q5_1 = BlockFormat("Q5_1", 7, 5, 32, 24)
Q4_K = BlockFormat("Q4_K", 12, 6, 256, 144)
Q5_K = BlockFormat("Q5_K", 13, 7, 256, 176)
Q6_K = BlockFormat("Q6_K", 14, 8, 256, 210)

FORMATS = {kind.name: kind for kind in (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K)}


@dataclass(frozen=True, slots=True, eq=False)
class BlockTensor:
    """A weight [N, K] as stored: bytes [N, row_bytes], C-contiguous, maybe a view of a file."""

    blocks: np.ndarray
    format: BlockFormat

    def __post_init__(self) -> None:
        assert self.blocks.dtype == np.uint8, self.blocks.dtype
        assert self.blocks.ndim == 2, self.blocks.shape
        assert self.blocks.shape[1] % self.format.block_bytes == 0, self.blocks.shape

    @property
    def out_features(self) -> int:
        """Rows."""
        return int(self.blocks.shape[0])

    @property
    def in_features(self) -> int:
        """Numbers per row."""
        return int(self.blocks.shape[1]) // self.format.block_bytes * self.format.block_size

    @property
    def num_values(self) -> int:
        """Numbers, all rows together."""
        return self.out_features * self.in_features
