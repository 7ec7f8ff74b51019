"""Rows of numbers as int8 with one scale each, in PyTorch: what every device and kernel does.

In float32: scale = amax / 127, q = round(x * (127 / amax)), ties to even; a row reads back as
scale * q, wrong by at most half a scale. A row is a K/V head of one token, or 32 activations of a
linear layer; what becomes of it depends on that row alone.
Shapes: D numbers of a row; any leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows whose largest number is not above this are stored as zeros: 127 / amax must be finite.
TINIEST = 1e-30


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 numbers [.., D] and float32 scales [..] of rows [.., D].

    A row with a NaN or an infinity gets a scale like it, so that reading the row shows it.
    """
    wide = rows.float()
    largest = wide.abs().amax(-1)
    # A tensor, because PyTorch may divide by, and divides, a number through a rounded reciprocal.
    limit = largest.new_tensor(127.0)
    inverse = torch.where(largest > TINIEST, limit / largest, 0.0)
    numbers = (wide * inverse[..., None]).round_().nan_to_num_(0.0)
    return numbers.to(torch.int8), largest / limit


def dequantise_rows(
    numbers: Tensor, scales: Tensor, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Return scale * q of numbers [.., D] and scales [..], computed in float32, in `dtype`."""
    if out is None:
        out = torch.empty(numbers.shape, dtype=dtype, device=numbers.device)
    return torch.mul(numbers, scales[..., None], out=out)
