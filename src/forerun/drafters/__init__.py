"""Drafting methods, one file each. Registry of lazy factories by vLLM's method names."""

from __future__ import annotations

from collections.abc import Callable

from forerun.drafters.base import Drafter
from forerun.speculative_config import SpeculativeConfig


def _none(_: SpeculativeConfig) -> Drafter:
    from forerun.drafters.none import NoneDrafter

    return NoneDrafter()


def _ngram(config: SpeculativeConfig) -> Drafter:
    from forerun.drafters.ngram import NgramDrafter

    return NgramDrafter(
        max_speculative_tokens=config.num_speculative_tokens,
        min_n=config.prompt_lookup_min,
        max_n=config.prompt_lookup_max,
    )


def _synthetic(config: SpeculativeConfig) -> Drafter:
    from forerun.drafters.synthetic import SyntheticDrafter

    return SyntheticDrafter(max_speculative_tokens=config.num_speculative_tokens)


DRAFTERS: dict[str, Callable[[SpeculativeConfig], Drafter]] = {
    "none": _none,
    "ngram": _ngram,
    "synthetic": _synthetic,
}


def build_drafter(config: SpeculativeConfig) -> Drafter:
    """Return the drafter named by `config.method`."""
    return DRAFTERS[config.method](config)
