"""What came of drafts, kept for a few steps and learnt from together. No torch.

A step of one request lasts three milliseconds; an array operation costs the same for one draft as
for thirty. So outcomes wait until there are enough of them, or until they are a few steps old.
Shapes: R requests of a step, k draft positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_DRAFTS_AT_ONCE = 32
_STEPS_AT_ONCE = 10


@dataclass(kw_only=True, slots=True)
class Outcomes:
    """Drafts as they were judged before verification, and what verification said."""

    slots: list[int]  # [R]
    evidence: np.ndarray  # [R, k]
    hits: np.ndarray  # [R]
    verifiers: np.ndarray  # [R]
    survival: np.ndarray  # [R, k]
    num_verified: list[int]  # [R]
    num_accepted: list[int]  # [R]

    @classmethod
    def join(cls, parts: list[Outcomes]) -> Outcomes:
        """Return the outcomes of several steps, oldest first."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            slots=[slot for part in parts for slot in part.slots],
            evidence=np.concatenate([part.evidence for part in parts]),
            hits=np.concatenate([part.hits for part in parts]),
            verifiers=np.concatenate([part.verifiers for part in parts]),
            survival=np.concatenate([part.survival for part in parts]),
            num_verified=[count for part in parts for count in part.num_verified],
            num_accepted=[count for part in parts for count in part.num_accepted],
        )


class OutcomeBuffer:
    """Outcomes nobody has learnt from yet."""

    def __init__(self) -> None:
        self.parts: list[Outcomes] = []
        self._num_drafts = 0

    def add(self, outcomes: Outcomes) -> None:
        """Keep the outcomes of a step."""
        self.parts.append(outcomes)
        self._num_drafts += len(outcomes.hits)

    @property
    def is_due(self) -> bool:
        """Whether there are enough of them to learn from."""
        return self._num_drafts >= _DRAFTS_AT_ONCE or len(self.parts) >= _STEPS_AT_ONCE

    def take(self) -> Outcomes | None:
        """Return all of them and forget them; None if there are none."""
        if not self.parts:
            return None
        joined = Outcomes.join(self.parts)
        self.parts, self._num_drafts = [], 0
        return joined
