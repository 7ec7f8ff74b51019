"""Layers of the block drafter's backbone: attention to context and block, MLP, norms.

A layer reads the fused context of every sequence and updates the rows of all blocks. Linear layers
run over all rows at once; attention goes sequence by sequence, its scores of context and block side
by side under one softmax. Norms, rotation and softmax are float32 inside. Flavours: Qwen3's layers,
and those of Gemma 4's global attention.
Shapes: T context rows, A anchors, s slots of a block, R = A s block rows, d hidden_size, K KV
heads, q query heads for each of them, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from forerun.drafters.dspark.config import DSparkConfig

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(slots=True)
class Span:
    """One sequence: its rows among the features, its anchors, and what those may not see."""

    rows: slice
    anchors: slice
    hidden_rows: Tensor  # [anchors, 1, rows] bool


@dataclass(slots=True)
class BlockLayout:
    """What all layers share: the spans, slots per block, and the rotation of context then block."""

    spans: list[Span]
    num_slots: int
    num_context: int
    cos: Tensor  # [T + R, 1, 1, D / 2] float32
    sin: Tensor  # [T + R, 1, 1, D / 2] float32


class DSparkLayer(nn.Module):
    """One layer: x += attention(norm(x), context); x += mlp(norm(x))."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, context: Tensor, layout: BlockLayout) -> Tensor:
        """Update block rows [R, d]; the context [T, d] stays as it is."""
        x = x + self.self_attn(self.input_layernorm(x), context, layout)
        return x + self.mlp(self.post_attention_layernorm(x))


class Gemma4Layer(DSparkLayer):
    """Norms what attention and MLP give as well, and scales its output by a stored number."""

    layer_scalar: Tensor

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Tensor, context: Tensor, layout: BlockLayout) -> Tensor:
        """Update block rows [R, d]; the context [T, d] stays as it is."""
        mixed = self.self_attn(self.input_layernorm(x), context, layout)
        x = x + self.post_attention_layernorm(mixed)
        update = self.mlp(self.pre_feedforward_layernorm(x))
        return (x + self.post_feedforward_layernorm(update)) * self.layer_scalar


def build_layer(config: DSparkConfig) -> DSparkLayer:
    """Return a layer of the configured flavour."""
    return {"qwen3": DSparkLayer, "gemma4": Gemma4Layer}[config.flavour](config)


class BlockAttention(nn.Module):
    """Attention of block rows to their context and their block; one k/v projection for both."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        d, size = config.hidden_size, config.head_dim
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = size
        self.scale = config.attention_scale
        self.eps = config.rms_norm_eps
        self.q_proj = nn.Linear(d, config.num_heads * size, bias=False)
        self.k_proj = nn.Linear(d, config.num_kv_heads * size, bias=False)
        has_v = not config.values_are_keys
        self.v_proj = nn.Linear(d, config.num_kv_heads * size, bias=False) if has_v else None
        self.o_proj = nn.Linear(config.num_heads * size, d, bias=False)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def forward(self, y: Tensor, context: Tensor, layout: BlockLayout) -> Tensor:
        """Return the update [R, d] of normed block rows [R, d]."""
        first, num_slots = layout.num_context, layout.num_slots
        q = self._rotate(self.q_norm(self._split(self.q_proj(y))), layout, first)
        keys, values = self._project_kv(torch.cat([context, y]), layout)
        # [R, K q, D] -> [K, A, s q, D]: the rows of a block and the heads that share keys are one.
        q = q.view(-1, num_slots, self.num_kv_heads, q.shape[1] // self.num_kv_heads, self.head_dim)
        q = q.permute(2, 0, 1, 3, 4).flatten(2, 3).contiguous() * self.scale
        mixed = _attend(q, keys, values, layout)
        mixed = mixed.unflatten(2, (num_slots, -1)).permute(1, 2, 0, 3, 4)
        return self.o_proj(mixed.reshape(len(y), -1))

    def _project_kv(self, rows: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor]:
        """Return keys and values [K, T + R, D]."""
        projected = self._split(self.k_proj(rows))
        keys = self._rotate(self.k_norm(projected), layout, 0)
        if self.v_proj is None:
            values = normalise(projected, self.eps).to(projected.dtype)
        else:
            values = self._split(self.v_proj(rows))
        return keys.transpose(0, 1), values.transpose(0, 1)

    def _split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (-1, self.head_dim))

    def _rotate(self, heads: Tensor, layout: BlockLayout, first: int) -> Tensor:
        """Rotate [rows, heads, D], whose first row is row `first` of the layout."""
        halves = heads.unflatten(-1, (2, -1)).float()
        a, b = halves[..., :1, :], halves[..., 1:, :]
        cos, sin = layout.cos[first:], layout.sin[first:]
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-2)
        return rotated.flatten(-2).to(heads.dtype)


class MLP(nn.Module):
    """down(act(gate x) * up x)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        d, size = config.hidden_size, config.intermediate_size
        self.activation = config.activation
        self.gate_proj = nn.Linear(d, size, bias=False)
        self.up_proj = nn.Linear(d, size, bias=False)
        self.down_proj = nn.Linear(size, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the update of normed rows."""
        return self.down_proj(_ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight in float32; the result is in the type to compute in."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return normalise(x, self.eps, self.weight.float()).to(compute_dtype(self.weight))


def normalise(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Return the RMS norm of the last dimension in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps)


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Return what linear layers compute in: autocast's type where it is on."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def _attend(
    q: Tensor,  # [K, A, s q, D], scaled
    keys: Tensor,  # [K, T + R, D], context then block rows
    values: Tensor,  # [K, T + R, D]
    layout: BlockLayout,
) -> Tensor:
    """Return the mixed values [K, A, s q, D]."""
    context_keys, block_keys = keys.split(
        [layout.num_context, keys.shape[1] - layout.num_context], 1
    )
    context_values, block_values = values.split([context_keys.shape[1], block_keys.shape[1]], 1)
    block_keys = block_keys.unflatten(1, (-1, layout.num_slots))
    block_values = block_values.unflatten(1, (-1, layout.num_slots))
    block_scores = q @ block_keys.mT
    mixed = [
        _attend_span(
            q[:, span.anchors],
            context_keys[:, span.rows],
            context_values[:, span.rows],
            block_scores[:, span.anchors],
            block_values[:, span.anchors],
            span.hidden_rows,
        )
        for span in layout.spans
    ]
    return torch.cat(mixed, dim=1)


def _attend_span(
    q: Tensor,  # [K, a, s q, D] of one sequence's anchors
    keys: Tensor,  # [K, rows, D]
    values: Tensor,  # [K, rows, D]
    block_scores: Tensor,  # [K, a, s q, s]
    block_values: Tensor,  # [K, a, s, D]
    hidden_rows: Tensor,  # [a, 1, rows]
) -> Tensor:
    """Mix context and block under one softmax."""
    scores = (q.flatten(1, 2) @ keys.mT).unflatten(1, q.shape[1:3])
    scores.masked_fill_(hidden_rows, -math.inf)
    weights = torch.cat([scores, block_scores], dim=-1).float().softmax(-1).to(q.dtype)
    on_context, on_block = weights.split([keys.shape[1], block_scores.shape[-1]], dim=-1)
    mixed = (on_context.flatten(1, 2) @ values).unflatten(1, q.shape[1:3])
    return mixed + on_block @ block_values
