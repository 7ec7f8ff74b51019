"""Small native operations against their PyTorch definitions, over random shapes and strides."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.kernels import Kernels, ops

DTYPES = (torch.float32, torch.bfloat16)
# float32: a few units in the last place. bfloat16: both round once or twice, to 8 bits.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1.0 / 128}

relaxed = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
shapes = {
    "num_rows": st.integers(1, 5),
    "num_heads": st.integers(1, 4),
    "size": st.integers(1, 70),
    "dtype": st.sampled_from(DTYPES),
    "seed": st.integers(0, 99),
}


@pytest.fixture(autouse=True)
def use(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "find_kernels", lambda: kernels)


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=generator)).to(dtype)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


@relaxed
@given(**shapes)
def test_rms_norm_of_rows(
    num_rows: int, num_heads: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    x, weight = (
        draw((num_rows, num_heads * size), dtype, seed),
        draw((num_heads * size,), DTYPES[0]),
    )
    assert_close(ops.rms_norm(x, weight, 1e-5), ops.rms_norm_reference(x, weight, 1e-5))


@relaxed
@given(**shapes)
def test_rms_norm_adds_an_update_in_place_first(
    num_rows: int, num_heads: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    shape = (num_rows, num_heads * size)
    x, update = draw(shape, dtype, seed), draw(shape, dtype, seed + 1)
    weight, other = draw(shape[1:], torch.float32), x.clone()
    result = ops.rms_norm(x, weight, 1e-5, update)
    assert_close(result, ops.rms_norm_reference(other, weight, 1e-5, update))
    assert torch.equal(x, other)
    assert not torch.equal(x, draw(shape, dtype, seed))


@relaxed
@given(**shapes)
def test_rms_norm_of_heads_inside_a_wider_row(
    num_rows: int, num_heads: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    wide = draw((num_rows, num_heads + 2, size), dtype, seed)
    before = wide.clone()
    x, weight = wide[:, :num_heads], draw((num_heads, size), torch.float32)
    assert_close(ops.rms_norm(x, weight, 1e-6), ops.rms_norm_reference(x, weight, 1e-6))
    assert torch.equal(wide, before)


def test_rms_norm_rounds_once() -> None:
    """1 + 2^-8 times 1 + 2^-8 is above the middle between bfloat16 numbers only if kept whole."""
    x = torch.full((1, 64), 1.0, dtype=torch.bfloat16)
    weight = torch.full((64,), 1.0 + 2.0**-8 + 2.0**-12)
    assert ops.rms_norm(x, weight, 0.0)[0, 0].item() == 1.0 + 2.0**-7


@relaxed
@given(**shapes)
def test_rotation_inside_a_wider_row(
    num_rows: int, num_heads: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    wide = draw((num_rows, num_heads + 2, 2 * size), dtype, seed)
    before = wide.clone()
    angles = draw((num_rows, size), torch.float32, seed + 1)
    sin = angles.sin()
    cosines = angles.cos()[:, None, None].to(dtype)
    sines = torch.stack((-sin, sin), dim=1)[:, None].to(dtype)
    expected = ops.rotate_heads_reference(before[:, :num_heads], cosines, sines)
    result = ops.rotate_heads(wide[:, :num_heads], cosines, sines)
    tolerance = 8 * TOLERANCES[dtype]  # the sum of two products can nearly cancel
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=TOLERANCES[dtype])
    assert torch.equal(wide[:, num_heads:], before[:, num_heads:])


@relaxed
@given(activation=st.sampled_from(sorted(ops.ACTIVATIONS)), **shapes)
def test_gate(
    activation: str, num_rows: int, num_heads: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    x = draw((num_rows, 2 * size * num_heads), dtype, seed)
    assert_close(ops.gate(x, activation), ops.gate_reference(x, activation))


@pytest.mark.parametrize("activation", sorted(ops.ACTIVATIONS))
def test_gate_far_from_zero(activation: str) -> None:
    gate_rows = torch.tensor([-1e30, -200.0, -87.5, -20.0, -0.0, 0.0, 20.0, 90.0, 200.0, 1e30])
    x = torch.cat((gate_rows, torch.ones(10)))[None]
    assert_close(ops.gate(x, activation), ops.gate_reference(x, activation))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_nan(dtype: torch.dtype) -> None:
    x = torch.full((1, 36), math.nan, dtype=dtype)
    assert ops.gate(x, "silu").isnan().all()
    assert ops.gate(x, "gelu_tanh").isnan().all()
    assert ops.rms_norm(x, torch.ones(36), 1e-5).isnan().all()


@pytest.mark.usefixtures("threads")
def test_threads_do_not_change_a_bit() -> None:
    x, weight = draw((96, 1200), torch.bfloat16), draw((1200,), torch.float32)
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append((ops.rms_norm(x, weight, 1e-5), ops.gate(x, "silu")))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = draw((7, 1200), torch.bfloat16), draw((1200,), torch.float32)
    normed, gated = ops.rms_norm(x, weight, 1e-5), ops.gate(x, "silu")
    for row in range(7):
        assert torch.equal(ops.rms_norm(x[row : row + 1], weight, 1e-5)[0], normed[row])
        assert torch.equal(ops.gate(x[row : row + 1].clone(), "silu")[0], gated[row])


def test_other_types_and_layouts_use_pytorch() -> None:
    x, weight = draw((4, 32), torch.float16), torch.ones(32)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), ops.rms_norm_reference(x, weight, 1e-5))
    across = draw((32, 4), torch.float32).t()
    expected = ops.rms_norm_reference(across, weight, 1e-5)
    assert torch.equal(ops.rms_norm(across, weight, 1e-5), expected)
    assert torch.equal(ops.gate(across, "silu"), ops.gate_reference(across, "silu"))
