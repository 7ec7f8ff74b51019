"""Rotary position embedding in the half-split (Hugging Face) layout.

With x = (a, b), each half D/2 wide, at position p: x' = (a cos - b sin, b cos + a sin) with angles
p * f_i, f_i = theta^(-2i/D) / factor_i. Every supported scaling variant is a set of factors.
Shapes: T rows, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forerun.kernels.ops import rotate_heads

# Twice the positions that are asked for are computed, at least so many.
_FIRST_POSITIONS = 4096


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and signed sines of one step's rows, shared by all layers with the same rope."""

    cos: Tensor  # [num_tokens, 1, 1, head_dim / 2]
    sin: Tensor  # [num_tokens, 1, 2, head_dim / 2], (-sin, +sin)


class Rotary(nn.Module):
    """Angles for one theta and one set of frequency factors."""

    inv_freq: Tensor

    def __init__(
        self,
        head_dim: int,
        theta: float,
        *,
        freq_factors: Sequence[float] | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inv_freq = 1.0 / (theta**exponents)
        if freq_factors is not None:
            inv_freq /= torch.tensor(freq_factors, dtype=torch.float32)
        self.register_buffer("inv_freq", inv_freq.to(device), persistent=False)
        self._table: Rotation | None = None

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotation of rows at these positions [num_tokens]."""
        table = self.find_table(int(positions.max()) if len(positions) else 0, dtype)
        return Rotation(cos=table.cos[positions], sin=table.sin[positions])

    def find_table(self, last: int, dtype: torch.dtype) -> Rotation:
        """Return the rotations of all positions up to `last` and some more, by position."""
        table = self._table
        if table is None or table.cos.dtype != dtype or last >= len(table.cos):
            table = self._table = self._compute(max(_FIRST_POSITIONS, 2 * (last + 1)), dtype)
        return table

    def _compute(self, num_positions: int, dtype: torch.dtype) -> Rotation:
        """Return the rotations of all positions below a number.

        A table, so that an angle's bits depend on nothing but its position: vectorised sines differ
        from those at the end of an array.
        """
        positions = torch.arange(num_positions, device=self.inv_freq.device)
        angles = positions.float()[:, None] * self.inv_freq
        sin = angles.sin()
        return Rotation(
            cos=angles.cos()[:, None, None].to(dtype),
            sin=torch.stack((-sin, sin), dim=1)[:, None].to(dtype),
        )


def apply_rotary(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate [num_tokens, num_heads, head_dim]; `heads` is used up and may be the result."""
    return rotate_heads(heads, rotation.cos, rotation.sin)


def split_angles(rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Return plain cosines and sines [num_tokens, head_dim / 2] as views, one row per token."""
    return rotation.cos.flatten(1), rotation.sin[:, 0, 1]
