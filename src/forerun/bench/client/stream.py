"""From the pieces of a reply to an `Answer`: which tokens came when, and how it ended.

An event is stamped with the read that completed it, so events that shared a read share a stamp.
Tokens per event come from the server's word alone, never from the number of events: `token_ids` of
the event, else the rise of `usage.completion_tokens` from event to event, else nobody knows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

TOKEN_IDS = "token_ids"
CONTINUOUS_USAGE = "continuous_usage"
UNKNOWN = "unknown"

_CONTENT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(slots=True, kw_only=True)
class Answer:
    """What one stream said. `event_tokens` is None where the server does not tell."""

    event_s: list[float] = field(default_factory=list)
    event_tokens: list[int] | None = None
    token_source: str = UNKNOWN
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    speculation: dict[str, Any] | None = None
    error: str | None = None


def iter_events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield (time, data) of each server-sent event once its blank line has arrived."""
    rest = b""
    for now_s, piece in pieces:
        rest = (rest + piece).replace(b"\r\n", b"\n")
        *blocks, rest = rest.split(b"\n\n")
        for block in blocks:
            lines = (line for line in block.split(b"\n") if line.startswith(b"data:"))
            data = b"\n".join(line[5:].strip() for line in lines)
            if data:
                yield now_s, data


class _Event(NamedTuple):
    """One event that is part of a choice, as counted in both ways."""

    now_s: float
    num_token_ids: int | None
    usage_tokens: int | None
    has_content: bool


class AnswerReader:
    """Takes the events of one stream in order; `finish` returns what they amount to."""

    def __init__(self) -> None:
        self._answer = Answer()
        self._events: list[_Event] = []
        self._is_done = False

    def add(self, now_s: float, data: bytes) -> None:
        """Take one event."""
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            event = json.loads(data.decode())
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self._fail(f"an event is not a JSON object: {data[:80]!r}")
        elif "error" in event:
            self._fail(describe_error(event))
        else:
            self._add_usage(event.get("usage"))
            self._add_choices(now_s, event)
            speculation = (event.get("metrics") or {}).get("speculative_decoding")
            if speculation is not None:
                self._answer.speculation = speculation

    def finish(self) -> Answer:
        """Decide how tokens are counted, and return the answer."""
        answer = self._answer
        if not self._is_done and answer.finish_reason is None:
            self._fail("the stream ended before a finish reason")
        counts = self._count_tokens()
        has_tokens = counts or [int(event.has_content) for event in self._events]
        kept = [index for index, count in enumerate(has_tokens) if count > 0]
        answer.event_s = [self._events[index].now_s for index in kept]
        if counts is not None:
            answer.event_tokens = [counts[index] for index in kept]
            if answer.output_tokens is None:
                answer.output_tokens = sum(answer.event_tokens)
        return answer

    def _fail(self, reason: str) -> None:
        if self._answer.error is None:
            self._answer.error = reason

    def _add_usage(self, usage: dict[str, Any] | None) -> None:
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            self._answer.prompt_tokens = usage.get("prompt_tokens")
            self._answer.cached_tokens = details.get("cached_tokens")
            self._answer.output_tokens = usage.get("completion_tokens")

    def _add_choices(self, now_s: float, event: dict[str, Any]) -> None:
        choices = event.get("choices") or []
        if not choices:
            return
        ids = [choice["token_ids"] for choice in choices if choice.get("token_ids") is not None]
        usage = event.get("usage") or {}
        self._events.append(
            _Event(
                now_s=now_s,
                num_token_ids=sum(map(len, ids)) if ids else None,
                usage_tokens=usage.get("completion_tokens"),
                has_content=any(_has_content(choice) for choice in choices),
            )
        )
        for choice in choices:
            self._answer.finish_reason = choice.get("finish_reason") or self._answer.finish_reason

    def _count_tokens(self) -> list[int] | None:
        """Return tokens per event, or None if the server told neither way."""
        events = self._events
        if any(event.num_token_ids is not None for event in events):
            self._answer.token_source = TOKEN_IDS
            return [event.num_token_ids or 0 for event in events]
        totals = [event.usage_tokens for event in events if event.has_content]
        if not totals or any(total is None for total in totals):
            return None
        self._answer.token_source = CONTINUOUS_USAGE
        counts = []
        seen = 0
        for event in events:
            total = seen if event.usage_tokens is None else event.usage_tokens
            counts.append(total - seen)
            seen = total
        return counts


def _has_content(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text")) or any(delta.get(key) for key in _CONTENT_KEYS)


def describe_error(payload: Any) -> str:
    """Return the message of an error reply, whichever of the usual shapes it has."""
    value = payload.get("error", payload) if isinstance(payload, dict) else payload
    if isinstance(value, dict):
        value = value.get("message") or value.get("detail") or value
    return str(value)[:300]


def describe_refusal(status: int, body: bytes) -> str:
    """Return what a reply with an error status says."""
    try:
        text = describe_error(json.loads(body))
    except ValueError:
        text = body[:300].decode("utf-8", "replace").strip() or "no message"
    return f"HTTP {status}: {text}"
