"""`forerun train run`: train a drafter on a folder of target answers; resumes what it finds."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from forerun import env
from forerun.commands.flags import Parser, add_config_flags, collect
from forerun.errors import ConfigError
from forerun.logs import configure_logging, get_logger
from forerun.training.settings import RECIPES, TrainSettings

if TYPE_CHECKING:
    from forerun.training.trainer import TrainReport

logger = get_logger(__name__)
_LOG_EVERY_S = 60.0
LOG_FILE = "log.jsonl"


def add_parser(stages: Any) -> Parser:
    """Add the stage and return its parser."""
    parser: Parser = stages.add_parser("run", help="train a drafter on the target's answers")
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FOLDER", help="what train generate wrote")
    add(
        "--output",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="where the drafter, its log and checkpoints go; a run found there goes on",
    )
    add("--target", metavar="MODEL", help="the target (default: the one the data was made with)")
    names = ", ".join(RECIPES)
    add("--recipe", default="dspark", help=f"settings to start from: {names} (default: dspark)")
    add_config_flags(parser, TrainSettings)
    parser.set_defaults(run=run, flags_parser=parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Train; print what the drafter reaches on held-out answers."""
    given = collect(args, [field.name for field in fields(TrainSettings)])
    settings = TrainSettings.from_recipe(args.recipe, given)
    configure_logging("train")
    env.limit_openmp_spinning()
    from forerun.training.session import open_session

    with TrainLine(args.output) as line, flush_denormals():
        trainer, processes = open_session(
            args.data, args.output, settings, line.update, target=args.target
        )
        with signals_to(trainer.request_stop):
            measured = trainer.run()
    processes.leave()
    if processes.is_main:
        heldout = None if measured is None else measured.to_dict()
        summary = {"output": str(args.output), "steps": trainer.num_done, "heldout": heldout}
        sys.stdout.write(json.dumps(summary) + "\n")
    return 0


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Take numbers too small for full precision as 0; once loading starts, threads inherit it.

    Tails of sharp distributions are full of them, and computing with them is many times slower.
    """
    import torch

    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def signals_to(stop: Callable[[], None]) -> Iterator[None]:
    """Let the first request to end call `stop`; a second one ends as usual."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(*_: object) -> None:
        restore()
        stop()

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        restore()


class TrainLine:
    """A live line on a terminal, a line a minute elsewhere, and every report as a line of JSON."""

    def __init__(self, output: Path) -> None:
        self._path = output / LOG_FILE
        self._is_shown = sys.stderr.isatty()
        self._live = Live(console=Console(stderr=True), auto_refresh=False)
        self._last_s = float("-inf")

    def __enter__(self) -> TrainLine:
        if self._is_shown:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            self._live.stop()

    def update(self, report: TrainReport) -> None:
        """Show a report and append it to the log."""
        self._append(report)
        text, now = describe(report), time.monotonic()
        if report.kind == "heldout":
            logger.info("%s", text)
        elif self._is_shown:
            self._live.update(Text(text), refresh=True)
        elif now - self._last_s > _LOG_EVERY_S:
            self._last_s = now
            logger.info("%s", text)

    def _append(self, report: TrainReport) -> None:
        record = {**asdict(report), **report.measured.to_dict()}
        del record["measured"]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written ({error.strerror}).") from error


def describe(report: TrainReport) -> str:
    """Return a report as one line."""
    measured = report.measured
    positions = " ".join(f"{value:.2f}" for value in measured.acceptance)
    text = (
        f"{report.kind} {report.num_done}/{report.num_steps}: loss {measured.loss:.3f} "
        f"(hard {measured.hard:.2f}, soft {measured.soft:.2f}, L1 {measured.l1:.3f}, confidence "
        f"{measured.confidence:.3f}), accepted {positions}, length "
        f"{measured.acceptance_length:.2f}"
    )
    if report.kind != "train":
        return text
    minutes, seconds = divmod(round(report.left_s), 60)
    return f"{text}; {report.tokens_per_s:.0f} tok/s, {minutes}:{seconds:02} left"
