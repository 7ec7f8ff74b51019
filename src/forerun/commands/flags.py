"""Command-line flags from config dataclass fields: the name with dashes, the field's help text.

A flag that is not given stays out of the namespace, so that defaults have one owner: the dataclass.
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn

from forerun.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from forerun.errors import ConfigError, describe_unknown_key

ENGINE_CONFIGS: tuple[type[Any], ...] = (ModelConfig, CacheConfig, SchedulerConfig)


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are ConfigErrors: one sentence, no usage text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing and exiting."""
        raise ConfigError(f"{message}; see {self.prog} --help.")

    def list_flags(self) -> list[str]:
        """Return every long flag this parser knows."""
        names = (name for action in self._actions for name in action.option_strings)
        return [name for name in names if name.startswith("--")]


def add_engine_flags(parser: Parser) -> None:
    """Add the flags of every part of EngineConfig."""
    for config in ENGINE_CONFIGS:
        add_config_flags(parser, config)
    parser.add_argument(
        "--speculative-config",
        metavar="JSON",
        default=argparse.SUPPRESS,
        help='drafter and verifier, such as \'{"method": "ngram", "num_speculative_tokens": 5}\' '
        'or \'{"method": "none"}\'',
    )


def add_config_flags(parser: Parser, config: type[Any]) -> None:
    """Add one flag per field of a config dataclass."""
    hints = typing.get_type_hints(config)
    group = parser.add_argument_group(config.__name__, (config.__doc__ or "").splitlines()[0])
    for field in fields(config):
        kind = unwrap_optional(hints[field.name])
        options: dict[str, Any] = {"default": argparse.SUPPRESS}
        options["help"] = _describe(field.metadata["help"], field.default)
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": kind, "metavar": kind.__name__.upper()}
        group.add_argument("--" + field.name.replace("_", "-"), **options)


def build_engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the engine's configuration from parsed flags; raises ConfigError."""
    return EngineConfig.from_options(**collect_engine_options(args))


def collect_engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of the engine that were given, by option name."""
    names = {field.name for config in ENGINE_CONFIGS for field in fields(config)}
    return collect(args, [*names, "speculative_config"])


def collect(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return those of the named flags that were given."""
    given = vars(args)
    return {name: given[name] for name in names if name in given}


def check_unknown(extras: list[str], parser: Parser) -> None:
    """Refuse arguments no flag claimed, naming the nearest flag."""
    if not extras:
        return
    flag = next((extra for extra in extras if extra.startswith("-")), None)
    if flag is None:
        raise ConfigError(f"unexpected argument {extras[0]!r}; see {parser.prog} --help.")
    name = flag.partition("=")[0]
    raise ConfigError(describe_unknown_key(name, parser.list_flags(), kind="option"))


def unwrap_optional(hint: Any) -> type:
    """Return T of T | None, and any other type as it is."""
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    assert isinstance(hint, type), f"no flag can be made from the type {hint}"
    return hint


def _describe(text: str, default: Any) -> str:
    # argparse reads % as a format; None is "auto", which resolve() explains in the log.
    shown = "" if default is None or default is MISSING else f" (default: {default})"
    return (text + shown).replace("%", "%%")


def check_output(path: Path) -> None:
    """Refuse an --output file that cannot be written, before any work is done for it."""
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder; give a file.")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}; create it.")
