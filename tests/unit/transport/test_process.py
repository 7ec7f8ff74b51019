"""The engine process's loop over a real pipe, with an engine that only pretends to work."""

from __future__ import annotations

import multiprocessing

import pytest

from forerun.engine.messages import ClientMessage, FailedMessage
from forerun.transport import process


class LeakyEngine:
    """Never has work, and has lost a block."""

    has_work = False

    def __init__(self) -> None:
        self.num_aborts = 0

    def abort_all(self) -> None:
        self.num_aborts += 1

    def check_integrity(self) -> None:
        raise AssertionError("block 7 is gone")


def test_an_idle_engine_that_leaked_says_so_and_ends(monkeypatch) -> None:
    monkeypatch.setattr(process, "_IDLE_CHECK_DELAY_S", 0.0)
    ours, theirs = multiprocessing.Pipe()
    process._serve(theirs, LeakyEngine())
    assert ours.recv() == FailedMessage(
        message="AssertionError: block 7 is gone", is_config_error=False
    )


def test_a_waiting_message_comes_before_the_check() -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.send(ClientMessage(shutdown=True))
    engine = LeakyEngine()
    process._serve(theirs, engine)
    assert engine.num_aborts == 1
    assert not ours.poll()


def test_the_end_of_the_pipe_ends_the_loop() -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    with pytest.raises(EOFError):
        process._serve(theirs, LeakyEngine())
