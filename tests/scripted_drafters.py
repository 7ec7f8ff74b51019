"""Drafters for tests: scripted tokens, and random ones that report the law they were drawn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from forerun.drafters.base import DrafterCapabilities, DraftProposal
from forerun.drafters.stateless import TokenOnlyDrafter
from forerun.plan import DraftRequest
from forerun.sampling.noise import Stream, derive_keys, uniform


class ScriptedDrafter(TokenOnlyDrafter):
    """Drafts what a function of (prefix, depth) says; deterministic, so q is one-hot."""

    capabilities = DrafterCapabilities(max_speculative_tokens=8)

    def __init__(self, draft: Callable[[Sequence[int], int], list[int]]) -> None:
        self._draft = draft

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        return DraftProposal(
            draft_token_ids=[self._draft(list(r.token_ids), r.depth) for r in requests]
        )

    def release(self, request_ids: Sequence[str]) -> None:
        pass


class RandomDrafter(TokenOnlyDrafter):
    """Draws each token from q(prefix), a function, with noise of the draft stream.

    `confidence(prefix)` is what it says of the token it draws after that prefix.
    """

    capabilities = DrafterCapabilities(max_speculative_tokens=8, emits_probs=True)

    def __init__(
        self,
        law: Callable[[Sequence[int]], torch.Tensor],
        depth: int,
        confidence: Callable[[Sequence[int]], float] | None = None,
    ) -> None:
        self._law = law
        self._depth = depth
        self._confidence = confidence
        if confidence is not None:
            self.capabilities = replace(self.capabilities, emits_confidence=True)

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        drafts, laws = zip(*(self._draw(request) for request in requests), strict=True)
        confidence = None
        if self._confidence is not None:
            confidence = [
                [self._confidence([*request.token_ids, *draft[:j]]) for j in range(len(draft))]
                for request, draft in zip(requests, drafts, strict=True)
            ]
        return DraftProposal(
            draft_token_ids=list(drafts), draft_probs=torch.stack(laws), confidence=confidence
        )

    def release(self, request_ids: Sequence[str]) -> None:
        pass

    def _draw(self, request: DraftRequest) -> tuple[list[int], torch.Tensor]:
        prefix = list(request.token_ids)
        laws = torch.zeros(self._depth, len(self._law(prefix)))
        for position in range(min(request.depth, self._depth)):
            laws[position] = self._law(prefix)
            key = derive_keys(
                Stream.DRAFT, request.seed, request.choice_index, request.num_draws, position
            )
            cumulative = laws[position].double().cumsum(0)
            chosen = int(torch.searchsorted(cumulative, uniform(key)[0] * cumulative[-1]))
            prefix.append(min(chosen, len(cumulative) - 1))
        return prefix[len(request.token_ids) :], laws
