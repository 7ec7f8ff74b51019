"""Notice within a few outcomes that predictions no longer hold.

Page's cumulative sums, one per alternative: "the log-odds of every outcome are off by d". Each sum
adds the log-likelihood ratio of the outcomes and restarts at zero, so where it last left zero is
the likeliest moment of the change. A ratio counts the odds that were given: three acceptances at
1 % weigh as much as they should, three rejections at 90 % too, and a drift smaller than half an
alternative never raises the alarm, however many outcomes show it.
"""

from __future__ import annotations

import numpy as np

# Shifts that are told apart from none. Smaller ones are left to ordinary forgetting.
SHIFTS = np.array([-5.0, -2.5, 2.5, 5.0])
_ODDS_GAIN = np.expm1(SHIFTS)
# False alarms are at most exp(-threshold) a call and alternative when predictions hold.
THRESHOLD = 8.5
MIN_PROBABILITY = 0.01


class ChangeDetector:
    """Cumulative sums over the outcomes since they were last reset."""

    def __init__(self) -> None:
        self._sums = np.zeros(len(SHIFTS))
        self._num_since = np.zeros(len(SHIFTS), dtype=np.int64)

    def observe(self, predicted: np.ndarray, accepted: np.ndarray) -> int:
        """Take in outcomes [m]; return how many of the latest follow a change (0: no change)."""
        predicted = np.minimum(np.maximum(predicted, MIN_PROBABILITY), 1.0 - MIN_PROBABILITY)
        null = np.log1p(np.multiply.outer(_ODDS_GAIN, predicted)).sum(axis=1)
        self._sums += SHIFTS * np.count_nonzero(accepted) - null
        self._num_since += len(predicted)
        restarted = self._sums <= 0.0
        self._sums[restarted] = 0.0
        self._num_since[restarted] = 0
        best = int(self._sums.argmax())
        if self._sums[best] < THRESHOLD:
            return 0
        num_changed = int(self._num_since[best])
        self.reset()
        return num_changed

    def reset(self) -> None:
        """Start anew."""
        self._sums[:] = 0.0
        self._num_since[:] = 0
