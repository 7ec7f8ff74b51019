"""Prometheus metrics (vLLM's names where the meaning is the same) and the periodic stats line.

Fed from two sides: every StepMessage of the engine, and the begin and end of every request. Times
are taken when the event loop receives an output: a slow client does not count against the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from forerun.core import FinishReason, RequestOutput
from forerun.engine.messages import NewRequest, StepMessage, StepStats
from forerun.server.budget_metrics import BudgetMetrics

_FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
)
_REQUEST_BUCKETS_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0)
_STEP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_ROW_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

_GAUGES = {
    "num_running": ("vllm:num_requests_running", "Requests running."),
    "num_waiting": ("vllm:num_requests_waiting", "Requests waiting."),
    "kv_usage_frac": ("vllm:kv_cache_usage_perc", "KV blocks in use; 1 means all."),
}
_COUNTERS = {
    "num_prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens computed."),
    "num_committed_tokens": ("vllm:generation_tokens", "Tokens that became output."),
    "num_preemptions": ("vllm:num_preemptions", "Requests that lost their blocks."),
    "num_prefix_queries": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache."),
    "num_prefix_hits": ("vllm:prefix_cache_hits", "Prompt tokens found in the cache."),
    "num_spec_steps": ("vllm:spec_decode_num_drafts", "Verifications, one per request and step."),
    "num_draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Tokens drafted."),
    "num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted."),
}
_OWN_COUNTERS = {
    "num_draft_tokens": ("forerun:draft_tokens", "Tokens drafted."),
    "num_lookup_tokens": ("forerun:lookup_tokens", "Of these, copied by lookups."),
    "num_verified_tokens": ("forerun:verified_tokens", "Draft tokens given to the target."),
    "num_accepted_tokens": ("forerun:accepted_tokens", "Draft tokens accepted."),
    "num_committed_tokens": ("forerun:committed_tokens", "Tokens that became output."),
}
_POSITION_COUNTERS = {
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
    "forerun:accepted_tokens_per_pos": "accepted_per_position",
    "forerun:verified_tokens_per_pos": "verified_per_position",
}
_STEP_HISTOGRAMS = {
    "verification_budget": ("forerun:verification_budget", "Draft tokens per step.", _ROW_BUCKETS),
    "num_rows": ("forerun:rows_per_step", "Rows given to the target per step.", _ROW_BUCKETS),
    "step_s": ("forerun:step_seconds", "Whole steps.", _STEP_BUCKETS_S),
    "host_s": ("forerun:host_seconds", "Host share of a step.", _STEP_BUCKETS_S),
}


@dataclass(slots=True)
class _RequestTiming:
    """Times of one prompt's choices, by choice index."""

    arrival_s: float
    num_choices: int
    last_output_s: dict[int, float] = field(default_factory=dict)
    num_finished: int = 0
    is_queue_time_known: bool = False


