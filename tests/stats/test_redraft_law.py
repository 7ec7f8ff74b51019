"""A position drafted again after a rejection must be drafted with new noise.

Step 1 drafts two tokens and verifies the first. Where it is rejected, step 2 drafts the second
position again, and a stale confidence (a function of step 1's second draft) decides whether that
draft is verified at all. This is allowed: the decision rests on the past. But with noise keyed by
position, the new draft is the old one, so admission depends on the very token it admits, and the
output law is off (the case of design rule 2, by way of the drafter's noise).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from forerun.core import SamplingParams
from forerun.sampling.noise import Stream, derive_keys, uniform
from forerun.verification.verify import Verifier
from stats.law import PROMPT, Proposal, Row, compute_p_value, verify_rows

NUM_SAMPLES = 20_000
DRAFT_LAW = np.array([0.3, 0.3, 0.2, 0.1, 0.1])

Keys = Callable[[Sequence[Row], int], np.ndarray]


def key_by_step(rows: Sequence[Row], place: int) -> np.ndarray:
    """Key as the drafters do: the request's step counter and the place in the block."""
    numbers, draws = np.array([(row.number, row.num_draws) for row in rows]).T
    return derive_keys(Stream.DRAFT, numbers, 0, draws, place)


def key_by_position(rows: Sequence[Row], place: int) -> np.ndarray:
    """Key by absolute position alone: the mistake."""
    numbers, lengths = np.array([(row.number, len(row.token_ids)) for row in rows]).T
    return derive_keys(Stream.DRAFT, numbers, 0, lengths + place)


def draft(rows: Sequence[Row], place: int, keys: Keys) -> list[int]:
    """Return draft token number `place` of every row; the draft law ignores the prefix."""
    noise = uniform(keys(rows, place))
    return (DRAFT_LAW.cumsum() <= noise[:, None]).sum(axis=1).tolist()


def generate_with_stale_admission(keys: Keys) -> np.ndarray:
    """Return two output tokens of every request, [NUM_SAMPLES, 2]."""
    verifier, params = Verifier(), SamplingParams()
    rows = [Row(number) for number in range(NUM_SAMPLES)]
    first, second = draft(rows, 0, keys), draft(rows, 1, keys)
    verify_rows(verifier, rows, params, [([token], DRAFT_LAW[None]) for token in first])
    redrafted = [row for row in rows if len(row.token_ids) == len(PROMPT) + 1]
    assert len(redrafted) > NUM_SAMPLES / 10
    again = draft(redrafted, 0, keys)
    proposals: list[Proposal] = [
        ([token], DRAFT_LAW[None]) if second[row.number] <= 1 else ([], None)  # stale confidence
        for row, token in zip(redrafted, again, strict=True)
    ]
    verify_rows(verifier, redrafted, params, proposals)
    return np.array([row.token_ids[len(PROMPT) : len(PROMPT) + 2] for row in rows])


def test_redrafted_positions_keep_the_law() -> None:
    """Joint law of two tokens, N = 20,000: p > 1e-4."""
    assert compute_p_value(generate_with_stale_admission(key_by_step), SamplingParams()) > 1e-4


def test_noise_keyed_by_position_would_break_the_law() -> None:
    """The same procedure with reused noise is rejected, N = 20,000: p < 1e-9."""
    outputs = generate_with_stale_admission(key_by_position)
    assert compute_p_value(outputs, SamplingParams()) < 1e-9
