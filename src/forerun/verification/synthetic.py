"""Acceptance by given rates instead of by what the target says: lossy, for benchmarks.

Draft j is accepted, given those before it were, with chance survival[j] / survival[j - 1]. Accepted
drafts are emitted as they are. The next token is the target's, chosen as the request asks, after
the committed tokens and the accepted drafts.
Shapes: N requests, D drafts, R = N + D rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from forerun.plan import ScheduledRequest
from forerun.verification.layout import VerifyLayout
from forerun.verification.methods import Verdict

VerifyRows = Callable[[Tensor, VerifyLayout], list[Verdict]]


class SyntheticRates:
    """`survival[j]` is the chance that drafts 0..j are all accepted."""

    def __init__(self, survival: Sequence[float]) -> None:
        given = np.array(survival, dtype=np.float64)
        before = np.concatenate(([1.0], given[:-1]))
        self._conditional = np.divide(given, before, out=np.zeros_like(given), where=before > 0)

    def count_accepted(self, layout: VerifyLayout) -> list[int]:
        """Return the number of accepted drafts of every request, [N]."""
        assert layout.num_drafts.max(initial=0) <= len(self._conditional), "a rate is missing"
        chances = self._conditional[layout.draft_position]
        is_accepted = layout.draw_accept_uniforms() < chances
        counts: list[int] = []
        for start, count in zip(layout.draft_starts, layout.num_drafts, strict=True):
            run = is_accepted[start : start + count]
            counts.append(int(count) if run.all() else int(run.argmin()))
        return counts

    def verify(self, logits: Tensor, layout: VerifyLayout, choose: VerifyRows) -> list[Verdict]:
        """Return verdicts; `choose` is the method that chooses tokens of requests without drafts.

        `logits` are processed rows [R, V].
        """
        accepted = self.count_accepted(layout)
        pairs = list(zip(layout.requests, accepted, strict=True))
        rows = [start + count for start, count in zip(layout.starts, accepted, strict=True)]
        final = logits[torch.tensor(rows, device=logits.device)]
        grown = VerifyLayout([_accept(request, count) for request, count in pairs])
        return [
            Verdict(
                token_ids=[*request.draft_token_ids[:count], *verdict.token_ids],
                num_accepted=count,
                is_finite=verdict.is_finite,
            )
            for (request, count), verdict in zip(pairs, choose(final, grown), strict=True)
        ]


def _accept(request: ScheduledRequest, count: int) -> ScheduledRequest:
    """Return the request as it would be with its first drafts committed and no others."""
    token_ids = request.token_ids
    if count:
        token_ids = [*token_ids, *request.draft_token_ids[:count]]
    return replace(request, token_ids=token_ids, draft_token_ids=())
