"""Prompt lookup: copy what followed an earlier occurrence of the last n tokens.

Method "ngram" (Saxena, prompt lookup decoding; vLLM's `ngram`). Longest n first, most recent match
first. Each request has an index from n-gram to the position after its latest occurrence, extended
only by newly committed tokens, so a step costs O(new tokens * n range + k) whatever the context.

Deviation from a plain lookup: when the copied run reaches the end of the context it continues from
its own beginning, so a loop of period p < k still yields k drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.drafters.base import DrafterCapabilities, DraftProposal
from forerun.drafters.stateless import TokenOnlyDrafter
from forerun.plan import DraftRequest


@dataclass(slots=True)
class NgramIndex:
    """For each n-gram that something follows: the position of what follows its last occurrence."""

    min_n: int
    max_n: int
    num_indexed: int = 0
    followers: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index the tokens committed since the last call. The list may only have grown."""
        assert len(token_ids) >= self.num_indexed, "committed tokens never shrink"
        for position in range(self.num_indexed, len(token_ids)):
            for n in range(self.min_n, min(self.max_n, position) + 1):
                self.followers[tuple(token_ids[position - n : position])] = position
        self.num_indexed = len(token_ids)

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Return where the continuation of the longest matching suffix starts, or None."""
        for n in range(min(self.max_n, len(token_ids)), self.min_n - 1, -1):
            position = self.followers.get(tuple(token_ids[-n:]))
            if position is not None:
                return position
        return None


class NgramDrafter(TokenOnlyDrafter):
    """Prompt lookup over each request's own committed tokens."""

    def __init__(self, *, max_speculative_tokens: int, min_n: int, max_n: int) -> None:
        self.capabilities = DrafterCapabilities(max_speculative_tokens=max_speculative_tokens)
        self._min_n = min_n
        self._max_n = max_n
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Return up to `depth` copied tokens per request; none where nothing matches."""
        return DraftProposal(draft_token_ids=[self._propose_one(request) for request in requests])

    def release(self, request_ids: Sequence[str]) -> None:
        """Drop the indexes of these requests."""
        for request_id in request_ids:
            self._indexes.pop(request_id, None)

    def _propose_one(self, request: DraftRequest) -> list[int]:
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = NgramIndex(self._min_n, self._max_n)
        index.extend(request.token_ids)
        start = index.find(request.token_ids)
        if start is None:
            return []
        period = len(request.token_ids) - start
        return [request.token_ids[start + offset % period] for offset in range(request.depth)]
