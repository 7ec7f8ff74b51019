"""DSparkNetwork: the drafter in plain PyTorch with autograd, for training and as the reference.

Taps of the target's layers are fused once per context row and give every layer keys and values, no
more (arXiv 2607.05147, section 3.1). A block is an anchor token and masks; its rows see each other,
both ways, and the context rows of their sequence before the anchor. Parameters are named as
checkpoints name them.
Shapes: T context rows, A anchors, s slots of a block (g drafts), R = A s block rows, n taps,
d hidden_size, D head_dim, V target and Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from forerun.drafters.dspark.block_layer import (
    BlockLayout,
    RMSNorm,
    Span,
    build_layer,
    compute_dtype,
)
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
        self.layers = nn.ModuleList(build_layer(config) for _ in range(config.num_layers))
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
        return self.hidden_norm(self.fc(features.to(compute_dtype(self.fc.weight))))

    def compute_base_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [..., Vd] of final hidden states, before the Markov bias."""
        logits = self.lm_head(hidden.to(compute_dtype(self.lm_head.weight))).float()
        cap = self.config.logit_softcap
        return logits if cap is None else (logits / cap).tanh() * cap

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
        rows = self.embed_tokens(token_ids.view(-1)) * self.config.embed_scale
        return rows.to(self.norm.weight.dtype)

    def _lay_out(self, batch: BlockBatch, num_slots: int) -> BlockLayout:
        starts, device = batch.sequence_starts, batch.features.device
        slots = torch.arange(num_slots, device=device)
        positions = [torch.arange(end - start, device=device) for start, end in pairwise(starts)]
        positions.append((batch.anchor_positions[:, None] + slots).view(-1))
        cos, sin = compute_rotation(self.config, torch.cat(positions))
        return BlockLayout(_find_spans(batch), num_slots, len(batch.features), cos, sin)


def compute_rotation(config: DSparkConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 cosines and sines [rows, 1, 1, D / 2] of rows at these positions."""
    exponents = torch.arange(0, config.head_dim, 2, device=positions.device) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_freq_factors is not None:
        frequencies = frequencies / frequencies.new_tensor(config.rope_freq_factors)
    angles = (positions.float()[:, None] * frequencies)[:, None, None]
    return angles.cos(), angles.sin()


def _find_spans(batch: BlockBatch) -> list[Span]:
    """Return the sequences that have anchors."""
    spans, first = [], 0
    counted = zip(pairwise(batch.sequence_starts), batch.anchor_counts, strict=True)
    for (start, end), count in counted:
        anchors = slice(first, first + count)
        first += count
        if count:
            rows = torch.arange(end - start, device=batch.features.device)
            hidden = rows >= batch.anchor_positions[anchors, None, None]
            spans.append(Span(slice(start, end), anchors, hidden))
    assert first == len(batch.anchor_ids), (first, len(batch.anchor_ids))
    return spans
