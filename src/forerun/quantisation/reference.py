"""Int8 multiplication of quantised weights in PyTorch: what the native kernels compute.

Rows are quantised to int8 per 32 numbers. Sums of code times code are integers below 2^24, exact in
float32, so a row's result does not depend on the rows beside it; scales and minima are applied in
float32, group after group.
Shapes: T rows, N out_features, K in_features, G = K / 32 groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.quantisation.decode import Codes, decode
from forerun.quantisation.formats import GROUP_SIZE, BlockTensor
from forerun.quantisation.rows import quantise_rows

_CHUNK_VALUES = 2**22


def quantise_groups(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [T, K] as int8 codes [T, K], float32 scales [T, G] and code sums int32 [T, G].

    A group that is not finite gets a scale that is not.
    """
    codes, scales = quantise_rows(_split_groups(x))
    return codes.flatten(1), scales, codes.sum(dim=2, dtype=torch.int32)


def multiply_reference(x: Tensor, codes: Codes, bias: Tensor | None) -> Tensor:
    """Return x W^T + b, float32 [T, N], for x [T, K].

    Each group adds (weight scale * row scale) * sum(code * row code), then
    minimum * (row scale * sum(row code)).
    """
    rows, row_scales, row_sums = quantise_groups(x)
    rows_by_group = _split_groups(rows.float()).unbind(1)
    weights_by_group = _split_groups(torch.from_numpy(codes.codes).float()).unbind(1)
    scales, minima = torch.from_numpy(codes.scales), torch.from_numpy(codes.minima)
    scaled_sums = row_scales * row_sums.float()
    total = torch.zeros(len(x), len(scales))
    for group, (row, weight) in enumerate(zip(rows_by_group, weights_by_group, strict=True)):
        scale = row_scales[:, group, None] * scales[:, group]
        total += (row @ weight.T).mul_(scale)
        total += scaled_sums[:, group, None] * minima[:, group]
    return total if bias is None else total.add_(bias.float())


class ReferenceWeight:
    """A quantised weight [N, K] without kernels; the same interface as kernels.packed.PackedWeight.

    `parts` follow each other in N and may differ in format; their bytes are copied. Slow: every
    use decodes them anew, a chunk at a time.
    """

    def __init__(self, parts: Sequence[BlockTensor], dtype: torch.dtype) -> None:
        self._parts = [BlockTensor(part.blocks.copy(), part.format) for part in parts]
        self.out_features = sum(part.out_features for part in parts)
        self.in_features = parts[0].in_features
        self.dtype = dtype

    def multiply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """Return x W^T + b, [T, N], for x [T, K]."""
        chunks = [multiply_reference(x, decode(chunk), None) for chunk in self._chunks()]
        out = torch.cat(chunks, dim=1)
        return (out if bias is None else out.add_(bias)).to(out_dtype)

    def read_rows(self, row_ids: Tensor) -> Tensor:
        """Return rows [T, K] of the weight; raises IndexError beyond its last row."""
        wanted = row_ids.numpy()
        if ((wanted < 0) | (wanted >= self.out_features)).any():
            raise IndexError(f"row ids must lie in 0 .. {self.out_features - 1}")
        out = np.empty((len(wanted), self.in_features), np.float32)
        first = 0
        for part in self._parts:
            (places,) = np.nonzero((wanted >= first) & (wanted < first + part.out_features))
            if len(places):
                rows = BlockTensor(part.blocks[wanted[places] - first], part.format)
                out[places] = decode(rows).to_float()
            first += part.out_features
        return torch.from_numpy(out).to(self.dtype)

    def _chunks(self) -> Iterator[BlockTensor]:
        step = max(1, _CHUNK_VALUES // self.in_features)
        for part in self._parts:
            for start in range(0, part.out_features, step):
                yield BlockTensor(part.blocks[start : start + step], part.format)


def _split_groups(rows: Tensor) -> Tensor:
    """Return rows [T, K] as [T, G, 32]."""
    return rows.reshape(len(rows), rows.shape[1] // GROUP_SIZE, GROUP_SIZE)
