"""Hidden states of a request, put together from the steps that computed them."""

from __future__ import annotations

import pytest
import torch

from forerun.hidden_states import ComputedRows
from forerun.training.answers.recorder import HiddenStateRecorder


def make_rows(positions: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Return taps [T, 2, 3] and hidden [T, 3] that say which position they are of."""
    hidden = torch.tensor(list(positions), dtype=torch.float32)[:, None].expand(-1, 3)
    return torch.stack([hidden, hidden + 100], dim=1), hidden


def take(recorder: HiddenStateRecorder, request_id: str, positions: range) -> None:
    rows = ComputedRows(request_id=request_id, position=positions.start, rows=range(len(positions)))
    recorder.take([rows], *make_rows(positions))


def test_pieces_of_a_prompt_and_single_rows_make_a_sequence() -> None:
    recorder = HiddenStateRecorder((1, 2))
    for positions in (range(4), range(4, 6), range(6, 7), range(7, 8)):
        take(recorder, "a", positions)
    features, hidden = recorder.collect("a", length=9, prompt_len=6)
    assert features[:, 0].tolist() == list(range(8))
    assert features[:, 3].tolist() == [100 + p for p in range(8)]
    assert hidden[:, 0].tolist() == [5, 6, 7]


def test_rows_of_several_requests_in_a_step_are_kept_apart() -> None:
    recorder = HiddenStateRecorder((1, 2))
    aux, hidden = make_rows(range(5))
    computed = [
        ComputedRows(request_id="a", position=0, rows=range(3)),
        ComputedRows(request_id="b", position=0, rows=range(3, 5)),
    ]
    recorder.take(computed, aux, hidden)
    assert recorder.collect("a", 4, 2)[0][:, 0].tolist() == [0, 1, 2]
    assert recorder.collect("b", 3, 1)[0][:, 0].tolist() == [3, 4]


def test_rows_computed_again_replace_those_before() -> None:
    """A preempted request begins anew; what it computed before must not shine through."""
    recorder = HiddenStateRecorder((1, 2))
    take(recorder, "a", range(5))
    rows = ComputedRows(request_id="a", position=0, rows=range(4))
    recorder.take([rows], *(tensor + 50 for tensor in make_rows(range(4))))
    features, _ = recorder.collect("a", length=6, prompt_len=2)
    assert features[:, 0].tolist() == [50, 51, 52, 53, 4]


def test_what_the_runner_does_with_its_memory_later_does_not_matter() -> None:
    recorder = HiddenStateRecorder((1, 2))
    aux, hidden = make_rows(range(3))
    aux, hidden = aux.bfloat16().contiguous(), hidden.bfloat16().contiguous()
    recorder.take([ComputedRows(request_id="a", position=0, rows=range(3))], aux, hidden)
    aux.zero_()
    hidden.zero_()
    assert recorder.collect("a", 4, 2)[0][:, 0].tolist() == [0, 1, 2]


def test_a_position_that_was_never_computed_is_no_silent_zero() -> None:
    recorder = HiddenStateRecorder((1, 2))
    take(recorder, "a", range(3))
    with pytest.raises(AssertionError, match="never computed"):
        recorder.collect("a", length=6, prompt_len=2)
    with pytest.raises(KeyError):
        recorder.collect("b", length=6, prompt_len=2)
