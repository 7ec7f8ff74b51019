"""Budget policies: how many draft tokens to verify each step. Registry of factories."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from forerun.budget.base import BudgetPolicy
from forerun.budget.controller import BudgetController
from forerun.budget.costs.profile import CostProfile
from forerun.errors import ConfigError
from forerun.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from forerun.budget.confidence.calibration import ConfidenceTemperatures


def _none(_: SpeculativeConfig) -> BudgetPolicy:
    from forerun.budget.policies.none import NonePolicy

    return NonePolicy()


def _fixed(config: SpeculativeConfig) -> BudgetPolicy:
    from forerun.budget.policies.fixed import FixedPolicy

    return FixedPolicy(draft_depth=config.num_speculative_tokens)


def _schedule(config: SpeculativeConfig) -> BudgetPolicy:
    from forerun.budget.policies.schedule import SchedulePolicy

    return SchedulePolicy(ranges=config.num_speculative_tokens_per_batch_size or ())


def _threshold(config: SpeculativeConfig) -> BudgetPolicy:
    from forerun.budget.policies.threshold import ThresholdPolicy

    return ThresholdPolicy(
        threshold=config.confidence_threshold or 0.0, draft_depth=config.num_speculative_tokens
    )


def _adaptive(config: SpeculativeConfig) -> BudgetPolicy:
    from forerun.budget.policies.adaptive import AdaptivePolicy

    return AdaptivePolicy(min_gain=config.adaptive_min_gain)


POLICIES: dict[str, Callable[[SpeculativeConfig], BudgetPolicy]] = {
    "none": _none,
    "fixed": _fixed,
    "schedule": _schedule,
    "threshold": _threshold,
    "adaptive": _adaptive,
}


def build_policy(config: SpeculativeConfig) -> BudgetPolicy:
    """Return the policy this configuration asks for."""
    return POLICIES[config.policy](config)


def build_controller(
    config: SpeculativeConfig,
    *,
    num_slots: int,
    profile: CostProfile | None = None,
    has_head: bool = False,
    temperatures: ConfidenceTemperatures | None = None,
) -> BudgetController:
    """Return the policy with what it needs around it; raises ConfigError if that is missing.

    `has_head` says that the drafter emits confidences; `temperatures` correct them.
    """
    from forerun.budget.confidence.model import ConfidenceModel
    from forerun.budget.costs.model import CostModel

    policy = build_policy(config)
    if policy.needs_costs and profile is None:
        raise ConfigError(
            'adaptive verification needs a cost profile; leave "cost_profile" out to measure one.'
        )
    confidence = lookup_confidence = None
    if policy.needs_confidence:
        confidence = ConfidenceModel(
            num_positions=config.num_speculative_tokens,
            has_head=has_head,
            temperatures=temperatures,
        )
    if config.prompt_lookup:
        lookup_confidence = ConfidenceModel(
            num_positions=config.num_speculative_tokens, has_head=False
        )
    return BudgetController(
        policy,
        num_slots=num_slots,
        num_positions=config.num_speculative_tokens,
        confidence=confidence,
        lookup_confidence=lookup_confidence,
        costs=None if profile is None or not policy.needs_costs else CostModel(profile),
    )
