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
    """y = x W^T + b over 2-D rows."""

    def __init__(
        self, in_features: int, out_features: int, options: WeightOptions, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = options.empty(out_features, in_features)
        self.bias = options.empty(out_features) if bias else None

    def split(self, sizes: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return views of the weight (and bias) of each part of a merged projection."""
        parts = [{"weight": weight} for weight in self.weight.split(list(sizes))]
        if self.bias is not None:
            for part, bias in zip(parts, self.bias.split(list(sizes)), strict=True):
                part["bias"] = bias
        return parts

    def forward(self, x: Tensor) -> Tensor:
        """Project rows [num_tokens, in_features] to [num_tokens, out_features]."""
        return F.linear(x, self.weight, self.bias)
