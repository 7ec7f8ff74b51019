"""Slots of requests and the ring of drafts: bounded, and blank for each owner."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.budget.recent_drafts import RecentDrafts
from forerun.budget.request_memory import RequestMemory


def test_a_new_owner_sees_nothing_of_the_one_before() -> None:
    memory = RequestMemory(2, 3)
    slot = memory.open(verifier=1, row_ms=0.2)
    memory.evidence[slot] = 7.0
    memory.survival[slot] = memory.earlier_survival[slot] = memory.confidence[slot] = 0.1
    memory.is_bound[slot] = memory.is_probe[slot] = True
    memory.is_new[slot] = False
    memory.count_hits([slot], [3], [0])
    memory.close(slot)
    again = memory.open(verifier=0, row_ms=0.0)
    assert again == slot
    assert memory.survival[again].tolist() == memory.earlier_survival[again].tolist() == [1, 1, 1]
    assert memory.evidence[again].tolist() == [0, 0, 0]
    assert not memory.is_bound[again]
    assert not memory.is_probe[again]
    assert memory.is_new[again]
    assert memory.hits[again] == 0.0
    assert memory.verifier[again] == 0


def test_slots_run_out_and_are_not_closed_twice() -> None:
    memory = RequestMemory(1, 3)
    slot = memory.open(0, 0.0)
    with pytest.raises(IndexError):
        memory.open(0, 0.0)
    memory.close(slot)
    with pytest.raises(AssertionError, match="closed twice"):
        memory.close(slot)


def test_hits_rise_and_fall_with_the_requests_own_outcomes_and_fade() -> None:
    memory = RequestMemory(3, 4)
    good, bad, silent = (memory.open(0, 0.0) for _ in range(3))
    for _ in range(10):
        memory.count_hits([good, bad], [4, 4], [4, 0])
    assert memory.hits[good] > 1.0
    assert memory.hits[bad] < -1.0
    assert memory.hits[silent] == 0.0
    for _ in range(400):
        memory.fade(np.array([good, bad]))
    np.testing.assert_allclose(memory.hits, 0.0, atol=0.05)


def make_ring(capacity: int = 4) -> RecentDrafts:
    return RecentDrafts(capacity, 2)


def add(ring: RecentDrafts, *lengths: int, mark: float = 0.0) -> None:
    count = len(lengths)
    ring.add(
        np.full((count, 2), mark, dtype=np.float32),
        np.array(lengths),
        np.zeros(count, dtype=np.float32),
        np.zeros(count, dtype=np.int8),
    )


def test_the_ring_keeps_the_latest_drafts_and_no_empty_ones() -> None:
    ring = make_ring()
    add(ring, 2, 0, 1, mark=1.0)
    assert sorted(ring.num_drafts.tolist()) == [1, 2]
    add(ring, 2, 2, 2, mark=2.0)
    assert len(ring) == 4
    assert sorted(ring.evidence[:, 0].tolist()) == [1.0, 2.0, 2.0, 2.0]
    add(ring, *[1] * 9, mark=3.0)
    assert ring.evidence[:, 0].tolist() == [3.0] * 4


def test_drafts_one_by_one_or_at_once_are_the_same_memory() -> None:
    ring, memory = make_ring(), RequestMemory(1, 2)
    slot = memory.open(0, 0.0)
    for mark in range(100):
        memory.evidence[slot] = mark
        ring.add_one(memory, slot, 2)
    assert sorted(ring.evidence[:, 0].tolist()) == [96.0, 97.0, 98.0, 99.0]
