"""Native segments: bit for bit what the modules compute one by one."""

from __future__ import annotations

import itertools

import pytest
import torch

import tiny_models
from forerun.attention import build_attention_backend
from forerun.kernels import explain_kernels, find_kernels
from tiny_models import FAMILIES, PagedRunner

# Overlapping prompts in several chunks; 30 rows are more than one row tile.
STEPS = ((30, 1), (3, 2), (1, 7), (1, 1))

pytestmark = pytest.mark.skipif(find_kernels() is None, reason=explain_kernels())


def run_steps(
    model: object, *, taps: tuple[int, ...] = (), kv_dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    runner = PagedRunner(model, kv_dtype=kv_dtype)  # type: ignore[arg-type]
    sequences = [runner.add([(7 * i + s) % 90 for i in range(60)]) for s in range(2)]
    results = []
    for counts in STEPS:
        logits, output = runner.step(list(zip(sequences, counts, strict=True)), taps)
        results += [*logits, output.hidden_states]
        if output.aux_hidden_states is not None:
            results.append(output.aux_hidden_states)
    return results


@pytest.mark.parametrize(
    ("family", "dtype"), [*itertools.product(FAMILIES, (torch.float32, torch.bfloat16))]
)
@pytest.mark.parametrize(("taps", "kv_dtype"), [((), None), ((-1, 0), None), ((), torch.int8)])
def test_segments_equal_modules(
    family: str,
    dtype: torch.dtype,
    taps: tuple[int, ...],
    kv_dtype: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        tiny_models, "build_attention_backend", lambda _: build_attention_backend("native")
    )
    model = tiny_models.make_model(family, dtype=dtype)
    assert model.segments is not None
    fused = run_steps(model, taps=taps, kv_dtype=kv_dtype)
    monkeypatch.setattr(model, "whole_step", None)
    for left, right in zip(fused, run_steps(model, taps=taps, kv_dtype=kv_dtype), strict=True):
        assert torch.equal(left, right), "one call and a call per segment"
    model.segments = None
    for left, right in zip(fused, run_steps(model, taps=taps, kv_dtype=kv_dtype), strict=True):
        assert torch.equal(left, right)


def test_a_gate_of_no_whole_vectors_is_left_to_the_modules() -> None:
    model = tiny_models.make_model(intermediate_size=72)
    assert model.segments is None
    assert all(linear.packed is not None for linear in model.layers[0].linears())
    assert all(bool(values.isfinite().all()) for values in run_steps(model))
