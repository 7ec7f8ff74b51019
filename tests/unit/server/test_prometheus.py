"""From StepStats and outputs to metrics and the stats line."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fake_engine import FakeEngine, Script, make_params, open_client
from forerun.core import FinishReason, RequestOutput
from forerun.engine.messages import NewRequest, StepMessage, StepStats
from forerun.server.prometheus import ServerMetrics, StatsLine


def read(metrics: ServerMetrics) -> dict[str, float]:
    """Return every sample; labels other than the model's name are part of the key."""
    return parse(metrics.render().decode())


def parse(text: str) -> dict[str, float]:
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "fake"
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            samples[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return samples


def step(outputs=(), **stats) -> StepMessage:
    return StepMessage(outputs=list(outputs), stats=StepStats(**stats))


def make_metrics(times=()) -> ServerMetrics:
    clock = iter(times)
    return ServerMetrics("fake", lambda: next(clock, 0.0))


def test_gauges_show_the_last_step_and_counters_add_up() -> None:
    metrics = make_metrics()
    metrics.on_step(step(num_running=3, num_waiting=2, kv_usage_frac=0.5, num_prompt_tokens=10))
    metrics.on_step(step(num_running=1, num_prompt_tokens=4, num_committed_tokens=7))
    samples = read(metrics)
    assert samples["vllm:num_requests_running"] == 1
    assert samples["vllm:num_requests_waiting"] == 0
    assert samples["vllm:kv_cache_usage_perc"] == 0
    assert samples["vllm:prompt_tokens_total"] == 14
    assert samples["vllm:generation_tokens_total"] == 7
    assert samples["forerun:committed_tokens_total"] == 7


def test_speculation_is_counted_in_total_and_per_position() -> None:
    metrics = make_metrics()
    metrics.on_step(step(num_rows=9, num_draft_tokens=10))
    metrics.on_step(
        step(
            num_rows=8,
            num_spec_steps=2,
            num_draft_tokens=10,
            num_verified_tokens=6,
            num_accepted_tokens=3,
            verified_per_position=[2, 2, 2],
            accepted_per_position=[2, 1],
            verification_budget=6,
        )
    )
    samples = read(metrics)
    assert samples["vllm:spec_decode_num_drafts_total"] == 2
    assert samples["vllm:spec_decode_num_draft_tokens_total"] == 20
    assert samples["vllm:spec_decode_num_accepted_tokens_total"] == 3
    assert samples["vllm:spec_decode_num_accepted_tokens_per_pos_total{position=0}"] == 2
    assert samples["vllm:spec_decode_num_accepted_tokens_per_pos_total{position=1}"] == 1
    assert samples["forerun:draft_tokens_total"] == 20
    assert samples["forerun:verified_tokens_total"] == 6
    assert samples["forerun:verified_tokens_per_pos_total{position=2}"] == 2
    assert samples["forerun:trimmed_tokens_total"] == 4
    assert samples["forerun:verification_budget_bucket{le=8.0}"] == 2
    assert samples["forerun:verification_budget_bucket{le=4.0}"] == 1


def test_a_draft_that_waits_a_step_is_trimmed_at_most_once() -> None:
    metrics = make_metrics()
    metrics.on_step(step(num_rows=1, num_draft_tokens=5))
    metrics.on_step(step(num_rows=1))
    metrics.on_step(step(num_rows=1, num_verified_tokens=5, num_draft_tokens=5))
    metrics.on_step(step(num_rows=1, num_verified_tokens=0))
    assert read(metrics)["forerun:trimmed_tokens_total"] == 5


def test_bookkeeping_between_steps_is_no_step() -> None:
    metrics = make_metrics()
    metrics.on_step(step(num_running=1))
    samples = read(metrics)
    assert samples["forerun:step_seconds_count"] == 0
    assert samples["forerun:rows_per_step_count"] == 0


def test_latencies_are_measured_per_request_and_per_emission() -> None:
    metrics = make_metrics([10.5, 10.75, 11.5])
    metrics.begin(
        NewRequest(request_id="a", prompt_token_ids=[1], params=make_params(), arrival_s=10.0)
    )
    for tokens, reason in ([1, 2], None), ([3], None), ([4], FinishReason.STOP):
        output = RequestOutput(
            request_id="a", token_ids=tokens, finish_reason=reason, queue_s=0.125
        )
        metrics.on_step(step([output]))
    metrics.end("a")
    samples = read(metrics)
    assert samples["vllm:time_to_first_token_seconds_sum"] == 0.5
    assert samples["vllm:inter_token_latency_seconds_count"] == 2
    assert samples["vllm:inter_token_latency_seconds_sum"] == 1.0
    assert samples["vllm:e2e_request_latency_seconds_sum"] == 1.5
    assert samples["vllm:request_queue_time_seconds_count"] == 1
    assert samples["vllm:request_queue_time_seconds_sum"] == 0.125
    assert samples["vllm:request_success_total{finished_reason=stop}"] == 1
    assert "vllm:request_success_total{finished_reason=abort}" not in samples


def test_choices_that_did_not_finish_count_as_aborted() -> None:
    metrics = make_metrics()
    request = NewRequest(request_id="a", prompt_token_ids=[1], params=make_params(n=3))
    metrics.begin(request)
    output = RequestOutput(request_id="a", token_ids=[1], finish_reason=FinishReason.LENGTH)
    metrics.on_step(step([output]))
    metrics.end("a")
    metrics.end("a")
    samples = read(metrics)
    assert samples["vllm:request_success_total{finished_reason=length}"] == 1
    assert samples["vllm:request_success_total{finished_reason=abort}"] == 2
    assert samples["vllm:e2e_request_latency_seconds_count"] == 0


@pytest.mark.anyio
async def test_metrics_of_served_requests_add_up_and_gauges_return_to_zero() -> None:
    async with open_client(FakeEngine(Script(("Hello",)))) as client:
        answers = [
            (await client.post("/v1/completions", json={"prompt": "hi", "n": 2})).json()
            for _ in range(3)
        ]
        samples = parse((await client.get("/metrics")).text)
    committed = sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert samples["vllm:generation_tokens_total"] == committed == 36
    assert samples["vllm:request_success_total{finished_reason=stop}"] == 6
    assert samples["vllm:num_requests_running"] == 0
    assert samples["vllm:kv_cache_usage_perc"] == 0
    assert samples["vllm:time_to_first_token_seconds_count"] == 3


def test_the_stats_line_sums_up_an_interval_and_is_silent_when_idle() -> None:
    line = StatsLine()
    assert line.take(10) is None
    line.on_step(step(num_rows=4, num_running=2, num_committed_tokens=30, num_prompt_tokens=50))
    line.on_step(
        step(
            num_rows=4,
            num_running=3,
            num_waiting=1,
            kv_usage_frac=0.25,
            num_committed_tokens=20,
            num_spec_steps=4,
            num_accepted_tokens=6,
        )
    )
    assert line.take(10) == (
        "running 3, waiting 1, prompt 5.0 tok/s, output 5.0 tok/s, KV use 25.0%, "
        "acceptance length 2.50"
    )
    assert line.take(10) is None
