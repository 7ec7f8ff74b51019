"""Qwen3 (dense). Difference from llama: an RMS norm over each query and key head before rotation.

head_dim is set apart from hidden_size (128 unless given). Biases only where `attention_bias` says
so; sliding windows as in Qwen2.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.gguf_file import GGUFFile
from forerun.models.decoder import DecoderModel
from forerun.models.hf_config import read_common_fields, read_rope, read_window_layers
from forerun.models.spec import Fields, ModelSpec


class Qwen3Model(DecoderModel):
    """Qwen3 family."""

    @classmethod
    def spec_from_hf(cls, config: Fields) -> ModelSpec:
        """Read config.json."""
        common = read_common_fields(config, head_dim=128)
        rope = read_rope(config, common["head_dim"])
        bias = config.flag("attention_bias")
        return ModelSpec(
            **common,
            layers=read_window_layers(config, rope),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
        )

    @classmethod
    def spec_from_gguf(cls, file: GGUFFile) -> ModelSpec:
        """Read GGUF metadata."""
        return replace(super().spec_from_gguf(file), qk_norm=True)
