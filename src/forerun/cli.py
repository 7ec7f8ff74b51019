"""The `forerun` command: subcommands, and what a mistake looks like to the user.

A ConfigError is one sentence on stderr and exit code 2; never a traceback. No torch here: `serve`
leaves it to the engine process, `generate` and `doctor` import it once their arguments are known to
be right.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import forerun
from forerun.commands import (
    bench,
    calibrate,
    doctor,
    evaluate,
    generate,
    profile,
    serve,
    train,
)
from forerun.commands.flags import Parser, check_unknown
from forerun.errors import ConfigError, RequestError

EXIT_USAGE = 2
EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code."""
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except ConfigError as error:
        print(f"forerun: {error}", file=sys.stderr)
        return EXIT_USAGE
    except RequestError as error:
        print(f"forerun: {error.message}", file=sys.stderr)
        return EXIT_USAGE if error.status < 500 else EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(argv: list[str]) -> int:
    parser = Parser(prog="forerun", description="LLM serving with speculative decoding.")
    parser.add_argument("--version", action="version", version=f"forerun {forerun.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {
        "serve": serve.add_parser(subparsers),
        "generate": generate.add_parser(subparsers),
        "profile": profile.add_parser(subparsers),
        "bench": bench.add_parser(subparsers),
        "train": train.add_parser(subparsers),
        "calibrate": calibrate.add_parser(subparsers),
        "evaluate": evaluate.add_parser(subparsers),
        "doctor": doctor.add_parser(subparsers),
    }
    args, extras = parser.parse_known_args(argv)
    # Subcommands with kinds of their own say which parser took the flags.
    check_unknown(extras, vars(args).get("flags_parser", commands[args.command]))
    code: int = args.run(args)
    return code
