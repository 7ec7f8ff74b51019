"""Logits and taps of every family against transformers, in float32 within 2e-4.

The KV block size is 4 and the Gemma window 7, so chunks cross block edges and windows at odd
places. Weights go through a saved folder and our loader.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.errors import ConfigError
from forerun.models.loader import load_model
from tiny_models import FAMILIES, PagedRunner, save_hf_model

TOLERANCE = 2e-4
LENGTH = 41

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5_000.0, "factor": 2.5}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear_rope": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3_bias": ("qwen3", {"attention_bias": True}),
    "gemma3_mqa_softcap": ("gemma3", {"num_key_value_heads": 1, "final_logit_softcapping": 3.0}),
    "gemma3_linear_rope": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return (transformers model, ours loaded from its folder)."""
    family, overrides = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    hf_model = save_hf_model(folder, family, **overrides)
    return hf_model, load_model(folder, dtype=torch.float32)


def draw_tokens(length: int = LENGTH, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


@torch.no_grad()
def compute_reference(hf_model: Any, token_ids: list[int]) -> torch.Tensor:
    return hf_model(torch.tensor([token_ids])).logits[0]


def assert_close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    assert reference.std() > 0.1  # logits that hardly vary would prove nothing
    torch.testing.assert_close(ours, reference, atol=TOLERANCE, rtol=0)


def test_whole_prefill(pair: Any) -> None:
    hf_model, model = pair
    runner, tokens = PagedRunner(model), draw_tokens()
    (logits,), _ = runner.step([(runner.add(tokens), LENGTH)])
    assert logits.dtype == torch.float32
    assert_close(logits, compute_reference(hf_model, tokens))


@pytest.mark.parametrize("chunks", [(1,) * LENGTH, (3, 6, 5, 17, 10), (20, 21), (40, 1)])
def test_chunked_prefill(pair: Any, chunks: tuple[int, ...]) -> None:
    hf_model, model = pair
    runner, tokens = PagedRunner(model), draw_tokens()
    sequence = runner.add(tokens)
    logits = torch.cat([runner.step([(sequence, rows)])[0][0] for rows in chunks])
    assert_close(logits, compute_reference(hf_model, tokens))


def test_prefix_already_in_the_cache(pair: Any) -> None:
    hf_model, model = pair
    runner, tokens = PagedRunner(model), draw_tokens()
    first = runner.add(tokens)
    runner.step([(first, LENGTH)])
    rest = draw_tokens(19, seed=1)
    second = runner.fork(first, 22, rest)
    assert second.num_computed == 20
    (logits,), _ = runner.step([(second, 21)])
    assert_close(logits, compute_reference(hf_model, tokens[:22] + rest)[20:])


def test_ragged_verify_rows_beside_a_prefill_chunk(pair: Any) -> None:
    hf_model, model = pair
    runner = PagedRunner(model)
    lengths = [5, 12, 33, 8, 27, 1]
    rows = [1, 6, 3, 1, 17, 25]  # 1 + m rows each; then a chunk over a context, and a fresh prompt
    work = []
    for index, (length, count) in enumerate(zip(lengths, rows, strict=True)):
        sequence = runner.add(draw_tokens(length + count, seed=index))
        runner.step([(sequence, length)])
        work.append((sequence, count))
    logits, _ = runner.step(work)
    for (sequence, count), ours in zip(work, logits, strict=True):
        assert_close(ours, compute_reference(hf_model, sequence.token_ids)[-count:])


def test_rejected_rows_are_overwritten(pair: Any) -> None:
    hf_model, model = pair
    runner, tokens = PagedRunner(model), draw_tokens()
    sequence = runner.add(tokens[:10] + [5, 6, 7, 8, 9])
    runner.step([(sequence, 15)])
    sequence.token_ids, sequence.num_computed = list(tokens), 10
    (logits,), _ = runner.step([(sequence, 4)])
    assert_close(logits, compute_reference(hf_model, tokens)[10:14])


def test_taps_are_the_residual_stream_after_each_layer(pair: Any) -> None:
    hf_model, model = pair
    runner, tokens = PagedRunner(model), draw_tokens()
    with torch.no_grad():
        states = hf_model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    _, output = runner.step([(runner.add(tokens), LENGTH)], target_layer_ids=(0, -1, 0))
    taps = output.aux_hidden_states
    assert taps is not None
    assert taps.shape == (LENGTH, 3, 48)
    for column, layer_id in enumerate((0, -1, 0)):
        torch.testing.assert_close(taps[:, column], states[layer_id + 1][0], atol=2e-4, rtol=0)
    torch.testing.assert_close(output.hidden_states, states[-1][0], atol=2e-4, rtol=0)


def test_last_layer_cannot_be_tapped(pair: Any) -> None:
    runner = PagedRunner(pair[1])
    with pytest.raises(ConfigError, match="holds 1; this model has taps -1 .* to 0"):
        runner.step([(runner.add([5]), 1)], target_layer_ids=(1,))


def test_no_taps_unless_asked(pair: Any) -> None:
    runner = PagedRunner(pair[1])
    _, output = runner.step([(runner.add([5, 6]), 2)])
    assert output.aux_hidden_states is None


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_equal_one_file(family: str, tmp_path: Path) -> None:
    save_hf_model(tmp_path / "one", family)
    save_hf_model(tmp_path / "many", family, shard_bytes=20_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (load_model(tmp_path / n, dtype=torch.float32, pack=False) for n in ("one", "many"))
    for (name, left), right in zip(one.named_parameters(), many.parameters(), strict=True):
        assert torch.equal(left, right), name


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_close_to_float32(family: str, tmp_path: Path) -> None:
    hf_model = save_hf_model(tmp_path, family)
    runner, tokens = PagedRunner(load_model(tmp_path, dtype=torch.bfloat16)), draw_tokens()
    (logits,), output = runner.step([(runner.add(tokens), LENGTH)])
    assert output.hidden_states.dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    reference = compute_reference(hf_model, tokens)
    assert (logits - reference).abs().mean() < 0.03 * reference.std()
