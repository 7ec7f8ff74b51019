"""Proposes nothing: the baseline arm, through the same step as every other drafter."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.drafters.base import DrafterCapabilities, DraftProposal
from forerun.drafters.stateless import TokenOnlyDrafter
from forerun.plan import DraftRequest


class NoneDrafter(TokenOnlyDrafter):
    """No drafts, no state."""

    capabilities = DrafterCapabilities(max_speculative_tokens=0)

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Return an empty proposal for each request."""
        return DraftProposal(draft_token_ids=[[] for _ in requests])

    def release(self, request_ids: Sequence[str]) -> None:
        """Nothing is kept."""
