"""The step loop: admit, schedule, execute, commit, advance, draft, emit.

Synchronous and single-threaded; transports (in-process or a pipe) call `add`, `abort` and `step`.
The engine survives anything a request or a step does: a failed forward fails that step's requests,
a failed drafter costs its drafts.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

from forerun.core import FinishReason, Request, RequestOutput
from forerun.engine.admission import check_request
from forerun.engine.commit import CommittedStep, Committer
from forerun.engine.messages import EngineLimits, NewRequest, StepMessage, StepStats
from forerun.engine.scheduler import Scheduler
from forerun.engine.trace import StepTrace, begin_trace
from forerun.errors import RequestError
from forerun.logs import get_logger
from forerun.plan import (
    DraftRequest,
    RequestDraft,
    RequestResult,
    Runner,
    ScheduledRequest,
    StepPlan,
)
from forerun.tokenization import Tokenizer

logger = get_logger(__name__)


class Engine:
    """One model replica: scheduler, runner and committer, driven step by step.

    `on_trace`, if set, is told about every step in full.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        eos_token_ids: frozenset[int],
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limits = limits
        self.scheduler = scheduler
        self._runner = runner
        self._committer = Committer(tokenizer)
        self._eos_token_ids = eos_token_ids
        self._now_s = now_s
        self.on_trace: Callable[[StepTrace], None] | None = None
        self._traced_drafts: dict[str, RequestDraft] = {}
        self._children: dict[str, list[Request]] = {}
        self._pending_outputs: list[RequestOutput] = []

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to say."""
        return self.scheduler.has_work or bool(self._pending_outputs)

    def add(self, new: NewRequest) -> None:
        """Queue a request; a refusal becomes its (only) output instead of an exception."""
        try:
            check_request(new.prompt_token_ids, new.params, self.limits)
            requests = self._expand(new)
            for request in requests:
                self._committer.open(request)
            self.scheduler.add(requests)
        except RequestError as error:
            self._refuse(new, error)
        except Exception as error:
            logger.exception("admission of %s failed", new.request_id)
            message = f"admission failed: {type(error).__name__}: {error}"
            self._refuse(new, RequestError(message, status=500, code="internal_error"))

    def abort(self, request_id: str) -> None:
        """Stop all choices of a request and free what they hold; unknown ids are ignored."""
        for request in list(self._children.get(request_id, ())):
            output = self._committer.end(request, FinishReason.ABORT)
            self._pending_outputs.append(output)
            self._forget([request])

    def abort_all(self) -> None:
        """Abort everything, for shutdown."""
        for request_id in list(self._children):
            self.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes; running requests are not disturbed."""
        self.scheduler.cache.reset_prefix_cache()

    def step(self) -> StepMessage:
        """Run one step over everything that can run and return what it produced."""
        started_s = self._now_s()
        stats = StepStats()
        before = self._count_scheduler_events()
        plan = self.scheduler.schedule()
        trace = None
        if self.on_trace is not None:
            trace = begin_trace(self.scheduler, plan, self._traced_drafts)
        runner_s = self._now_s()
        results, error = self._execute(plan)
        runner_s = self._now_s() - runner_s
        outputs = self._take_pending()
        if error is not None:
            outputs += self._fail_step(plan, error)
        else:
            outputs += self._commit(plan, results, stats)
            stats.draft_s = self._draft(stats)
        self._fill_stats(stats, before)
        stats.step_s = self._now_s() - started_s
        stats.host_s = stats.step_s - runner_s - stats.draft_s
        if error is None:
            self._teach_budget(plan, stats)
            if trace is not None and self.on_trace is not None:
                trace.finish(results, stats)
                self.on_trace(trace)
        return StepMessage(outputs=outputs, stats=stats)

    def check_integrity(self) -> None:
        """Assert that nothing leaked; when idle, that nothing is left at all."""
        self.scheduler.check_integrity()
        live = {r.request_id for group in self._children.values() for r in group}
        assert live == set(self.scheduler.requests), "engine and scheduler disagree"

    def _expand(self, new: NewRequest) -> list[Request]:
        seed = new.params.seed
        if seed is None:
            seed = secrets.randbits(63)
        requests = [
            Request(
                request_id=f"{new.request_id}#{index}",
                parent_id=new.request_id,
                params=new.params,
                token_ids=list(new.prompt_token_ids),
                num_prompt_tokens=len(new.prompt_token_ids),
                seed=seed,
                eos_token_ids=self._eos_token_ids,
                choice_index=index,
                leader_id=f"{new.request_id}#0" if index else None,
                arrival_s=new.arrival_s or time.monotonic(),
                max_total_tokens=min(self.limits.max_model_len, self.limits.num_kv_tokens),
            )
            for index in range(new.params.n)
        ]
        self._children[new.request_id] = list(requests)
        return requests

    def _refuse(self, new: NewRequest, error: RequestError) -> None:
        for request in self._children.pop(new.request_id, []):
            self._committer.close(request)
        for index in range(new.params.n):
            self._pending_outputs.append(
                RequestOutput(
                    request_id=new.request_id,
                    choice_index=index,
                    finish_reason=FinishReason.ERROR,
                    error=error,
                )
            )

    def _execute(self, plan: StepPlan) -> tuple[Sequence[RequestResult], RequestError | None]:
        if not plan.requests:
            return [], None
        try:
            return self._runner.execute(plan).results, None
        except Exception as error:
            logger.exception("step %d failed", plan.step)
            message = f"the model step failed: {type(error).__name__}: {error}"
            return [], RequestError(message, status=500, code="step_failed")

    def _fail_step(self, plan: StepPlan, error: RequestError) -> list[RequestOutput]:
        outputs = []
        for scheduled in plan.requests:
            request = self.scheduler.requests[scheduled.request_id]
            outputs.append(self._committer.end(request, FinishReason.ERROR, error))
            self._forget([request])
        return outputs

    def _commit(
        self, plan: StepPlan, results: Sequence[RequestResult], stats: StepStats
    ) -> list[RequestOutput]:
        outputs = []
        finished = []
        for scheduled, result in zip(plan.requests, results, strict=True):
            request = self.scheduler.requests[scheduled.request_id]
            committed = self._committer.commit(request, scheduled, result)
            _count_step(stats, scheduled.num_rows, len(scheduled.draft_token_ids), committed)
            stats.num_prompt_tokens += _count_prompt_rows(scheduled)
            output = committed.output
            if output.token_ids or output.prompt_logprobs or output.finish_reason is not None:
                outputs.append(output)
            if request.finish_reason is not None:
                finished.append(request)
        self.scheduler.advance(plan, results)
        self._forget(finished)
        return outputs

    def _draft(self, stats: StepStats) -> float:
        """Let requests get drafts for the next step; return the seconds the drafter took."""
        selected = self.scheduler.select_drafting()
        stats.num_drafting = len(selected)
        drafts, elapsed_s = self._ask_drafter(selected) if selected else ([], 0.0)
        self.scheduler.set_drafts(drafts)
        drafts += self.scheduler.looked_up
        stats.num_lookup_tokens = sum(len(draft.token_ids) for draft in self.scheduler.looked_up)
        if self.on_trace is not None:
            self._traced_drafts = {draft.request_id: draft for draft in drafts}
        for draft in drafts:
            stats.num_draft_tokens += len(draft.token_ids)
            request = self.scheduler.requests[draft.request_id]
            self._committer.count_drafted(request, len(draft.token_ids))
        return elapsed_s

    def _ask_drafter(self, selected: Sequence[DraftRequest]) -> tuple[list[RequestDraft], float]:
        """Return what the drafter proposes, nothing if it fails, and the seconds it took."""
        started_s = self._now_s()
        try:
            drafts = self._runner.draft(selected)
        except Exception:
            logger.exception("the drafter failed; the next step runs without its drafts")
            drafts = []
        return list(drafts), self._now_s() - started_s

    def _teach_budget(self, plan: StepPlan, stats: StepStats) -> None:
        """Tell the budget what the step cost, and say in the stats what it had expected."""
        budget = self.scheduler.budget
        if not plan.requests:
            return
        decision = budget.decision
        stats.predicted_step_s = (decision.target_ms + decision.draft_ms) / 1000
        stats.predicted_draft_s = decision.draft_ms / 1000
        target_ms = (stats.step_s - stats.draft_s) * 1000
        draft_ms = stats.draft_s * 1000 if stats.num_drafting else None
        budget.observe_times(target_ms, draft_ms)
        stats.budget_state = budget.state
        stats.calibration = budget.take_calibration()

    def _forget(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        for request in requests:
            self.scheduler.remove(request)
            self._committer.close(request)
            siblings = self._children[request.parent_id]
            siblings.remove(request)
            if not siblings:
                del self._children[request.parent_id]
        self._runner.release([request.request_id for request in requests])

    def _take_pending(self) -> list[RequestOutput]:
        pending, self._pending_outputs = self._pending_outputs, []
        return pending

    def _count_scheduler_events(self) -> tuple[int, int, int, int]:
        scheduler = self.scheduler
        return (
            scheduler.num_preemptions,
            scheduler.num_prefix_queries,
            scheduler.num_prefix_hits,
            scheduler.budget.planner.num_probes,
        )

    def _fill_stats(self, stats: StepStats, before: tuple[int, int, int, int]) -> None:
        scheduler = self.scheduler
        after = self._count_scheduler_events()
        changes = [now - then for now, then in zip(after, before, strict=True)]
        stats.num_preemptions, stats.num_prefix_queries = changes[:2]
        stats.num_prefix_hits, stats.num_probes = changes[2:]
        stats.num_running = len(scheduler.running)
        stats.num_waiting = len(scheduler.waiting)
        stats.kv_usage_frac = scheduler.cache.usage_frac
        stats.verification_budget = stats.num_verified_tokens


def _count_prompt_rows(scheduled: ScheduledRequest) -> int:
    """Return how many of a request's rows were prompt tokens."""
    left = scheduled.num_prompt_tokens - scheduled.num_computed_tokens
    return max(0, min(scheduled.num_new_tokens, left))


def _count_step(
    stats: StepStats, num_rows: int, num_verified: int, committed: CommittedStep
) -> None:
    stats.num_rows += num_rows
    stats.num_committed_tokens += len(committed.output.token_ids)
    if num_verified == 0:
        return
    accepted = committed.num_accepted_tokens
    stats.num_spec_steps += 1
    stats.num_verified_tokens += num_verified
    stats.num_accepted_tokens += accepted
    _add_prefix(stats.verified_per_position, num_verified)
    _add_prefix(stats.accepted_per_position, accepted)


def _add_prefix(counts: list[int], length: int) -> None:
    """Add one to the first `length` entries, growing the list as needed."""
    counts.extend([0] * (length - len(counts)))
    for position in range(length):
        counts[position] += 1
