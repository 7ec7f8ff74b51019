"""DSparkNetwork: the drafter in plain PyTorch with autograd, for training and as the reference.

Taps of the target's layers are fused once per context row and give every layer keys and values, no
more (arXiv 2607.05147, section 3.1). A block is an anchor token and masks; its rows see
each other, both ways, and the context rows of their sequence before the anchor. All linear layers
run over the rows of all sequences at once; only attention goes sequence by sequence.
Parameters are named as checkpoints name them. Norms, rotation and softmax are float32 inside.
Shapes: T context rows, A anchors, s slots of a block (g drafts), R = A s block rows, n taps,
d hidden_size, K KV heads, q query heads for each of them, D head_dim, V target and Vd draft
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from forerun.drafters.dspark.config import DSparkConfig
from forerun.drafters.dspark.heads import ConfidenceHead, build_markov_head

INIT_STD = 0.02


@dataclass(slots=True)
class BlockBatch:
    """Anchors of several sequences with their context, packed one sequence after the other.

    Row i of a sequence's features is position i. `block_size` counts drafts, at most the config's.
    """

    features: Tensor  # [T, n * d]
    sequence_starts: Sequence[int]  # [num_seqs + 1] into features
    anchor_ids: Tensor  # [A] token ids, grouped by sequence in order
    anchor_positions: Tensor  # [A] within their sequences
    anchor_counts: Sequence[int]  # [num_seqs]
    block_size: int


@dataclass(slots=True)
class _Span:
    """One sequence: its rows among the features, its anchors, and what those may not see."""

    rows: slice
    anchors: slice
    hidden_rows: Tensor  # [anchors, 1, rows] bool


@dataclass(slots=True)
class _Layout:
    """What all layers share: the spans, slots per block, and the rotation of context then block."""

    spans: list[_Span]
    num_slots: int
    num_context: int
    cos: Tensor  # [T + R, 1, 1, D / 2] float32
    sin: Tensor  # [T + R, 1, 1, D / 2] float32


class DSparkNetwork(nn.Module):
    """Backbone and heads of one drafter; `d2t` holds the target id of every draft id.

    Embeddings and LM head are frozen. They are the target's after `share_target`, and then not part
    of a checkpoint (`shares_target`).
    """

    d2t: Tensor

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.config = config
        d, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        self.fc = nn.Linear(len(config.target_layer_ids) * d, d, bias=False)
        self.hidden_norm = RMSNorm(d, eps)
        self.layers = nn.ModuleList(DSparkLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(d, eps)
        self.lm_head = nn.Linear(d, config.draft_vocab_size, bias=False)
        self.markov_head = build_markov_head(config)
        self.confidence_head = ConfidenceHead(config) if config.has_confidence_head else None
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size))
        self.shares_target = False
        self._initialise()

    def share_target(self, embed: Tensor, head: Tensor) -> None:
        """Use the target's embeddings and the draft vocabulary's rows of its head, both [V, d]."""
        expected = (self.config.vocab_size, self.config.hidden_size)
        assert embed.shape == expected == head.shape, (embed.shape, head.shape, expected)
        rows = head[self.d2t.to(head.device)] if self.config.has_reduced_vocab else head
        self.embed_tokens.weight = nn.Parameter(embed.detach(), requires_grad=False)
        self.lm_head.weight = nn.Parameter(rows.detach(), requires_grad=False)
        self.shares_target = True

    def set_draft_vocabulary(self, target_ids: Tensor) -> None:
        """Set the target id of every draft id [Vd], rising; call before `share_target`."""
        assert target_ids.shape == self.d2t.shape, (target_ids.shape, self.d2t.shape)
        self.d2t.copy_(target_ids)

    def forward(self, batch: BlockBatch) -> Tensor:
        """Return the hidden states [A, g, d] of the slots that predict, after the final norm."""
        assert 1 <= batch.block_size <= self.config.block_size, batch.block_size
        context = self.project_context(batch.features)
        num_slots = self.config.count_slots(batch.block_size)
        layout = self._lay_out(batch, num_slots)
        x = self._embed_blocks(batch.anchor_ids, num_slots)
        for layer in self.layers:
            x = layer(x, context, layout)
        hidden = self.norm(x).view(-1, num_slots, self.config.hidden_size)
        # Slots of both conventions then predict the same: slot j of the result, position a + 1 + j.
        return hidden[:, num_slots - batch.block_size :]

    def project_context(self, features: Tensor) -> Tensor:
        """Fuse the taps [T, n * d] of context rows into what every layer reads, [T, d]."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def compute_base_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [..., Vd] of final hidden states, before the Markov bias."""
        return self.lm_head(hidden.to(self.lm_head.weight.dtype)).float()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for table in (self.embed_tokens, self.lm_head):
            table.weight.requires_grad_(False)

    def _embed_blocks(self, anchor_ids: Tensor, num_slots: int) -> Tensor:
        """Return the input rows [R, d]: anchor, then masks."""
        token_ids = anchor_ids.new_full((len(anchor_ids), num_slots), self.config.mask_token_id)
        token_ids[:, 0] = anchor_ids
        return self.embed_tokens(token_ids.view(-1)).to(self.norm.weight.dtype)

    def _lay_out(self, batch: BlockBatch, num_slots: int) -> _Layout:
        starts, device = batch.sequence_starts, batch.features.device
        slots = torch.arange(num_slots, device=device)
        positions = [torch.arange(end - start, device=device) for start, end in pairwise(starts)]
        positions.append((batch.anchor_positions[:, None] + slots).view(-1))
        cos, sin = compute_rotation(self.config, torch.cat(positions))
        return _Layout(_find_spans(batch), num_slots, len(batch.features), cos, sin)


