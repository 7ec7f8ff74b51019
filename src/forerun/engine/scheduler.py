"""Who runs in the next step, and with how many rows. No torch, no clock of its own.

A request has a gap (committed tokens without K/V), never a phase. Rows of a step are given out in
the order of design section 2: anchors (gap of one) first, then larger gaps in chunks, oldest first,
then waiting requests, and what is left goes to draft tokens by the budget policy. So a full house
of speculating requests never blocks a new prompt, and absent requests pay nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

from forerun.budget.confidence.calibration import VERIFIERS
from forerun.budget.controller import BudgetController
from forerun.budget.costs.model import StepShape
from forerun.cache.manager import KVCacheManager
from forerun.core import FinishReason, Request, RequestStatus
from forerun.drafters.base import Drafter
from forerun.errors import RequestError
from forerun.plan import DraftRequest, RequestDraft, RequestResult, ScheduledRequest, StepPlan
from forerun.sampling.method import choose_method

# The verifiers as the budget's estimator numbers them.
_VERIFIERS = {name: number for number, name in enumerate(VERIFIERS)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """Bounds of one step and of the queue.

    `num_lookahead_slots` is how far past the committed tokens the drafter writes K/V: slots are
    reserved before it drafts.
    `max_prefill_while_decoding` bounds the rows of larger gaps in a step that others decode in:
    they wait for every row of it. `max_logits_rows` bounds anchors and drafts, by the memory their
    logits take.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_while_decoding: int
    max_waiting_requests: int
    num_lookahead_slots: int = 0
    max_logits_rows: int = 2**31


