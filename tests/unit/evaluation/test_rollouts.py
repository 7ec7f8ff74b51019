"""Drafts written down while a real engine verifies them."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.engine.trace import RequestTrace, StepTrace
from forerun.errors import ConfigError
from forerun.evaluation.rollouts import RolloutRecorder
from forerun.evaluation.run import RolloutSettings, roll_out_all, verify_everything
from forerun.speculative_config import SpeculativeConfig

EOS = 2
ROWS = [
    {"category": name, "messages": [{"role": "user", "content": text}]}
    for name, text in (("copy", "Say abc abc abc abc abc abc."), ("chat", "Hello!"))
]


def record(drafts: list[int], accepted: int, *, admitted: int | None = None) -> RolloutRecorder:
    recorder = RolloutRecorder({EOS})
    request = RequestTrace(
        request_id="a#0",
        draft_token_ids=drafts,
        survival=[],
        confidence=[0.9] * len(drafts),
        num_admitted=len(drafts) if admitted is None else admitted,
        num_accepted=accepted,
    )
    recorder.take(StepTrace(step=0, num_rows=1, requests=[request]))
    return recorder


def test_a_draft_counts_as_far_as_it_was_verified() -> None:
    found = record([5, 6, 7, 8], 1, admitted=3).finish({"a#0": "x"}, 5)
    assert (found.num_known[0], found.num_accepted[0], found.ends_text[0]) == (3, 1, False)
    assert np.isfinite(found.confidence[0]).tolist() == [True] * 3 + [False] * 2


def test_nothing_is_known_after_an_accepted_end_of_text() -> None:
    found = record([5, EOS, 7, 8], 4).finish({"a#0": "x"}, 4)
    assert (found.num_known[0], found.num_accepted[0], found.ends_text[0]) == (2, 2, True)


def test_a_rejected_end_of_text_ends_nothing() -> None:
    found = record([5, EOS, 7], 1).finish({"a#0": "x"}, 3)
    assert (found.num_known[0], found.num_accepted[0], found.ends_text[0]) == (3, 1, False)


def test_steps_without_drafts_are_no_rounds() -> None:
    assert record([], 0).finish({"a#0": "x"}, 3).num_drafts == 0


def test_every_verifier_is_rolled_out_at_full_length() -> None:
    options = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    settings = RolloutSettings(max_tokens=40)
    found = roll_out_all(options, ROWS, settings)
    assert list(found) == ["greedy", "standard", "coupled"]
    for rollouts in found.values():
        assert rollouts.num_drafts > 0
        assert set(rollouts.dataset.tolist()) <= {"copy", "chat"}
        assert (rollouts.num_accepted <= rollouts.num_known).all()
        assert not rollouts.has_confidence


def test_what_cannot_be_rolled_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="without a drafter"):
        verify_everything(SpeculativeConfig(method="none"))
    synthetic = SpeculativeConfig(
        method="synthetic",
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=(0.5,),
        num_speculative_tokens=1,
    )
    with pytest.raises(ConfigError, match="synthetic"):
        verify_everything(synthetic)
