"""Weights and the linear layer.

A merged projection (q, k and v; gate and up) is one Linear whose rows are filled part by part: its
parts are views, so a loader writes straight into the merged weight and nothing is held twice.
Quantised weights never fill it: they come as blocks, part by part, when the model is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor, nn

from forerun.cache.huge_pages import advise_huge_pages
from forerun.kernels.packed import (
    PackedMemory,
    PackedWeight,
    measure_packed,
    pack,
    pack_blocks,
)
from forerun.quantisation.formats import BlockTensor
from forerun.quantisation.reference import ReferenceWeight


@dataclass(frozen=True, slots=True)
class WeightOptions:
    """Where and how the weights of a model are held."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return an uninitialised frozen weight; memory is touched only when it is filled."""
        data = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(data, requires_grad=False)


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlocks:
    """Where the quantised weight of one Linear comes from, part by part in output order.

    `num_bytes` is its size in the native kernels' layout, None to hold it for the reference. `read`
    and, when what it returned is no longer used, `done` are called once.
    """

    num_bytes: int | None
    read: Callable[[], Sequence[BlockTensor]]
    done: Callable[[], None]


class Block(nn.Module):
    """A module without hooks: calling it is calling `forward`.

    A step makes hundreds of calls whose work takes microseconds; nn.Module's dispatch would be a
    noticeable part of it.
    """

    def __call__(self, *args: Any) -> Any:
        """Run forward."""
        return self.forward(*args)


class Linear(Block):
    """y = x W^T + b over 2-D rows.

    Loaders fill `weight`; `pack` or `pack_for_onednn` may then replace it by a layout that computes
    faster: that of our own kernel (any number of rows, rows can still be read), or oneDNN's.
    `hold_blocks` puts a quantised weight in its place. Only one of them is held.
    """

    def __init__(
        self, in_features: int, out_features: int, options: WeightOptions, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = options.dtype
        self.weight: nn.Parameter | None = options.empty(out_features, in_features)
        self.bias = options.empty(out_features) if bias else None
        self.packed: PackedWeight | ReferenceWeight | None = None
        self.packed_bias: Tensor | None = None
        self.onednn_weight: Tensor | None = None
        self.is_quantised = False
        # How many numbers are held in which type.
        self.weight_types = {str(self.dtype).removeprefix("torch."): in_features * out_features}
        # From this many rows on a packed weight is restored and left to oneDNN: see crossover.py.
        self.plain_from: int | None = None

    @property
    def plain_weight(self) -> Tensor:
        """The weight as a loader fills it, [out_features, in_features]; gone once packed."""
        assert self.weight is not None, "the weight was packed before"
        return self.weight

    def pack(self, memory: PackedMemory) -> None:
        """Hold the weight in the native kernel's layout from now on."""
        self._hold(pack(self.plain_weight, memory))

    def hold_blocks(self, parts: Sequence[BlockTensor], memory: PackedMemory | None) -> None:
        """Hold a quantised weight from now on; without memory, for the reference."""
        if memory is None:
            self._hold(ReferenceWeight(parts, self.dtype))
        else:
            self._hold(pack_blocks(parts, self.dtype, memory))
        self.is_quantised = True
        self.weight_types = dict.fromkeys((part.format.name for part in parts), 0)
        for part in parts:
            self.weight_types[part.format.name] += part.num_values

    def _hold(self, packed: PackedWeight | ReferenceWeight) -> None:
        self.packed = packed
        self.packed_bias = None if self.bias is None else self.bias.data.float()
        self.weight = None

    def pack_for_onednn(self) -> None:
        """Hold the weight in oneDNN's layout from now on, where that is possible."""
        if self.weight is not None and _can_pack_for_onednn(self.weight):
            self.onednn_weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, None)
            self.weight = None

    def split(self, sizes: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return views of the weight (and bias) of each part of a merged projection."""
        parts = [{"weight": weight} for weight in self.plain_weight.split(list(sizes))]
        if self.bias is not None:
            for part, bias in zip(parts, self.bias.split(list(sizes)), strict=True):
                part["bias"] = bias
        return parts

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Project rows [num_tokens, in_features] to [num_tokens, out_features].

        `out_dtype` is the weight's type or float32, which saves rounding sums that are wanted so.
        """
        wanted = out_dtype or self.dtype
        if self.packed is not None:
            if self.plain_from is not None and len(x) >= self.plain_from:
                return self.multiply_plain(x).to(wanted)
            return self.packed.multiply(x, self.packed_bias, wanted)
        if self.weight is not None:
            return F.linear(x, self.weight, self.bias).to(wanted)
        pointwise = torch.ops.mkldnn._linear_pointwise
        return pointwise(x, self.onednn_weight, self.bias, "none", [], "").to(wanted)

    def multiply_plain(self, x: Tensor) -> Tensor:
        """Project rows through the plain layout of a packed weight, restored for this call."""
        assert self.packed is not None, "the weight is not packed"
        weight = self.packed.read_rows(torch.arange(self.out_features))
        return F.linear(x, weight, self.bias)

    def read_rows(self, row_ids: Tensor) -> Tensor:
        """Return fresh rows [num_rows, in_features] of the weight."""
        if self.packed is not None:
            return self.packed.read_rows(row_ids)
        return F.embedding(row_ids, self.plain_weight)


def pack_linears(
    linears: Iterable[Linear], blocks: Mapping[Linear, StoredBlocks] | None = None
) -> bool:
    """Let layers hold their weights as the native kernels read them, in one block of memory.

    Those with stored blocks take these; the others are packed all or, if one of them cannot be,
    none. Return whether all are native now.
    """
    chosen, blocks = list(linears), blocks or {}
    sizes = _measure_plain([linear for linear in chosen if linear not in blocks])
    sizes |= {x: found.num_bytes for x, found in blocks.items() if found.num_bytes is not None}
    buffer = torch.empty(PackedMemory.count_bytes(list(sizes.values())), dtype=torch.uint8)
    advise_huge_pages(buffer.data_ptr(), len(buffer))
    memory = PackedMemory(buffer)
    for linear in chosen:
        if linear in blocks:
            linear.hold_blocks(blocks[linear].read(), memory if linear in sizes else None)
            blocks[linear].done()
        elif linear in sizes:
            linear.pack(memory)
    return all(linear in sizes for linear in chosen)


def _measure_plain(linears: Iterable[Linear]) -> dict[Linear, int]:
    """Return the packed size of every plain weight, or nothing if one has no such layout."""
    sizes: dict[Linear, int] = {}
    for linear in linears:
        size = measure_packed(linear.plain_weight)
        if size is None:
            return {}
        sizes[linear] = size
    return sizes


def _can_pack_for_onednn(weight: Tensor) -> bool:
    """Whether oneDNN computes this weight's type natively on this device."""
    if not weight.is_cpu or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.enabled:
        return False
    ops = torch.ops.mkldnn
    needed = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return all(hasattr(ops, name) for name in needed) and bool(ops._is_mkldnn_bf16_supported())
