"""Self-attention: merged q/k/v projection, optional head norms, rotary, backend, output projection.

Shapes: T rows, Hq query heads, Hkv KV heads, D head_dim. Query and key heads sit side by side in
the merged projection, so norm and rotation treat them as one tensor of Hq + Hkv heads.
"""

from __future__ import annotations

from torch import Tensor

from forerun.attention.base import AttentionContext, AttentionLayer
from forerun.layers.linear import Block, Linear, WeightOptions
from forerun.layers.norm import HeadNorm
from forerun.layers.rotary import Rotation, apply_rotary


class Attention(Block):
    """One attention block; `layer` says what the backend must know about it."""

    def __init__(
        self,
        hidden_size: int,
        layer: AttentionLayer,
        options: WeightOptions,
        *,
        qkv_bias: bool,
        o_bias: bool,
        head_norm_eps: float | None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.num_rotated = layer.num_heads + layer.num_kv_heads
        num_all = self.num_rotated + layer.num_kv_heads
        self.qkv = Linear(hidden_size, num_all * layer.head_dim, options, bias=qkv_bias)
        self.o = Linear(layer.num_heads * layer.head_dim, hidden_size, options, bias=o_bias)
        self.head_norm = None
        if head_norm_eps is not None:
            sizes = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
            self.head_norm = HeadNorm(*sizes, head_norm_eps, options)

    def forward(self, x: Tensor, rotation: Rotation, attention: AttentionContext) -> Tensor:
        """Attend; rows [num_tokens, hidden_size] in and out."""
        heads = self.qkv(x).view(x.shape[0], -1, self.layer.head_dim)
        rotated, value = heads[:, : self.num_rotated], heads[:, self.num_rotated :]
        if self.head_norm is not None:
            rotated = self.head_norm(rotated)
        rotated = apply_rotary(rotated, rotation)
        query, key = rotated[:, : self.layer.num_heads], rotated[:, self.layer.num_heads :]
        return self.o(attention.attend(query, key, value, self.layer))
