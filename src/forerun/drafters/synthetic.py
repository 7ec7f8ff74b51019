"""Drafts without content, for synthetic acceptance: the request's own latest tokens once more.

Method "synthetic". Always as many tokens as asked for, at no cost and with ids the model knows, so
that a benchmark can set the acceptance and measure the engine alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.drafters.base import DrafterCapabilities, DraftProposal
from forerun.drafters.stateless import TokenOnlyDrafter
from forerun.plan import DraftRequest


class SyntheticDrafter(TokenOnlyDrafter):
    """Repeats the tail of the committed tokens; keeps nothing."""

    def __init__(self, *, max_speculative_tokens: int) -> None:
        self.capabilities = DrafterCapabilities(max_speculative_tokens=max_speculative_tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Return exactly `depth` tokens per request."""
        return DraftProposal(draft_token_ids=[_repeat_tail(request) for request in requests])

    def release(self, request_ids: Sequence[str]) -> None:
        """Nothing is kept."""


def _repeat_tail(request: DraftRequest) -> list[int]:
    tail = request.token_ids[-request.depth :]
    return [tail[place % len(tail)] for place in range(request.depth)]
