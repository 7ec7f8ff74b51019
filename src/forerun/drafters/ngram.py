"""Prompt lookup: copy what followed an earlier occurrence of the last n tokens.

Method "ngram" (Saxena, prompt lookup decoding; vLLM's `ngram`). Longest n first, most recent match
first. Each request has an index from n-gram to the position after its latest occurrence, extended
only by newly committed tokens, so a step costs O(new tokens * n range + k) whatever the context.

Deviation from a plain lookup: when the copied run reaches the end of the context it continues from
its own beginning, so a loop of period p < k still yields k drafts.

Evidence of draft j is log2(m + j), m the tokens that match before the copied run (max_n or less in
the index, counted on to at most 32): every accepted draft makes the match one longer. It is in no
unit; an estimator learns from outcomes which chance it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.drafters.base import DrafterCapabilities, DraftProposal
from forerun.drafters.stateless import TokenOnlyDrafter
from forerun.plan import DraftRequest

MAX_MATCH = 32


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

    def find(self, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """Return (where the continuation of the longest matching suffix starts, n), or None."""
        for n in range(min(self.max_n, len(token_ids)), self.min_n - 1, -1):
            position = self.followers.get(tuple(token_ids[-n:]))
            if position is not None:
                return position, n
        return None


def count_match(token_ids: Sequence[int], position: int) -> int:
    """Return how many tokens before `position` equal the last ones; at most MAX_MATCH."""
    earlier = token_ids[max(0, position - MAX_MATCH) : position]
    for length, (a, b) in enumerate(zip(reversed(earlier), reversed(token_ids), strict=False)):
        if a != b:
            return length
    return len(earlier)


class NgramDrafter(TokenOnlyDrafter):
    """Prompt lookup over each request's own committed tokens."""

    def __init__(self, *, max_speculative_tokens: int, min_n: int, max_n: int) -> None:
        self.capabilities = DrafterCapabilities(max_speculative_tokens=max_speculative_tokens)
        self._min_n = min_n
        self._max_n = max_n
        self._indexes: dict[str, NgramIndex] = {}
        longest = max(MAX_MATCH, max_n) + max_speculative_tokens
        self._evidence = [0.0, *(math.log2(length) for length in range(1, longest + 1))]

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Return up to `depth` copied tokens per request; none where nothing matches."""
        drafts = [self._propose_one(request) for request in requests]
        return DraftProposal(
            draft_token_ids=[token_ids for token_ids, _ in drafts],
            evidence=[evidence for _, evidence in drafts],
        )

    def release(self, request_ids: Sequence[str]) -> None:
        """Drop the indexes of these requests."""
        for request_id in request_ids:
            self._indexes.pop(request_id, None)

    def _propose_one(self, request: DraftRequest) -> tuple[list[int], list[float]]:
        """Return the copied tokens and the evidence of each."""
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = NgramIndex(self._min_n, self._max_n)
        token_ids, depth = request.token_ids, request.depth
        index.extend(token_ids)
        found = index.find(token_ids)
        if found is None:
            return [], []
        start, length = found
        if length == self._max_n:
            # Shorter matches are as long as they get: the next longer one was looked up first.
            length = max(length, count_match(token_ids, start))
        copied = list(token_ids[start : start + depth])
        while len(copied) < depth:
            copied += copied[: depth - len(copied)]
        return copied, self._evidence[length : length + depth]
