"""RMS norm: x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

Weights and the computation are float32 whatever the type of x; only the result is rounded. A
Gemma weight w, which means (1 + w), is stored as 1 + w: see models/gemma3.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.ops import rms_norm
from forerun.layers.linear import Block, WeightOptions


class RMSNorm(Block):
    """Norm of hidden states."""

    def __init__(self, size: int, eps: float, options: WeightOptions) -> None:
        super().__init__()
        self.weight = options.empty(size, dtype=torch.float32)
        self.eps = eps

    def forward(self, x: Tensor, update: Tensor | None = None) -> Tensor:
        """Normalise rows [num_tokens, size], after adding `update` to them in place."""
        return rms_norm(x, self.weight, self.eps, update)


class HeadNorm(Block):
    """Norm of every query and key head at once; query heads share one weight, key heads another."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, options: WeightOptions
    ) -> None:
        super().__init__()
        # One row per head, so that q and k go through a single multiplication.
        self.weight = options.empty(num_heads + num_kv_heads, head_dim, dtype=torch.float32)
        self.num_heads = num_heads
        self.eps = eps

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise [num_tokens, num_heads + num_kv_heads, head_dim] over head_dim."""
        return rms_norm(heads, self.weight, self.eps)
