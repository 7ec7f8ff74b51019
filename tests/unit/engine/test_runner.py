"""What ModelRunner remembers of drafts between steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fakes import drain, new_request
from forerun.drafters.base import DrafterCapabilities, DraftProposal
from forerun.drafters.stateless import TokenOnlyDrafter
from forerun.plan import DraftRequest
from forerun.verification.verify import Verifier
from model_engines import make_model, make_model_engine

VOCAB_SIZE = 5


class AlternatingDrafter(TokenOnlyDrafter):
    """Drafts token 0: first with a uniform law, then as a deterministic proposal, and so on."""

    capabilities = DrafterCapabilities(max_speculative_tokens=1, emits_probs=True)

    def __init__(self) -> None:
        self.num_calls = 0

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        self.num_calls += 1
        tokens = [[0] for _ in requests]
        if self.num_calls % 2 == 0:
            return DraftProposal(draft_token_ids=tokens)
        laws = torch.full((len(requests), 1, VOCAB_SIZE), 1 / VOCAB_SIZE)
        return DraftProposal(draft_token_ids=tokens, draft_probs=laws)

    def release(self, request_ids: Sequence[str]) -> None:
        pass


def test_a_draft_without_a_law_is_not_judged_by_the_law_of_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A deterministic proposal after a drawn one was verified with the earlier q: accepted with
    min(1, p / q) instead of p, so the drafted token came out too often."""
    has_law: list[bool] = []
    verify = Verifier.verify

    def spy(self, logits, requests, draft_probs):
        if requests[0].draft_token_ids:
            has_law.append(draft_probs[0] is not None)
        return verify(self, logits, requests, draft_probs)

    monkeypatch.setattr(Verifier, "verify", spy)
    engine = make_model_engine(
        make_model(vocab_size=VOCAB_SIZE),
        drafter=AlternatingDrafter(),
        speculative_config={"num_speculative_tokens": 1},
    )
    engine.add(new_request("r", [1, 2, 3], max_tokens=20))
    drain(engine)
    assert len(has_law) >= 4
    assert has_law == [index % 2 == 0 for index in range(len(has_law))]
