"""Configuration errors: each names what was given and the nearest valid key."""

from __future__ import annotations

import pytest

from forerun.config import EngineConfig, SchedulerConfig, ServerConfig, parse_bytes
from forerun.errors import ConfigError
from forerun.speculative_config import SpeculativeConfig


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"methd": "ngram"}', "did you mean 'method'"),
        ('{"method": "eagle9"}', "one of none, ngram"),
        ('{"num_speculative_tokens": "5"}', "must be int"),
        ('{"num_speculative_tokens": true}', "must be int"),
        ('{"num_speculative_tokens": 0}', "1..32"),
        ('{"prompt_lookup_min": 5}', "prompt_lookup_max"),
        ('{"rejection_sample_method": "lossy"}', "standard, coupled"),
        ('{"num_speculative_tokens": -1}', "1..32"),
        ('{"enable_adaptive_verificaton": true}', "did you mean 'enable_adaptive_verification'"),
        ('{"method": "none", "enable_adaptive_verification": true}', "needs drafts"),
        ('{"enable_adaptive_verification": true, "confidence_threshold": 0.5}', "exclude"),
        ('{"confidence_threshold": 1.5}', "0..1"),
        ('{"adaptive_min_gain": -0.1}', "0..1"),
        ('{"cost_profile": "costs.json"}', "enable_adaptive_verification"),
        ('{"method": "draft_model"}', "go together"),
        ('{"prompt_lookup": true, "enable_adaptive_verification": true}', 'use "method": "ngram"'),
        ('{"method": "dspark", "model": "x", "prompt_lookup": true}', "prompt_lookup needs"),
        ('{"model": "x"}', "go together"),
        ('{"num_speculative_tokens_per_batch_size": [[1, 4]]}', r"\[first, last, k\]"),
        ('{"num_speculative_tokens_per_batch_size": [[1, 4, 3], [6, 8, 1]]}', "follow one another"),
        ('{"num_speculative_tokens_per_batch_size": [[1, 4, 9]]}', "k in 0..5"),
        ('{"method": "synthetic"}', "synthetic"),
        ('{"rejection_sample_method": "synthetic"}', "exactly one"),
        (
            '{"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.9], '
            '"num_speculative_tokens": 2}',
            "never rise",
        ),
        (
            '{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 9}',
            "1..6",
        ),
    ],
)
def test_speculative_config_errors(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        SpeculativeConfig.from_json(text)


@pytest.mark.parametrize(
    ("keys", "policy"),
    [
        ({"method": "none"}, "none"),
        ({}, "fixed"),
        ({"enable_adaptive_verification": True}, "adaptive"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 64, 0]]}, "schedule"),
        ({"confidence_threshold": 0.4}, "threshold"),
    ],
)
def test_keys_choose_the_policy(keys: dict, policy: str) -> None:
    assert SpeculativeConfig.from_dict(keys).policy == policy


def test_an_engine_verifies_adaptively_when_nothing_is_said() -> None:
    for model, method, depth in (
        ("smollm2-135m-instruct", "dspark", 5),
        ("qwen2.5-coder-0.5b-instruct", "ngram", 7),
    ):
        speculative = EngineConfig.from_options(model=model).speculative
        assert speculative.policy == "adaptive"
        assert (speculative.method, speculative.num_speculative_tokens) == (method, depth)


def test_a_synthetic_length_becomes_the_rates_of_least_variance() -> None:
    keys = {"rejection_sample_method": "synthetic", "num_speculative_tokens": 3}
    config = SpeculativeConfig.from_dict({**keys, "synthetic_acceptance_length": 2.6})
    assert config.survival_rates == pytest.approx((1.0, 0.6, 0.0))
    rates = [0.9, 0.5, 0.5]
    config = SpeculativeConfig.from_dict({**keys, "synthetic_acceptance_rates": rates})
    assert config.survival_rates == (0.9, 0.5, 0.5)


def test_none_method_drafts_nothing() -> None:
    assert SpeculativeConfig.from_json('{"method": "none"}').max_draft_tokens == 0


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        EngineConfig.from_options(max_num_seq=3)


def test_options_reach_their_owner() -> None:
    config = EngineConfig.from_options(
        dtype="float32", max_num_seqs=3, kv_block_size=8, speculative_config={"method": "none"}
    )
    assert config.model.dtype == "float32"
    assert config.scheduler.max_num_seqs == 3
    assert config.cache.kv_block_size == 8
    assert config.speculative.method == "none"


def test_row_budget_must_cover_one_row_per_request() -> None:
    with pytest.raises(ConfigError, match="max-num-seqs"):
        SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=32)


@pytest.mark.parametrize(
    ("text", "size"), [("512M", 512 << 20), ("2G", 2 << 30), ("1.5GiB", 3 << 29), ("4096", 4096)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes("kv_cache_memory", text) == size


@pytest.mark.parametrize("text", ["", "big", "-1G", "0", "nan"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 512M"):
        parse_bytes("kv_cache_memory", text)


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_api_key_is_refused(key: str) -> None:
    """An unset variable in --api-key "$KEY" gave a server that any empty bearer token opened."""
    with pytest.raises(ConfigError, match="--api-key"):
        ServerConfig(api_key=key)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_memory": 2**30},
        {"max_num_seqs": "8"},
        {"max_num_seqs": 2.5},
        {"max_num_seqs": True},
        {"enable_prefix_caching": "no"},
        {"model": None},
        {"speculative_config": 5},
    ],
)
def test_options_of_the_wrong_type_are_refused_by_name(options: dict) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} must be .*got"):
        EngineConfig.from_options(**options)
