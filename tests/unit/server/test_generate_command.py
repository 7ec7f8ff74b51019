"""`forerun generate` without a model: what happens around the answer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

import forerun
from forerun.cli import main
from forerun.core import FinishReason, RequestOutput


class FakeLLM:
    """Answers "Hello" in two pieces."""

    step_stats = ()

    def __init__(self, **options: Any) -> None:
        self.tokenizer = self
        self.generation_defaults: dict[str, float] = {}
        self.has_chat_template = False

    def stream(self, prompt: str, params: object) -> Iterator[RequestOutput]:
        yield RequestOutput(request_id="r", text="Hel", num_output_tokens=1)
        yield RequestOutput(
            request_id="r", text="lo", num_output_tokens=2, finish_reason=FinishReason.STOP
        )


def test_a_reader_that_closes_the_pipe_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """`forerun generate ... | head -c 2` ended in a BrokenPipeError traceback."""
    monkeypatch.setattr(forerun, "LLM", FakeLLM, raising=False)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert main(["generate", "hi"]) == 0


def test_the_answer_goes_to_stdout_and_stats_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forerun, "LLM", FakeLLM, raising=False)
    assert main(["generate", "hi", "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello\n"
    assert captured.err.startswith("2 tokens, first after ")
