"""`forerun train`: a drafter for a target, in stages that each resume.

`generate` lets the target answer prompts and keeps what it computed; `run` trains on that.
"""

from __future__ import annotations

from typing import Any

from forerun.commands.flags import Parser
from forerun.commands.train import generate, run

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> Parser:
    """Add the subcommand and its stages; return its parser."""
    parser: Parser = subparsers.add_parser("train", help="train a drafter for a target")
    stages = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")
    generate.add_parser(stages)
    run.add_parser(stages)
    return parser
