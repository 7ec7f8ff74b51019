"""Hugging Face folders: every defect is one sentence naming the culprit; weights are held once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.errors import ConfigError
from forerun.models.loader import load_model, random_model, read_model_spec
from tiny_models import FAMILIES, make_config, make_model, make_spec, save_hf_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete tiny Llama."""
    save_hf_model(tmp_path, "llama")
    return tmp_path


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors; dots in names are written as two underscores."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(folder: Path) -> None:
    load_model(folder, dtype=torch.float32)


def test_missing_tensors_are_named(folder: Path) -> None:
    edit_weights(folder, model__norm__weight=None)
    with pytest.raises(ConfigError, match=r"lacks tensor model\.norm\.weight"):
        load(folder)


def test_many_missing_tensors_are_summarised(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=4)
    with pytest.raises(ConfigError, match=r"lacks tensors model\.layers\.2.* and 15 more"):
        load(folder)


def test_unused_tensors_are_named(folder: Path) -> None:
    edit_weights(folder, model__layers__0__self_attn__q_norm__weight=torch.ones(12))
    with pytest.raises(ConfigError, match=r"q_norm\.weight that its configuration has no place"):
        load(folder)


def test_old_rotary_buffers_are_no_surprise(folder: Path) -> None:
    edit_weights(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(6))
    load(folder)


def test_wrong_shapes_are_named(folder: Path) -> None:
    edit_weights(folder, lm_head__weight=torch.ones(96, 48))
    with pytest.raises(ConfigError, match=r"lm_head\.weight has shape \[96, 48\].*\[97, 48\]"):
        load(folder)


def test_integer_weights_are_refused(folder: Path) -> None:
    edit_weights(folder, model__norm__weight=torch.ones(48, dtype=torch.int8))
    with pytest.raises(ConfigError, match="model.norm.weight is stored as int8"):
        load(folder)


def test_truncated_weights_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="truncated or corrupt"):
        load(folder)


def test_corrupt_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="truncated or corrupt"):
        load(folder)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save_hf_model(tmp_path, "llama", shard_bytes=20_000)
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ConfigError, match=f"lacks {victim.name}, which its index names"):
        load(tmp_path)


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no .safetensors files"):
        load(folder)


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_model_spec(tmp_path / "nowhere")


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"neither a folder nor a \.gguf file"):
        read_model_spec(path)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_model_spec(tmp_path)


def test_broken_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; supported"),
        ({"architectures": None}, "lacks 'architectures'"),
        ({"quantization_config": {"bits": 4}}, "holds quantised weights"),
        ({"hidden_size": None}, "lacks 'hidden_size', which must be a positive integer"),
        ({"hidden_size": "wide"}, "hidden_size = 'wide'; it must be a positive integer"),
        ({"num_key_value_heads": 3}, "4 query heads and 3 KV heads"),
        ({"head_dim": 11}, "head_dim is 11; it must be even"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'; it must be silu or gelu_pytorch_tanh"),
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1; it must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'; it must be true or false"),
        ({"eos_token_id": "end"}, "eos_token_id = 'end'; it must be a token id"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5; it must be 1"),
    ],
)
def test_bad_configuration_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_config() | changes))
    with pytest.raises(ConfigError, match=message):
        read_model_spec(tmp_path)


def test_generation_config_adds_end_tokens(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert read_model_spec(folder).eos_token_ids == (2, 9)


def test_tied_head_shares_storage(tmp_path: Path) -> None:
    save_hf_model(tmp_path, "llama", tie_word_embeddings=True)
    model = load_model(tmp_path, dtype=torch.bfloat16)
    assert model.head.table is model.embed.table


def test_redundant_head_of_a_tied_model_is_accepted(tmp_path: Path) -> None:
    save_hf_model(tmp_path, "llama", tie_word_embeddings=True)
    edit_weights(tmp_path, lm_head__weight=torch.ones(97, 48))
    load(tmp_path)


def test_progress_counts_to_the_end(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(
        folder, dtype=torch.float32, progress=lambda done, total: calls.append((done, total))
    )
    assert calls == [(done, 21) for done in range(1, 22)]


def test_norms_stay_float32_in_a_bfloat16_model(folder: Path) -> None:
    model = load_model(folder, dtype=torch.bfloat16, pack=False)
    kinds = {
        name.endswith("norm.weight"): weight.dtype for name, weight in model.named_parameters()
    }
    assert kinds == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.parametrize("family", FAMILIES)
def test_random_model_is_a_function_of_its_seed(family: str) -> None:
    one, same, other = (make_model(family, seed=seed, pack=False) for seed in (3, 3, 4))
    weights = [list(model.parameters()) for model in (one, same, other)]
    assert all(torch.equal(left, right) for left, right in zip(*weights[:2], strict=True))
    assert not any(torch.equal(left, right) for left, right in zip(*weights[::2], strict=True))


def test_random_model_has_lively_logits() -> None:
    model = random_model(make_spec("gemma3"), seed=0, dtype=torch.float32)
    logits = model.compute_logits(torch.randn(4, 48))
    assert 0.2 < logits.std() < 20


def test_kv_layers_follow_the_spec() -> None:
    layers = make_spec("llama", num_hidden_layers=3).build_kv_layers()
    assert [(layer.num_kv_heads, layer.head_dim) for layer in layers] == [(2, 12)] * 3
