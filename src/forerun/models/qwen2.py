"""Qwen2 and Qwen2.5. Difference from llama: q, k and v always have biases, nothing else does.

A sliding window on the layers from `max_window_layers` on, where `use_sliding_window` is set. GGUF
files store q and k as they are, and a separately quantised head even where the model ties it.
"""

from __future__ import annotations

from forerun.models.decoder import DecoderModel
from forerun.models.hf_config import read_common_fields, read_rope, read_window_layers
from forerun.models.spec import Fields, ModelSpec


class Qwen2Model(DecoderModel):
    """Qwen2 family."""

    @classmethod
    def spec_from_hf(cls, config: Fields) -> ModelSpec:
        """Read config.json."""
        common = read_common_fields(config)
        rope = read_rope(config, common["head_dim"])
        return ModelSpec(**common, layers=read_window_layers(config, rope), qkv_bias=True)
