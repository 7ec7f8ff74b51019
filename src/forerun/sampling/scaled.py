"""Rows of logits with their temperature, and the two facts one pass over each row gives.

They are all it takes to compute the probability of any token: p = exp(l / T - peak) * peak_prob.
Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.sampling_ops import MeasuredRows, measure_rows

# Rows worked on at once where a temporary as wide as the vocabulary is needed.
CHUNK_ROWS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledRows(MeasuredRows):
    """Measured rows; a row without a distribution has a peak or probability that is not finite."""

    @classmethod
    def measure(cls, logits: Tensor, temperature: np.ndarray) -> ScaledRows:
        """Find peak and normaliser of every row [R, V] for its temperature [R]."""
        column = torch.from_numpy(temperature).to(logits.device)[:, None]
        measured = measure_rows(logits, column) or _measure_reference(logits, column)
        return cls(**{field.name: getattr(measured, field.name) for field in fields(measured)})

    def select(self, rows: np.ndarray) -> ScaledRows:
        """Return some rows (sorted, unique); itself when that is all of them."""
        if len(rows) == len(self.logits):
            return self
        index = torch.from_numpy(rows).to(self.logits.device)
        return ScaledRows(
            logits=self.logits[index],
            temperature=self.temperature[index],
            peak=self.peak[index],
            peak_prob=self.peak_prob[index],
            tile_probs=None if self.tile_probs is None else self.tile_probs[index],
        )

    def compute_probs(self, logits: Tensor) -> Tensor:
        """Return the probabilities of some logits of each row, [R, any]."""
        return (logits / self.temperature - self.peak).exp_().mul_(self.peak_prob)


def _measure_reference(logits: Tensor, temperature: Tensor) -> MeasuredRows:
    """Compute measure_rows in PyTorch, a few rows at a time."""
    is_scaled = bool((temperature != 1.0).any())
    peaks, peak_probs = [], []
    chunks = zip(logits.split(CHUNK_ROWS), temperature.split(CHUNK_ROWS), strict=True)
    for chunk, divisor in chunks:
        scaled = chunk / divisor if is_scaled else chunk
        peaks.append(scaled.amax(dim=-1, keepdim=True))
        peak_probs.append(scaled.softmax(dim=-1).amax(dim=-1, keepdim=True))
    return MeasuredRows(
        logits=logits,
        temperature=temperature,
        peak=torch.cat(peaks),
        peak_prob=torch.cat(peak_probs),
        tile_probs=None,
    )
