"""Drafting methods, one file each. Registry of lazy factories by vLLM's method names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from forerun.drafters.base import Drafter, DrafterLoading
from forerun.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from forerun.cache.kv_store import KVLayerShape

Factory = Callable[[SpeculativeConfig, DrafterLoading | None], Drafter]


def _none(_: SpeculativeConfig, __: DrafterLoading | None) -> Drafter:
    from forerun.drafters.none import NoneDrafter

    return NoneDrafter()


def _ngram(config: SpeculativeConfig, _: DrafterLoading | None) -> Drafter:
    from forerun.drafters.ngram import NgramDrafter

    return NgramDrafter(
        max_speculative_tokens=config.num_speculative_tokens,
        min_n=config.prompt_lookup_min,
        max_n=config.prompt_lookup_max,
    )


def _synthetic(config: SpeculativeConfig, _: DrafterLoading | None) -> Drafter:
    from forerun.drafters.synthetic import SyntheticDrafter

    return SyntheticDrafter(max_speculative_tokens=config.num_speculative_tokens)


def _draft_model(config: SpeculativeConfig, loading: DrafterLoading | None) -> Drafter:
    from forerun.drafters.load_draft_model import load_draft_model

    assert loading is not None, "a draft model has weights to load"
    return load_draft_model(config, loading)


def _dspark(config: SpeculativeConfig, loading: DrafterLoading | None) -> Drafter:
    from forerun.drafters.dspark.load import load_dspark

    assert loading is not None, "a block drafter has weights to load"
    return load_dspark(config, loading)


DRAFTERS: dict[str, Factory] = {
    "none": _none,
    "ngram": _ngram,
    "draft_model": _draft_model,
    "dspark": _dspark,
    "dflash": _dspark,
    "synthetic": _synthetic,
}


def build_drafter(config: SpeculativeConfig, loading: DrafterLoading | None = None) -> Drafter:
    """Return the drafter named by `config.method`; those with weights need `loading`."""
    return DRAFTERS[config.method](config, loading)


def build_lookup(config: SpeculativeConfig) -> Drafter | None:
    """Return what looks up drafts before the drafter is asked; None if nothing does."""
    return _ngram(config, None) if config.prompt_lookup else None


def read_kv_layers(config: SpeculativeConfig) -> tuple[KVLayerShape, ...]:
    """Return the layers the drafter will have in the pool, before any weights are loaded."""
    if config.method == "draft_model":
        from forerun.drafters.load_draft_model import read_draft_spec

        return read_draft_spec(config).build_kv_layers()
    if config.method in ("dspark", "dflash"):
        from forerun.drafters.dspark.backbone import build_spec
        from forerun.drafters.dspark.load import read_config

        return build_spec(read_config(config)).build_kv_layers()
    return ()
