"""config.json of a Hugging Face folder -> the parts of a ModelSpec that families share. No torch.

Both spellings of rotary settings are read: rope_theta with rope_scaling (transformers 4) and
rope_parameters (transformers 5, for Gemma one per layer type).
"""

from __future__ import annotations

import math
from typing import Any

from forerun.errors import ConfigError
from forerun.models.spec import Fields, LayerSpec, RopeSpec

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_common_fields(
    config: Fields, *, head_dim: int | None = None, default_tie: bool = False
) -> dict[str, Any]:
    """Return the ModelSpec arguments every family reads the same way; `layers` is not among them.

    `head_dim` is the family's own default; None means hidden_size / num_attention_heads.
    """
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    head_dim = config.integer("head_dim", head_dim or hidden_size // num_heads)
    bos = config.token_ids("bos_token_id")
    return {
        "architecture": config.values["architectures"][0],
        "hidden_size": hidden_size,
        "intermediate_size": config.integer("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": config.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "vocab_size": config.integer("vocab_size"),
        "max_model_len": config.integer("max_position_embeddings", 2048),
        "rms_norm_eps": config.number("rms_norm_eps", 1e-6),
        "attention_scale": head_dim**-0.5,
        "tie_word_embeddings": config.flag("tie_word_embeddings", default=default_tie),
        "activation": read_activation(config, "hidden_act", "silu"),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": config.token_ids("eos_token_id"),
    }


def read_activation(config: Fields, key: str, default: str) -> str:
    """Return our name of the MLP's activation."""
    given = config.text(key, default)
    if given not in _ACTIVATIONS:
        raise config.error(key, given, " or ".join(_ACTIVATIONS))
    return _ACTIVATIONS[given]


def read_layer_types(config: Fields, default: list[str]) -> list[str]:
    """Return the attention kind of each layer, from `layer_types` where given."""
    given = config.values.get("layer_types") or default
    for kind in given:
        if kind not in (FULL_ATTENTION, SLIDING_ATTENTION):
            allowed = f"a list of {FULL_ATTENTION} and {SLIDING_ATTENTION}"
            raise config.error("layer_types", given, allowed)
    num_layers = config.integer("num_hidden_layers")
    if len(given) != num_layers:
        raise config.error("layer_types", given, f"a list of {num_layers} entries")
    return list(given)


def read_window_layers(config: Fields, rope: RopeSpec) -> tuple[LayerSpec, ...]:
    """Return the layers of Qwen configs: a window on late layers, if it is switched on at all."""
    num_layers = config.integer("num_hidden_layers")
    slides = config.flag("use_sliding_window") and config.values.get("sliding_window") is not None
    first = config.values.get("max_window_layers", 28) if slides else num_layers
    default = [SLIDING_ATTENTION if i >= first else FULL_ATTENTION for i in range(num_layers)]
    kinds = read_layer_types(config, default)
    window = config.integer("sliding_window") if SLIDING_ATTENTION in kinds else None
    return tuple(
        LayerSpec(window=window if kind == SLIDING_ATTENTION else None, rope=rope) for kind in kinds
    )


def read_rope(
    config: Fields, head_dim: int, *, default_theta: float = 10_000.0, layer_type: str | None = None
) -> RopeSpec:
    """Return the rotary settings (of one layer type); unknown scaling raises ConfigError."""
    parameters = config.mapping("rope_parameters")
    if parameters is not None and layer_type is not None:
        parameters = parameters.mapping(layer_type)
    if parameters is None:
        scaling = config.mapping("rope_scaling")
        merged = {"rope_theta": config.number("rope_theta", default_theta)}
        merged.update(scaling.values if scaling else {})
        parameters = Fields(merged, f"{config.source} rope_scaling")
    for fields in (config, parameters):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            given = fields.values["partial_rotary_factor"]
            raise fields.error("partial_rotary_factor", given, "1 (the whole head rotates)")
    theta = parameters.number("rope_theta", default_theta)
    return RopeSpec(theta=theta, freq_factors=_read_factors(parameters, head_dim, theta))


def _read_factors(parameters: Fields, head_dim: int, theta: float) -> tuple[float, ...] | None:
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return (parameters.number("factor"),) * (head_dim // 2)
    if kind == "llama3":
        return _llama3_factors(parameters, head_dim, theta)
    raise ConfigError(
        f"{parameters.source} asks for rope type {kind!r}; supported are default, linear and "
        "llama3. Use a checkpoint without this scaling."
    )


def _llama3_factors(parameters: Fields, head_dim: int, theta: float) -> tuple[float, ...]:
    """Keep short wavelengths, divide long ones by `factor`, interpolate frequencies between."""
    factor = parameters.number("factor")
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if high <= low:
        raise parameters.error("high_freq_factor", high, f"greater than low_freq_factor ({low})")
    context = parameters.number("original_max_position_embeddings")
    factors = []
    for index in range(head_dim // 2):
        turns = context * theta ** (-2 * index / head_dim) / (2 * math.pi)
        # 0 at `low` turns over the original context and below, 1 at `high` turns and above.
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1.0 / ((1.0 - kept) / factor + kept))
    return tuple(factors)
