"""Budget policies: how many draft tokens to verify each step. Registry of factories."""

from __future__ import annotations

from collections.abc import Callable

from forerun.budget.base import BudgetPolicy
from forerun.config import SpeculativeConfig


def _none(_: SpeculativeConfig) -> BudgetPolicy:
    from forerun.budget.none import NonePolicy

    return NonePolicy()


def _fixed(config: SpeculativeConfig) -> BudgetPolicy:
    from forerun.budget.fixed import FixedPolicy

    return FixedPolicy(draft_depth=config.num_speculative_tokens)


POLICIES: dict[str, Callable[[SpeculativeConfig], BudgetPolicy]] = {"none": _none, "fixed": _fixed}


def build_policy(config: SpeculativeConfig) -> BudgetPolicy:
    """Return the policy this configuration asks for."""
    return POLICIES["none" if config.method == "none" else "fixed"](config)
