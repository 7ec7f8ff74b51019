"""What `forerun evaluate` and `forerun calibrate` share: flags, prompts, and the rollouts."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.budget.confidence.calibration import VERIFIERS
from forerun.commands.flags import Parser, add_engine_flags
from forerun.commands.progress import LoadingBar
from forerun.core import SamplingParams
from forerun.errors import ConfigError
from forerun.logs import get_logger

if TYPE_CHECKING:
    from forerun.evaluation.rollouts import Rollouts

logger = get_logger(__name__)
CALIBRATION = "calibration"
_LOG_EVERY_S = 30.0


def add_rollout_flags(parser: Parser, *, default_prompts: str) -> None:
    """Add what says which answers are rolled out how, and the engine's flags."""
    add = parser.add_argument
    add(
        "--prompts",
        default=default_prompts,
        metavar="NAME|FILE",
        help=f"a named set, or JSON lines as bench takes them (default: {default_prompts})",
    )
    add("--num-prompts", type=int, help="take only the first so many of each category")
    add("--max-tokens", type=int, default=256, help="longest answer (default: 256)")
    add(
        "--verifiers",
        nargs="+",
        choices=VERIFIERS,
        default=list(VERIFIERS),
        help="greedy is temperature 0 (default: all three)",
    )
    add("--temperature", type=float, default=1.0, help="of standard and coupled (default: 1)")
    add_engine_flags(parser)


def read_prompts(source: str, per_category: int | None) -> list[dict[str, Any]]:
    """Return prompts with category and messages, from a named set or a file."""
    from forerun.bench.workload import parse_row, read_rows

    if Path(source).suffix == ".jsonl" or Path(source).exists():
        rows = read_rows(Path(source))
    else:
        rows = [parse_row(value, n) for n, value in enumerate(_build_named(source), 1)]
    if not all(row.is_chat for row in rows):
        raise ConfigError(f"{source}: every row needs messages; texts are not rolled out.")
    chosen: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        part = chosen.setdefault(row.category, [])
        if per_category is None or len(part) < per_category:
            part.append({"category": row.category, "messages": row.prompt})
    return [row for part in chosen.values() for row in part]


def _build_named(name: str) -> list[dict[str, Any]]:
    if name == CALIBRATION:
        from forerun.data.training_prompts import build_calibration_prompts

        return build_calibration_prompts(logger.info)
    from forerun.data.prompt_sets import build_prompt_set

    return build_prompt_set(name, logger.info)


def obtain_rollouts(
    args: argparse.Namespace, options: dict[str, Any], rows: list[dict[str, Any]]
) -> dict[str, Rollouts]:
    """Run what the flags ask for, with a progress line."""
    SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    if args.temperature == 0:
        raise ConfigError("--temperature is that of sampled answers; greedy is a verifier.")
    from forerun.evaluation.run import RolloutSettings, roll_out_all

    settings = RolloutSettings(
        verifiers=tuple(args.verifiers), temperature=args.temperature, max_tokens=args.max_tokens
    )
    with LoadingBar() as bar:
        watch = _Watch(bar, len(rows))
        return roll_out_all(options, rows, settings, report=watch.update, loading=bar.update)


class _Watch:
    """Shows tokens of the verifier at work: on a terminal as it goes, else now and then."""

    def __init__(self, bar: LoadingBar, num_prompts: int) -> None:
        self._bar = bar
        self._num_prompts = num_prompts
        self._started: dict[str, float] = {}
        self._noted_s = 0.0

    def update(self, verifier: str, num_tokens: int) -> None:
        """Say how far a verifier is."""
        now = time.perf_counter()
        started_s = self._started.setdefault(verifier, now)
        if now - self._noted_s < (0.2 if sys.stderr.isatty() else _LOG_EVERY_S):
            return
        self._noted_s = now
        speed = num_tokens / max(now - started_s, 1e-3)
        self._bar.note(
            f"{verifier}: {num_tokens} tokens of {self._num_prompts} answers, {speed:.0f} tok/s"
        )
