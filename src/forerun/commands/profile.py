"""`forerun profile`: what a step costs on this machine, by rows and by drafting requests.

The measurement that adaptive verification decides by, taken with the flags of `serve` and kept in
the cache folder, where a later start with the same flags finds it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.commands.flags import (
    Parser,
    add_engine_flags,
    build_engine_config,
    check_output,
)
from forerun.commands.progress import LoadingBar
from forerun.errors import ConfigError
from forerun.logs import configure_logging

if TYPE_CHECKING:
    from forerun.budget.costs.profile import CostProfile
    from forerun.config import EngineConfig

_MIN_COLUMNS = 100


def add_parser(subparsers: Any) -> Parser:
    """Add the subcommand and return its parser."""
    parser: Parser = subparsers.add_parser("profile", help="measure what a step costs here")
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the profile to a file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--fresh", action="store_true", help="measure even if the cache holds this profile"
    )
    add_engine_flags(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure or find the profile, show it, and write it if asked."""
    config = build_engine_config(args)
    output: Path | None = args.output
    if output is not None:
        check_output(output)
    configure_logging("profile")
    profile = _obtain(config, is_fresh=args.fresh)
    from forerun.budget.costs.files import write_profile

    if output is not None:
        try:
            write_profile(profile, output)
        except OSError as error:
            raise ConfigError(
                f"--output {output} cannot be written ({error.strerror or error}); give another."
            ) from error
    if args.json:
        values = {"source": profile.source, **profile.to_dict()}
        sys.stdout.write(json.dumps(values) + "\n")
    else:
        show(profile)
    return 0


def show(profile: CostProfile) -> None:
    """Print where the profile comes from, its tables and its other terms."""
    console = Console()
    # Where stdout is no terminal, rich would assume 80 columns.
    console.width = max(console.width, _MIN_COLUMNS)
    console.print(Text(f"cost profile: {profile.source}", style="bold"), soft_wrap=True)
    console.print(build_verify_table(profile))
    if len(profile.draft_requests):
        console.print(build_draft_table(profile))
    terms = {
        "per request": profile.request_ms,
        "per 1,000 cached tokens": 1000.0 * profile.kv_token_ms,
        "and later row": 1000.0 * profile.row_token_ms,
        "per sampled row": profile.sampled_row_ms,
        "per filtered row": profile.filtered_row_ms,
    }
    console.print("  ".join(f"{name} {ms:.4f} ms" for name, ms in terms.items()), soft_wrap=True)


def build_verify_table(profile: CostProfile) -> Table:
    """Return the table of target steps by rows."""
    table = _build_table("rows", "ms", "ms per row", "tokens/s")
    for rows, ms in zip(profile.verify_rows.tolist(), profile.verify_ms.tolist(), strict=True):
        speed = f"{1000.0 * rows / ms:,.0f}" if ms else ""
        table.add_row(str(rows), f"{ms:.2f}", f"{ms / rows:.3f}", speed)
    return table


def build_draft_table(profile: CostProfile) -> Table:
    """Return the table of drafting by requests."""
    table = _build_table("drafting requests", "first token, ms", "each further, ms")
    columns = (profile.draft_requests, profile.draft_first_ms, profile.draft_next_ms)
    for requests, first, further in zip(*(column.tolist() for column in columns), strict=True):
        table.add_row(str(requests), f"{first:.3f}", f"{further:.4f}")
    return table


def _build_table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2))
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _obtain(config: EngineConfig, *, is_fresh: bool) -> CostProfile:
    """Load what is to be measured, and measure it if it has to be."""
    with LoadingBar() as bar:
        from forerun.engine.build import find_costs, load_parts

        parts = load_parts(config, progress=bar.update)
        return find_costs(config, parts, progress=bar.update, is_fresh=is_fresh)
