"""What the controller remembers of each running request, in arrays by slot. No torch.

A slot belongs to a request from its start to its end or preemption, and starts blank each time: no
number of an earlier owner, or of the time before a preemption, is ever seen. Size is fixed at
start. Shapes: S slots, k draft positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.core import Request

# Chance and weight of what a request is thought to accept before anything is seen.
_PRIOR_WEIGHT = 2.0
# Weight of earlier drafts in a request's recent acceptance, per draft.
_HITS_DECAY = 0.85
# The same for each step in which a request does not draft.
_IDLE_DECAY = 0.98


class RequestMemory:
    """Slots and their arrays; a slot number indexes the first dimension of each."""

    def __init__(self, num_slots: int, num_positions: int) -> None:
        shape = (num_slots, num_positions)
        self.num_positions = num_positions
        self.evidence = np.zeros(shape, dtype=np.float32)
        self.confidence = np.ones(shape, dtype=np.float32)
        self.survival = np.ones(shape, dtype=np.float32)
        self.earlier_survival = np.ones(shape, dtype=np.float32)  # of the draft before this one
        self.is_bound = np.zeros(num_slots, dtype=bool)  # drawn: the non-anticipating rule binds
        self.is_probe = np.zeros(num_slots, dtype=bool)
        self.is_new = np.ones(num_slots, dtype=bool)  # the drafter never drafted for it yet
        self.source = np.zeros(num_slots, dtype=np.int8)  # of the draft: see draft_source.py
        self.verifier = np.zeros(num_slots, dtype=np.int8)
        self.row_ms = np.zeros(num_slots)
        self.hits = np.zeros(num_slots, dtype=np.float32)  # log-odds against the average
        self._num_hits = np.zeros(num_slots)
        self._num_seen = np.zeros(num_slots)
        self.has_sampled = False  # whether any request so far cost more than greedy
        self._average = 0.5  # acceptance over all requests
        self._free = list(range(num_slots - 1, -1, -1))

    def open(self, verifier: int, row_ms: float) -> int:
        """Return a blank slot."""
        slot = self._free.pop()
        self.evidence[slot] = 0.0
        self.confidence[slot] = self.survival[slot] = self.earlier_survival[slot] = 1.0
        self.is_bound[slot] = self.is_probe[slot] = False
        self.is_new[slot] = True
        self.source[slot] = 0
        self.verifier[slot] = verifier
        self.row_ms[slot] = row_ms
        self.has_sampled |= row_ms > 0.0
        self._num_hits[slot] = self._num_seen[slot] = self.hits[slot] = 0.0
        return slot

    def close(self, slot: int) -> None:
        """Give a slot back."""
        assert slot not in self._free, f"slot {slot} is closed twice"
        self._free.append(slot)

    def fade(self, slots: np.ndarray) -> None:
        """Let requests that do not draft become unknown again, a little each step."""
        self._num_hits[slots] *= _IDLE_DECAY
        self._num_seen[slots] *= _IDLE_DECAY
        self._update_hits(slots)

    def count_hits(
        self, slots: Sequence[int], num_verified: Sequence[int], num_accepted: Sequence[int]
    ) -> None:
        """Take in outcomes of slots that verified something: a rejection is seen, what follows not.

        Drafts that were never verified change nothing.
        """
        accepted = np.array(num_accepted, dtype=np.float64)
        seen = np.minimum(accepted + 1.0, num_verified)
        self._num_hits[slots] = _HITS_DECAY * self._num_hits[slots] + accepted
        self._num_seen[slots] = _HITS_DECAY * self._num_seen[slots] + seen
        total = float(seen.sum())
        share = total / (total + 200.0)
        mean = float(accepted.sum()) / max(total, 1.0)
        self._average += share * (mean - self._average)
        self._average = min(max(self._average, 0.02), 0.98)
        self._update_hits(slots)

    def _update_hits(self, slots: np.ndarray | Sequence[int]) -> None:
        """Turn counts into log-odds against the average over all requests."""
        average = self._average
        accepted = self._num_hits[slots] + _PRIOR_WEIGHT * average
        rejected = self._num_seen[slots] - self._num_hits[slots] + _PRIOR_WEIGHT * (1.0 - average)
        self.hits[slots] = np.log(accepted * (1.0 - average) / (rejected * average))


def find_slots(requests: Sequence[Request]) -> np.ndarray:
    """Return the slots of running requests, int64 [R]."""
    return np.fromiter((request.slot for request in requests), dtype=np.int64, count=len(requests))