class Scheduler:
    """Queues and plans. Owns every unfinished request and the cache manager's tables."""

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: KVCacheManager,
        budget: BudgetController,
        *,
        default_method: str = "standard",
        lookup: Drafter | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.budget = budget
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # tokens looked up in the prefix cache
        self.num_prefix_hits = 0  # tokens found there
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.requests: dict[str, Request] = {}
        self.looked_up: list[RequestDraft] = []  # drafts of the latest `select_drafting`
        self._lookup = lookup
        self._default_method = default_method
        self._now_s = now_s
        self._step = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self.waiting)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the choices of one API call together; 503 if they do not fit in the queue."""
        limit = self.limits.max_waiting_requests
        if len(self.waiting) + len(requests) > limit:
            raise RequestError(
                f"the queue is full: {len(self.waiting)} requests wait and {limit} may; "
                "try again later.",
                status=503,
                code="queue_full",
                retry_after_s=1,
            )
        for request in requests:
            assert request.request_id not in self.requests, f"{request.request_id} added twice"
            self.requests[request.request_id] = request
            self.waiting.append(request)

    def schedule(self) -> StepPlan:
        """Give out the rows of one step. The plan is empty only when nothing can run."""
        rows_left = self.limits.max_num_batched_tokens
        anchors = self._schedule_anchors()
        rows_left -= len(anchors)
        if anchors:
            rows_left = min(rows_left, self.limits.max_prefill_while_decoding)
        chunks: list[tuple[Request, int]] = []
        for request in [r for r in self.running if r.gap > 1]:
            if rows_left == 0:
                break
            rows_left -= self._schedule_chunk(request, rows_left, chunks)
        self._admit_waiting(rows_left, chunks)
        # NOTE: reserving for a chunk may have preempted an anchor that was already chosen.
        anchors = [r for r in anchors if r.status is RequestStatus.RUNNING]
        chunks = [(r, rows) for r, rows in chunks if r.status is RequestStatus.RUNNING]
        admitted = self._admit_drafts(anchors, chunks)
        self._step += 1
        scheduled = [
            _plan(self.cache, r, 1, count) for r, count in zip(anchors, admitted, strict=True)
        ]
        scheduled += [_plan(self.cache, r, rows, 0) for r, rows in chunks]
        return StepPlan(step=self._step, requests=scheduled)

    def advance(self, plan: StepPlan, results: Sequence[RequestResult]) -> None:
        """Move computed counts past the step, publish and trim blocks, drop used drafts.

        Call it after the step's tokens were committed to `token_ids`.
        """
        self._observe(plan, results)
        for scheduled, result in zip(plan.requests, results, strict=True):
            request = self.requests[scheduled.request_id]
            if request.finish_reason is FinishReason.ERROR:
                continue  # its K/V may be the reason: publish nothing
            computed = scheduled.num_new_tokens + result.num_accepted_tokens
            # A stop inside the accepted prefix leaves the request finished; cap for the record.
            request.num_computed_tokens = min(
                scheduled.num_computed_tokens + computed, len(request.token_ids)
            )
            request.num_drafter_computed_tokens = min(
                request.num_drafter_computed_tokens, request.num_computed_tokens
            )
            request.drop_drafts()
            request.num_draws += 1
            self.cache.commit(request)

    def select_drafting(self) -> list[DraftRequest]:
        """Return who drafts for the next step: running requests one anchor away from it.

        Those whose own text is taken for a draft have it already, and are in `looked_up`.
        """
        candidates = [r for r in self.running if r.gap == 1 and r.num_remaining_tokens > 1]
        num_decoding = len(candidates)
        if self._lookup is not None:
            candidates = self._look_up(self._lookup, candidates)
        context = sum(request.num_computed_tokens for request in candidates)
        depths = self.budget.choose_depths(candidates, context, num_decoding)
        selected = []
        for request, depth in zip(candidates, depths, strict=True):
            room = min(depth, request.num_remaining_tokens - 1)
            if room > 0 and self._reserve_lookahead(request, room):
                selected.append(_plan_draft(self.cache, request, room))
        return selected

    def set_drafts(self, drafts: Sequence[RequestDraft]) -> None:
        """Attach proposals, which are of running requests."""
        requests = [self.requests[draft.request_id] for draft in drafts]
        for request, draft in zip(requests, drafts, strict=True):
            request.draft_token_ids = draft.token_ids
            request.num_drafter_computed_tokens = draft.num_drafter_computed_tokens
            self.cache.mark_drafter_valid(request)
        self.budget.record(requests, drafts)

    def remove(self, request: Request) -> None:
        """Forget a finished or aborted request and free its blocks."""
        if self.requests.pop(request.request_id, None) is None:
            return
        if request in self.running:
            self.running.remove(request)
            self.budget.close(request)
        else:
            self.waiting.remove(request)
        if self._lookup is not None:
            self._lookup.release([request.request_id])
        self.cache.free(request)
        request.status = RequestStatus.FINISHED

    def check_integrity(self) -> None:
        """Assert that queues, states and block tables agree."""
        queued = {r.request_id for r in (*self.running, *self.waiting)}
        assert queued == set(self.requests), "queues and request index disagree"
        assert all(r.status is RequestStatus.RUNNING for r in self.running)
        assert all(r.status is RequestStatus.WAITING for r in self.waiting)
        for request in self.running:
            covered = len(self.cache.block_table(request)) * self.cache.kv_block_size
            assert request.num_computed_tokens <= covered, f"{request.request_id} lost blocks"
            assert request.gap >= 1, f"{request.request_id} has no gap"
        self.cache.check_integrity()
        assert self.requests or self.cache.usage_frac == 0, "blocks are held, but by no request"

    def _look_up(self, lookup: Drafter, candidates: Sequence[Request]) -> list[Request]:
        """Give requests a copy of their own text for a draft where it pays; return the others."""
        most = lookup.capabilities.max_speculative_tokens
        asked = [
            _plan_draft(self.cache, r, min(most, r.num_remaining_tokens - 1)) for r in candidates
        ]
        found = lookup.propose(asked)
        assert found.evidence is not None, "lookups say how long the match is"
        drafts = [
            RequestDraft(request_id=request.request_id, token_ids=token_ids, evidence=evidence)
            for request, token_ids, evidence in zip(
                candidates, found.draft_token_ids, found.evidence, strict=True
            )
        ]
        is_taken = self.budget.choose_lookups(candidates, drafts)
        self.looked_up = list(compress(drafts, is_taken))
        for request, draft in compress(zip(candidates, drafts, strict=True), is_taken):
            request.draft_token_ids = draft.token_ids
        return [r for r, taken in zip(candidates, is_taken, strict=True) if not taken]

    def _schedule_anchors(self) -> list[Request]:
        """Reserve for every request with a gap of one, oldest first; preempt from the tail."""
        anchors: list[Request] = []
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING or request.gap != 1:
                continue
            if self._reserve_anchor(request):
                anchors.append(request)
        return anchors

    def _reserve_anchor(self, request: Request) -> bool:
        if self.cache.reserve(request, len(request.token_ids) + len(request.draft_token_ids)):
            return True
        # Drafts are optional: give them up before taking blocks from anyone.
        request.drop_drafts()
        return self._reserve_or_preempt(request, len(request.token_ids))

    def _reserve_lookahead(self, request: Request, room: int) -> bool:
        """Reserve the slots the drafter writes; False if that would take others' next blocks."""
        slots = min(room, self.limits.num_lookahead_slots)
        if slots == 0:
            return True
        wanted = len(request.token_ids) + slots
        missing = self.cache.count_blocks(wanted) - len(self.cache.block_table(request))
        if missing > 0 and missing + len(self.running) > self.cache.pool.num_free_blocks:
            return False
        return self.cache.reserve(request, wanted)

    def _schedule_chunk(
        self, request: Request, rows_left: int, chunks: list[tuple[Request, int]]
    ) -> int:
        """Schedule up to `rows_left` rows of a gap; return the rows taken."""
        if request.status is not RequestStatus.RUNNING:
            return 0
        rows = min(request.gap, rows_left)
        if not self._reserve_or_preempt(request, request.num_computed_tokens + rows):
            return 0
        chunks.append((request, rows))
        return rows

    def _reserve_or_preempt(self, request: Request, num_tokens: int) -> bool:
        """Reserve, preempting younger requests as needed; False if it had to yield itself."""
        while not self.cache.reserve(request, num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Free everything and queue again in front; the tokens stay, the K/V is recomputed."""
        self.running.remove(request)
        self.budget.close(request)
        self.cache.free(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = request.num_drafter_computed_tokens = 0
        request.generation += 1
        request.drop_drafts()
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _admit_waiting(self, rows_left: int, chunks: list[tuple[Request, int]]) -> None:
        """Start waiting requests in order while rows, seats and blocks last."""
        held_back: list[Request] = []
        while self.waiting and rows_left > 0 and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            leader = self.requests.get(request.leader_id) if request.leader_id else None
            if leader is not None and leader.num_computed_tokens < leader.num_prompt_tokens - 1:
                # The sibling is computing this very prompt: wait and share its blocks.
                held_back.append(self.waiting.popleft())
                continue
            if not self._start(request, leader):
                break
            rows = min(request.gap, rows_left)
            chunks.append((request, rows))
            rows_left -= rows
        self.waiting.extendleft(reversed(held_back))

    def _start(self, request: Request, leader: Request | None) -> bool:
        """Give a waiting request its seat and blocks for all its tokens, or change nothing."""
        cached = self.cache.admit(request, leader)
        # Each running request may need a block next step; keep those free to avoid thrashing.
        spare = len(self.running)
        missing = self.cache.count_blocks(len(request.token_ids))
        missing -= cached // self.cache.kv_block_size
        fits = missing + spare <= self.cache.pool.num_free_blocks
        if not fits or not self.cache.reserve(request, len(request.token_ids)):
            self.cache.free(request)
            return False
        self.waiting.popleft()
        self.running.append(request)
        method = choose_method(request.params, self._default_method)
        self.budget.open(request, _VERIFIERS.get(method, 0))
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = cached
        request.num_drafter_computed_tokens = self.cache.count_drafter_tokens(request)
        self.num_prefix_queries += len(request.token_ids)
        self.num_prefix_hits += cached
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self._now_s()
            request.num_cached_tokens = cached
        return True

    def _admit_drafts(
        self, anchors: Sequence[Request], chunks: Sequence[tuple[Request, int]]
    ) -> list[int]:
        """Let the budget decide and return the admitted drafts per anchor."""
        num_chunk_rows = sum(rows for _, rows in chunks)
        num_ending = sum(rows == request.gap for request, rows in chunks)
        num_rows = len(anchors) + num_chunk_rows
        context = sum(request.num_computed_tokens for request in anchors)
        context += sum(request.num_computed_tokens for request, _ in chunks)
        shape = StepShape(
            num_rows=num_rows,
            num_requests=len(anchors) + len(chunks),
            num_prompt_rows=num_chunk_rows - num_ending,
            num_context_tokens=context,
        )
        num_decoding = len(anchors) + num_ending
        room = min(
            self.limits.max_num_batched_tokens - num_rows,
            self.limits.max_logits_rows - num_decoding,
        )
        return self.budget.choose_budget(anchors, shape, num_decoding, max(0, room))

    def _observe(self, plan: StepPlan, results: Sequence[RequestResult]) -> None:
        """Tell the budget what came of the drafts that were verified."""
        seen = [
            (self.requests[scheduled.request_id], len(scheduled.draft_token_ids), result)
            for scheduled, result in zip(plan.requests, results, strict=True)
            if scheduled.draft_token_ids and result.error is None
        ]
        self.budget.observe(
            [request for request, _, _ in seen],
            [num_verified for _, num_verified, _ in seen],
            [result.num_accepted_tokens for _, _, result in seen],
        )


def _plan(
    cache: KVCacheManager, request: Request, num_new_tokens: int, num_admitted: int
) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=request.request_id,
        generation=request.generation,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_new_tokens=num_new_tokens,
        draft_token_ids=request.draft_token_ids[:num_admitted],
        block_table=cache.block_table(request),
        params=request.params,
        seed=request.seed,
        choice_index=request.choice_index,
        num_draws=request.num_draws,
        banned_token_ids=request.banned_token_ids,
    )


def _plan_draft(cache: KVCacheManager, request: Request, depth: int) -> DraftRequest:
    return DraftRequest(
        request_id=request.request_id,
        generation=request.generation,
        token_ids=request.token_ids,
        depth=depth,
        block_table=cache.block_table(request),
        params=request.params,
        seed=request.seed,
        choice_index=request.choice_index,
        num_draws=request.num_draws,
        num_drafter_computed_tokens=request.num_drafter_computed_tokens,
    )
