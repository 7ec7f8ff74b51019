"""Adaptive verification against no speculation and against a fixed depth, over load.

Servers run all the time: none, a drafter with each fixed depth verified every step, the same with
its greatest depth and adaptive verification; if wanted, adaptive n-gram drafts beside another
drafter, and that one without the lookups its adaptive arm may have. A block measures every load,
and at each load every arm once on the same prompts (natural stops, greedy), one right after another
and in rotated order: the machine's speed drifts within minutes. Reported per load: throughput of
each arm, and adaptive against each other arm and against the best of them, as ratios within blocks
with their 95 % interval. Also what was verified per step, and predicted against measured step time.

Throughput is that of the steady window, with all places taken: it needs five requests per place or
more. Over a whole short run the arms differ by how long their last, least predictable requests keep
a nearly empty engine busy. At one request both are the same.

    python -m benchmarks.adaptive
    python -m benchmarks.adaptive --blocks 3 --serve-flags "--dtype bfloat16 --quantization exact"
    python -m benchmarks.adaptive --model qwen2.5-coder-0.5b-instruct
    python -m benchmarks.adaptive --depths 3,5 --beside-ngram \
        --drafter '{"method": "dspark", "model": "smollm2-135m-instruct-dspark", \
                    "prompt_lookup": true}'
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from benchmarks.progress import show_progress
from rich.console import Console
from rich.table import Table

from forerun.bench.options import BenchConfig
from forerun.bench.paired.compare import compute_ratio_interval
from forerun.bench.paired.plan import Arm, order_arms
from forerun.bench.paired.server import Server
from forerun.bench.results.checks import OK
from forerun.bench.results.provenance import collect_provenance
from forerun.bench.run import Watcher, measure

NGRAM = {"method": "ngram"}
ADAPTIVE = {"enable_adaptive_verification": True}
Speculation = dict[str, dict[str, Any]]
COUNTERS = {
    "verified": "forerun:verified_tokens_total",
    "accepted": "forerun:accepted_tokens_total",
    "drafted": "forerun:draft_tokens_total",
    "committed": "forerun:committed_tokens_total",
    "steps": "forerun:step_seconds_count",
    "measured_s": "forerun:step_seconds_sum",
    "predicted_s": "forerun:predicted_step_seconds_total",
}


def main() -> None:
    """Run every block and print tables, JSON last."""
    args = parse_arguments(sys.argv[1:])
    speculation = build_speculation(args)
    arms = [
        Arm(name=name, command=_build_command(keys, args)) for name, keys in speculation.items()
    ]
    sizes = dict(zip(args.loads, args.prompts, strict=True))
    cells: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {
            arm.name: stack.enter_context(
                Server(arm.command or "", folder / f"{arm.name}.log", 600.0)
            ).base_url
            for arm in arms
        }
        total = args.blocks * len(sizes) * len(arms)
        progress = stack.enter_context(show_progress(total))
        for block in range(args.blocks):
            for load, num_prompts in sizes.items():
                for arm in order_arms(arms, block):
                    progress.note(f"block {block + 1}, load {load}, {arm.name}")
                    config = _build_config(urls[arm.name], load, num_prompts, block)
                    cells.append(_measure_cell(config, arm.name, block))
                    progress.advance()
            _save(args.output, args, cells)
    summary = summarise(cells, list(speculation))
    show(summary)
    if args.figure is not None:
        draw(summary, args.figure, f"{args.model}, {args.drafter['method']} drafts, real prompts")
    print(json.dumps({"summary": summary, "provenance": collect_provenance()}))


def parse_arguments(given: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--serve-flags", default="", help="more flags of every server")
    parser.add_argument("--loads", type=_parse_list, default=[1, 4, 16, 64])
    parser.add_argument(
        "--prompts", type=_parse_list, default=[6, 24, 96, 320], help="requests per load"
    )
    parser.add_argument("--drafter", type=json.loads, default=NGRAM, help="keys of the drafter")
    parser.add_argument("--depths", type=_parse_list, default=[3, 7], help="fixed depths")
    parser.add_argument(
        "--beside-ngram", action="store_true", help="measure adaptive n-gram drafts too"
    )
    parser.add_argument(
        "--beside-alone", action="store_true", help="measure adaptive drafts without lookups too"
    )
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--output", type=Path, help="write every cell to this JSON file")
    parser.add_argument("--figure", type=Path, help="draw budget and throughput over load")
    args = parser.parse_args(given)
    if len(args.loads) != len(args.prompts):
        parser.error("--prompts needs one number per load")
    return args


def build_speculation(args: argparse.Namespace) -> Speculation:
    """Return the speculative configuration of every arm."""
    depth = {"num_speculative_tokens": max(args.depths)}
    speculation: Speculation = {"none": {"method": "none"}}
    alone = {key: value for key, value in args.drafter.items() if key != "prompt_lookup"}
    for fixed in args.depths:
        speculation[f"fixed-{fixed}"] = {**alone, "num_speculative_tokens": fixed}
    speculation["adaptive"] = {**args.drafter, **depth, **ADAPTIVE}
    if args.beside_alone:
        speculation["alone"] = {**alone, **depth, **ADAPTIVE}
    if args.beside_ngram:
        speculation["ngram"] = {**NGRAM, "num_speculative_tokens": 7, **ADAPTIVE}
    return speculation


def summarise(cells: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> list[dict[str, Any]]:
    """Return one entry per load: arms, and adaptive against the others within blocks."""
    summary = []
    for load in dict.fromkeys(cell["load"] for cell in cells):
        speeds: dict[str, dict[int, float]] = {name: {} for name in arms}
        for cell in cells:
            if cell["load"] == load and cell["is_sound"]:
                speeds[cell["arm"]][cell["block"]] = cell["throughput"]
        medians = {name: statistics.median(of.values()) for name, of in speeds.items() if of}
        best = max((name for name in medians if name != "adaptive"), key=medians.__getitem__)
        ratios = {
            name: _compare(speeds["adaptive"], speeds[name]) for name in arms if name != "adaptive"
        }
        summary.append(
            {
                "load": load,
                "throughput": medians,
                "best_other": best,
                "over_none": {
                    name: _compare(of, speeds["none"])["median"] for name, of in speeds.items()
                },
                "adaptive_over_best": ratios[best],
                "adaptive_over": ratios,
                "counters": {arm: _sum_counters(cells, load, arm) for arm in arms},
            }
        )
    return summary


def show(summary: Sequence[Mapping[str, Any]]) -> None:
    """Print the tables."""
    console = Console(width=130)
    table = Table(title="output tokens / s (median of blocks); adaptive / arm: median [95 %]")
    others = list(summary[0]["adaptive_over"])
    arms = list(summary[0]["counters"])
    for column in ("load", *arms, *(f"/ {name}" for name in others), "best other"):
        table.add_column(column, justify="right")
    for entry in summary:
        ratios = [_format_ratio(ratio) for ratio in entry["adaptive_over"].values()]
        speeds = [f"{entry['throughput'].get(name, 0.0):.1f}" for name in arms]
        table.add_row(str(entry["load"]), *speeds, *ratios, entry["best_other"])
    console.print(table)
    steps = Table(title="per step")
    for column in ("load", "arm", "tokens", "drafted", "verified", "accepted", "predicted / taken"):
        steps.add_column(column, justify="right")
    for entry in summary:
        for arm, sums in entry["counters"].items():
            each = [sums[key] / sums["steps"] for key in ("committed", "drafted", "verified")]
            each.append(sums["accepted"] / sums["steps"])
            ratio = sums["predicted_s"] / sums["measured_s"] if sums["predicted_s"] else None
            shown = "" if ratio is None else f"{ratio:.3f}"
            steps.add_row(str(entry["load"]), arm, *(f"{x:.2f}" for x in each), shown)
    console.print(steps)


def draw(summary: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw throughput of all arms, and verified drafts per request and step, over load."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    loads = [entry["load"] for entry in summary]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for number, name in enumerate(summary[0]["counters"]):
        style = {"color": f"C{number}", "marker": "o", "label": name}
        style["linewidth"] = 3 if name == "adaptive" else 1
        left.plot(loads, [entry["over_none"][name] for entry in summary], **style)
        if name != "none":
            right.plot(loads, [_count_verified(entry, name) for entry in summary], **style)
    left.set_ylabel("output tokens / s, relative to none")
    right.set_ylabel("B / requests in flight")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(loads, [str(load) for load in loads])
        axis.set_xlabel("requests in flight")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _count_verified(entry: Mapping[str, Any], name: str) -> float:
    """Return the drafts verified per step and request in flight."""
    sums = entry["counters"][name]
    verified: float = sums["verified"] / sums["steps"] / entry["load"]
    return verified


def _parse_list(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _build_command(keys: Mapping[str, Any], args: argparse.Namespace) -> str:
    speculation = json.dumps(keys)
    command = f"{sys.executable} -m forerun serve {args.model} --port {{port}}"
    return f"{command} {args.serve_flags} --speculative-config '{speculation}'"


def _build_config(url: str, load: int, num_prompts: int, block: int) -> BenchConfig:
    return BenchConfig(
        base_url=url,
        dataset_name="evaluation",
        num_prompts=num_prompts,
        max_concurrency=load,
        num_warmups=load if block == 0 else 0,
        reset_prefix_cache=True,
        temperature=0.0,
        seed=block,
    )


def _measure_cell(config: BenchConfig, arm: str, block: int) -> dict[str, Any]:
    before = _read_counters(config.base_url)
    watcher = Watcher(note=lambda _: None, on_finished=lambda *_: None)
    result = measure(config, watcher).result
    after = _read_counters(config.base_url)
    return {
        "arm": arm,
        "load": config.max_concurrency,
        "block": block,
        "throughput": result.get("sd_output_throughput_steady") or result["output_throughput"],
        "whole_throughput": result["output_throughput"],
        "interactivity_p50": result.get("sd_interactivity_p50"),
        "is_sound": result["sd_gates"].get("all_completed") == OK,
        "failed_gates": {k: v for k, v in result["sd_gates"].items() if v != OK},
        "counters": {key: after[key] - before[key] for key in COUNTERS},
    }


def _read_counters(base_url: str) -> dict[str, float]:
    lines = httpx.get(f"{base_url}/metrics", timeout=10.0).text.splitlines()
    values = {}
    for line in lines:
        name, _, rest = line.partition("{")
        if rest:
            values.setdefault(name, float(rest.rpartition(" ")[2]))
    return {key: values.get(name, 0.0) for key, name in COUNTERS.items()}


def _sum_counters(cells: Sequence[Mapping[str, Any]], load: int, arm: str) -> dict[str, float]:
    sound = [
        cell for cell in cells if cell["load"] == load and cell["arm"] == arm and cell["is_sound"]
    ]
    return {key: sum(cell["counters"][key] for cell in sound) for key in COUNTERS}


def _compare(adaptive: Mapping[int, float], other: Mapping[int, float]) -> dict[str, Any]:
    ratios = [adaptive[block] / other[block] for block in sorted(adaptive) if block in other]
    low, high = compute_ratio_interval(ratios)
    return {"median": statistics.median(ratios), "low": low, "high": high, "ratios": ratios}


def _format_ratio(ratio: Mapping[str, Any]) -> str:
    if ratio["low"] is None:
        return f"{ratio['median']:.3f}"
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def _save(path: Path | None, args: argparse.Namespace, cells: Sequence[Mapping[str, Any]]) -> None:
    if path is not None:
        options = {key: str(value) for key, value in vars(args).items()}
        path.write_text(json.dumps({"options": options, "cells": list(cells)}))


if __name__ == "__main__":
    main()
