"""Where drafts come from, and what is learnt of each source: one model of acceptance per source.

There are two: the drafter, and copies of a request's own text, looked up before it is asked.
What a draft is thought to be worth stands in the memory of its request until verification has
decided; its outcome then teaches the source it came from. No torch.
Shapes: R requests, k draft positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from forerun.budget.confidence.model import ConfidenceModel
from forerun.budget.outcomes import OutcomeBuffer, Outcomes
from forerun.budget.recent_drafts import RecentDrafts
from forerun.budget.request_memory import RequestMemory, find_slots
from forerun.budget.survival import compute_survival, mark_drafts
from forerun.core import Request
from forerun.plan import RequestDraft

DRAFTER, LOOKUP = 0, 1

# For so few an array operation costs more than a loop.
_FEW_REQUESTS = 4


class DraftSource:
    """One source's acceptance model and the outcomes it has not learnt from yet.

    `number` marks its drafts in the memory. `recent` remembers them for plans of drafting; None for
    a source that costs nothing, which is never planned.
    """

    def __init__(
        self,
        number: int,
        memory: RequestMemory,
        confidence: ConfidenceModel,
        recent: RecentDrafts | None = None,
    ) -> None:
        self.number = number
        self.confidence = confidence
        self.outcomes = OutcomeBuffer()
        self._memory = memory
        self._recent = recent

    def judge(self, request: Request, draft: RequestDraft) -> list[float]:
        """Return the survival of every token of one draft, without remembering it."""
        return list(accumulate(self._predict_one(request.slot, draft)[1], mul))

    def record(self, requests: Sequence[Request], drafts: Sequence[RequestDraft]) -> None:
        """Remember what was drafted for these requests, and what it is thought to be worth."""
        if len(drafts) <= _FEW_REQUESTS:
            for request, draft in zip(requests, drafts, strict=True):
                self._record_one(request.slot, draft)
            return
        memory, slots = self._memory, find_slots(requests)
        counts = np.array([len(draft.token_ids) for draft in drafts], dtype=np.int64)
        is_draft = mark_drafts(counts, memory.num_positions)
        hits, verifiers = memory.hits[slots], memory.verifier[slots]
        evidence = self.confidence.read_evidence(drafts, is_draft, verifiers)
        confidence = self.confidence.estimator.predict(evidence, hits, verifiers) * is_draft
        memory.earlier_survival[slots] = memory.survival[slots]
        memory.evidence[slots], memory.confidence[slots] = evidence, confidence
        memory.survival[slots] = compute_survival(confidence)
        memory.is_bound[slots] = [draft.is_drawn for draft in drafts]
        memory.source[slots] = self.number
        if self._recent is not None:
            memory.is_new[slots] = False
            self._recent.add(evidence, counts, hits, verifiers)

    def observe(
        self, slots: Sequence[int], num_verified: Sequence[int], num_accepted: Sequence[int]
    ) -> None:
        """Keep what verification said of the drafts in these slots that are of this source."""
        memory = self._memory
        own = np.flatnonzero(memory.source[slots] == self.number).tolist()
        if not own:
            return
        slots = [slots[i] for i in own]
        self.outcomes.add(
            Outcomes(
                slots=slots,
                evidence=memory.evidence[slots],
                hits=memory.hits[slots],
                verifiers=memory.verifier[slots],
                survival=memory.survival[slots],
                num_verified=[num_verified[i] for i in own],
                num_accepted=[num_accepted[i] for i in own],
            )
        )

    def learn(self) -> bool:
        """Take in the outcomes that wait; return whether acceptance is not what it was."""
        for part in self.outcomes.parts:
            self._memory.count_hits(part.slots, part.num_verified, part.num_accepted)
        outcomes = self.outcomes.take()
        if outcomes is None:
            return False
        estimator = self.confidence.estimator
        num_changes = estimator.num_changes
        verified, accepted = np.array(outcomes.num_verified), np.array(outcomes.num_accepted)
        self.confidence.stats.observe(outcomes.survival, verified, accepted)
        estimator.observe(outcomes.evidence, outcomes.hits, outcomes.verifiers, verified, accepted)
        return estimator.num_changes != num_changes

    def _record_one(self, slot: int, draft: RequestDraft) -> None:
        """Do the same for one request without array arithmetic, which costs more than the work."""
        memory, num_drafts = self._memory, len(draft.token_ids)
        evidence, confidence = self._predict_one(slot, draft)
        if draft.is_drawn:
            memory.earlier_survival[slot] = memory.survival[slot]
        padding = [0.0] * (memory.num_positions - num_drafts)
        memory.evidence[slot] = evidence + padding
        memory.survival[slot] = [*accumulate(confidence, mul), *padding]
        memory.confidence[slot] = confidence + padding
        memory.is_bound[slot] = draft.is_drawn
        memory.source[slot] = self.number
        if self._recent is not None:
            memory.is_new[slot] = False
            if num_drafts:
                self._recent.add_one(memory, slot, num_drafts)

    def _predict_one(self, slot: int, draft: RequestDraft) -> tuple[list[float], list[float]]:
        """Return the evidence and the confidence of every token."""
        memory = self._memory
        verifier = int(memory.verifier[slot])
        evidence = self.confidence.read_one(draft, verifier)
        hits = float(memory.hits[slot])
        return evidence, self.confidence.estimator.predict_one(evidence, hits, verifier)
