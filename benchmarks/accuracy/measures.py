"""How far a distribution over the next token is from the reference's. Pure, in float64.

KL is KL(reference || arm) in nats: what coding with the arm costs where the reference is true.
Shapes: R rows, V vocab_size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowMeasures:
    """One number per row, all that is kept of logits."""

    kl: Tensor  # [num_rows] float64
    nll: Tensor  # [num_rows] float64, of the token that follows
    is_same_top: Tensor  # [num_rows] bool

    @classmethod
    def join(cls, parts: Sequence[RowMeasures]) -> RowMeasures:
        """Return the rows of all parts, in order."""
        return cls(
            torch.cat([part.kl for part in parts]),
            torch.cat([part.nll for part in parts]),
            torch.cat([part.is_same_top for part in parts]),
        )


class Reference:
    """The reference's distributions over some rows, to compare others with."""

    def __init__(self, logits: Tensor, target_ids: Tensor) -> None:
        self._log_probs = logits.double().log_softmax(-1)  # [num_rows, vocab_size]
        self._probs = self._log_probs.exp()
        self._top = logits.argmax(-1)
        self._target_ids = target_ids

    def compare(self, logits: Tensor) -> RowMeasures:
        """Return the measures of other logits [num_rows, vocab_size] on the same rows."""
        log_probs = logits.double().log_softmax(-1)
        nll = -log_probs.gather(1, self._target_ids[:, None])[:, 0]
        kl = (self._log_probs - log_probs).mul_(self._probs).sum(-1)
        return RowMeasures(kl, nll, logits.argmax(-1) == self._top)

    def compare_itself(self) -> RowMeasures:
        """Return the reference's own measures."""
        nll = -self._log_probs.gather(1, self._target_ids[:, None])[:, 0]
        return RowMeasures(torch.zeros_like(nll), nll, torch.ones_like(nll, dtype=torch.bool))


def summarise(measures: RowMeasures, reference: RowMeasures) -> dict[str, Any]:
    """Return the figures of the table; `reference` are the reference's measures of these rows."""
    nll, reference_nll = float(measures.nll.mean()), float(reference.nll.mean())
    return {
        "num_tokens": len(measures.kl),
        "kl_mean": float(measures.kl.mean()),
        "kl_p99": float(measures.kl.quantile(0.99)),
        "same_top_share": float(measures.is_same_top.double().mean()),
        "perplexity": math.exp(nll),
        "perplexity_change_percent": 100 * math.expm1(nll - reference_nll),
    }
