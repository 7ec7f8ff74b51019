"""One run as one flat JSON object: vLLM's keys with vLLM's arithmetic, ours under `sd_`.

vLLM's `itl` is per event and its `tpot` divides by N - 1; ours are `sd_itl_token` and `sd_tpot`.
The one deliberate difference: `max_output_tokens_per_s` counts tokens, not events. Latencies are
milliseconds. Keys whose facts the server does not tell are null, or left out as a group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from forerun.bench import metrics
from forerun.bench.client.endpoint import Endpoint
from forerun.bench.options import BenchConfig
from forerun.bench.records import RequestRecord
from forerun.bench.results.checks import run_checks
from forerun.bench.results.statistics import (
    add_known,
    compute_percentile,
    divide,
    keep_known,
    summarise_ms,
)
from forerun.bench.window import SteadyWindow, find_steady_window

RESULT_SCHEMA_VERSION = 1
_OWN_PERCENTILES = (50.0, 90.0, 99.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What is known about a run beside its records."""

    config: BenchConfig
    endpoint: Endpoint
    num_prompts: int
    started_at: datetime
    provenance: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)


def build_result(
    facts: RunFacts, records: Sequence[RequestRecord], client_cpu_share: float
) -> dict[str, Any]:
    """Return the result of a run with at least one record."""
    config = facts.config
    completed = metrics.select_completed(records)
    concurrency = config.max_concurrency if config.is_closed_loop else None
    window = find_steady_window(records, concurrency)
    result = _build_identity(facts) | _build_totals(records, completed)
    for name, values in _collect_vllm_series(completed).items():
        if name in config.parse_latencies():
            result |= summarise_ms(name, values, config.parse_percentiles())
    queue_s = [record.ready_s - record.intent_s for record in completed]
    result |= summarise_ms("client_queue_time", queue_s, config.parse_percentiles())
    result |= _build_vllm_acceptance(metrics.compute_acceptance(completed))
    result |= _build_own(facts, records, completed, window)
    result["sd_client_cpu_share"] = client_cpu_share
    result["sd_gates"] = run_checks(
        config,
        records,
        completed,
        window,
        num_prompts=facts.num_prompts,
        client_cpu_share=client_cpu_share,
    )
    if config.save_detailed:
        result |= _build_details(records)
    return result


def build_file_stem(facts: RunFacts) -> str:
    """Return vLLM's name of a result file, without its suffix."""
    config = facts.config
    load = "" if config.max_concurrency is None else f"-concurrency{config.max_concurrency}"
    model = facts.endpoint.model.rsplit("/", 1)[-1]
    stamp = facts.started_at.strftime("%Y%m%d-%H%M%S")
    label = config.label or facts.endpoint.backend
    stem = f"{label}-{_format_rate(config)}qps{load}-{model}-{stamp}"
    return re.sub(r"[^\w.+-]", "_", stem)


def _format_rate(config: BenchConfig) -> str:
    return "inf" if config.is_closed_loop else f"{config.request_rate:g}"


def _build_identity(facts: RunFacts) -> dict[str, Any]:
    config = facts.config
    return {
        "date": facts.started_at.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": facts.endpoint.backend,
        "backend": facts.endpoint.backend,
        "label": config.label,
        "model_id": facts.endpoint.model,
        "tokenizer_id": facts.endpoint.model,
        "num_prompts": facts.num_prompts,
        "request_rate": "inf" if config.is_closed_loop else config.request_rate,
        "burstiness": 1.0,
        "max_concurrency": config.max_concurrency,
    }


def _build_totals(
    records: Sequence[RequestRecord], completed: Sequence[RequestRecord]
) -> dict[str, Any]:
    duration_s = metrics.compute_duration(records)
    start_s = min(record.sent_s for record in records)
    num_input = add_known(record.prompt_tokens for record in completed)
    num_output = add_known(record.output_tokens for record in completed)
    num_total = None if num_input is None or num_output is None else num_input + num_output
    tokens = metrics.collect_tokens(completed)
    return {
        "duration": duration_s,
        "completed": len(completed),
        "failed": len(records) - len(completed),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": divide(len(completed), duration_s),
        "request_goodput": None,
        "output_throughput": divide(num_output, duration_s),
        "total_token_throughput": divide(num_total, duration_s),
        "max_output_tokens_per_s": metrics.compute_peak_throughput(tokens, start_s, duration_s),
        "max_concurrent_requests": metrics.compute_max_in_flight(records),
    }


def _collect_vllm_series(completed: Sequence[RequestRecord]) -> dict[str, list[float]]:
    return {
        "ttft": [metrics.compute_ttft(record) for record in completed],
        "tpot": keep_known(metrics.compute_tpot_vllm(record) for record in completed),
        "itl": [gap for record in completed for gap in metrics.compute_itl_chunk(record)],
        "e2el": [metrics.compute_e2el(record) for record in completed],
    }


def _collect_own_series(completed: Sequence[RequestRecord]) -> dict[str, list[float]]:
    return {
        "ttft": [metrics.compute_ttft(record) for record in completed],
        "ttft_from_intent": [metrics.compute_ttft_from_intent(record) for record in completed],
        "tpot": keep_known(metrics.compute_tpot(record) for record in completed),
        "itl_chunk": [gap for record in completed for gap in metrics.compute_itl_chunk(record)],
        "itl_token": [gap for record in completed for gap in metrics.compute_itl_token(record)],
        "max_gap": keep_known(metrics.compute_max_gap(record) for record in completed),
        "e2el": [metrics.compute_e2el(record) for record in completed],
        "dispatch_delay": [record.sent_s - record.ready_s for record in completed],
    }


