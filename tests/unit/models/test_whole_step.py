"""A step in one native call: its taps, what it refuses, that it grows with rows and positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny_models
from forerun.attention import build_attention_backend
from forerun.kernels import explain_kernels, find_kernels
from forerun.layers import rotary
from forerun.models.decoder import DecoderModel
from forerun.models.loader import load_model
from gguf_files import write_random
from tiny_models import FAMILIES, PagedRunner

NUM_LAYERS = 6
LAYER_TYPES = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
WEIGHTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.float32}

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


@pytest.fixture(scope="module", params=[(f, w) for f in FAMILIES for w in WEIGHTS], ids="-".join)
def deep_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> DecoderModel:
    """Return a model of every family and kind of weights, with layers to choose from."""
    family, weights = request.param
    if weights != "int8":
        dtype = WEIGHTS[weights]
        kinds = {"layer_types": LAYER_TYPES} if family == "gemma3" else {}
        return tiny_models.make_model(family, dtype=dtype, num_hidden_layers=NUM_LAYERS, **kinds)
    folder: Path = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": NUM_LAYERS}
    path = write_random(folder / "m.gguf", family, kind=Kind.Q8_0, **sizes)
    return load_model(path, dtype=WEIGHTS[weights], quantization="int8")


def run_tapped(
    model: DecoderModel, counts: list[tuple[int, int]], taps: list[int], kv_dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return the rows and the taps of every step of two sequences."""
    runner = PagedRunner(model, kv_dtype=kv_dtype)
    sequences = [runner.add([(7 * i + s) % 90 for i in range(200)]) for s in range(2)]
    outputs = [runner.step(list(zip(sequences, step, strict=True)), taps)[1] for step in counts]
    rows = [output.hidden_states for output in outputs]
    return rows + [t for o in outputs if (t := o.aux_hidden_states) is not None]


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    counts=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=3),
    taps=st.lists(st.integers(-1, NUM_LAYERS - 2), max_size=NUM_LAYERS + 1),
    int8_pool=st.booleans(),
)
def test_taps_equal_those_of_the_modules(
    deep_model: DecoderModel, counts: list[tuple[int, int]], taps: list[int], int8_pool: bool
) -> None:
    """Any taps, in any order and repeated."""
    kv_dtype = torch.int8 if int8_pool else deep_model.embed.table.dtype
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(DecoderModel, "_run_segments")  # one call or nothing
        patch.delattr(DecoderModel, "_run_modules")
        native = run_tapped(deep_model, counts, taps, kv_dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deep_model, "whole_step", None)
        patch.setattr(deep_model, "segments", None)
        expected = run_tapped(deep_model, counts, taps, kv_dtype)
    assert len(native) == (2 if taps else 1) * len(counts)
    for left, right in zip(native, expected, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


def test_taps_outlive_the_next_step() -> None:
    runner = PagedRunner(tiny_models.make_model())
    sequence = runner.add(list(range(20)))
    _, first = runner.step([(sequence, 10)], (-1, 0))
    assert first.aux_hidden_states is not None
    kept = first.aux_hidden_states.clone()
    _, untapped = runner.step([(sequence, 10)])
    assert untapped.aux_hidden_states is None
    assert torch.equal(first.aux_hidden_states, kept)
