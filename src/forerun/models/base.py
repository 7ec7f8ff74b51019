"""What the engine and drafters may ask of a target model.

Shapes: T rows (num_tokens), d hidden_size, V vocab_size, n tapped layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from forerun.attention.base import AttentionContext
from forerun.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Result of one forward over the rows of a step."""

    hidden_states: Tensor  # [num_tokens, hidden_size], after the final norm
    aux_hidden_states: Tensor | None  # [num_tokens, num_taps, hidden_size], residual stream
    logits: Tensor | None = None  # [len(logits_rows), vocab_size] float32, if they came for free


class TargetModel(Protocol):
    """A decoder-only language model over ragged rows."""

    spec: ModelSpec

    def forward(
        self,
        token_ids: Tensor,  # [num_tokens] int64
        positions: Tensor,  # [num_tokens] int64
        attention: AttentionContext,
        target_layer_ids: Sequence[int] = (),
        logits_rows: range = range(0),
    ) -> ModelOutput:
        """Run all layers. Taps follow style.md: id k is layer k's output, -1 the embeddings.

        Logits of `logits_rows` are wanted next: a model may compute them along the way.
        """
        ...

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return float32 logits [num_rows, vocab_size] of final-normed rows."""
        ...
