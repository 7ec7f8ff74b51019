"""Gemma 3, text only. Differences from llama:

- five of six layers see a sliding window and rotate with a local theta; scaling is global only;
- norms over query and key heads, and on the outputs of attention and MLP;
- norm weights w mean (1 + w): Hugging Face stores w, GGUF stores 1 + w, we hold 1 + w;
- embeddings times sqrt(hidden_size), tanh GELU, attention scale query_pre_attn_scalar^(-1/2).
GGUF files name neither the window pattern nor (mostly) the local theta: both are fixed here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

from forerun.gguf_file import GGUFFile
from forerun.models.decoder import DecoderModel
from forerun.models.gguf import read_gguf_fields, read_metadata
from forerun.models.hf_config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    read_activation,
    read_common_fields,
    read_layer_types,
    read_rope,
)
from forerun.models.spec import Fields, LayerSpec, ModelSpec, RopeSpec

_WINDOW_PATTERN = 6
_LOCAL_THETA = 10_000.0
_GLOBAL_THETA = 1_000_000.0
_LAYERS_27B = 62


class Gemma3Model(DecoderModel):
    """Gemma 3 family."""

    hf_names: ClassVar[dict[str, str]] = DecoderModel.hf_names | {
        "post_attention_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    }
    hf_norm_offset = 1.0

    @classmethod
    def spec_from_hf(cls, config: Fields) -> ModelSpec:
        """Read config.json."""
        for key in ("attn_logit_softcapping", "use_bidirectional_attention"):
            if config.values.get(key):
                raise config.error(key, config.values[key], "unset for Gemma 3")
        common = read_common_fields(config, head_dim=256, default_tie=True)
        bias = config.flag("attention_bias")
        common["activation"] = read_activation(config, "hidden_activation", "gelu_pytorch_tanh")
        common["attention_scale"] = config.number("query_pre_attn_scalar", 256) ** -0.5
        return ModelSpec(
            **common,
            **_differences(common["hidden_size"]),
            layers=_read_layers(config, common["head_dim"]),
            qkv_bias=bias,
            o_bias=bias,
            logit_softcap=config.optional_number("final_logit_softcapping"),
        )

    @classmethod
    def spec_from_gguf(cls, file: GGUFFile) -> ModelSpec:
        """Read GGUF metadata."""
        common = read_gguf_fields(file)
        num_layers = len(common["layers"])
        fields = read_metadata(file)
        local = RopeSpec(theta=fields.number("gemma3.rope.freq_base_swa", _LOCAL_THETA))
        window = fields.integer("gemma3.attention.sliding_window")
        kinds = _build_pattern(num_layers, _WINDOW_PATTERN)
        common["layers"] = tuple(
            layer if kind == FULL_ATTENTION else replace(layer, window=window, rope=local)
            for layer, kind in zip(common["layers"], kinds, strict=True)
        )
        common["activation"] = "gelu_tanh"
        if num_layers == _LAYERS_27B:  # the one size whose query_pre_attn_scalar is not head_dim
            common["attention_scale"] = (common["hidden_size"] / common["num_heads"]) ** -0.5
        return ModelSpec(**common, **_differences(common["hidden_size"]))


def _differences(hidden_size: int) -> dict[str, Any]:
    return {"qk_norm": True, "post_norms": True, "embed_scale": math.sqrt(hidden_size)}


def _build_pattern(num_layers: int, pattern: int) -> list[str]:
    """Return the kind of each layer: every `pattern`-th is global."""
    return [
        SLIDING_ATTENTION if (index + 1) % pattern else FULL_ATTENTION
        for index in range(num_layers)
    ]


def _read_layers(config: Fields, head_dim: int) -> tuple[LayerSpec, ...]:
    pattern = config.integer("sliding_window_pattern", _WINDOW_PATTERN)
    default = _build_pattern(config.integer("num_hidden_layers"), pattern)
    full = LayerSpec(
        window=None,
        rope=read_rope(config, head_dim, default_theta=_GLOBAL_THETA, layer_type=FULL_ATTENTION),
    )
    local = LayerSpec(
        window=config.integer("sliding_window", 4096), rope=_read_local_rope(config, head_dim)
    )
    kinds = read_layer_types(config, default)
    return tuple(full if kind == FULL_ATTENTION else local for kind in kinds)


def _read_local_rope(config: Fields, head_dim: int) -> RopeSpec:
    if config.mapping("rope_parameters") is not None:
        return read_rope(config, head_dim, default_theta=_LOCAL_THETA, layer_type=SLIDING_ATTENTION)
    return RopeSpec(theta=config.number("rope_local_base_freq", _LOCAL_THETA))
