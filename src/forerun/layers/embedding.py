"""Token embedding and language-model head. A tied head uses the embedding's storage."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from forerun.layers.linear import Block, WeightOptions


class Embedding(Block):
    """Rows of the embedding table, optionally scaled (Gemma)."""

    def __init__(
        self, vocab_size: int, hidden_size: int, options: WeightOptions, *, scale: float | None
    ) -> None:
        super().__init__()
        self.weight = options.empty(vocab_size, hidden_size)
        # The scale is rounded to the weight type first, as checkpoints were trained with.
        self.scale = None if scale is None else torch.tensor(scale, dtype=options.dtype).item()

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return fresh rows [num_tokens, hidden_size], which the caller may change in place."""
        rows = F.embedding(token_ids, self.weight)
        return rows if self.scale is None else rows.mul_(self.scale)


class Head(Block):
    """Logits of final-normed rows."""

    def __init__(self, weight: nn.Parameter, *, softcap: float | None) -> None:
        super().__init__()
        self.weight = weight
        self.softcap = softcap

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return float32 logits [num_rows, vocab_size]."""
        logits = F.linear(hidden_states, self.weight).float()
        if self.softcap is None:
            return logits
        return logits.div_(self.softcap).tanh_().mul_(self.softcap)
