"""The target distribution of rows, dense or sparse, as everything downstream uses it.

Rows without filters stay logits, turned into probabilities only where someone looks; filtered rows
hold the candidates that may survive, so that draws and noise cost what survives. Rows of one kind
and width form a part, and a batch has as many parts as it has widths (mostly one).
Shapes: R rows in all, r rows of one part, C candidates per row, V vocabulary, N selected rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.sampling_ops import (
    LeftOut,
    draw_listed,
    draw_rows,
    sample_coupled,
    sample_listed,
)
from forerun.sampling.noise import exponential
from forerun.sampling.reduce import argmax_rows
from forerun.sampling.scaled import CHUNK_ROWS, ScaledRows


@dataclass(frozen=True, kw_only=True, slots=True)
class SparsePart:
    """Filtered rows: candidates by descending logit, ties by ascending id.

    `probs` sum to one; beyond the cut they are exactly 0.
    """

    rows: np.ndarray  # [r] int64, places in the whole batch
    token_ids: Tensor  # [r, C] int64
    probs: Tensor  # [r, C] float32

    def get_probs(self, index: Tensor, token_ids: Tensor) -> Tensor:
        """Return the probability of one token in each of these rows of the part, [N]."""
        matches = self.token_ids[index] == token_ids[:, None]
        return (self.probs[index] * matches).sum(dim=-1)

    def select(self, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return probabilities [N, C] of these rows of the part, and the columns' token ids."""
        return self.probs[index], self.token_ids[index]

    def draw_native(
        self, index: Tensor, uniforms: Tensor, left_out: LeftOut | None
    ) -> Tensor | None:
        """Return one drawn token id per row of `index`, [N], if kernels can draw it."""
        return draw_listed((self.probs, self.token_ids), index, uniforms, left_out)

    def sample_coupled(self, keys: Tensor) -> Tensor:
        """Return the coupled sample of every row of the part, [r]."""
        samples = sample_listed(self.probs, self.token_ids, keys)
        if samples is not None:
            return samples
        columns = (self.probs / exponential(keys, self.token_ids)).argmax(dim=-1, keepdim=True)
        return self.token_ids.gather(1, columns).squeeze(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DensePart:
    """Rows over the whole vocabulary, as logits.

    Nothing of the size of the logits is made from them except for a few rows at a time.
    """

    rows: np.ndarray  # [r] int64, places in the whole batch
    scaled: ScaledRows  # [r, V]

    def get_probs(self, index: Tensor, token_ids: Tensor) -> Tensor:
        """Return the probability of one token in each of these rows of the part, [N]."""
        given = self.scaled
        scaled = given.logits[index, token_ids][:, None] / given.temperature[index]
        return ((scaled - given.peak[index]).exp() * given.peak_prob[index]).squeeze(1)

    def select(self, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return probabilities [N, V] of these rows of the part; the column is the token id."""
        given = self.scaled
        return given.logits[index].div_(given.temperature[index]).softmax(dim=-1), None

    def draw_native(
        self, index: Tensor, uniforms: Tensor, left_out: LeftOut | None
    ) -> Tensor | None:
        """Return one drawn token id per row of `index`, [N], if kernels can draw it."""
        return draw_rows(self.scaled, index, uniforms, left_out)

    def sample_coupled(self, keys: Tensor) -> Tensor:
        """Return the coupled sample of every row of the part, [r]."""
        samples = sample_coupled(self.scaled.logits, self.scaled.temperature, keys)
        return self._sample_reference(keys) if samples is None else samples

    def _sample_reference(self, keys: Tensor) -> Tensor:
        device = keys.device
        every_id = torch.arange(self.scaled.logits.shape[1], device=device)
        samples = []
        for index in torch.arange(len(keys), device=device).split(CHUNK_ROWS):
            probs, _ = self.select(index)
            samples.append(argmax_rows(probs.div_(exponential(keys[index], every_id))))
        return torch.cat(samples)


Part = SparsePart | DensePart


class TargetDistribution:
    """Distributions of R rows in their original order, whatever part each is in.

    `is_finite` [R] is false where the logits gave no distribution (NaN, +inf, or all -inf).
    """

    def __init__(self, parts: Sequence[Part], is_finite: Tensor) -> None:
        self.parts = tuple(parts)
        self.is_finite = is_finite
        self._part_of, self._index_of = self._locate_rows()

    def split(self, rows: Tensor) -> Iterator[tuple[Part, Tensor, Tensor]]:
        """Yield (part, places in `rows`, index in the part) until every row is covered."""
        if len(self.parts) == 1:
            yield self.parts[0], torch.arange(len(rows), device=rows.device), rows
            return
        owners = self._part_of[rows]
        for number, part in enumerate(self.parts):
            places = (owners == number).nonzero().squeeze(1)
            if len(places):
                yield part, places, self._index_of[rows[places]]

    def get_probs(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """Return p(token) for N (row, token) pairs, float32 [N]."""
        probs = torch.empty(len(rows), device=rows.device)
        for part, places, index in self.split(rows):
            probs[places] = part.get_probs(index, token_ids[places])
        return probs

    def sample_coupled(self, keys: Tensor) -> Tensor:
        """Return argmax(p / E(key, token id)) for every row, int64 [R], from one key per row.

        Equal to the Gumbel-max sample argmax(log p + g) with g = -log E.
        """
        samples = torch.empty_like(keys)
        for part in self.parts:
            rows = torch.from_numpy(part.rows).to(keys.device)
            samples[rows] = part.sample_coupled(keys[rows])
        return samples

    def _locate_rows(self) -> tuple[Tensor, Tensor]:
        num_rows = len(self.is_finite)
        places = np.zeros((2, num_rows), dtype=np.int64)
        for number, part in enumerate(self.parts):
            places[0, part.rows] = number
            places[1, part.rows] = np.arange(len(part.rows))
        part_of, index_of = torch.from_numpy(places).to(self.is_finite.device)
        return part_of, index_of
