"""`forerun calibrate`: temperatures that make a drafter's confidences true, beside its checkpoint.

Two thirds of the prompts are fitted to, the rest judge. Fit and serve at the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from forerun.commands.flags import Parser, collect_engine_options
from forerun.commands.rollouts import (
    CALIBRATION,
    add_rollout_flags,
    obtain_rollouts,
    read_prompts,
)
from forerun.errors import ConfigError
from forerun.logs import configure_logging

if TYPE_CHECKING:
    import numpy as np

    from forerun.evaluation.rollouts import Rollouts

_JUDGED = 3  # every third prompt


def add_parser(subparsers: Any) -> Parser:
    """Add the subcommand and return its parser."""
    parser: Parser = subparsers.add_parser(
        "calibrate", help="fit the temperatures of a drafter's confidences"
    )
    add_rollout_flags(parser, default_prompts=CALIBRATION)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Roll out, fit, judge, write."""
    configure_logging("calibrate")
    options = collect_engine_options(args)
    folder, num_positions = find_checkpoint(options)
    rows = read_prompts(args.prompts, args.num_prompts)
    for index, row in enumerate(rows):
        row["category"] = "judged" if index % _JUDGED == 0 else "fitted"
    rollouts = obtain_rollouts(args, options, rows)
    from forerun.budget.confidence.calibration import TEMPERATURES_FILE

    content, table = fit_all(rollouts)
    content |= {"dataset": args.prompts, "num_positions": num_positions}
    path = folder / TEMPERATURES_FILE
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
    console = Console()
    console.print(table)
    console.print(f"written to {path}")
    return 0


def find_checkpoint(options: dict[str, Any]) -> tuple[Path, int]:
    """Return the drafter's folder and how many tokens it drafts; raises ConfigError."""
    from forerun.config import EngineConfig
    from forerun.drafters.locate import find_drafter_path

    speculative = EngineConfig.from_options(**options).speculative
    folder = find_drafter_path(speculative)
    if folder is None or not folder.is_dir():
        raise ConfigError(
            "calibrate needs a drafter with a confidence head; name its folder in "
            '--speculative-config \'{"method": "dspark", "model": FOLDER}\'.'
        )
    return folder, speculative.num_speculative_tokens


def fit_all(rollouts: dict[str, Rollouts]) -> tuple[dict[str, Any], Table]:
    """Return the file's content and a table of errors before and after, on prompts not fitted."""
    from forerun.evaluation.temperatures import fit_scaling

    content: dict[str, Any] = {
        "offsets": {},
        "num_samples": 0,
        "ece_before": {},
        "ece_after": {},
    }
    table = Table("verifier", "position", title="expected calibration error on prompts not fitted")
    for name in ("temperature", "offset", "before", "after"):
        table.add_column(name, justify="right")
    for verifier, found in rollouts.items():
        fitted = found.select(found.dataset == "fitted")
        try:
            scaling = fit_scaling(fitted)
        except ValueError as error:
            raise ConfigError(f"this drafter cannot be calibrated: {error}") from error
        judged = found.select(found.dataset == "judged")
        before = _measure_ece(judged, judged.confidence)
        after = _measure_ece(judged, scaling.apply(judged.confidence))
        content[verifier] = _round(scaling.temperatures)
        content["offsets"][verifier] = _round(scaling.offsets)
        content["num_samples"] += fitted.num_drafts
        content["ece_before"][verifier] = before
        content["ece_after"][verifier] = after
        rows = zip(scaling.temperatures, scaling.offsets, before, after, strict=False)
        for position, (temperature, offset, one, other) in enumerate(rows, 1):
            errors = (f"{one * 100:.1f} %", f"{other * 100:.1f} %")
            shown = (f"{temperature:.3f}", f"{offset:+.3f}", *errors)
            table.add_row(verifier, str(position), *shown)
    return content, table


def _round(values: np.ndarray) -> list[float]:
    return [round(float(value), 4) for value in values]


def _measure_ece(rollouts: Rollouts, confidence: np.ndarray) -> list[float]:
    from forerun.evaluation.metrics import compute_survival, measure

    figures = measure(rollouts, compute_survival(confidence))
    return [round(place.ece or 0.0, 5) for place in figures.positions]
