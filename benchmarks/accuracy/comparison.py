"""All arms reading the same windows in lockstep, so that no logits need to be kept.

Forward passes of a window leave hidden states; logits are computed and compared few rows at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from benchmarks.accuracy.arms import REFERENCE, Forwarder
from benchmarks.accuracy.measures import Reference, RowMeasures
from benchmarks.accuracy.text import Window
from torch import Tensor

from forerun import LLM

# Some tens of megabytes in float64 with a vocabulary of 49,152.
_ROWS_COMPARED = 64


class Comparison:
    """Reads windows with every engine, the reference among them."""

    def __init__(self, engines: Mapping[str, LLM], rows_per_step: int) -> None:
        self._forwarders = {name: Forwarder(llm, rows_per_step) for name, llm in engines.items()}
        self._parts: dict[str, dict[str, list[RowMeasures]]] = {
            name: defaultdict(list) for name in engines
        }

    def read(self, window: Window) -> None:
        """Run one window through every arm and keep how its rows compare."""
        hidden = {name: f.forward(window.token_ids) for name, f in self._forwarders.items()}
        targets = torch.tensor(window.token_ids[1:])
        for start in range(0, window.num_scored, _ROWS_COMPARED):
            stop = min(start + _ROWS_COMPARED, window.num_scored)
            rows = {name: states[start:stop] for name, states in hidden.items()}
            self._compare(window.kind, rows, targets[start:stop])

    def join(self) -> dict[str, dict[str, RowMeasures]]:
        """Return the measures of all rows so far, by arm and kind of text."""
        return {
            name: {kind: RowMeasures.join(parts) for kind, parts in kinds.items()}
            for name, kinds in self._parts.items()
        }

    def _compare(self, kind: str, rows: Mapping[str, Tensor], target_ids: Tensor) -> None:
        logits = self._forwarders[REFERENCE.name].compute_logits(rows[REFERENCE.name])
        reference = Reference(logits, target_ids)
        for name, forwarder in self._forwarders.items():
            if name == REFERENCE.name:
                measures = reference.compare_itself()
            else:
                measures = reference.compare(forwarder.compute_logits(rows[name]))
            self._parts[name][kind].append(measures)
