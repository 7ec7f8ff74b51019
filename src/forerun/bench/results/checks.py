"""Gates: what must hold before a run may support a decision.

Each gate is "ok" or one sentence saying what is wrong. A run that fails one is kept and reported;
it just proves less.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.bench.client.stream import UNKNOWN
from forerun.bench.metrics import compute_ttft
from forerun.bench.options import BenchConfig
from forerun.bench.records import RequestRecord
from forerun.bench.window import SteadyWindow

OK = "ok"
MAX_DELAY_MEDIAN_S = 0.001
MAX_DELAY_SHARE_OF_TTFT = 0.05
MAX_CPU_SHARE = 0.8
MIN_REQUESTS_FOR_P99 = 300


def run_checks(
    config: BenchConfig,
    records: Sequence[RequestRecord],
    completed: Sequence[RequestRecord],
    window: SteadyWindow | str,
    *,
    num_prompts: int,
    client_cpu_share: float,
) -> dict[str, str]:
    """Return every gate with its verdict."""
    return {
        "not_interrupted": check_not_interrupted(records, num_prompts),
        "all_completed": check_completed(records, completed),
        "tokens_per_event": check_token_source(completed),
        "token_counts_agree": check_token_counts(completed),
        "steady_window": window if isinstance(window, str) else window.refusal or OK,
        "dispatch_delay": check_dispatch(completed),
        "client_cpu": check_client_cpu(client_cpu_share),
        "distinct_prompts": check_distinct(records),
        "natural_text": check_natural(config),
        "p99_estimable": check_num_requests(completed),
    }


def check_not_interrupted(records: Sequence[RequestRecord], num_prompts: int) -> str:
    """Every request of the workload must have been sent."""
    if len(records) == num_prompts:
        return OK
    return f"interrupted after {len(records)} of {num_prompts} requests"


def check_completed(records: Sequence[RequestRecord], completed: Sequence[RequestRecord]) -> str:
    """Every request must have ended well and with tokens."""
    if len(completed) == len(records):
        return OK
    errors = [record.error for record in records if record.error is not None]
    reason = errors[0] if errors else "an answer without tokens"
    return f"{len(records) - len(completed)} of {len(records)} requests failed; first: {reason}"


def check_token_source(completed: Sequence[RequestRecord]) -> str:
    """Tokens per event must be known, or nothing per token can be said."""
    if all(record.token_source != UNKNOWN for record in completed):
        return OK
    return (
        "the server tells tokens per event neither by return_token_ids nor by "
        "continuous_usage_stats: per-token figures are left out"
    )


def check_token_counts(completed: Sequence[RequestRecord]) -> str:
    """Tokens of the events must add up to the usage of the answer."""
    differing = [
        record.request_id
        for record in completed
        if record.event_tokens is not None and sum(record.event_tokens) != record.output_tokens
    ]
    if not differing:
        return OK
    return (
        f"tokens of the events and usage differ in {len(differing)} answers, such as {differing[0]}"
    )


def check_dispatch(completed: Sequence[RequestRecord]) -> str:
    """The client must send when it should: it may not be what is measured."""
    if not completed:
        return OK
    delays_s = [record.sent_s - record.ready_s for record in completed]
    median_s, p99_s = np.percentile(delays_s, (50, 99))
    ttft_s = float(np.median([compute_ttft(record) for record in completed]))
    if median_s > MAX_DELAY_MEDIAN_S:
        return f"the client sent {median_s * 1000:.2f} ms late in the median; 1 ms is allowed"
    if p99_s > MAX_DELAY_SHARE_OF_TTFT * ttft_s:
        return (
            f"the client sent {p99_s * 1000:.2f} ms late at p99, over 5 % of the median TTFT "
            f"({ttft_s * 1000:.1f} ms)"
        )
    return OK


def check_client_cpu(share: float) -> str:
    """The client must not be short of processor time."""
    if share <= MAX_CPU_SHARE:
        return OK
    return f"the client used {share:.0%} of a core; above 80 % it may be what is measured"


def check_distinct(records: Sequence[RequestRecord]) -> str:
    """Prompts should differ, or a prefix cache answers the later ones."""
    distinct = {record.request_id.partition("#")[0] for record in records}
    if len(distinct) == len(records):
        return OK
    return f"{len(records)} requests share {len(distinct)} prompts: a prefix cache may help"


def check_natural(config: BenchConfig) -> str:
    """Forced lengths and random prompts make text no user would see, and drafters like it."""
    if config.dataset_name == "random":
        return "random prompts: acceptance and speculation's gain mean nothing here"
    if config.ignore_eos:
        return "outputs are forced past their natural end: acceptance is synthetic"
    return OK


def check_num_requests(completed: Sequence[RequestRecord]) -> str:
    """A p99 over requests has no upper confidence bound below 299 of them."""
    if len(completed) >= MIN_REQUESTS_FOR_P99:
        return OK
    return f"{len(completed)} requests; p99 over requests needs {MIN_REQUESTS_FOR_P99}"