class ServerMetrics:
    """All metrics of one application. Runs on the event loop."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._clock = clock
        self._timings: dict[str, _RequestTiming] = {}
        self._num_drafted = self._num_verified = self._num_trimmed = 0
        self._gauges = {key: self._gauge(*spec) for key, spec in _GAUGES.items()}
        named = [*_COUNTERS.items(), *_OWN_COUNTERS.items()]
        self._counters = [(key, self._counter(*spec)) for key, spec in named]
        self._trimmed = self._counter("forerun:trimmed_tokens", "Tokens drafted, never verified.")
        self._per_position = {
            name: self._split_counter(name, "By draft position.", "position")
            for name in _POSITION_COUNTERS
        }
        self.budget = BudgetMetrics(self.registry, self._labels)
        self._steps = [(key, self._histogram(*spec)) for key, spec in _STEP_HISTOGRAMS.items()]
        self._finished = self._split_counter(
            "vllm:request_success", "Choices that ended, by reason.", "finished_reason"
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first output.", _FIRST_TOKEN_BUCKETS_S
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Gaps between outputs.", _TOKEN_BUCKETS_S
        )
        self._end_to_end = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last output.", _REQUEST_BUCKETS_S
        )
        self._queue_time = self._histogram(
            "vllm:request_queue_time_seconds", "Arrival to first schedule.", _REQUEST_BUCKETS_S
        )

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def begin(self, request: NewRequest) -> None:
        """Start the clock of a request."""
        timing = _RequestTiming(request.arrival_s, request.params.n)
        self._timings[request.request_id] = timing

    def end(self, request_id: str) -> None:
        """Stop the clock; choices that did not finish by themselves count as aborted."""
        timing = self._timings.pop(request_id, None)
        if timing is not None and timing.num_finished < timing.num_choices:
            self._count_finished(FinishReason.ABORT, timing.num_choices - timing.num_finished)

    def on_step(self, message: StepMessage) -> None:
        """Take in one step; pass this to AsyncEngine.add_stats_listener."""
        self._observe_stats(message.stats)
        now_s = self._clock()
        for output in message.outputs:
            timing = self._timings.get(output.request_id)
            if timing is not None:
                self._observe_output(timing, output, now_s)

    def _observe_stats(self, stats: StepStats) -> None:
        for key, gauge in self._gauges.items():
            gauge.set(getattr(stats, key))
        for key, counter in self._counters:
            counter.inc(getattr(stats, key))
        for name, key in _POSITION_COUNTERS.items():
            self._count_positions(name, getattr(stats, key))
        if stats.num_rows > 0:
            self.budget.observe(stats)
            self._count_trimmed(stats)
            for key, histogram in self._steps:
                histogram.observe(getattr(stats, key))

    def _count_trimmed(self, stats: StepStats) -> None:
        """Count drafts of earlier steps that this step did not verify.

        What a step drafts is verified by the next one at the earliest. Totals are compared, so a
        draft that has to wait a step is not counted for good when it is verified after all.
        """
        self._num_verified += stats.num_verified_tokens
        num_trimmed = self._num_drafted - self._num_verified
        self._num_drafted += stats.num_draft_tokens
        if num_trimmed > self._num_trimmed:
            self._trimmed.inc(num_trimmed - self._num_trimmed)
            self._num_trimmed = num_trimmed

    def _count_positions(self, name: str, counts: Sequence[int]) -> None:
        for position, count in enumerate(counts):
            labels = {**self._labels, "position": str(position)}
            self._per_position[name].labels(**labels).inc(count)

    def _observe_output(self, timing: _RequestTiming, output: RequestOutput, now_s: float) -> None:
        if output.queue_s is not None and not timing.is_queue_time_known:
            timing.is_queue_time_known = True
            self._queue_time.observe(output.queue_s)
        if output.token_ids:
            last_s = timing.last_output_s.get(output.choice_index)
            if last_s is not None:
                self._inter_token.observe(now_s - last_s)
            elif not timing.last_output_s:
                self._first_token.observe(now_s - timing.arrival_s)
            timing.last_output_s[output.choice_index] = now_s
        if output.finish_reason is not None:
            timing.num_finished += 1
            self._count_finished(output.finish_reason, 1)
            if timing.num_finished == timing.num_choices:
                self._end_to_end.observe(now_s - timing.arrival_s)

    def _count_finished(self, reason: FinishReason, count: int) -> None:
        self._finished.labels(**self._labels, finished_reason=reason.value).inc(count)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(**self._labels)

    def _split_counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, ["model_name", label], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return metric.labels(**self._labels)


class StatsLine:
    """Sums up steps for one log line per interval; silent when nothing happened."""

    def __init__(self) -> None:
        self._last = StepStats()
        self._reset()

    def on_step(self, message: StepMessage) -> None:
        """Take in one step; pass this to AsyncEngine.add_stats_listener."""
        stats = self._last = message.stats
        self._num_steps += stats.num_rows > 0
        self._num_prompt += stats.num_prompt_tokens
        self._num_committed += stats.num_committed_tokens
        self._num_spec_steps += stats.num_spec_steps
        self._num_accepted += stats.num_accepted_tokens
        self._num_drafted += stats.num_draft_tokens
        self._num_verified += stats.num_verified_tokens

    def take(self, elapsed_s: float) -> str | None:
        """Return the line for the last `elapsed_s` seconds and start over; None when idle."""
        if self._num_steps == 0:
            return None
        line = (
            f"running {self._last.num_running}, waiting {self._last.num_waiting}, "
            f"prompt {self._num_prompt / elapsed_s:.1f} tok/s, "
            f"output {self._num_committed / elapsed_s:.1f} tok/s, "
            f"KV use {self._last.kv_usage_frac:.1%}"
        )
        if self._num_spec_steps:
            line += f", acceptance length {1 + self._num_accepted / self._num_spec_steps:.2f}"
        if self._num_drafted:
            line += (
                f", drafted {self._num_drafted}, verified {self._num_verified}, "
                f"accepted {self._num_accepted}"
            )
        if self._last.budget_state:
            line += f", {self._last.budget_state.replace('_', ' ')}"
        self._reset()
        return line

    def _reset(self) -> None:
        self._num_steps = self._num_prompt = self._num_committed = 0
        self._num_spec_steps = self._num_accepted = 0
        self._num_drafted = self._num_verified = 0
