"""`forerun bench serve` measures a running server; `forerun bench paired` compares servers.

Tables go to stdout; with --json the last line is the result as JSON. Exit code 0 if every request
ended well, 1 if some failed, 2 if nothing could begin, 130 after an interrupt (what had finished is
kept). What computes is imported when it is needed: `forerun serve` passes through here too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from forerun.bench.options import BenchConfig
from forerun.bench.paired.plan import PairedPlan, parse_arm, parse_loads
from forerun.commands.flags import Parser, add_config_flags, collect
from forerun.errors import ConfigError
from forerun.logs import configure_logging, get_logger

if TYPE_CHECKING:
    from forerun.bench.run import Watcher

logger = get_logger(__name__)

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
_MIN_COLUMNS = 132
# What a paired plan decides itself.
_CELL_OPTIONS = {
    "base_url": "--arm",
    "max_concurrency": "--loads",
    "request_rate": "--loads",
    "result_filename": "--result-dir",
    "label": "--arm",
}


def add_parser(subparsers: Any) -> Parser:
    """Add the subcommand with its two kinds and return its parser."""
    parser: Parser = subparsers.add_parser("bench", help="measure and compare servers")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    serve = kinds.add_parser("serve", help="measure a running OpenAI-compatible server")
    _add_common_flags(serve)
    serve.set_defaults(run=run_serve, flags_parser=serve)
    paired = kinds.add_parser("paired", help="compare servers in interleaved blocks")
    paired.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="server to start, with {port} in its command, or NAME=URL of one that runs; "
        "the first arm is what the others are compared with",
    )
    paired.add_argument(
        "--loads",
        default="1,4",
        metavar="LIST",
        help="requests in flight, such as 1,4,16, or arrival rates, such as 2.5rps (default: 1,4)",
    )
    paired.add_argument("--blocks", type=int, default=3, metavar="N", help="repeats (default: 3)")
    paired.add_argument(
        "--server-ready-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long a server may take to start (default: 600)",
    )
    _add_common_flags(paired)
    paired.set_defaults(run=run_paired, flags_parser=paired)
    return parser


def _add_common_flags(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as the last line")
    add_config_flags(parser, BenchConfig)


def run_serve(args: argparse.Namespace) -> int:
    """Measure one server and show the result."""
    from forerun.bench.results.table import build_run_tables
    from forerun.bench.run import measure

    config = BenchConfig(**_collect_config(args))
    configure_logging("bench")
    with _show_progress() as watcher:
        outcome = measure(config, watcher)
    _show(build_run_tables(outcome.result), outcome.result if args.json else None)
    for path in outcome.paths:
        sys.stderr.write(f"wrote {path}\n")
    if outcome.is_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILURE if outcome.result["failed"] else 0


def run_paired(args: argparse.Namespace) -> int:
    """Compare servers and show the ratios."""
    from forerun.bench.paired.runner import PairedRunner
    from forerun.bench.results.table import build_paired_table

    for name, instead in _CELL_OPTIONS.items():
        if name in args:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} does not go with bench paired; use {instead}.")
    options = _collect_config(args)
    plan = PairedPlan(
        arms=[parse_arm(text) for text in args.arm],
        loads=parse_loads(args.loads),
        num_blocks=args.blocks,
        bench=BenchConfig(**options),
        result_dir=Path(options.get("result_dir", ".")),
        server_ready_timeout_s=args.server_ready_timeout,
    )
    configure_logging("bench")
    with _show_progress() as watcher:
        runner = PairedRunner(plan, watcher)
        try:
            report = runner.run()
            code = 0
        except KeyboardInterrupt:
            report = runner.build_report()
            code = EXIT_INTERRUPTED
    _show([build_paired_table(report["comparisons"])], report if args.json else None)
    failed = [run for run in report["runs"] if run["error"] is not None]
    for run in failed:
        where = f"{run['arm']}, load {run['load']}, block {run['block'] + 1}"
        sys.stderr.write(f"no figure for {where}: {run['error']}\n")
    return code or (EXIT_FAILURE if failed else 0)


def _collect_config(args: argparse.Namespace) -> dict[str, Any]:
    return collect(args, [field.name for field in fields(BenchConfig)])


@contextlib.contextmanager
def _show_progress() -> Iterator[Watcher]:
    """Show what is going on: a bar if stderr is a terminal, else notes in the log."""
    from forerun.bench.run import Watcher

    if not sys.stderr.isatty():
        yield Watcher(note=logger.info, on_finished=lambda _done, _total: None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    task = progress.add_task("starting", total=None)
    with progress:
        yield Watcher(
            note=lambda text: progress.update(task, description=text),
            on_finished=lambda done, total: progress.update(task, completed=done, total=total),
        )


def _show(tables: Iterable[Table], value: dict[str, Any] | None) -> None:
    console = Console()
    # Ratios need the room; where stdout is no terminal, rich would assume 80 columns.
    console.width = max(console.width, _MIN_COLUMNS)
    for table in tables:
        console.print(table)
    if value is not None:
        sys.stdout.write(json.dumps(value) + "\n")
