"""`forerun doctor`: what this machine uses and why, and what to change.

Exit code 0 without problems, 1 with one or more. Nothing is fetched, loaded or changed. What
examines the machine imports torch, so it is imported when it is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.commands.flags import Parser

if TYPE_CHECKING:
    from forerun.doctor.report import Report, Section

EXIT_FAILURE = 1
_MIN_COLUMNS = 100


def add_parser(subparsers: Any) -> Parser:
    """Add the subcommand and return its parser."""
    parser: Parser = subparsers.add_parser("doctor", help="show what this machine uses, and why")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--measure",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure memory bandwidth, for less than a second (default: yes)",
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Examine the machine and show the report."""
    from forerun.doctor.diagnose import diagnose

    report = diagnose(measure=args.measure)
    if args.json:
        sys.stdout.write(json.dumps(report.to_json(), indent=2) + "\n")
    else:
        show(report)
    return EXIT_FAILURE if report.problems else 0


def show(report: Report) -> None:
    """Print one table per section, then the problems."""
    console = Console()
    # Where stdout is no terminal, rich would assume 80 columns.
    console.width = max(console.width, _MIN_COLUMNS)
    for section in report.sections:
        console.print(_build_table(section))
    if not report.problems:
        console.print(Text("no problems found", style="green"))
    for number, (name, problem) in enumerate(report.problems, 1):
        # Unbroken, so that a command in the advice can be copied.
        headline = f"problem {number}, {name}: {problem.what}"
        console.print(Text(headline, style="bold red"), soft_wrap=True)
        console.print(Text(f"  what to do: {problem.advice}"), soft_wrap=True)


def _build_table(section: Section) -> Table:
    # Text, not str: rich reads brackets in a str as markup.
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=28)
    table.add_row(Text(section.name, style="bold"))
    for fact in section.facts:
        table.add_row(Text("  " + fact.label), Text(fact.text))
    return table
