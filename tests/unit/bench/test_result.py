"""A whole result from the scenario: every figure equals the one computed by hand."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from forerun.bench.options import BenchConfig
from forerun.bench.records import RequestRecord
from forerun.bench.results.result import RunFacts, build_file_stem, build_result
from unit.bench.scenario import CONCURRENCY, SCRIPTS
from unit.bench.scripted_server import Script, make_endpoint, make_event, play_scripts


def make_facts(**options: Any) -> RunFacts:
    return RunFacts(
        config=BenchConfig(**{"max_concurrency": CONCURRENCY, **options}),
        endpoint=make_endpoint(),
        num_prompts=4,
        started_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        provenance={"git_sha": "abc"},
    )


@pytest.fixture(scope="module")
def records() -> list[RequestRecord]:
    return play_scripts(SCRIPTS, CONCURRENCY)


@pytest.fixture(scope="module")
def result(records: list[RequestRecord]) -> dict[str, Any]:
    return build_result(make_facts(save_detailed=True), records, 0.05)


TTFT = [0.5, 1.0, 2.0]
TPOT_VLLM = [1.0 / 4, 0.1 / 4, 0.4 / 3]
TPOT = [1.0 / 4, 0.1 / 4, 0.4 / 2]
E2EL = [1.5, 1.1, 2.4]
ITL_CHUNK = [0.0, 0.1, 0.2, 0.4, 0.8]
ITL_TOKEN = [0.025] * 4 + [0.2 / 3] * 3 + [0.2] * 2 + [0.8]
HAND_COMPUTED = {
    "completed": 3,
    "failed": 1,
    "duration": 3.5,
    "total_input_tokens": 30,
    "total_output_tokens": 14,
    "request_throughput": 3 / 3.5,
    "output_throughput": 14 / 3.5,
    "total_token_throughput": 44 / 3.5,
    # Three buckets of 3.5 / 3 s; the first holds 1 + 3 + 1 + 4 tokens.
    "max_output_tokens_per_s": 9 * 3 / 3.5,
    "max_concurrent_requests": 2,
    "mean_ttft_ms": 1000 * sum(TTFT) / 3,
    "median_ttft_ms": 1000,
    "p90_ttft_ms": 1800,
    "mean_tpot_ms": 1000 * sum(TPOT_VLLM) / 3,
    "median_tpot_ms": 1000 * 0.4 / 3,
    "mean_itl_ms": 300,
    "median_itl_ms": 200,
    "p99_itl_ms": 784,
    "mean_e2el_ms": 1000 * sum(E2EL) / 3,
    "median_e2el_ms": 1500,
    "mean_client_queue_time_ms": 0,
    "sd_ttft_from_intent_mean_ms": 1000 * sum(TTFT) / 3,
    "sd_tpot_mean_ms": 1000 * sum(TPOT) / 3,
    "sd_tpot_median_ms": 200,
    "sd_itl_chunk_mean_ms": 300,
    "sd_itl_token_mean_ms": 1000 * sum(ITL_TOKEN) / 10,
    "sd_itl_token_median_ms": 1000 * 0.2 / 3,
    "sd_max_gap_median_ms": 400,
    "sd_max_gap_max_ms": 800,
    "sd_dispatch_delay_p99_ms": 0,
    "sd_interactivity_p50": 5,
    # Linear interpolation between the slowest two of 4, 5 and 40 tokens/s.
    "sd_interactivity_p10": 4.2,
    "sd_interactivity_hmean": (4 + 4 + 2) / (1.0 + 0.1 + 0.4),
    "sd_e2e_norm_interactivity_p50": 5 / 1.5,
    # From the second first token (1.0) to the last send (1.5), r0, r1 and r2 fill both places.
    "sd_steady_window_s": 0.5,
    "sd_realised_concurrency": 2,
    "sd_tokens_per_event": 14 / 8,
    "sd_coalesced_share": 1 / 5,
    "sd_prefix_hit_rate": 12 / 30,
    "spec_decode_acceptance_rate": 100 * 9 / 24,
    "spec_decode_acceptance_length": 1 + 9 / 12,
    "spec_decode_num_drafts": 12,
    "spec_decode_draft_tokens": 24,
    "spec_decode_accepted_tokens": 9,
    "spec_decode_per_position_acceptance_rates": [0.5, 0.25],
    "sd_al_pooled": 1.75,
    "sd_waste": 9 / 18,
    "sd_client_cpu_share": 0.05,
}


@pytest.mark.parametrize("key", HAND_COMPUTED)
def test_a_figure_equals_the_one_computed_by_hand(result: dict[str, Any], key: str) -> None:
    assert result[key] == pytest.approx(HAND_COMPUTED[key])


def test_a_short_run_has_no_steady_throughput_and_says_why(result: dict[str, Any]) -> None:
    assert result["sd_output_throughput_steady"] is None
    assert result["sd_gates"]["steady_window"] == "2.0 waves of requests; at least 5 are needed"


def test_gates_name_what_went_wrong(result: dict[str, Any]) -> None:
    gates = result["sd_gates"]
    assert gates["all_completed"].startswith("1 of 4 requests failed; first: the server closed")
    assert gates["p99_estimable"] == "3 requests; p99 over requests needs 300"
    for name in ("not_interrupted", "tokens_per_event", "dispatch_delay", "client_cpu"):
        assert gates[name] == "ok", name


def test_details_are_vllms_lists_in_row_order(result: dict[str, Any]) -> None:
    assert result["ttfts"] == pytest.approx([*TTFT, 0.1])
    assert result["itls"][1] == pytest.approx([0.1, 0.0])
    assert result["output_lens"] == [5, 5, 4, 1]
    assert [bool(error) for error in result["errors"]] == [False, False, False, True]


def test_only_the_latencies_and_percentiles_asked_for_are_reported(
    records: list[RequestRecord],
) -> None:
    facts = make_facts(percentile_metrics="ttft", metric_percentiles="25,99.9")
    result = build_result(facts, records, 0.0)
    assert result["p25_ttft_ms"] == pytest.approx(750)
    assert result["p99.9_ttft_ms"] == pytest.approx(1998)
    assert "mean_tpot_ms" not in result
    assert "p90_ttft_ms" not in result


def test_without_token_counts_nothing_per_token_is_claimed() -> None:
    silent = Script.of_events((0.5, make_event()), (0.75, make_event(finish_reason="stop")))
    result = build_result(make_facts(), play_scripts([silent], 1), 0.0)
    assert result["median_itl_ms"] == pytest.approx(250)
    for key in ("sd_itl_token_p50_ms", "mean_tpot_ms", "output_throughput", "sd_interactivity_p50"):
        assert result[key] is None, key
    assert "per-token figures are left out" in result["sd_gates"]["tokens_per_event"]


def test_counts_that_disagree_with_usage_are_flagged() -> None:
    usage = {"completion_tokens": 7, "prompt_tokens": 1}
    script = Script.of_events((0.5, make_event(2, finish_reason="stop", usage=usage)))
    result = build_result(make_facts(), play_scripts([script], 1), 0.0)
    assert result["total_output_tokens"] == 7
    assert "differ in 1 answers, such as r0" in result["sd_gates"]["token_counts_agree"]


def test_random_prompts_and_forced_lengths_are_marked() -> None:
    script = Script.of_events((0.5, make_event(2, finish_reason="stop")))
    records = play_scripts([script], 1)
    forced = build_result(make_facts(ignore_eos=True), records, 0.0)
    random = build_result(make_facts(dataset_name="random"), records, 0.0)
    assert "synthetic" in forced["sd_gates"]["natural_text"]
    assert "mean nothing" in random["sd_gates"]["natural_text"]


def test_the_key_stays_out_of_the_result(records: list[RequestRecord]) -> None:
    result = build_result(make_facts(api_key="secret-key"), records, 0.0)
    assert "secret-key" not in str(result)
    assert result["sd_provenance"] == {"git_sha": "abc"}


def test_file_names_are_vllms() -> None:
    assert build_file_stem(make_facts()) == "openai-infqps-concurrency2-m-20260102-030405"
    open_loop = make_facts(max_concurrency=None, request_rate=2.5, label="a/b")
    assert build_file_stem(open_loop) == "a_b-2.5qps-m-20260102-030405"
