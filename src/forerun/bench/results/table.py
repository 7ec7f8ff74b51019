"""A result for human eyes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from forerun.bench.results.checks import OK

_NOT_ESTIMABLE = "-"
_TOTALS = (
    ("requests completed", "completed", "{:d}"),
    ("requests failed", "failed", "{:d}"),
    ("duration, s", "duration", "{:.2f}"),
    ("input tokens", "total_input_tokens", "{:d}"),
    ("output tokens", "total_output_tokens", "{:d}"),
    ("requests / s", "request_throughput", "{:.2f}"),
    ("output tokens / s, whole run", "output_throughput", "{:.2f}"),
    ("output tokens / s, steady window", "sd_output_throughput_steady", "{:.2f}"),
    ("output tokens / s, peak", "max_output_tokens_per_s", "{:.2f}"),
    ("speed of a user, tokens / s, p50", "sd_interactivity_p50", "{:.2f}"),
    ("speed of a user, tokens / s, p10", "sd_interactivity_p10", "{:.2f}"),
    ("requests in flight, mean", "sd_realised_concurrency", "{:.2f}"),
    ("tokens per event", "sd_tokens_per_event", "{:.2f}"),
    ("acceptance length, pooled", "sd_al_pooled", "{:.2f}"),
    ("drafts accepted, %", "spec_decode_acceptance_rate", "{:.1f}"),
)
# Name, key prefix, and whether it has one value per request (then p99 needs many requests).
_LATENCIES = (
    ("TTFT", "sd_ttft", True),
    ("TTFT from intent", "sd_ttft_from_intent", True),
    ("TPOT", "sd_tpot", True),
    ("gap between events (itl_chunk)", "sd_itl_chunk", False),
    ("gap per token (itl_token)", "sd_itl_token", False),
    ("largest gap", "sd_max_gap", True),
    ("E2E", "sd_e2el", True),
)


def build_run_tables(result: Mapping[str, Any]) -> list[Table]:
    """Return the tables of one run: totals, latencies, and the gates that did not hold."""
    totals = Table(title=f"{result['model_id']} - {_describe_load(result)}", show_header=False)
    totals.add_column()
    totals.add_column(justify="right")
    for label, key, pattern in _TOTALS:
        if result.get(key) is not None:
            totals.add_row(label, pattern.format(result[key]))
    tables = [totals, _build_latencies(result)]
    failed = {name: text for name, text in result["sd_gates"].items() if text != OK}
    if failed:
        gates = Table(title="what this run cannot prove", show_header=False)
        for name, text in failed.items():
            gates.add_row(name, text)
        tables.append(gates)
    return tables


def _describe_load(result: Mapping[str, Any]) -> str:
    parts = []
    if result["request_rate"] != "inf":
        parts.append(f"{result['request_rate']:g} requests / s")
    if result["max_concurrency"] is not None:
        parts.append(f"concurrency {result['max_concurrency']}")
    return ", ".join(parts) or "all requests at once"


def _build_latencies(result: Mapping[str, Any]) -> Table:
    table = Table(title="milliseconds")
    table.add_column("latency")
    statistics = ("mean", "p50", "p90", "p99")
    for statistic in statistics:
        table.add_column(statistic, justify="right")
    has_p99 = result["sd_gates"]["p99_estimable"] == OK
    for label, prefix, is_per_request in _LATENCIES:
        cells = [_format(result.get(f"{prefix}_{statistic}_ms")) for statistic in statistics]
        if is_per_request and not has_p99:
            cells[-1] = _NOT_ESTIMABLE
        table.add_row(label, *cells)
    return table


def _format(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def build_paired_table(comparisons: Sequence[Mapping[str, Any]]) -> Table:
    """Return one line per load, arm and metric: medians, and the ratio to the first arm."""
    table = Table(title="ratio to the first arm, block by block")
    for name in ("load", "metric", "arm"):
        table.add_column(name, no_wrap=True)
    for name in ("first arm", "this arm", "ratio", "min .. max", "95 % interval", "blocks"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in comparisons:
        table.add_row(
            entry["load"],
            entry["metric"],
            entry["arm"],
            f"{entry['baseline_median']:.2f}",
            f"{entry['arm_median']:.2f}",
            f"{entry['ratio_median']:.3f}",
            f"{entry['ratio_min']:.3f} .. {entry['ratio_max']:.3f}",
            _format_interval(entry),
            str(len(entry["ratios"])),
        )
    return table


def _format_interval(entry: Mapping[str, Any]) -> str:
    if entry["ratio_low"] is None:
        return "one block"
    return f"{entry['ratio_low']:.3f} .. {entry['ratio_high']:.3f}"
