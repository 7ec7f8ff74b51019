"""Server-sent events to tokens per event: whom to believe, and what is left unsaid."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.bench.client.stream import Answer, AnswerReader, describe_refusal, iter_events
from unit.bench.scripted_server import as_event, make_event


def read(*pieces: tuple[float, bytes]) -> Answer:
    reader = AnswerReader()
    for now_s, data in iter_events(pieces):
        reader.add(now_s, data)
    return reader.finish()


def make_delta(text: str | None = None, **fields: Any) -> bytes:
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": fields.pop("finish_reason", None)}
    return as_event({"choices": [choice], **fields})


def test_an_event_belongs_to_the_read_that_completed_it() -> None:
    event = make_event(1)
    pieces = [(1.0, event[:10]), (2.0, event[10:] + event), (3.0, event.replace(b"\n", b"\r\n"))]
    assert [now_s for now_s, _ in iter_events(pieces)] == [2.0, 2.0, 3.0]


def test_comments_and_event_names_are_not_data() -> None:
    pieces = [(1.0, b": ping\n\nevent: message\ndata: {}\n\n")]
    assert list(iter_events(pieces)) == [(1.0, b"{}")]


def test_token_ids_come_before_usage() -> None:
    answer = read(
        (1.0, make_event(2, usage={"completion_tokens": 9})),
        (2.0, make_event(3, finish_reason="stop", usage={"completion_tokens": 5})),
    )
    assert (answer.token_source, answer.event_tokens) == ("token_ids", [2, 3])
    assert answer.output_tokens == 5


def test_rising_usage_tells_tokens_per_event() -> None:
    answer = read(
        (1.0, make_delta("", usage={"completion_tokens": 0})),
        (2.0, make_delta("a", usage={"completion_tokens": 1})),
        (3.0, make_delta("bcd", usage={"completion_tokens": 4})),
        (4.0, make_delta(finish_reason="stop", usage={"completion_tokens": 4})),
        (5.0, as_event({"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 7}})),
    )
    assert answer.token_source == "continuous_usage"
    assert (answer.event_s, answer.event_tokens) == ([2.0, 3.0], [1, 3])
    assert (answer.prompt_tokens, answer.output_tokens) == (7, 4)


def test_usage_at_the_end_alone_leaves_tokens_per_event_unknown() -> None:
    answer = read(
        (1.0, make_delta("a")),
        (2.0, make_delta("b", finish_reason="stop")),
        (3.0, as_event({"choices": [], "usage": {"completion_tokens": 6}})),
    )
    assert (answer.token_source, answer.event_tokens) == ("unknown", None)
    assert (answer.event_s, answer.output_tokens) == ([1.0, 2.0], 6)


def test_reasoning_counts_as_output() -> None:
    thinking = {"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}
    answer = read(
        (1.0, as_event({"choices": [thinking]})), (2.0, make_delta("a", finish_reason="stop"))
    )
    assert answer.event_s == [1.0, 2.0]


def test_tokens_without_text_are_an_event() -> None:
    answer = read((1.0, make_event(1, text="")), (2.0, make_event(1, finish_reason="stop")))
    assert answer.event_s == [1.0, 2.0]


def test_done_ends_a_stream_that_has_no_finish_reason() -> None:
    assert read((1.0, make_event(1) + b"data: [DONE]\n\n")).error is None
    assert read((1.0, make_event(1))).error == "the stream ended before a finish reason"


def test_garbage_is_an_error_of_the_request() -> None:
    answer = read((1.0, b"data: {oops\n\n"), (2.0, make_event(1, finish_reason="stop")))
    assert answer.error == "an event is not a JSON object: b'{oops'"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "HTTP 400: too long"),
        (b'{"detail": "not found"}', "HTTP 400: not found"),
        (b'{"error": "plain"}', "HTTP 400: plain"),
        (b"<html>", "HTTP 400: <html>"),
        (b"", "HTTP 400: no message"),
    ],
)
def test_a_refusal_is_put_into_words(body: bytes, message: str) -> None:
    assert describe_refusal(400, body) == message
