"""Token embedding and language-model head: two uses of a table of one row per token.

A tied head is the embedding's own table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.layers.linear import Block, Linear, WeightOptions


class Embedding(Block):
    """Rows of the table, optionally scaled (Gemma)."""

    def __init__(self, table: Linear, options: WeightOptions, *, scale: float | None) -> None:
        super().__init__()
        self.table = table
        # The scale is rounded to the weight type first, as checkpoints were trained with.
        self.scale = None if scale is None else torch.tensor(scale, dtype=options.dtype).item()

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return fresh rows [num_tokens, hidden_size], which the caller may change in place."""
        rows = self.table.read_rows(token_ids)
        return rows if self.scale is None else rows.mul_(self.scale)


class Head(Block):
    """Logits of final-normed rows."""

    def __init__(self, table: Linear, *, softcap: float | None) -> None:
        super().__init__()
        self.table = table
        self.softcap = softcap

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return float32 logits [num_rows, vocab_size]."""
        logits: Tensor = self.table(hidden_states, torch.float32)
        if self.softcap is None:
            return logits
        return logits.div_(self.softcap).tanh_().mul_(self.softcap)
