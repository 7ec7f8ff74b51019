"""A bounded memory of what drafters proposed lately, whoever asked. No torch.

It keeps the evidence, not the confidence made from it: replayed, old drafts are judged by what is
known now. Shapes: M remembered drafts at most, k draft positions.
"""

from __future__ import annotations

import numpy as np

from forerun.budget.request_memory import RequestMemory

_MOST_WAITING = 32


class RecentDrafts:
    """A ring of the last drafts of at least one token.

    Empty ones are left out: a drafter that finds nothing costs next to nothing, and says nothing
    about what its drafts are worth once it finds some.
    """

    def __init__(self, capacity: int, num_positions: int) -> None:
        self._evidence = np.zeros((capacity, num_positions), dtype=np.float32)
        self._num_drafts = np.zeros(capacity, dtype=np.int64)
        self._hits = np.zeros(capacity, dtype=np.float32)
        self._verifier = np.zeros(capacity, dtype=np.int8)
        self._next = 0
        self._size = 0
        self._waiting: list[tuple[np.ndarray, ...]] = []

    def __len__(self) -> int:
        self._settle()
        return self._size

    def add(
        self,
        evidence: np.ndarray,  # [R, k]
        num_drafts: np.ndarray,  # [R]
        hits: np.ndarray,  # [R]
        verifiers: np.ndarray,  # [R]
    ) -> None:
        """Remember drafts; of more than fit, the last ones.

        They are written when someone looks, or when there are many: see `OutcomeBuffer`.
        """
        self._waiting.append((evidence, num_drafts, hits, verifiers))
        if len(self._waiting) >= _MOST_WAITING:
            self._settle()

    def add_one(self, memory: RequestMemory, slot: int, num_drafts: int) -> None:
        """Remember the draft that a slot holds."""
        own = slice(slot, slot + 1)
        self.add(
            memory.evidence[own].copy(),
            np.array([num_drafts]),
            memory.hits[own].copy(),
            memory.verifier[own].copy(),
        )

    def _settle(self) -> None:
        """Write the drafts that wait into the ring."""
        if not self._waiting:
            return
        evidence, num_drafts, hits, verifiers = map(
            np.concatenate, zip(*self._waiting, strict=True)
        )
        self._waiting.clear()
        capacity = len(self._evidence)
        kept = num_drafts.nonzero()[0][-capacity:]
        count = len(kept)
        places = (self._next + np.arange(count)) % capacity
        self._evidence[places] = evidence[kept]
        self._num_drafts[places] = num_drafts[kept]
        self._hits[places] = hits[kept]
        self._verifier[places] = verifiers[kept]
        self._next = int((self._next + count) % capacity)
        self._size = min(capacity, self._size + count)

    @property
    def evidence(self) -> np.ndarray:
        """Evidence of every remembered draft, [M, k]."""
        return self._evidence[: len(self)]

    @property
    def num_drafts(self) -> np.ndarray:
        """Tokens proposed, [M]."""
        return self._num_drafts[: len(self)]

    @property
    def hits(self) -> np.ndarray:
        """The requests' recent acceptance at that time, [M]."""
        return self._hits[: len(self)]

    @property
    def verifiers(self) -> np.ndarray:
        """The requests' verifiers, [M]."""
        return self._verifier[: len(self)]
