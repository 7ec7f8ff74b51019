"""Leaving large steps to oneDNN: measured, and right whichever way it is decided."""

from __future__ import annotations

import pytest
import torch

import tiny_models
from forerun.kernels import explain_kernels, find_kernels
from forerun.layers import crossover
from forerun.layers.linear import Linear
from tiny_models import PagedRunner

pytestmark = pytest.mark.skipif(find_kernels() is None, reason=explain_kernels())


def make_times(monkeypatch: pytest.MonkeyPatch, pairs: list[tuple[float, float]]) -> None:
    times = iter(pairs)
    monkeypatch.setattr(crossover, "_time_in_turn", lambda *_: next(times))
    monkeypatch.setattr(crossover, "read_cpu_flags", lambda: {"avx2", "amx_bf16"})


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([(1.0, 1.1), (4.0, 3.9)], None),
        ([(1.0, 1.1), (4.0, 2.0)], 256),
        ([(1.0, 0.5)], 64),
    ],
)
def test_only_a_clear_gain_switches(
    times: list[tuple[float, float]], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_times(monkeypatch, times)
    assert tiny_models.make_model(dtype=torch.bfloat16).measure_crossover() == expected


def test_nothing_is_timed_without_matrix_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    make_times(monkeypatch, [])
    assert tiny_models.make_model(dtype=torch.float32).measure_crossover() is None
    monkeypatch.setattr(crossover, "read_cpu_flags", lambda: {"avx2", "avx512_bf16"})
    assert tiny_models.make_model(dtype=torch.bfloat16).measure_crossover() is None


def test_a_model_that_is_not_packed_has_nothing_to_switch() -> None:
    assert tiny_models.make_model(pack=False).measure_crossover() is None


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_steps_from_the_switch_point_on_give_the_same_logits(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_rows = []
    multiply_plain = Linear.multiply_plain

    def record(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        plain_rows.append(len(x))
        return multiply_plain(linear, x)

    monkeypatch.setattr(Linear, "multiply_plain", record)
    model = tiny_models.make_model(family)
    results = []
    for switch in (None, 4):
        model.switch_from(switch)
        runner = PagedRunner(model)
        sequence = runner.add(list(range(40)))
        results.append([runner.step([(sequence, rows)])[0][0] for rows in (3, 30, 1, 6)])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)
    # Steps of 3 and 1 rows are below the switch point.
    assert plain_rows == [30] * 8 + [6] * 8


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_real_measurements_are_two_positive_times(family: str) -> None:
    linear = tiny_models.make_model(family).layers[0].mlp.gate_up
    x = torch.randn(8, linear.in_features)
    first, second = crossover._time_in_turn(lambda: linear(x), lambda: linear.multiply_plain(x))
    assert min(first, second) > 0
    torch.testing.assert_close(linear(x), linear.multiply_plain(x), atol=1e-5, rtol=1e-5)
