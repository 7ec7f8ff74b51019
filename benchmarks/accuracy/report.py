"""From measures to the result: figures per arm and kind of text, bounds, tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.accuracy.arms import EXACT, REFERENCE, Arm
from benchmarks.accuracy.measures import RowMeasures, summarise
from benchmarks.accuracy.outputs import TokenIds, compare_outputs
from benchmarks.accuracy.text import KINDS
from rich.table import Table

Measures = Mapping[str, RowMeasures]  # by kind of text
Answers = Mapping[str, Sequence[TokenIds]]  # by arm


def describe_arm(arm: Arm, measures: Measures, reference: Measures) -> dict[str, Any]:
    """Return an arm's figures over everything and per kind of text, and its bounds."""
    kinds = {kind: summarise(measures[kind], reference[kind]) for kind in measures}
    joined, reference_joined = (
        RowMeasures.join(list(parts.values())) for parts in (measures, reference)
    )
    overall = summarise(joined, reference_joined)
    return {"all": overall, "kinds": kinds, "bounds": judge(arm, overall)}


def judge(arm: Arm, overall: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the arm's bounds and whether they are met; what is not a number meets none."""
    change = abs(overall["perplexity_change_percent"])
    checks = (
        ("kl_mean", overall["kl_mean"], arm.max_kl),
        ("perplexity_change_percent", change, arm.max_ppl_change),
    )
    return {
        name: {"bound": bound, "is_met": value <= bound}
        for name, value, bound in checks
        if bound is not None
    }


def describe_outputs(answers: Answers) -> dict[str, dict[str, Any]]:
    """Return, per arm, how its answers differ from the reference's and from exact bfloat16's."""
    others = [name for name in (REFERENCE.name, EXACT) if name in answers]
    return {
        name: {other: compare_outputs(own, answers[other]) for other in others if other != name}
        for name, own in answers.items()
        if name != REFERENCE.name
    }


def build_distribution_table(result: Mapping[str, Any]) -> Table:
    """Return one line per arm, and one per kind of text below it."""
    title = f"{result['model']}: next token against fp32, {result['num_tokens']} tokens"
    table = Table(title=title, caption=_describe_text(result["text"]))
    table.add_column("arm", no_wrap=True)
    for name in ("mean KL", "p99 KL", "same top-1", "perplexity", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bounds", no_wrap=True)
    for name, arm in result["arms"].items():
        if "error" in arm:
            table.add_row(name, "failed")
            continue
        table.add_row(name, *_format_figures(name, arm["all"]), _format_bounds(arm["bounds"]))
        for kind, figures in arm["kinds"].items():
            table.add_row(f"  {kind}", *_format_figures(name, figures), "", style="dim")
    return table


def build_output_table(result: Mapping[str, Any]) -> Table:
    """Return one line per arm: outputs that differ, and where the first difference is."""
    table = Table(
        title=f"greedy answers to {result['num_prompts']} code prompts, "
        f"up to {result['max_tokens']} tokens",
        caption="first difference: mean place, in tokens, over the answers that differ",
    )
    table.add_column("arm", no_wrap=True)
    others = (REFERENCE.name, EXACT)
    for other in others:
        table.add_column(f"differ from {other}", justify="right")
        table.add_column("first difference", justify="right")
    for name, outputs in result["outputs"].items():
        cells = [cell for other in others for cell in _format_outputs(outputs.get(other))]
        table.add_row(name, *cells)
    return table


def build_notes(result: Mapping[str, Any]) -> list[str]:
    """Return why arms failed."""
    arms = result["arms"].items()
    return [f"{name} failed: {arm['error']}" for name, arm in arms if "error" in arm]


def _describe_text(counts: Mapping[str, int]) -> str:
    parts = (f"{kind} {counts[kind]} ({what})" for kind, what in KINDS.items() if kind in counts)
    return "tokens of " + ", ".join(parts)


def _format_figures(name: str, figures: Mapping[str, Any]) -> list[str]:
    perplexity = f"{figures['perplexity']:.3f}"
    if name == REFERENCE.name:
        return ["", "", "", perplexity, ""]
    return [
        f"{figures['kl_mean']:.5f}",
        f"{figures['kl_p99']:.4f}",
        f"{100 * figures['same_top_share']:.2f} %",
        perplexity,
        f"{figures['perplexity_change_percent']:+.3f} %",
    ]


def _format_bounds(bounds: Mapping[str, Mapping[str, Any]]) -> str:
    labels = {"kl_mean": "KL <= {:g}", "perplexity_change_percent": "change <= {:g} %"}
    return ", ".join(
        labels[name].format(entry["bound"]) + (" pass" if entry["is_met"] else " MISS")
        for name, entry in bounds.items()
    )


def _format_outputs(entry: Mapping[str, Any] | None) -> tuple[str, str]:
    if entry is None:
        return "", ""
    share = f"{entry['num_different']} of {entry['num_outputs']}"
    share += f" ({100 * entry['different_share']:.0f} %)"
    place = entry["first_difference_mean"]
    return share, "" if place is None else f"{place:.1f}"
