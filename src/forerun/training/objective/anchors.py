"""Which positions of an answer start a training block, and what its slots are held against.

An anchor is a committed answer token whose own features the block cannot see; its block predicts
the tokens after it. Labels end with the sequence.
Shapes: L tokens of a sequence, A anchors, g slots of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Blocks:
    """Teacher-forced blocks of one sequence; ids at positions outside the mask mean nothing."""

    positions: Tensor  # [A] of the anchors
    previous: Tensor  # [A, g] the token before every slot's label: anchor, then labels
    labels: Tensor  # [A, g]
    mask: Tensor  # [A, g] bool: the label exists


def sample_anchors(prompt_len: int, length: int, count: int, seed: int) -> Tensor:
    """Return up to `count` of the positions prompt_len .. length - 2, rising."""
    generator = torch.Generator().manual_seed(seed)
    available = max(0, length - 1 - prompt_len)
    chosen = torch.randperm(available, generator=generator)[:count]
    return prompt_len + chosen.sort().values


def build_blocks(token_ids: Tensor, positions: Tensor, block_size: int) -> Blocks:
    """Return the blocks of anchors at these positions of a sequence [L]."""
    places = positions[:, None] + torch.arange(block_size + 1)
    tokens = token_ids[places.clamp_max(len(token_ids) - 1)]
    return Blocks(positions, tokens[:, :-1], tokens[:, 1:], places[:, 1:] < len(token_ids))
