"""Weights in the layout of the native linear kernel, and what can be done with them.

A packed weight replaces the plain or the stored quantised one: it is as large, and rows can still
be read back (a tied embedding). Every output is one sum in ascending order of the input, so a row's
result does not depend on the rows computed with it.
Shapes: T rows, N out_features, K in_features.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.kernels import Kernels, abi, find_kernels
from forerun.kernels.abi import DTYPE_CODES
from forerun.quantisation.formats import GROUP_SIZE, BlockTensor

# Panels start on a cache line, which is also the widest vector.
_ALIGNMENT = 64
# The format of numbers of the model's type.
PLAIN = 0
# Parts must begin at a whole vector of any instruction set.
_PART_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Outputs from number `begin` on, `offset` bytes into the panels; format as in cpp/abi.h."""

    format: int
    begin: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [N, K] in panels (bytes, 64-byte aligned); `dtype` is that of the rows it takes."""

    panels: Tensor
    out_features: int
    in_features: int
    dtype: torch.dtype
    kernels: Kernels
    parts: tuple[PackedPart, ...] = (PackedPart(PLAIN, 0, 0),)
    _described: dict[int, abi.PackedWeight] = field(default_factory=dict, repr=False)

    def describe(self, bias: Tensor | None) -> abi.PackedWeight:
        """Return the kernels' view of this weight and its float32 bias; both must stay alive."""
        bias_address = 0 if bias is None else bias.data_ptr()
        if bias_address not in self._described:
            self._described[bias_address] = self._describe(bias_address)
        return self._described[bias_address]

    def _describe(self, bias_address: int) -> abi.PackedWeight:
        address = self.panels.data_ptr()
        parts = (
            abi.WeightPart(panels=address + part.offset, format=part.format, begin=part.begin)
            for part in self.parts
        )
        return abi.PackedWeight(
            parts=(abi.WeightPart * abi.MAX_PARTS)(*parts),
            num_parts=len(self.parts),
            bias=bias_address,
            out_features=self.out_features,
            in_features=self.in_features,
        )

    def multiply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """Return x W^T + b, [T, N], of the weight's type or float32, for x [T, K]."""
        x = _make_dense(x, self.dtype)
        num_rows = len(x)
        out = torch.empty(num_rows, self.out_features, dtype=out_dtype)
        scratch = torch.empty(num_rows, self.in_features, dtype=self.dtype)
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


def measure_blocks(tensors: Sequence[BlockTensor]) -> int | None:
    """Return the bytes of a merged weight once packed; None if it cannot be computed as it is.

    `tensors` are its parts [N_i, K] in the order of the outputs; formats may differ.
    """
    kernels = find_kernels()
    if kernels is None or not 1 <= len(tensors) <= abi.MAX_PARTS:
        return None
    if tensors[0].in_features % GROUP_SIZE:
        return None
    if any(tensor.out_features % _PART_MULTIPLE for tensor in tensors[:-1]):
        return None
    return sum(_measure_part(kernels, tensor) for tensor in tensors)


def pack_blocks(
    tensors: Sequence[BlockTensor], dtype: torch.dtype, memory: PackedMemory
) -> PackedWeight:
    """Copy quantised tensors that can be packed, as one weight for rows of type `dtype`."""
    kernels, num_bytes = find_kernels(), measure_blocks(tensors)
    if kernels is None or num_bytes is None:
        raise ValueError("these quantised tensors cannot be packed here")
    panels = memory.take(num_bytes)
    parts, begin, offset = [], 0, 0
    for tensor in tensors:
        kernels.pack_blocks(byref(_describe_blocks(tensor, panels.data_ptr() + offset)))
        parts.append(PackedPart(tensor.format.code, begin, offset))
        begin += tensor.out_features
        offset += _measure_part(kernels, tensor)
    in_features = tensors[0].in_features
    return PackedWeight(panels, begin, in_features, dtype, kernels, tuple(parts))


def _measure_part(kernels: Kernels, tensor: BlockTensor) -> int:
    return int(kernels.block_bytes(byref(_describe_blocks(tensor, None))))


def _describe_blocks(tensor: BlockTensor, panels: int | None) -> abi.PackBlocksParams:
    return abi.PackBlocksParams(
        blocks=tensor.blocks.ctypes.data,
        panels=panels,
        format=tensor.format.code,
        out_features=tensor.out_features,
        in_features=tensor.in_features,
        num_threads=torch.get_num_threads(),
    )


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
