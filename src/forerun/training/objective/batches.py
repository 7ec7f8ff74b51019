"""Sequences to one packed batch: the network's input and what its rows are held against.

Only context rows some anchor can see are kept. The target's row for slot k of the block at anchor a
is that of position a + k, which is row a + k + 1 - prompt_len of the stored hidden states.
Shapes: A anchors of all sequences, g slots, R = A g rows, d hidden_size, n taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from forerun.drafters.dspark.network import BlockBatch
from forerun.training.answers.shards import TargetSequence
from forerun.training.objective.anchors import Blocks, build_blocks, sample_anchors


@dataclass(slots=True)
class TrainBatch:
    """One step's data, on the device."""

    blocks: BlockBatch
    previous: Tensor  # [A, g]
    labels: Tensor  # [A, g] target ids
    mask: Tensor  # [A, g] bool
    hidden: Tensor  # [R, d] the target's final-normed rows
    log_normaliser: Tensor  # [R]

    @property
    def num_tokens(self) -> int:
        """Context and block rows computed."""
        return len(self.blocks.features) + self.mask.numel()


@dataclass(slots=True)
class _Part:
    """One sequence's share."""

    features: Tensor
    blocks: Blocks
    hidden: Tensor
    log_normaliser: Tensor


def build_batch(
    sequences: Sequence[TargetSequence],
    seeds: Sequence[int],
    *,
    anchors_per_sequence: int,
    block_size: int,
    device: torch.device,
) -> TrainBatch:
    """Return a batch; the anchors of a sequence follow from its seed."""
    positions = [
        sample_anchors(s.prompt_len, len(s.token_ids), anchors_per_sequence, seed)
        for s, seed in zip(sequences, seeds, strict=True)
    ]
    parts = [
        _build_part(sequence, anchors, block_size)
        for sequence, anchors in zip(sequences, positions, strict=True)
    ]
    blocks = [part.blocks for part in parts]
    previous = torch.cat([b.previous for b in blocks]).to(device)
    return TrainBatch(
        blocks=BlockBatch(
            features=torch.cat([part.features for part in parts]).to(device),
            sequence_starts=[0, *accumulate(len(part.features) for part in parts)],
            anchor_ids=previous[:, 0],
            anchor_positions=torch.cat([b.positions for b in blocks]).to(device),
            anchor_counts=[len(b.positions) for b in blocks],
            block_size=block_size,
        ),
        previous=previous,
        labels=torch.cat([b.labels for b in blocks]).to(device),
        mask=torch.cat([b.mask for b in blocks]).to(device),
        hidden=torch.cat([part.hidden for part in parts]).to(device),
        log_normaliser=torch.cat([part.log_normaliser for part in parts]).to(device),
    )


def _build_part(sequence: TargetSequence, positions: Tensor, block_size: int) -> _Part:
    blocks = build_blocks(sequence.token_ids, positions, block_size)
    rows = positions[:, None] + torch.arange(block_size) + 1 - sequence.prompt_len
    rows = rows.clamp_max(len(sequence.hidden) - 1).view(-1)
    visible = int(positions[-1])
    return _Part(
        sequence.features[:visible], blocks, sequence.hidden[rows], sequence.target_lse[rows]
    )
