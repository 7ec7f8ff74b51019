"""Keeps the hidden states of answers in memory until they are written to disk.

Shapes: L tokens of a sequence (prompt and answer), n tapped layers, d hidden_size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forerun.hidden_states import ComputedRows


class HiddenStateRecorder:
    """A HiddenStateSink. Rows computed again, after a preemption, replace those before."""

    def __init__(
        self, target_layer_ids: Sequence[int], on_rows: Callable[[int], None] | None = None
    ) -> None:
        self.target_layer_ids = tuple(target_layer_ids)
        self._on_rows = on_rows
        # Whole steps are kept, as slices of them share memory; a piece is (position, rows).
        self._features: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
        self._hidden: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)

    def take(
        self, computed: Sequence[ComputedRows], aux_hidden_states: Tensor, hidden_states: Tensor
    ) -> None:
        """Keep a copy of the step's rows in bfloat16, on the host."""
        features = _copy(aux_hidden_states.flatten(1))
        hidden = _copy(hidden_states)
        for part in computed:
            span = slice(part.rows.start, part.rows.stop)
            self._features[part.request_id].append((part.position, features[span]))
            self._hidden[part.request_id].append((part.position, hidden[span]))
        if self._on_rows is not None:
            self._on_rows(len(hidden))

    def collect(self, request_id: str, length: int, prompt_len: int) -> tuple[Tensor, Tensor]:
        """Return and forget features [L - 1, n * d] and hidden [L - prompt_len, d] of a sequence.

        Feature rows are positions 0 .. L - 2: the last token was never computed. Hidden row i
        predicts answer token i. Raises KeyError for a request that was not recorded.
        """
        features = _join(self._features.pop(request_id), 0, length - 1)
        hidden = _join(self._hidden.pop(request_id), prompt_len - 1, length - 1)
        return features, hidden


def _copy(rows: Tensor) -> Tensor:
    return rows.to(device="cpu", dtype=torch.bfloat16, copy=True)


def _join(pieces: Sequence[tuple[int, Tensor]], begin: int, end: int) -> Tensor:
    """Return the rows at positions begin .. end - 1."""
    joined = torch.full((end - begin, pieces[0][1].shape[1]), torch.nan, dtype=torch.bfloat16)
    for position, rows in pieces:
        first, last = max(position, begin), min(position + len(rows), end)
        if first < last:
            joined[first - begin : last - begin] = rows[first - position : last - position]
    assert not joined.isnan().any(), "a position was never computed, or its numbers are not finite"
    return joined
