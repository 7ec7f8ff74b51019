"""What a step costs here and now: the measured profile, corrected by every real step.

Startup tables age: the bandwidth of a shared machine moves by a factor of two within minutes, and
with it the price of one row more than that of eight. One correction is common to all sizes and
follows the median error of the last steps; one per measured size is moved by every step a bounded
bit, so that a step which was disturbed hardly counts, and fades where nothing is observed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from forerun.budget.cost_profile import CostProfile

# The log-error of one step counts at most this much, and moves a local correction by this share.
_LARGEST_ERROR = 0.1
_LOCAL_SHARE = 0.08
_LARGEST_CORRECTION = math.log(64.0)
# Every so many steps the median of their errors moves the common correction by this share of it,
# the table is rebuilt, and local corrections fade.
_STEPS_PER_UPDATE = 16
_COMMON_SHARE = 0.5
_FADE = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """What a step holds before drafts are added.

    `row_ms` sums what sampling its rows costs beyond greedy; `sampling_ms` is the mean of it per
    draft row. `num_prompt_rows` of `num_rows` belong to requests that do not sample yet.
    """

    num_rows: int
    num_requests: int
    num_prompt_rows: int = 0
    num_context_tokens: int = 0
    row_ms: float = 0.0
    sampling_ms: float = 0.0


class CostModel:
    """A CostProfile and its corrections. Bounded, deterministic given the times it is told."""

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile
        self._rows: list[int] = profile.verify_rows.tolist()
        self._local = np.zeros(len(self._rows))
        self._common = 0.0
        self._errors: list[float] = []
        self._draft = 0.0
        self._scale = 1.0
        self._draft_scale = 1.0
        self._corrected = profile

    def verify(self, rows: np.ndarray) -> np.ndarray:
        """Return corrected ms of a target step over so many rows, without its other terms."""
        return self._corrected.verify(rows)

    def draft(self, num_requests: np.ndarray, depth: int) -> np.ndarray:
        """Return corrected ms of drafting."""
        return self.profile.draft(num_requests, depth) * self._draft_scale

    def price(self, shape: StepShape, draft_ms: float = 0.0) -> ModelledStep:
        """Return the costs of a step; `draft_ms` is what drafting after it will cost."""
        return ModelledStep(self, shape, draft_ms)

    def fixed_ms(self, shape: StepShape) -> float:
        """Return what a step costs beside its rows."""
        profile = self.profile
        return self._scale * (
            profile.request_ms * shape.num_requests
            + profile.kv_token_ms * shape.num_context_tokens
            + shape.row_ms
        )

    def draft_row_ms(self, shape: StepShape) -> float:
        """Return what a draft row costs beside the table: it is sampled, and reads its context."""
        profile = self.profile
        excess = shape.num_context_tokens / max(1, shape.num_requests) - profile.context_tokens
        return self._scale * (shape.sampling_ms + profile.row_token_ms * max(0.0, excess))

    def observe_step(self, num_rows: int, predicted_ms: float, measured_ms: float) -> None:
        """Learn from the target's part of a real step."""
        error = _compare(predicted_ms, measured_ms)
        self._errors.append(error)
        moved = _LOCAL_SHARE * _bound(error)
        index = min(max(bisect_right(self._rows, num_rows) - 1, 0), len(self._rows) - 1)
        following = min(index + 1, len(self._rows) - 1)
        share = 0.0
        if following > index:
            width = self._rows[following] - self._rows[index]
            share = min(1.0, max(0.0, (num_rows - self._rows[index]) / width))
        self._local[index] += moved * (1.0 - share)
        self._local[following] += moved * share
        if len(self._errors) == _STEPS_PER_UPDATE:
            self._update()

    def observe_draft(self, predicted_ms: float, measured_ms: float) -> None:
        """Learn from one call of the drafter."""
        moved = self._draft + _LOCAL_SHARE * _bound(_compare(predicted_ms, measured_ms))
        self._draft = min(max(moved, -_LARGEST_CORRECTION), _LARGEST_CORRECTION)
        self._draft_scale = math.exp(self._draft)

    def _update(self) -> None:
        """Rebuild the table: what was learnt for all, for each size, and no size below another."""
        limit = _LARGEST_CORRECTION
        self._common += _COMMON_SHARE * median(self._errors)
        self._common = min(max(self._common, -limit), limit)
        self._errors.clear()
        self._local *= 1.0 - _FADE
        np.clip(self._local, -limit, limit, out=self._local)
        self._scale = math.exp(self._common)
        corrected = self.profile.verify_ms * (self._scale * np.exp(self._local))
        self._corrected = replace(self.profile, verify_ms=corrected)


@dataclass(frozen=True, slots=True)
class ModelledStep:
    """StepCosts of one step."""

    model: CostModel
    shape: StepShape
    draft_ms: float

    def step(self, num_draft_rows: np.ndarray) -> np.ndarray:
        """Return the cost of the whole step with so many draft rows."""
        return self._cost(self.shape.num_rows, num_draft_rows)

    def decode(self, num_draft_rows: np.ndarray) -> np.ndarray:
        """Return what it would cost without its prompt rows."""
        return self._cost(self.shape.num_rows - self.shape.num_prompt_rows, num_draft_rows)

    def target_ms(self, num_draft_rows: int) -> float:
        """Return the cost of the target's part alone."""
        rows = np.array([self.shape.num_rows + num_draft_rows])
        verify = float(self.model.verify(rows)[0])
        return verify + self.model.fixed_ms(self.shape) + num_draft_rows * self._draft_row_ms

    def _cost(self, num_rows: int, num_draft_rows: np.ndarray) -> np.ndarray:
        cost = self.model.verify(num_rows + num_draft_rows)
        cost += self.model.fixed_ms(self.shape) + self.draft_ms
        cost += self._draft_row_ms * num_draft_rows
        return cost

    @property
    def _draft_row_ms(self) -> float:
        return self.model.draft_row_ms(self.shape)


@dataclass(frozen=True, slots=True)
class ModelledDrafting:
    """DraftCosts of the next decode step."""

    model: CostModel
    shape: StepShape

    def verify(self, num_draft_rows: np.ndarray) -> np.ndarray:
        """Return the cost of the target's part with so many draft rows."""
        return ModelledStep(self.model, self.shape, 0.0).step(num_draft_rows)

    def draft(self, num_requests: np.ndarray, depth: int) -> np.ndarray:
        """Return the cost of drafting for so many requests."""
        return self.model.draft(num_requests, depth)


def _compare(predicted_ms: float, measured_ms: float) -> float:
    """Return the log-error; 0 for times that cannot be compared."""
    if predicted_ms <= 0.0 or measured_ms <= 0.0:
        return 0.0
    return math.log(measured_ms / predicted_ms)


def _bound(error: float) -> float:
    return min(max(error, -_LARGEST_ERROR), _LARGEST_ERROR)
