"""Row-wise reductions over a vocabulary: argmax and drawing by inverse distribution function.

Both work in two levels, blocks then the chosen block: an argmax over block maxima is several times
faster than torch's on a CPU, and adding up blocks first keeps the cumulative sums short and exact.
Shapes: R rows, V entries per row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from forerun.kernels.sampling_ops import find_largest

_ARGMAX_BLOCK = 256
_DRAW_BLOCK = 256
_FLAT_LIMIT = 1024
_BELOW_ONE = 1.0 - 2.0**-53


def argmax_rows(values: Tensor) -> Tensor:
    """Return the index of each row's maximum, the first among equals, int64 [R]. NaN wins."""
    native = find_largest(values)
    if native is not None:
        return native[0]
    num_rows, width = values.shape
    num_blocks = width // _ARGMAX_BLOCK
    if values.is_cuda or num_blocks < 2:
        return values.argmax(dim=-1)
    split = num_blocks * _ARGMAX_BLOCK
    blocks = values[:, :split].unflatten(1, (num_blocks, _ARGMAX_BLOCK))
    block = blocks.amax(dim=-1).argmax(dim=-1)
    rows = torch.arange(num_rows, device=values.device)
    winner = block * _ARGMAX_BLOCK + blocks[rows, block].argmax(dim=-1)
    if split == width:
        return winner
    tail = split + values[:, split:].argmax(dim=-1)
    pair = torch.stack([winner, tail], dim=1)
    return pair[rows, values.gather(1, pair).argmax(dim=-1)]


def find_best(logits: Tensor) -> tuple[list[int], list[bool]]:
    """Return the index of each row's maximum and whether that is finite, on the host."""
    native = find_largest(logits)
    if native is not None:
        indices, largest = native
        return indices.tolist(), [math.isfinite(value) for value in largest.tolist()]
    indices = argmax_rows(logits)
    is_finite = logits.gather(1, indices[:, None]).squeeze(1).isfinite()
    indices_cpu, is_finite_cpu = torch.stack([indices, is_finite.long()]).tolist()
    return indices_cpu, [bool(flag) for flag in is_finite_cpu]


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return one index per row, int64 [R], drawn with probability weight / (sum of the row).

    `weights` [R, V] are >= 0 and need not be normalised; `uniforms` [R] are float64 in [0, 1). An
    entry of weight 0 is never returned unless the whole row is 0.
    """
    width = weights.shape[1]
    if width <= _FLAT_LIMIT:
        return _invert(weights.double(), uniforms)[0]
    missing = -width % _DRAW_BLOCK
    padded = functional.pad(weights, (0, missing)) if missing else weights
    blocks = padded.unflatten(1, (-1, _DRAW_BLOCK))
    block, leftover = _invert(blocks.sum(dim=-1).double(), uniforms)
    rows = torch.arange(len(weights), device=weights.device)
    inner, _ = _invert(blocks[rows, block].double(), leftover)
    return block * _DRAW_BLOCK + inner


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest index whose cumulative weight exceeds u * total, and u inside it."""
    cumulative = weights.cumsum(dim=-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    index = (cumulative <= target).sum(dim=-1, keepdim=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, index)
    leftover = (target - (cumulative.gather(1, index) - weight)) / weight
    return index.squeeze(1), leftover.squeeze(1).clamp(0.0, _BELOW_ONE)
