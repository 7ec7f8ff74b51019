"""The cost model: terms of a step, and corrections that follow a machine but not its hiccups."""

from __future__ import annotations

import numpy as np
import pytest

from budgets import make_profile
from forerun.budget.costs.model import CostModel, StepShape

ROWS = [1, 2, 4, 8, 16, 32]
MS = [4.0, 4.1, 4.3, 6.0, 10.0, 20.0]


def make_model(**more: object) -> CostModel:
    return CostModel(make_profile(ROWS, MS, **more))


def one_request(num_rows: int = 1) -> StepShape:
    return StepShape(num_rows=num_rows, num_requests=1)


def run(model: CostModel, times: dict[int, float], num_steps: int) -> None:
    """Let steps of these sizes take these times, by turns."""
    for step in range(num_steps):
        rows = list(times)[step % len(times)]
        predicted = model.price(one_request()).target_ms(rows - 1)
        model.observe_step(rows, predicted, times[rows])


def predict(model: CostModel, rows: int) -> float:
    return model.price(one_request()).target_ms(rows - 1)


def test_a_step_is_priced_as_the_table_says_for_every_budget() -> None:
    step = make_model().price(one_request(2), draft_ms=0.5)
    np.testing.assert_allclose(step.step(2), [4.6, 4.7, 4.8])
    # Beyond the table by its last slope.
    np.testing.assert_allclose(step.step(62)[-1], 20.0 + 32 * 10 / 16 + 0.5)
    assert not step.has_prompt_rows


def test_prompt_rows_are_left_out_of_the_decode_cost() -> None:
    shape = StepShape(num_rows=16, num_requests=2, num_prompt_rows=14)
    step = make_model().price(shape)
    assert step.has_prompt_rows
    np.testing.assert_allclose(step.step(0), [10.0])
    np.testing.assert_allclose(step.decode(2), [4.1, 4.2, 4.3])
    assert step.plain_decode_ms() == pytest.approx(4.1)


def test_sampling_counts_for_anchors_and_for_drafts() -> None:
    shape = StepShape(num_rows=2, num_requests=2, row_ms=0.3, sampling_ms=0.15)
    step = make_model().price(shape)
    np.testing.assert_allclose(step.step(2), [4.4, 4.2 + 0.3 + 0.15, 4.3 + 0.3 + 0.3])
    assert step.target_ms(2) == pytest.approx(4.9)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_machine_that_changes_speed_is_followed_also_where_nothing_ran(factor: float) -> None:
    model = make_model()
    run(model, {1: 4.0 * factor}, 240)
    assert predict(model, 1) == pytest.approx(4.0 * factor, rel=0.03)
    assert predict(model, 8) == pytest.approx(6.0 * factor, rel=0.1)


def test_sizes_may_change_by_different_factors() -> None:
    """Slow memory makes one row dearer and eight rows not: the price of a draft row falls."""
    model = make_model()
    run(model, {1: 6.0, 8: 6.0}, 480)
    assert predict(model, 1) == pytest.approx(6.0, rel=0.05)
    assert predict(model, 8) == pytest.approx(6.0, rel=0.05)
    assert predict(model, 32) > predict(model, 16) > predict(model, 8)


def test_one_disturbed_step_in_ten_does_nothing_much() -> None:
    model = make_model()
    for step in range(480):
        took = 80.0 if step % 10 == 0 else 4.0
        model.observe_step(1, predict(model, 1), took)
    assert predict(model, 1) == pytest.approx(4.0, rel=0.1)


def test_the_table_never_falls() -> None:
    model = make_model()
    run(model, {1: 9.0, 16: 5.0}, 480)
    costs = model.price(one_request()).step(40)
    assert (np.diff(costs) >= 0).all()


def test_times_without_meaning_change_nothing() -> None:
    model = make_model()
    for _ in range(100):
        model.observe_step(1, 4.0, 0.0)
        model.observe_step(1, 0.0, 4.0)
    assert predict(model, 1) == 4.0


def test_drafting_is_corrected_by_itself() -> None:
    model = make_model(draft_requests=[1, 8], draft_first_ms=[1.0, 2.0], draft_next_ms=[0.5, 0.5])
    for _ in range(200):
        model.observe_draft(float(model.draft(np.array([1]), 3)[0]), 6.0)
    np.testing.assert_allclose(model.draft(np.array([1, 8]), 3), [6.0, 9.0], rtol=0.05)
    assert predict(model, 1) == 4.0


def test_memory_does_not_grow() -> None:
    model = make_model()
    run(model, {1: 4.0}, 1000)
    assert len(model._samples) < 100
