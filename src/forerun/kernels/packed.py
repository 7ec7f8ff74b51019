"""Weights in the layout of the native linear kernel, and what can be done with them.

A packed weight replaces the plain one: it is as large, and rows can still be read back (a tied
embedding). Every output is one sum in ascending order of the input, so a row's result does not
depend on the rows computed with it.
Shapes: T rows, N out_features, K in_features.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels import Kernels, abi, find_kernels
from forerun.kernels.abi import DTYPE_CODES

# Panels start on a cache line, which is also the widest vector.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [N, K] in panels (bytes, 64-byte aligned)."""

    panels: Tensor
    out_features: int
    in_features: int
    dtype: torch.dtype
    kernels: Kernels

    def describe(self, bias: Tensor | None) -> abi.PackedWeight:
        """Return the kernels' view of this weight and its float32 bias; both must stay alive."""
        return abi.PackedWeight(
            panels=self.panels.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            out_features=self.out_features,
            in_features=self.in_features,
        )

    def multiply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """Return x W^T + b, [T, N], of the weight's type or float32, for x [T, K]."""
        x = _make_dense(x, self.dtype)
        num_rows = len(x)
        out = torch.empty(num_rows, self.out_features, dtype=out_dtype)
        scratch = torch.empty(num_rows if num_rows > 1 else 0, self.in_features, dtype=self.dtype)
        params = abi.LinearParams(
            weight=self.describe(bias),
            x=x.data_ptr(),
            out=out.data_ptr(),
            scratch=scratch.data_ptr(),
            x_stride=x.stride(0),
            num_rows=num_rows,
            out_dtype=DTYPE_CODES[out_dtype],
            dtype=DTYPE_CODES[self.dtype],
            num_threads=torch.get_num_threads(),
        )
        self.kernels.linear(byref(params))
        return out

    def read_rows(self, row_ids: Tensor) -> Tensor:
        """Return rows [T, K] of the weight; raises IndexError beyond its last row."""
        row_ids = row_ids.contiguous()
        out = torch.empty(len(row_ids), self.in_features, dtype=self.dtype)
        params = abi.UnpackParams(
            weight=self.describe(None),
            row_ids=row_ids.data_ptr(),
            out=out.data_ptr(),
            num_rows=len(row_ids),
            dtype=DTYPE_CODES[self.dtype],
            num_threads=torch.get_num_threads(),
        )
        if self.kernels.unpack(byref(params)):
            raise IndexError(f"row ids must lie in 0 .. {self.out_features - 1}")
        return out


class PackedMemory:
    """Memory for the packed weights of one model, in the order in which they are packed."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._used = -buffer.data_ptr() % _ALIGNMENT

    @staticmethod
    def count_bytes(sizes: list[int]) -> int:
        """Return how large a buffer weights of these sizes need."""
        return _ALIGNMENT + sum(_round_up(size) for size in sizes)

    def take(self, num_bytes: int) -> Tensor:
        """Return the next part of the buffer."""
        part = self._buffer[self._used : self._used + num_bytes]
        assert len(part) == num_bytes, "the buffer was counted too small"
        self._used += _round_up(num_bytes)
        return part


def measure_packed(weight: Tensor) -> int | None:
    """Return the size of a weight [N, K] once packed, in bytes; None if it cannot be packed."""
    kernels = find_kernels()
    if kernels is None or not weight.is_cpu or weight.dtype not in DTYPE_CODES:
        return None
    if weight.shape[1] * weight.itemsize % 4:
        return None
    return int(kernels.packed_bytes(byref(_describe_packing(weight, None))))


def pack(weight: Tensor, memory: PackedMemory) -> PackedWeight:
    """Copy a weight that can be packed, [N, K]."""
    kernels = find_kernels()
    num_bytes = measure_packed(weight)
    if kernels is None or num_bytes is None:
        raise ValueError(f"a {weight.dtype} weight {tuple(weight.shape)} cannot be packed here")
    weight = weight.contiguous()
    panels = memory.take(num_bytes)
    kernels.pack(byref(_describe_packing(weight, panels)))
    out_features, in_features = weight.shape
    return PackedWeight(panels, out_features, in_features, weight.dtype, kernels)


def _describe_packing(weight: Tensor, panels: Tensor | None) -> abi.PackParams:
    return abi.PackParams(
        weight=weight.data_ptr(),
        panels=None if panels is None else panels.data_ptr(),
        out_features=weight.shape[0],
        in_features=weight.shape[1],
        dtype=DTYPE_CODES[weight.dtype],
        num_threads=torch.get_num_threads(),
    )


def _make_dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows whose numbers are dense and start on a 4-byte boundary."""
    assert x.dtype == dtype, f"rows are {x.dtype}, the weight is {dtype}"
    usable = x.stride(1) == 1 and x.data_ptr() % 4 == 0 and x.stride(0) * x.itemsize % 4 == 0
    return x if usable else x.contiguous()


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