class DSparkLayer(nn.Module):
    """One layer: x += attention(norm(x), context); x += mlp(norm(x))."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, context: Tensor, layout: _Layout) -> Tensor:
        """Update block rows [R, d]; the context [T, d] stays as it is."""
        x = x + self.self_attn(self.input_layernorm(x), context, layout)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockAttention(nn.Module):
    """Attention of block rows to their context and their block; one k/v projection for both."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        d, size = config.hidden_size, config.head_dim
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = size
        self.scale = size**-0.5
        self.q_proj = nn.Linear(d, config.num_heads * size, bias=False)
        self.k_proj = nn.Linear(d, config.num_kv_heads * size, bias=False)
        self.v_proj = nn.Linear(d, config.num_kv_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_heads * size, d, bias=False)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def forward(self, y: Tensor, context: Tensor, layout: _Layout) -> Tensor:
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

    def _project_kv(self, rows: Tensor, layout: _Layout) -> tuple[Tensor, Tensor]:
        """Return keys and values [K, T + R, D]."""
        keys = self._rotate(self.k_norm(self._split(self.k_proj(rows))), layout, 0)
        return keys.transpose(0, 1), self._split(self.v_proj(rows)).transpose(0, 1)

    def _split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (-1, self.head_dim))

    def _rotate(self, heads: Tensor, layout: _Layout, first: int) -> Tensor:
        """Rotate [rows, heads, D], whose first row is row `first` of the layout."""
        halves = heads.unflatten(-1, (2, -1)).float()
        a, b = halves[..., :1, :], halves[..., 1:, :]
        cos, sin = layout.cos[first:], layout.sin[first:]
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-2)
        return rotated.flatten(-2).to(heads.dtype)


class MLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        d, size = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, size, bias=False)
        self.up_proj = nn.Linear(d, size, bias=False)
        self.down_proj = nn.Linear(size, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the update of normed rows."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight in float32; the result is in the type to compute in."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        normed = F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
        return normed.to(_compute_dtype(self.weight))


def compute_rotation(config: DSparkConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 cosines and sines [rows, 1, 1, D / 2] of rows at these positions."""
    exponents = torch.arange(0, config.head_dim, 2, device=positions.device) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_freq_factors is not None:
        frequencies = frequencies / frequencies.new_tensor(config.rope_freq_factors)
    angles = (positions.float()[:, None] * frequencies)[:, None, None]
    return angles.cos(), angles.sin()


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """Return what linear layers compute in: autocast's type where it is on."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def _find_spans(batch: BlockBatch) -> list[_Span]:
    """Return the sequences that have anchors."""
    spans, first = [], 0
    counted = zip(pairwise(batch.sequence_starts), batch.anchor_counts, strict=True)
    for (start, end), count in counted:
        anchors = slice(first, first + count)
        first += count
        if count:
            rows = torch.arange(end - start, device=batch.features.device)
            hidden = rows >= batch.anchor_positions[anchors, None, None]
            spans.append(_Span(slice(start, end), anchors, hidden))
    assert first == len(batch.anchor_ids), (first, len(batch.anchor_ids))
    return spans


def _attend(
    q: Tensor,  # [K, A, s q, D], scaled
    keys: Tensor,  # [K, T + R, D], context then block rows
    values: Tensor,  # [K, T + R, D]
    layout: _Layout,
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
    scores = scores.masked_fill(hidden_rows, -math.inf)
    weights = torch.cat([scores, block_scores], dim=-1).float().softmax(-1).to(q.dtype)
    on_context, on_block = weights.split([keys.shape[1], block_scores.shape[-1]], dim=-1)
    mixed = (on_context.flatten(1, 2) @ values).unflatten(1, q.shape[1:3])
    return mixed + on_block @ block_values
