"""Weights and the linear layer.

A merged projection (q, k and v; gate and up) is one Linear whose rows are filled part by part: its
parts are views, so a loader writes straight into the merged weight and nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class WeightOptions:
    """Where and how the weights of a model are held."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return an uninitialised frozen weight; memory is touched only when it is filled."""
        data = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(data, requires_grad=False)


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

    Loaders fill `weight`; `prepack` may then replace it by oneDNN's own layout, which is never
    slower here and up to 1.6 times faster for few rows (docs/log.md). Only one of the two is held.
    """

    def __init__(
        self, in_features: int, out_features: int, options: WeightOptions, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight: nn.Parameter | None = options.empty(out_features, in_features)
        self.bias = options.empty(out_features) if bias else None
        self.packed_weight: Tensor | None = None

    def prepack(self) -> None:
        """Hold the weight in oneDNN's layout from now on, where that is possible."""
        if self.weight is not None and _can_prepack(self.weight):
            self.packed_weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, None)
            self.weight = None

    def split(self, sizes: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return views of the weight (and bias) of each part of a merged projection."""
        assert self.weight is not None, "the weight was prepacked"
        parts = [{"weight": weight} for weight in self.weight.split(list(sizes))]
        if self.bias is not None:
            for part, bias in zip(parts, self.bias.split(list(sizes)), strict=True):
                part["bias"] = bias
        return parts

    def forward(self, x: Tensor) -> Tensor:
        """Project rows [num_tokens, in_features] to [num_tokens, out_features]."""
        if self.weight is not None:
            return F.linear(x, self.weight, self.bias)
        pointwise = torch.ops.mkldnn._linear_pointwise
        return pointwise(x, self.packed_weight, self.bias, "none", [], "")


def _can_prepack(weight: Tensor) -> bool:
    """Whether oneDNN computes this weight's type natively on this device."""
    if not weight.is_cpu or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.enabled:
        return False
    ops = torch.ops.mkldnn
    needed = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return all(hasattr(ops, name) for name in needed) and bool(ops._is_mkldnn_bf16_supported())
