"""The seam through which a step's hidden states leave the runner, for those who record them.

A drafter is trained on what its target computed. A sink gets it while the target generates, so that
nothing is computed twice. Shapes: T rows of a step, n tapped layers, d hidden_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputedRows:
    """Consecutive rows of one request in a step: rows `rows` sit at positions from `position` on.

    `request_id` is that of one choice: the id of the call, a hash sign, the number of the choice.
    """

    request_id: str
    position: int
    rows: range


class HiddenStateSink(Protocol):
    """Takes hidden states of every row of every step. Called on the engine's thread."""

    target_layer_ids: tuple[int, ...]

    def take(
        self,
        computed: Sequence[ComputedRows],
        aux_hidden_states: Tensor,  # [T, n, d], residual stream after the tapped layers
        hidden_states: Tensor,  # [T, d], after the final norm
    ) -> None:
        """Take a step's rows. The tensors' memory is the runner's: copy what is kept."""
        ...
