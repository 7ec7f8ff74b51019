"""The three dialects: what each says in our terms, what tensors decide, published sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from dspark_networks import (
    deepspec_values,
    make_batch,
    make_config,
    make_gemma4_config,
    make_network,
    make_tensors,
    qwen3_values,
    specforge_values,
    speculators_values,
    write_drafter,
)
from forerun.drafters.dspark.checkpoint import load_dspark_tensors, load_network, read_dspark_config
from forerun.drafters.dspark.config import DSparkConfig
from forerun.drafters.dspark.dialects import parse_config
from forerun.drafters.dspark.network import DSparkNetwork, compute_rotation
from forerun.errors import ConfigError

CONFIG = make_config()
REDUCED = make_config(draft_vocab_size=20)
TABLES = ("embed_tokens.weight", "lm_head.weight")
NAMES = make_tensors(CONFIG).keys()
Values = Callable[[DSparkConfig], dict[str, Any]]
DIALECTS = [deepspec_values, specforge_values, speculators_values]

# Totals and trainable counts of the published checkpoints (64 tensors each).
PUBLISHED = {
    "qwen3_4b": (2560, 9728, 32, [1, 9, 17, 25, 33], 1_393_133_569, 615_221_249),
    "qwen3_8b": (4096, 12288, 32, [1, 9, 17, 25, 33], 2_371_081_729, 1_126_422_017),
    "qwen3_14b": (5120, 17408, 40, [1, 10, 19, 28, 37], 3_416_263_169, 1_860_438_529),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_have_their_published_sizes(name: str) -> None:
    hidden, intermediate, heads, taps, total, trainable = PUBLISHED[name]
    values = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 5,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000},
        "layer_types": ["full_attention"] * 5,
        "block_size": 7,
        "target_layer_ids": taps,
        "mask_token_id": 151_669,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "tie_word_embeddings": False,
    }
    config = parse_config(values, {"confidence_head.proj.bias"})
    assert config.rope_theta == 1e6
    with torch.device("meta"):
        parameters = list(DSparkNetwork(config).parameters())
    assert len(parameters) == 64
    assert sum(p.numel() for p in parameters) == total
    assert sum(p.numel() for p in parameters if p.requires_grad) == trainable


GEMMA4_12B = {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "hidden_size": 3840,
    "intermediate_size": 15_360,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "num_hidden_layers": 5,
    "vocab_size": 262_144,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1_000_000.0,
            "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "layer_types": ["full_attention"] * 5,
    "block_size": 7,
    "target_layer_ids": [5, 17, 29, 41, 46],
    "mask_token_id": 4,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
}


def test_the_published_gemma4_checkpoint_has_its_published_size() -> None:
    config = parse_config(GEMMA4_12B, {"confidence_head.proj.bias"})
    assert config.logit_softcap == 30.0
    with torch.device("meta"):
        state = DSparkNetwork(config).state_dict()
    del state["d2t"]
    assert sum(tensor.numel() for tensor in state.values()) == 3_430_444_550


def test_gemma4_heads_turn_as_transformers_turns_them() -> None:
    config = parse_config(GEMMA4_12B, {"confidence_head.proj.bias"})
    target = Gemma4TextConfig(**{**GEMMA4_12B, "architectures": None})
    positions = torch.arange(0, 5000, 7)
    rotary = Gemma4TextRotaryEmbedding(target)
    cos, sin = rotary(torch.zeros(1), positions[None], "full_attention")
    own_cos, own_sin = compute_rotation(config, positions)
    torch.testing.assert_close(own_cos[:, 0, 0], cos[0, :, :256], atol=1e-5, rtol=0)
    torch.testing.assert_close(own_sin[:, 0, 0], sin[0, :, :256], atol=1e-5, rtol=0)


def test_stored_gemma4_tensors_compute_what_their_network_does(tmp_path: Path) -> None:
    config = make_gemma4_config()
    values = deepspec_values(config) | {
        "architectures": ["Gemma4DSparkModel"],
        "global_head_dim": config.head_dim,
        "num_global_key_value_heads": 1,
        "num_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 2.0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": config.rope_theta,
                "partial_rotary_factor": 0.25,
            }
        },
    }
    whole = make_network(config)
    tensors = whole.state_dict()
    del tensors["d2t"]
    folder = write_drafter(tmp_path, values, tensors)
    assert read_dspark_config(folder) == config
    batch = make_batch(config)
    torch.testing.assert_close(load_network(folder)(batch), whole(batch), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_k_eq_v": False}, "attention_k_eq_v = False"),
        ({"global_head_dim": None}, "lacks 'global_head_dim'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "proportional"),
        ({"rope_parameters": None}, "lacks 'rope_parameters'"),
        ({"hidden_activation": "silu"}, "must be gelu_pytorch_tanh"),
    ],
)
def test_bad_gemma4_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(GEMMA4_12B | changes, NAMES)


@pytest.mark.parametrize("write", DIALECTS)
def test_every_dialect_says_the_same(write: Values) -> None:
    config = parse_config(write(CONFIG), NAMES)
    assert replace(config, verifier="") == CONFIG
    assert config.verifier == ("org/Target-1B" if write is speculators_values else "")


@pytest.mark.parametrize("write", DIALECTS)
def test_stored_tensors_compute_what_their_network_does(write: Values, tmp_path: Path) -> None:
    """With its own tables, as DeepSpec stores them."""
    folder = write_drafter(tmp_path, write(CONFIG), make_tensors(CONFIG))
    network, batch = load_network(folder), make_batch(CONFIG)
    assert not network.shares_target
    hidden, expected = network(batch), make_network(CONFIG, seed=5)(batch)
    torch.testing.assert_close(hidden, expected, atol=0, rtol=0)


@pytest.mark.parametrize("write", DIALECTS)
def test_absent_tables_are_the_targets(write: Values, tmp_path: Path) -> None:
    tensors = make_tensors(CONFIG, leave_out=TABLES)
    folder = write_drafter(tmp_path, write(CONFIG), tensors)
    assert load_dspark_tensors(folder, read_dspark_config(folder)).keys() == tensors.keys()
    network, whole = load_network(folder), make_network(CONFIG, seed=5)
    batch = make_batch(CONFIG)
    assert network(batch).isnan().all(), "drafts without the target's embeddings"
    network.share_target(whole.embed_tokens.weight, whole.lm_head.weight)
    torch.testing.assert_close(network(batch), whole(batch), atol=0, rtol=0)
    assert network.shares_target


def test_names_with_a_model_prefix_are_read(tmp_path: Path) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in make_tensors(CONFIG).items()}
    folder = write_drafter(tmp_path, deepspec_values(CONFIG), tensors)
    assert load_dspark_tensors(folder, read_dspark_config(folder)).keys() == NAMES


def test_draft_ids_are_offsets_in_speculators(tmp_path: Path) -> None:
    target_ids = torch.arange(3, 61, 3)[:20].clamp(max=59)
    target_ids[-1] = 60
    mask = torch.zeros(61, dtype=torch.bool)
    mask[target_ids] = True
    config = make_config(draft_vocab_size=len(target_ids))
    tensors = make_tensors(config, leave_out=TABLES)
    tensors |= {"d2t": target_ids - torch.arange(len(target_ids)), "t2d": mask}
    tensors["verifier_lm_head.weight"] = torch.zeros(61, 24)
    folder = write_drafter(tmp_path, speculators_values(config), tensors)
    loaded = load_dspark_tensors(folder, read_dspark_config(folder))
    assert loaded["d2t"].tolist() == target_ids.tolist()
    assert not {"t2d", "verifier_lm_head.weight"} & loaded.keys()
    network = load_network(folder)
    embed, head = torch.randn(2, 61, 24)
    network.share_target(embed, head)
    torch.testing.assert_close(network.lm_head.weight.data, head[target_ids])


def test_offsets_of_a_full_draft_vocabulary_are_all_zero(tmp_path: Path) -> None:
    tensors = make_tensors(CONFIG) | {"d2t": torch.zeros(61, dtype=torch.int64)}
    folder = write_drafter(tmp_path, speculators_values(CONFIG), tensors)
    assert "d2t" not in load_dspark_tensors(folder, read_dspark_config(folder))


def test_an_anchor_that_predicts_nothing_is_no_draft() -> None:
    legacy = make_config(sample_from_anchor=False)
    for write in DIALECTS:
        values = write(legacy) | {"block_size": 6}
        values.pop("sample_from_anchor", None)
        if write is deepspec_values:  # always has the other convention
            values["sample_from_anchor"] = False
        if write is specforge_values:
            values["architectures"] = ["DFlashDraftModel"]
            del values["dflash_config"]["projector_type"]
        config = parse_config(values, NAMES)
        assert (config.sample_from_anchor, config.block_size, config.num_slots) == (False, 5, 6)


@pytest.mark.parametrize(("kind", "tensor"), [("gated", "gate_proj"), ("rnn", "joint_proj")])
def test_tensors_decide_the_kind_of_markov_head(kind: str, tensor: str) -> None:
    names = {*NAMES, f"markov_head.{tensor}.weight"}
    assert parse_config(deepspec_values(CONFIG), names).markov_head_type == kind


def test_the_confidence_bias_is_optional(tmp_path: Path) -> None:
    tensors = make_tensors(CONFIG, leave_out=["confidence_head.proj.bias"])
    folder = write_drafter(tmp_path, deepspec_values(CONFIG), tensors)
    assert not read_dspark_config(folder).confidence_bias
    head = load_network(folder).confidence_head
    assert head is not None
    assert head.proj.bias is None


def test_differences_to_the_qwen3_defaults_are_enough() -> None:
    values = speculators_values(CONFIG)
    layers = values["transformer_layer_config"]
    for key in ("num_key_value_heads", "max_position_embeddings", "intermediate_size"):
        del layers[key]
    layers["num_attention_heads"] = 64
    config = parse_config(values, NAMES)
    assert (config.num_kv_heads, config.max_model_len) == (32, 32_768)
    assert config.intermediate_size == 22_016


def test_scaled_rotary_frequencies_are_read() -> None:
    values = deepspec_values(CONFIG)
    values |= {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}
    config = parse_config(values, NAMES)
    assert config.rope_freq_factors == (4.0,) * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_head_type": "attention"}, "markov_head_type is 'attention'.*vanilla or gated"),
        ({"mask_token_id": 61}, r"mask_token_id is 61.*below vocab_size \(61\)"),
        ({"mask_token_id": None}, "lacks 'mask_token_id'"),
        ({"target_layer_ids": [1, 1]}, r"target_layer_ids is \(1, 1\)"),
        ({"target_layer_ids": [-2, 1]}, "from -1 on"),
        ({"target_layer_ids": []}, r"target_layer_ids is \(\)"),
        ({"target_layer_ids": ["1"]}, "a list of layer numbers"),
        ({"markov_rank": -3}, "markov_rank = -3"),
        ({"markov_rank": 0}, "markov_rank is 0"),
        ({"block_size": 0}, "block_size = 0"),
        ({"block_size": 1, "sample_from_anchor": False}, "block_size = 1.*at least 2"),
        ({"num_key_value_heads": 3}, "num_kv_heads is 3.*divisor"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "full"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"vocab_size": "61"}, "vocab_size = '61'"),
    ],
)
def test_bad_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(deepspec_values(CONFIG) | changes, NAMES)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dspark_block_size": 5}, "part of its target's checkpoint"),
        (qwen3_values(CONFIG), "not that of a DSpark or DFlash drafter"),
        (speculators_values(CONFIG) | {"speculators_model_type": "eagle3"}, "dspark or dflash"),
        (speculators_values(CONFIG) | {"transformer_layer_config": None}, "lacks 'transformer_la"),
        (speculators_values(CONFIG) | {"draft_vocab_size": 62}, "at most vocab_size"),
        (specforge_values(CONFIG) | {"dflash_config": {"attention_mode": "mla"}}, "gqa or mha"),
    ],
)
def test_other_checkpoints_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(values, NAMES)
