"""What configurations mean, with the answers written out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from forerun.errors import ConfigError
from tiny_models import make_spec


def list_windows(**overrides: Any) -> list[int | None]:
    return [layer.window for layer in make_spec(**overrides).layers]


def test_llama_is_plain() -> None:
    spec = make_spec("llama")
    assert list_windows() == [None, None]
    options = (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm, spec.post_norms)
    assert not any(options)
    assert spec.attention_scale == 12**-0.5
    assert spec.eos_token_ids == (2,)


def test_head_dim_defaults_to_an_equal_share() -> None:
    assert make_spec("llama", head_dim=None).head_dim == 12
    assert make_spec("qwen3", head_dim=None).head_dim == 128
    assert make_spec("gemma3", head_dim=None).head_dim == 256


def test_attention_bias_of_llama_covers_all_projections() -> None:
    spec = make_spec("llama", attention_bias=True, mlp_bias=True)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (True, True, True)


def test_qwen2_always_has_qkv_biases_only() -> None:
    spec = make_spec("qwen2")
    assert (spec.qkv_bias, spec.o_bias, spec.qk_norm) == (True, False, False)


def test_qwen_window_applies_to_late_layers_where_switched_on() -> None:
    window = {"family": "qwen2", "sliding_window": 64, "max_window_layers": 1}
    assert list_windows(**window) == [None, None]
    assert list_windows(**window, use_sliding_window=True) == [None, 64]


def test_gemma_pattern_is_five_local_layers_then_a_global_one() -> None:
    windows = list_windows(
        family="gemma3", num_hidden_layers=13, layer_types=None, sliding_window=32
    )
    assert [index for index, window in enumerate(windows) if window is None] == [5, 11]


def test_gemma_thetas_of_both_config_generations() -> None:
    old = make_spec("gemma3", rope_theta=5e5, rope_local_base_freq=2e4)
    new = make_spec(
        "gemma3",
        rope_parameters={
            "full_attention": {"rope_theta": 5e5, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
        },
    )
    assert old == new
    assert [layer.rope.theta for layer in new.layers] == [2e4, 5e5]
    assert [layer.rope.theta for layer in make_spec("gemma3").layers] == [1e4, 1e6]


def test_gemma_scales() -> None:
    spec = make_spec("gemma3")
    assert spec.embed_scale == math.sqrt(48)
    assert spec.attention_scale == 1 / 3
    assert spec.tie_word_embeddings


def test_rope_scaling_of_both_config_generations() -> None:
    linear = {"type": "linear", "factor": 4.0}
    old = make_spec("llama", rope_theta=1e5, rope_scaling=linear)
    new = make_spec(
        "llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5}
    )
    assert old == new
    assert new.layers[0].rope.freq_factors == (4.0,) * 6


def test_llama3_factors_keep_short_and_stretch_long_wavelengths() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    spec = make_spec("llama", head_dim=8, rope_theta=1e4, rope_scaling=scaling)
    factors = spec.layers[0].rope.freq_factors
    assert factors is not None
    # Turns over 64 positions: 10.19, 1.019, 0.1019, 0.01019; between 1 and 4 is interpolated.
    kept = (64 * 0.1 / (2 * math.pi) - 1) / 3
    assert factors == pytest.approx((1.0, 1 / ((1 - kept) / 8 + kept), 8.0, 8.0))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'; supported are default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks 'factor'"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear'; it must be an object"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 2.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "high_freq_factor = 1.0; it must be greater than low_freq_factor",
        ),
        ({"family": "qwen3", "layer_types": ["linear_attention"] * 2}, "must be a list of full"),
        ({"family": "qwen3", "layer_types": ["full_attention"]}, "a list of 2 entries"),
        ({"family": "gemma3", "attn_logit_softcapping": 50.0}, "must be unset for Gemma 3"),
        ({"family": "gemma3", "use_bidirectional_attention": True}, "must be unset for Gemma 3"),
    ],
)
def test_what_cannot_be_computed_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_spec(**overrides)
