"""Fields of configuration dataclasses, and the checks they share. Bad values raise ConfigError."""

from __future__ import annotations

from dataclasses import field
from types import NoneType
from typing import Any, get_args

from forerun.errors import ConfigError


def option(default: Any, help_text: str) -> Any:
    """Return a dataclass field whose metadata holds its help text."""
    return field(default=default, metadata={"help": help_text})


def check_type(name: str, value: object, allowed: Any) -> None:
    """Raise ConfigError unless `value` is what the option's annotation says; bools are no ints."""
    kinds = get_args(allowed) or (allowed,)
    if type(value) not in kinds and not (type(value) is int and float in kinds):
        names = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
        raise ConfigError(f"{name} must be {names}, got {value!r}.")


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless the value is one of those allowed."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")


def check_positive(name: str, value: int | None) -> None:
    """Raise ConfigError unless the value is at least 1 or None."""
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}.")


def check_frac(name: str, value: float) -> None:
    """Raise ConfigError unless the value is in 0..1."""
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name} must be in 0..1, got {value}.")
