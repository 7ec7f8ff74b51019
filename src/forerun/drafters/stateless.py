"""What drafters without a network have in common: nothing to bind, nothing to ingest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.attention.base import AttentionContext
    from forerun.drafters.base import DrafterCache
    from forerun.models.base import TargetModel


class TokenOnlyDrafter:
    """Base of drafters that read committed tokens only; implements half of `Drafter`."""

    def bind(self, target: TargetModel, cache: DrafterCache) -> None:
        """Need nothing of either."""

    def ingest(
        self,
        aux_hidden_states: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionContext,
    ) -> None:
        """Never happens: no layer is tapped."""
        raise AssertionError(f"{type(self).__name__} taps no layers")
