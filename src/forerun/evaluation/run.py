"""Rollouts of one drafter with every verifier asked for, by one engine that verifies everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.budget.confidence.calibration import VERIFIERS
from forerun.config import EngineConfig
from forerun.engine.llm import LLM
from forerun.errors import ConfigError
from forerun.evaluation.rollouts import Rollouts, roll_out
from forerun.speculative_config import SpeculativeConfig

Report = Callable[[str, int], None]
# Prompts, anchors and full drafts of so many fit a step of any engine: drafts are never cut short.
MAX_NUM_SEQS = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSettings:
    """What is rolled out. `temperature` is that of the sampled verifiers; greedy has 0."""

    verifiers: tuple[str, ...] = VERIFIERS
    temperature: float = 1.0
    max_tokens: int = 256


def verify_everything(config: SpeculativeConfig) -> SpeculativeConfig:
    """Return the configuration with every draft verified at full length."""
    if config.method == "none":
        raise ConfigError(
            "there is nothing to roll out without a drafter; name one with --speculative-config."
        )
    if config.rejection_sample_method == "synthetic":
        raise ConfigError("synthetic acceptance says nothing about a drafter; leave it out.")
    return replace(
        config,
        enable_adaptive_verification=False,
        prompt_lookup=False,
        confidence_threshold=None,
        num_speculative_tokens_per_batch_size=None,
        rejection_sample_method="standard",
    )


def roll_out_all(
    options: Mapping[str, Any],
    rows: Sequence[dict[str, Any]],
    settings: RolloutSettings,
    *,
    report: Report | None = None,
    loading: Callable[[str, int, int], None] | None = None,
) -> dict[str, Rollouts]:
    """Return the rollouts of each verifier; `options` are the engine's, `report(verifier, tokens)`.

    Raises ConfigError.
    """
    config = EngineConfig.from_options(**options)
    speculative = verify_everything(config.speculative)
    wanted = {"max_num_seqs": MAX_NUM_SEQS, **options, "speculative_config": speculative}
    llm = LLM(**wanted, progress=loading)

    def run(verifier: str) -> Rollouts:
        return roll_out(
            llm,
            rows,
            verifier=verifier,
            temperature=0.0 if verifier == "greedy" else settings.temperature,
            max_tokens=settings.max_tokens,
            report=None if report is None else lambda tokens: report(verifier, tokens),
        )

    return {verifier: run(verifier) for verifier in settings.verifiers}
