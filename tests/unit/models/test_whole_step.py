"""A step in one native call: what it refuses, and that it grows with its rows and positions."""

from __future__ import annotations

import pytest
import torch

import tiny_models
from forerun.attention import build_attention_backend
from forerun.kernels import explain_kernels, find_kernels
from forerun.layers import rotary
from forerun.models.decoder import DecoderModel
from tiny_models import FAMILIES, PagedRunner

pytestmark = pytest.mark.skipif(find_kernels() is None, reason=explain_kernels())


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tiny_models, "build_attention_backend", lambda _: build_attention_backend("native")
    )


def compute_logits(model: DecoderModel, counts: tuple[int, ...]) -> torch.Tensor:
    runner = PagedRunner(model)
    sequence = runner.add([(7 * i) % 90 for i in range(sum(counts))])
    return torch.cat([runner.step([(sequence, count)])[0][0] for count in counts])


@pytest.mark.parametrize("family", FAMILIES)
def test_more_positions_than_were_prepared(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compute_logits(tiny_models.make_model(family), (70,))
    monkeypatch.setattr(rotary, "_FIRST_POSITIONS", 8)
    assert torch.equal(compute_logits(tiny_models.make_model(family), (3, 9, 58)), expected)


def test_scratch_memory_grows_and_shrinks_with_the_step() -> None:
    model = tiny_models.make_model()
    expected = compute_logits(model, (100,))
    assert torch.equal(compute_logits(model, (1, 70, 1, 2, 26)), expected)


@pytest.mark.parametrize("token_id", [-1, 97])
def test_a_token_beyond_the_vocabulary_is_refused(token_id: int) -> None:
    runner = PagedRunner(tiny_models.make_model(tie_word_embeddings=True))
    sequence = runner.add([5, token_id, 6])
    with pytest.raises(IndexError, match=r"0 \.\. 96"):
        runner.step([(sequence, 3)])


def test_results_outlive_the_next_step() -> None:
    runner = PagedRunner(tiny_models.make_model())
    sequence = runner.add(list(range(20)))
    _, first = runner.step([(sequence, 10)])
    kept = first.hidden_states.clone()
    runner.step([(sequence, 10)])
    assert torch.equal(first.hidden_states, kept)
