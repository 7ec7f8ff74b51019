"""config.json of a block drafter -> DSparkConfig, from each of three dialects. No torch.

DeepSpec puts its keys beside those of a Qwen3 or Gemma 4 config; SpecForge puts them into
`dflash_config`; speculators puts the Qwen3 config into `transformer_layer_config`. They count the
layers they tap and the slots of a block differently; what they say here is in our terms: layer k's
output, and drafts per block. What they leave open, the names of the stored tensors decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from forerun.drafters.dspark.config import DSparkConfig
from forerun.errors import ConfigError
from forerun.models.hf_config import (
    FULL_ATTENTION,
    read_common_fields,
    read_rope,
    read_window_layers,
)
from forerun.models.spec import Fields

SPECULATORS_TYPES = ("dspark", "dflash")
_CONFIDENCE_BIAS = "confidence_head.proj.bias"
_SPECFORGE_ATTENTION = ("gqa", "mha")
_SIZE_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_model_len",
    "rms_norm_eps",
)
# What transformers leaves out of a Qwen3 config when it writes differences only.
_QWEN3_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}


def parse_config(values: dict[str, Any], tensor_names: Collection[str]) -> DSparkConfig:
    """Return the configuration of a drafter with these tensors; raises ConfigError."""
    config = Fields(values, "the drafter's config.json")
    options = _find_reader(config)(config)
    if options["markov_rank"]:
        options["markov_head_type"] = _find_head_type(options["markov_head_type"], tensor_names)
    lacks_bias = options["has_confidence_head"] and _CONFIDENCE_BIAS not in tensor_names
    return DSparkConfig(**options, confidence_bias=not lacks_bias)


def _find_reader(config: Fields) -> Callable[[Fields], dict[str, Any]]:
    keys = config.values
    if "speculators_model_type" in keys or "transformer_layer_config" in keys:
        return _read_speculators
    if "dflash_config" in keys:
        return _read_specforge
    if "target_layer_ids" in keys:
        return _read_deepspec
    if any(key.startswith("dspark_") for key in keys):
        raise ConfigError(
            "the drafter is part of its target's checkpoint (dspark_ keys, as in DeepSeek-V4); "
            "only drafters in a folder of their own are supported."
        )
    raise ConfigError(
        f"{config.source} is not that of a DSpark or DFlash drafter: it has none of "
        "'target_layer_ids' (DeepSpec), 'dflash_config' (SpecForge) and 'speculators_model_type' "
        "(speculators)."
    )


def _read_deepspec(config: Fields) -> dict[str, Any]:
    is_gemma = "Gemma4" in _read_architecture(config)
    return {
        **(_read_gemma4_backbone(config) if is_gemma else _read_backbone(config)),
        **_read_heads(config),
        **_read_block(config, sample_from_anchor=True),
        "target_layer_ids": _read_layer_ids(config, "target_layer_ids", offset=0),
    }


def _read_specforge(config: Fields) -> dict[str, Any]:
    nested = config.mapping("dflash_config")
    assert nested is not None, "chosen by this key"
    merged = Fields({**config.values, **nested.values}, nested.source)
    mode = merged.text("attention_mode", _SPECFORGE_ATTENTION[0])
    if mode not in _SPECFORGE_ATTENTION:
        raise merged.error("attention_mode", mode, " or ".join(_SPECFORGE_ATTENTION))
    is_dspark = merged.text("projector_type", "") == "dspark"
    is_dspark |= "DSpark" in _read_architecture(config)
    return {
        **_read_backbone(config),
        **_read_heads(merged),
        **_read_block(merged, sample_from_anchor=is_dspark),
        "target_layer_ids": _read_layer_ids(merged, "target_layer_ids", offset=0),
    }


def _read_speculators(config: Fields) -> dict[str, Any]:
    kind = config.text("speculators_model_type", SPECULATORS_TYPES[0])
    if kind not in SPECULATORS_TYPES:
        raise config.error("speculators_model_type", kind, " or ".join(SPECULATORS_TYPES))
    layers = config.mapping("transformer_layer_config")
    if layers is None:
        raise config.error("transformer_layer_config", None, "the configuration of its layers")
    defaults = _QWEN3_DEFAULTS if layers.values.get("model_type") == "qwen3" else {}
    backbone = _read_backbone(Fields({**defaults, **layers.values}, layers.source))
    return {
        **backbone,
        **_read_heads(config),
        # Checkpoints older than the flag have an anchor slot that predicts nothing.
        **_read_block(config, sample_from_anchor=False),
        "draft_vocab_size": config.integer("draft_vocab_size", backbone["vocab_size"]),
        # Theirs name the input of a layer, ours the output.
        "target_layer_ids": _read_layer_ids(config, "aux_hidden_state_layer_ids", offset=-1),
        "verifier": _read_verifier(config),
    }


def _read_backbone(config: Fields) -> dict[str, Any]:
    sizes = _read_sizes(config, "silu")
    rope = read_rope(config, sizes["head_dim"])
    windows = [layer.window for layer in read_window_layers(config, rope)]
    if any(window is not None for window in windows):
        raise config.error("layer_types", config.values.get("layer_types"), "full attention only")
    return {**sizes, "rope_theta": rope.theta, "rope_freq_factors": rope.freq_factors}


def _read_gemma4_backbone(config: Fields) -> dict[str, Any]:
    """Read layers that all have the geometry of Gemma 4's global attention."""
    if not config.flag("attention_k_eq_v"):
        raise config.error("attention_k_eq_v", False, "true (values made from keys)")
    renamed = {
        **config.values,
        "head_dim": config.integer("global_head_dim"),
        "num_key_value_heads": config.integer("num_global_key_value_heads"),
        "hidden_act": config.text("hidden_activation", "gelu_pytorch_tanh"),
    }
    sizes = _read_sizes(Fields(renamed, config.source), "gelu_pytorch_tanh")
    kinds = config.mapping("rope_parameters")
    rope = kinds.mapping(FULL_ATTENTION) if kinds else None
    if rope is None or rope.text("rope_type", "") != "proportional":
        given = config.values.get("rope_parameters")
        raise config.error("rope_parameters", given, f"of type proportional for {FULL_ATTENTION}")
    num_turning = int(rope.number("partial_rotary_factor", 1.0) * sizes["head_dim"] // 2)
    num_still = sizes["head_dim"] // 2 - num_turning
    return {
        **sizes,
        "rope_theta": rope.number("rope_theta"),
        # An infinite factor is a frequency of 0: those pairs do not turn.
        "rope_freq_factors": (1.0,) * num_turning + (math.inf,) * num_still,
        "flavour": "gemma4",
        "logit_softcap": config.optional_number("final_logit_softcapping"),
    }


def _read_sizes(config: Fields, activation: str) -> dict[str, Any]:
    """Return the sizes of layers that have no biases and this activation."""
    values = {"architectures": [""], **config.values}
    common = read_common_fields(Fields(values, config.source), head_dim=128)
    if config.text("hidden_act", "silu") != activation:
        raise config.error("hidden_act", config.values.get("hidden_act"), activation)
    if config.flag("attention_bias"):
        raise config.error("attention_bias", True, "false (projections without bias)")
    return {
        **{name: common[name] for name in _SIZE_FIELDS},
        "num_layers": config.integer("num_hidden_layers"),
        "draft_vocab_size": common["vocab_size"],
    }


def _read_heads(config: Fields) -> dict[str, Any]:
    rank = config.values.get("markov_rank") or 0
    if not isinstance(rank, int) or rank < 0:
        raise config.error("markov_rank", rank, "0 (no Markov head) or a positive integer")
    return {
        "markov_rank": rank,
        "markov_head_type": config.text("markov_head_type", "vanilla"),
        "has_confidence_head": config.flag("enable_confidence_head"),
        "confidence_with_markov": config.flag("confidence_head_with_markov", default=rank > 0),
    }


def _read_block(config: Fields, *, sample_from_anchor: bool) -> dict[str, Any]:
    """Return drafts per block; an anchor slot that predicts nothing is not one of them."""
    mask_ids = config.token_ids("mask_token_id")
    if len(mask_ids) != 1:
        raise config.error("mask_token_id", config.values.get("mask_token_id"), "one token id")
    samples = config.flag("sample_from_anchor", default=sample_from_anchor)
    num_slots = config.integer("block_size")
    if num_slots == 1 and not samples:
        raise config.error("block_size", num_slots, "at least 2 (the anchor and one draft)")
    return {
        "mask_token_id": mask_ids[0],
        "sample_from_anchor": samples,
        "block_size": num_slots if samples else num_slots - 1,
    }


def _read_layer_ids(config: Fields, key: str, *, offset: int) -> tuple[int, ...]:
    given = config.values.get(key)
    if not isinstance(given, list) or not all(type(layer) is int for layer in given):
        raise config.error(key, given, "a list of layer numbers")
    return tuple(layer + offset for layer in given)


def _read_verifier(config: Fields) -> str:
    details = config.mapping("speculators_config")
    verifier = details.mapping("verifier") if details else None
    return verifier.text("name_or_path", "") if verifier else ""


def _read_architecture(config: Fields) -> str:
    names = config.values.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _find_head_type(configured: str, tensor_names: Collection[str]) -> str:
    """Return the kind of the Markov head: a tensor only one kind has outweighs the name."""
    for kind, name in (("gated", "gate_proj"), ("rnn", "joint_proj")):
        if f"markov_head.{name}.weight" in tensor_names:
            return kind
    return configured
