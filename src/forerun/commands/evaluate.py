"""`forerun evaluate`: what a drafter reaches on real answers, by data set and verifier."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from forerun.commands.flags import Parser, check_output, collect_engine_options
from forerun.commands.rollouts import (
    add_rollout_flags,
    obtain_rollouts,
    read_prompts,
)
from forerun.logs import configure_logging

if TYPE_CHECKING:
    from forerun.evaluation.metrics import AcceptanceFigures
    from forerun.evaluation.rollouts import Rollouts

Figures = dict[str, dict[str, "AcceptanceFigures"]]
_MIN_COLUMNS = 120
ALL = "all"


def add_parser(subparsers: Any) -> Parser:
    """Add the subcommand and return its parser."""
    parser: Parser = subparsers.add_parser(
        "evaluate", help="acceptance and calibration of a drafter on real answers"
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the figures as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_rollout_flags(parser, default_prompts="acceptance")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Roll out, measure, show."""
    if args.output is not None:
        check_output(args.output)
    configure_logging("evaluate")
    rows = read_prompts(args.prompts, args.num_prompts)
    options = collect_engine_options(args)
    rollouts = obtain_rollouts(args, options, rows)
    figures = measure_all(scale_all(rollouts, options))
    values = {
        "prompts": args.prompts,
        "num_prompts": len(rows),
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "figures": {
            verifier: {name: asdict(found) for name, found in sets.items()}
            for verifier, sets in figures.items()
        },
    }
    if args.output is not None:
        args.output.write_text(json.dumps(values, indent=1) + "\n")
    if args.json:
        sys.stdout.write(json.dumps(values) + "\n")
    else:
        show(figures)
    return 0


def scale_all(rollouts: dict[str, Rollouts], options: dict[str, Any]) -> dict[str, Rollouts]:
    """Return rollouts with the confidences that are served: those beside a checkpoint's weights."""
    import numpy as np

    from forerun.budget.confidence.calibration import VERIFIERS
    from forerun.config import EngineConfig
    from forerun.engine.build import load_temperatures

    temperatures = load_temperatures(EngineConfig.from_options(**options).speculative)
    if temperatures is None:
        return rollouts
    scaled = {}
    for verifier, found in rollouts.items():
        verifiers = np.full(found.num_drafts, VERIFIERS.index(verifier))
        confidence = temperatures.apply(found.confidence, verifiers)
        scaled[verifier] = replace(found, confidence=confidence)
    return scaled


def measure_all(rollouts: dict[str, Rollouts]) -> Figures:
    """Return figures by verifier and data set, all of them together last."""
    from forerun.evaluation.metrics import measure

    figures: Figures = {}
    for verifier, found in rollouts.items():
        names = list(dict.fromkeys(found.dataset.tolist()))
        figures[verifier] = {name: measure(found.select(found.dataset == name)) for name in names}
        figures[verifier][ALL] = measure(found)
    return figures


def show(figures: Figures) -> None:
    """Print one table of lengths, and one of positions per verifier."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, _MIN_COLUMNS))
    console.print(_build_lengths(figures))
    for verifier, sets in figures.items():
        console.print(_build_positions(verifier, sets[ALL]))


def _build_lengths(figures: Figures) -> Table:
    table = Table("verifier", "data set", title="acceptance length (with bonus)")
    for name in ("drafts", "length", "conditional acceptance by position"):
        table.add_column(name, justify="right")
    for verifier, sets in figures.items():
        for name, found in sets.items():
            chances = " ".join(_format(p.conditional) for p in found.positions)
            length = f"{found.acceptance_length:.3f}"
            table.add_row(verifier, name, str(found.num_drafts), length, chances)
    return table


def _build_positions(verifier: str, found: AcceptanceFigures) -> Table:
    table = Table("position", title=f"{verifier}: survival of drafts up to a position")
    for name in ("judged", "conditional", "survival", "predicted", "ECE", "AUROC"):
        table.add_column(name, justify="right")
    for number, place in enumerate(found.positions, 1):
        ece = "" if place.ece is None else f"{place.ece * 100:.1f} %"
        figures = (place.conditional, place.survival, place.predicted)
        shown = [_format(figure) for figure in figures]
        table.add_row(str(number), str(place.num_judged), *shown, ece, _format(place.auroc))
    return table


def _format(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
