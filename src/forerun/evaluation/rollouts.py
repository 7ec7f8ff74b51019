"""Drafts as they were verified in real answers: what an evaluation and a calibration are made of.

Every draft is verified at full length, so no outcome is missing for want of budget. After an
accepted end of text nothing is known: what was drafted beyond it counts neither way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.budget.confidence.calibration import VERIFIERS
from forerun.core import SamplingParams
from forerun.engine.llm import LLM
from forerun.engine.trace import RequestTrace, StepTrace


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollouts:
    """n drafts of at most k tokens, in the order they were verified.

    `confidence` is the drafter's own, NaN where it gave none. A draft that ended the text has
    `ends_text`: its round committed no token beyond the accepted ones.
    """

    dataset: np.ndarray  # [n] of str
    num_known: np.ndarray  # [n] positions with a known outcome
    num_accepted: np.ndarray  # [n]
    ends_text: np.ndarray  # [n] bool
    confidence: np.ndarray  # [n, k] float32

    @property
    def num_drafts(self) -> int:
        """Verified drafts."""
        return len(self.num_known)

    @property
    def num_positions(self) -> int:
        """Longest draft."""
        return int(self.confidence.shape[1])

    @property
    def has_confidence(self) -> bool:
        """Whether the drafter said what it expected."""
        return self.num_drafts > 0 and not bool(np.isnan(self.confidence[:, 0]).any())

    def select(self, chosen: np.ndarray) -> Rollouts:
        """Return some drafts, by mask or index."""
        return Rollouts(
            dataset=self.dataset[chosen],
            num_known=self.num_known[chosen],
            num_accepted=self.num_accepted[chosen],
            ends_text=self.ends_text[chosen],
            confidence=self.confidence[chosen],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draft:
    request_id: str
    confidence: list[float]
    num_known: int
    num_accepted: int
    ends_text: bool


class RolloutRecorder:
    """Writes down every draft of an engine; its `take` is an engine's `on_trace`."""

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._drafts: list[_Draft] = []

    def take(self, trace: StepTrace) -> None:
        """Write down the drafts of one step."""
        self._drafts += [self._read(r) for r in trace.requests if r.num_admitted]

    def finish(self, datasets: dict[str, str], num_positions: int) -> Rollouts:
        """Return what was written down; `datasets` by request id. The recorder is empty then."""
        drafts, self._drafts = self._drafts, []
        confidence = np.full((len(drafts), num_positions), np.nan, dtype=np.float32)
        for row, draft in enumerate(drafts):
            confidence[row, : len(draft.confidence)] = draft.confidence
        return Rollouts(
            dataset=np.array([datasets[draft.request_id] for draft in drafts], dtype=np.str_),
            num_known=np.array([draft.num_known for draft in drafts], dtype=np.int64),
            num_accepted=np.array([draft.num_accepted for draft in drafts], dtype=np.int64),
            ends_text=np.array([draft.ends_text for draft in drafts], dtype=bool),
            confidence=confidence,
        )

    def _read(self, request: RequestTrace) -> _Draft:
        accepted = request.draft_token_ids[: request.num_accepted]
        end = next((i for i, t in enumerate(accepted) if t in self._eos_token_ids), None)
        known = request.num_admitted if end is None else end + 1
        return _Draft(
            request_id=request.request_id,
            confidence=request.confidence[: request.num_admitted],
            num_known=known,
            num_accepted=min(request.num_accepted, known),
            ends_text=end is not None,
        )


def roll_out(
    llm: LLM,
    rows: Sequence[dict[str, Any]],
    *,
    verifier: str,
    temperature: float,
    max_tokens: int,
    seed: int = 0,
    report: Callable[[int], None] | None = None,
) -> Rollouts:
    """Answer prompts (`category`, `messages`) with a verifier; return all drafts.

    `report` gets the number of tokens so far. The engine's policy must verify drafts at full length
    (`fixed`); greedy needs temperature 0.
    """
    assert verifier in VERIFIERS, verifier
    assert (verifier == "greedy") == (temperature == 0.0), (verifier, temperature)
    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed + index if verifier == "coupled" else None,
        )
        for index in range(len(rows))
    ]
    recorder = RolloutRecorder(llm.tokenizer.eos_token_ids)
    count = _Counter(recorder.take, report)
    llm.engine.on_trace = count.take
    try:
        completions = llm.chat([row["messages"] for row in rows], params)
    finally:
        llm.engine.on_trace = None
    datasets = {
        f"{completion.request_id}#0": row["category"]
        for row, completion in zip(rows, completions, strict=True)
    }
    return recorder.finish(datasets, llm.info["speculative"]["num_speculative_tokens"])


class _Counter:
    """Counts committed tokens on the way to a recorder."""

    def __init__(
        self, take: Callable[[StepTrace], None], report: Callable[[int], None] | None
    ) -> None:
        self._take = take
        self._report = report
        self._num_tokens = 0

    def take(self, trace: StepTrace) -> None:
        """Pass a step on."""
        self._take(trace)
        self._num_tokens += sum(len(request.emitted_token_ids) for request in trace.requests)
        if self._report is not None:
            self._report(self._num_tokens)
