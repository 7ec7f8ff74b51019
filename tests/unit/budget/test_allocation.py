"""Allocation by survival: order, bounds, prefixes and the non-anticipating rule."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forerun.budget.survival import allocate, compute_survival

# Few distinct values, so that ties and saturated confidences are common.
CONFIDENCES = st.lists(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=5), min_size=1, max_size=6
)


def survive(rows: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (survival [R, k], number of drafts [R]) of ragged confidences."""
    padded = np.zeros((len(rows), 5), dtype=np.float32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return compute_survival(padded), np.array([len(row) for row in rows])


@given(CONFIDENCES, st.integers(0, 40))
def test_budget_is_spent_on_the_largest_survivals(rows: list[list[float]], budget: int) -> None:
    survival, lengths = survive(rows)
    admitted = allocate(survival, lengths, budget)
    assert (admitted <= lengths).all()
    assert admitted.sum() == min(budget, lengths.sum())
    kept = sorted(survival[r, j] for r in range(len(rows)) for j in range(admitted[r]))
    everything = sorted(survival[r, j] for r in range(len(rows)) for j in range(lengths[r]))
    assert kept == everything[len(everything) - len(kept) :]


@given(CONFIDENCES, st.integers(0, 40), st.data())
def test_admission_of_a_token_ignores_it_and_what_follows(
    rows: list[list[float]], budget: int, data: st.DataObject
) -> None:
    """Metamorphic: change the confidences that token j decides (those after j); whether slots up to
    j are admitted must not move."""
    before = allocate(*survive(rows), budget)
    r = data.draw(st.integers(0, len(rows) - 1))
    if not rows[r]:
        return
    j = data.draw(st.integers(0, len(rows[r]) - 1))
    tail = data.draw(
        st.lists(
            st.sampled_from([0.0, 0.25, 0.5, 1.0]),
            min_size=len(rows[r]) - j - 1,
            max_size=len(rows[r]) - j - 1,
        )
    )
    changed = [list(row) for row in rows]
    changed[r][j + 1 :] = tail
    after = allocate(*survive(changed), budget)
    assert min(before[r], j + 1) == min(after[r], j + 1)


def test_survival_is_the_running_product() -> None:
    survival, lengths = survive([[0.5, 0.5, 1.0], [], [1.0]])
    assert survival.tolist() == [
        [0.5, 0.25, 0.25, 0, 0],
        [0, 0, 0, 0, 0],
        [1.0, 0, 0, 0, 0],
    ]
    assert lengths.tolist() == [3, 0, 1]
