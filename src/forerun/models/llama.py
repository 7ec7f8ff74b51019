"""Llama and SmolLM2: the plain decoder that other families differ from.

Optional biases on all projections (attention_bias, mlp_bias). GGUF files of this family store the
rows of q and k of each head with the two rotary halves interleaved; the loader undoes that.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.models.decoder import DecoderModel
from forerun.models.spec import Fields, ModelSpec


class LlamaModel(DecoderModel):
    """Llama family."""

    gguf_permutes_heads = True

    @classmethod
    def spec_from_hf(cls, config: Fields) -> ModelSpec:
        """Read config.json."""
        attention_bias = config.flag("attention_bias")
        return replace(
            super().spec_from_hf(config),
            qkv_bias=attention_bias,
            o_bias=attention_bias,
            mlp_bias=config.flag("mlp_bias"),
        )
