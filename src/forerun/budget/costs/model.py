"""What a step costs here and now: the measured profile, corrected by every real step.

Startup tables age: the bandwidth of a shared machine moves by a factor of two within minutes, and
with it the price of one row more than that of eight. One correction is common to all sizes and
follows the median error of the last steps; one per measured size follows what is left of it in
steps of about that size, bounded, so that a step which was disturbed hardly counts, and fades.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

import numpy as np

from forerun.budget.costs.profile import CostProfile

# What the log-error of one step, less the common one, counts at most.
_LARGEST_ERROR = 0.3
_LARGEST_CORRECTION = math.log(64.0)
# Every so many steps the median of their errors moves the common correction by a share of it. What
# is left moves the local ones by a share that falls with the distance in octaves; with fewer steps
# than enough near a size, by less.
_STEPS_PER_UPDATE = 24
_COMMON_SHARE = 0.6
_LOCAL_SHARE = 0.4
_OCTAVES = 0.5
_ENOUGH_STEPS = 3.0
_FADE = 0.005
# The correction of drafting moves by this share of every call's error.
_DRAFT_SHARE = 0.05
_MOST_TABULATED = 2048


@dataclass(kw_only=True, slots=True)
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
        self._octaves = np.log2(profile.verify_rows)
        self._local = np.zeros(len(self._octaves))
        self._common = 0.0
        self._draft = 0.0
        self._scale = 1.0
        self._draft_scale = 1.0
        self._curve = profile.trace(profile.verify_ms)
        self._by_rows = np.empty(0)
        self._samples: list[tuple[int, float, float]] = []
        self._tabulate()

    def verify(self, rows: np.ndarray) -> np.ndarray:
        """Return corrected ms of a target step over so many rows, without its other terms."""
        ms: np.ndarray = np.interp(rows, *self._curve)
        return ms

    def verify_up_to(self, first: int, last: int) -> np.ndarray:
        """Return `verify` of the row counts first .. last, as a new array."""
        if last < len(self._by_rows):
            return self._by_rows[first : last + 1].copy()
        return self.verify(np.arange(first, last + 1))

    def verify_one(self, rows: int) -> float:
        """Return `verify` of one row count."""
        if rows < len(self._by_rows):
            return float(self._by_rows[rows])
        return float(self.verify(np.array([rows]))[0])

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
        """Take in the target's part of a real step; several are learnt from together."""
        self._samples.append((num_rows, predicted_ms, measured_ms))
        if len(self._samples) == _STEPS_PER_UPDATE:
            self._update()

    def observe_draft(self, predicted_ms: float, measured_ms: float) -> None:
        """Learn from one call of the drafter."""
        error = _compare(predicted_ms, measured_ms)
        moved = self._draft + _DRAFT_SHARE * min(max(error, -_LARGEST_ERROR), _LARGEST_ERROR)
        self._draft = min(max(moved, -_LARGEST_CORRECTION), _LARGEST_CORRECTION)
        self._draft_scale = math.exp(self._draft)

    def _update(self) -> None:
        """Rebuild the table: what was learnt for all, for each size, and no size below another."""
        limit = _LARGEST_CORRECTION
        errors = [_compare(predicted, measured) for _, predicted, measured in self._samples]
        common = median(errors)
        octaves = np.log2([max(1, num_rows) for num_rows, _, _ in self._samples])
        rest = np.clip(np.subtract(errors, common), -_LARGEST_ERROR, _LARGEST_ERROR)
        nearness = np.exp(-np.abs(np.subtract.outer(self._octaves, octaves)) / _OCTAVES)
        weight = nearness.sum(axis=1)
        self._local += _LOCAL_SHARE * (nearness @ rest) / np.maximum(weight, _ENOUGH_STEPS)
        self._samples.clear()
        self._common += _COMMON_SHARE * common
        self._common = min(max(self._common, -limit), limit)
        self._local *= 1.0 - _FADE
        np.clip(self._local, -limit, limit, out=self._local)
        self._scale = math.exp(self._common)
        corrected = self.profile.verify_ms * (self._scale * np.exp(self._local))
        self._curve = self.profile.trace(np.maximum.accumulate(corrected))
        self._tabulate()

    def _tabulate(self) -> None:
        """Write the curve out for every row count that was measured: look-ups become slices."""
        self._by_rows = np.interp(
            np.arange(min(int(self.profile.verify_rows[-1]), _MOST_TABULATED) + 1), *self._curve
        )


@dataclass(slots=True)
class ModelledStep:
    """StepCosts of one step."""

    model: CostModel
    shape: StepShape
    draft_ms: float

    @property
    def has_prompt_rows(self) -> bool:
        """Whether the step holds more than its decoding requests need."""
        return self.shape.num_prompt_rows > 0

    def step(self, most: int) -> np.ndarray:
        """Return the cost of the whole step with 0 .. `most` draft rows."""
        return self._cost(self.shape.num_rows, most)

    def decode(self, most: int) -> np.ndarray:
        """Return what it would cost without its prompt rows."""
        return self._cost(self.shape.num_rows - self.shape.num_prompt_rows, most)

    def target_ms(self, num_draft_rows: int) -> float:
        """Return the cost of the target's part alone."""
        shape, model = self.shape, self.model
        verify = model.verify_one(shape.num_rows + num_draft_rows)
        return verify + model.fixed_ms(shape) + num_draft_rows * model.draft_row_ms(shape)

    def plain_decode_ms(self) -> float:
        """Return the cost of the target's part without prompt rows and drafts."""
        shape, model = self.shape, self.model
        return model.verify_one(shape.num_rows - shape.num_prompt_rows) + model.fixed_ms(shape)

    def _cost(self, num_rows: int, most: int) -> np.ndarray:
        cost = self.model.verify_up_to(num_rows, num_rows + most)
        cost += self.model.fixed_ms(self.shape) + self.draft_ms
        row_ms = self.model.draft_row_ms(self.shape)
        if row_ms:
            cost += row_ms * np.arange(most + 1)
        return cost


@dataclass(frozen=True, slots=True)
class ModelledDrafting:
    """DraftCosts of the next decode step."""

    model: CostModel
    shape: StepShape

    def verify(self, num_draft_rows: np.ndarray) -> np.ndarray:
        """Return the cost of the target's part with so many draft rows."""
        model, shape = self.model, self.shape
        cost = model.verify(shape.num_rows + num_draft_rows) + model.fixed_ms(shape)
        return cost + model.draft_row_ms(shape) * num_draft_rows

    def draft(self, num_requests: np.ndarray, depth: int) -> np.ndarray:
        """Return the cost of drafting for so many requests."""
        return self.model.draft(num_requests, depth)


def _compare(predicted_ms: float, measured_ms: float) -> float:
    """Return the log-error; 0 for times that cannot be compared."""
    if predicted_ms <= 0.0 or measured_ms <= 0.0:
        return 0.0
    return math.log(measured_ms / predicted_ms)