def _build_vllm_acceptance(acceptance: metrics.Acceptance | None) -> dict[str, Any]:
    if acceptance is None:
        return {}
    rate = acceptance.draft_rate
    return {
        "spec_decode_acceptance_rate": None if rate is None else 100 * rate,
        "spec_decode_acceptance_length": acceptance.length,
        "spec_decode_num_drafts": acceptance.num_steps,
        "spec_decode_draft_tokens": acceptance.num_drafted,
        "spec_decode_accepted_tokens": acceptance.num_accepted,
        "spec_decode_per_position_acceptance_rates": acceptance.per_position,
    }


def _build_own(
    facts: RunFacts,
    records: Sequence[RequestRecord],
    completed: Sequence[RequestRecord],
    window: SteadyWindow | str,
) -> dict[str, Any]:
    own: dict[str, Any] = {"sd_schema_version": RESULT_SCHEMA_VERSION}
    own |= _build_own_throughput(records, completed, window)
    own |= _build_own_speeds(completed)
    for name, values in _collect_own_series(completed).items():
        own |= summarise_ms(f"sd_{name}", values, _OWN_PERCENTILES)
    gaps = keep_known(metrics.compute_max_gap(record) for record in completed)
    own["sd_max_gap_max_ms"] = max(gaps) * 1000 if gaps else None
    own |= _build_own_counts(completed)
    own |= _build_own_acceptance(metrics.compute_acceptance(completed))
    config = {key: value for key, value in asdict(facts.config).items() if key != "api_key"}
    config["request_rate"] = _format_rate(facts.config)
    own["sd_config"] = config
    own["sd_request_fields"] = facts.endpoint.fields
    own["sd_provenance"] = facts.provenance
    return own | {f"sd_{name}": value for name, value in facts.extra.items()}


def _build_own_throughput(
    records: Sequence[RequestRecord],
    completed: Sequence[RequestRecord],
    window: SteadyWindow | str,
) -> dict[str, Any]:
    whole = add_known(record.output_tokens for record in completed)
    whole_rate = divide(whole, metrics.compute_duration(records))
    if isinstance(window, str):
        start_s = min(record.sent_s for record in records)
        end_s = start_s + metrics.compute_duration(records)
        steady = window_s = None
    else:
        start_s, end_s, steady = window.start_s, window.end_s, window.throughput
        window_s = end_s - start_s
    return {
        "sd_output_throughput_steady": steady,
        "sd_steady_window_s": window_s,
        "sd_steady_share": divide(steady, whole_rate),
        "sd_realised_concurrency": metrics.compute_mean_in_flight(records, start_s, end_s),
    }


def _build_own_speeds(completed: Sequence[RequestRecord]) -> dict[str, Any]:
    speeds = keep_known(metrics.compute_speed(record) for record in completed)
    normalised = keep_known(metrics.compute_normalised_speed(record) for record in completed)
    return {
        "sd_interactivity_p50": compute_percentile(speeds, 50),
        "sd_interactivity_p10": compute_percentile(speeds, 10),
        "sd_interactivity_hmean": metrics.compute_harmonic_speed(completed),
        "sd_e2e_norm_interactivity_p50": compute_percentile(normalised, 50),
        "sd_e2e_norm_interactivity_p10": compute_percentile(normalised, 10),
    }


def _build_own_counts(completed: Sequence[RequestRecord]) -> dict[str, Any]:
    cached = add_known(record.cached_tokens for record in completed)
    num_events = sum(len(record.event_s) for record in completed)
    gaps = [gap for record in completed for gap in metrics.compute_itl_chunk(record)]
    tokens = metrics.collect_tokens(completed)
    return {
        "sd_token_timing_source": sorted({record.token_source for record in completed}),
        "sd_tokens_per_event": divide(sum(count for _, count in tokens) or None, num_events),
        "sd_coalesced_share": divide(gaps.count(0.0), len(gaps)),
        "sd_prefix_hit_rate": divide(
            cached, add_known(record.prompt_tokens for record in completed) or 0
        ),
    }


def _build_own_acceptance(acceptance: metrics.Acceptance | None) -> dict[str, Any]:
    if acceptance is None:
        return {}
    return {
        "sd_al_pooled": acceptance.length,
        "sd_al_request_mean": float(np.mean(acceptance.request_lengths)),
        "sd_al_request_p10": compute_percentile(acceptance.request_lengths, 10),
        "sd_al_request_p50": compute_percentile(acceptance.request_lengths, 50),
        "sd_al_request_p90": compute_percentile(acceptance.request_lengths, 90),
        "sd_num_spec_steps": acceptance.num_steps,
        "sd_num_drafted": acceptance.num_drafted,
        "sd_num_verified": acceptance.num_verified,
        "sd_num_accepted": acceptance.num_accepted,
        "sd_waste": acceptance.waste,
    }


def _build_details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return vLLM's per-request lists, in seconds; requests without tokens have 0 and []."""
    return {
        "input_lens": [record.prompt_tokens or 0 for record in records],
        "output_lens": [record.output_tokens or 0 for record in records],
        "ttfts": [metrics.compute_ttft(r) if r.event_s else 0.0 for r in records],
        "itls": [metrics.compute_itl_chunk(record) for record in records],
        "latencies": [metrics.compute_e2el(r) if r.event_s else 0.0 for r in records],
        "start_times": [record.sent_s for record in records],
        "queue_times": [record.ready_s - record.intent_s for record in records],
        "errors": [record.error or "" for record in records],
    }
