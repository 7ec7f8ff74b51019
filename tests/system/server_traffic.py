"""Requests for the real server, sent with the real openai client, and their answers as one shape.

A `Case` is one request of either endpoint; `stream` and `ask` send it and return a `Reply`, so that
a streamed answer can be compared with the whole one. Cases that are to be aborted ask for more than
they will ever get.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import openai

MODEL = "smollm2-135m-instruct"
STOPS = [" the", "\u4e0a", "\U0001f680", "\u0628\u062d\u0631"]
TOP_LOGPROBS = 3
NUM_ABORTED_TOKENS = 200
_NUM_TOKENS = 24
_MOST_CHUNKS = 8

_QUESTIONS = (
    "Name three rivers of Europe and say something about each of them.",
    "Write about space, with these signs: \U0001f680 \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u8bf7\u7528\u4e2d\u6587\u4ecb\u7ecd\u5317\u4eac\u548c\u4e0a\u6d77\u3002",
    "\u0627\u0643\u062a\u0628 \u062c\u0645\u0644\u0629 \u0639\u0646 \u0627\u0644\u0628\u062d\u0631",
)
_TEXTS = (
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "\U0001f600\U0001f389\U0001f680" * 4,
    "\u5317\u4eac\u3001\u4e0a\u6d77\u3001" * 4,
    "\u0627\u0644\u0628\u062d\u0631 \u0643\u0628\u064a\u0631. " * 4,
)
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "stops": {"temperature": 0.7, "stop": STOPS},
    "logprobs": {"temperature": 1.0},
    "choices": {"temperature": 1.0, "n": 2},
    "unseeded": {"temperature": 1.0},
}
_EXTRA: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.2},
    "unseeded": {"top_k": 50, "min_p": 0.02},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One request. `abort_after` chunks its stream is closed; None reads it to the end."""

    kind: str
    is_chat: bool
    options: dict[str, Any]
    abort_after: int | None

    @property
    def num_choices(self) -> int:
        return self.options.get("n", 1)


@dataclass(slots=True)
class Answer:
    """One choice, put together again."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Reply:
    """All choices of one answer. `tail` is the end of a stream as it came over the wire."""

    answers: list[Answer]
    usage: Any = None
    tail: bytes = b""


def make_client(url: str) -> openai.AsyncOpenAI:
    """Return the real client, without retries and with room for every stream at once."""
    http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [_record_tail]})
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240.0, http_client=http
    )


async def _record_tail(response: Any) -> None:
    """Keep the end of the body in `extensions`: the client hides the [DONE] of a stream."""
    iterate = response.aiter_bytes
    response.extensions["tail"] = b""

    async def iterate_and_record() -> AsyncIterator[bytes]:
        async for part in iterate():
            response.extensions["tail"] = (response.extensions["tail"] + part)[-64:]
            yield part

    response.aiter_bytes = iterate_and_record


def build_cases() -> list[Case]:
    """Return 64 requests: every kind with every prompt, every other one to be aborted."""
    chance = random.Random(64)
    cases = []
    for row, kind in enumerate(_KINDS):
        for column in range(len(_QUESTIONS) + len(_TEXTS)):
            abort_after = chance.randint(0, _MOST_CHUNKS) if (row + column) % 2 else None
            options = _build_options(kind, column, is_aborted=abort_after is not None)
            is_chat = column < len(_QUESTIONS)
            cases.append(Case(kind=kind, is_chat=is_chat, options=options, abort_after=abort_after))
    chance.shuffle(cases)
    return cases


def _build_options(kind: str, column: int, *, is_aborted: bool) -> dict[str, Any]:
    is_chat = column < len(_QUESTIONS)
    options = {"model": MODEL, "max_tokens": _NUM_TOKENS, **_KINDS[kind]}
    extra = {"return_token_ids": True, **_EXTRA.get(kind, {})}
    if kind not in ("greedy", "unseeded"):
        options["seed"] = 100 + column
    if kind == "logprobs":
        wanted = {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        options |= wanted if is_chat else {"logprobs": TOP_LOGPROBS}
    if is_aborted:
        options |= {"max_tokens": NUM_ABORTED_TOKENS, "stop": ["no such text"]}
        extra["ignore_eos"] = True
    if is_chat:
        options["messages"] = [{"role": "user", "content": _QUESTIONS[column]}]
    else:
        options["prompt"] = _TEXTS[column - len(_QUESTIONS)]
    return options | {"extra_body": extra}


async def stream(client: openai.AsyncOpenAI, case: Case) -> Reply:
    """Stream a case to its end, or to where it is to be aborted."""
    reply = Reply([Answer() for _ in range(case.num_choices)])
    endpoint = client.chat.completions if case.is_chat else client.completions
    options = case.options | {"stream": True, "stream_options": {"include_usage": True}}
    async with await endpoint.create(**options) as events:
        num_chunks = 0
        while case.abort_after is None or num_chunks < case.abort_after:
            chunk = await anext(events, None)
            if chunk is None:
                break
            num_chunks += 1
            _add_chunk(reply, chunk)
        reply.tail = events.response.extensions["tail"]
    return reply


async def ask(client: openai.AsyncOpenAI, case: Case) -> Reply:
    """Send a case without streaming."""
    endpoint = client.chat.completions if case.is_chat else client.completions
    whole = await endpoint.create(**case.options)
    reply = Reply([Answer() for _ in range(case.num_choices)], whole.usage)
    for choice in whole.choices:
        _add_choice(reply.answers[choice.index], choice)
    return reply


def _add_chunk(reply: Reply, chunk: Any) -> None:
    assert reply.usage is None, "a chunk came after the usage"
    reply.usage = chunk.usage
    assert (chunk.usage is None) == bool(chunk.choices)
    for choice in chunk.choices:
        _add_choice(reply.answers[choice.index], choice)


def _add_choice(answer: Answer, choice: Any) -> None:
    assert not answer.finish_reasons, "a choice went on after its finish_reason"
    source = getattr(choice, "delta", None) or getattr(choice, "message", None)
    answer.text += (source.content if source is not None else choice.text) or ""
    answer.token_ids += getattr(choice, "token_ids", None) or []
    answer.logprobs += _list_logprobs(choice.logprobs)
    if choice.finish_reason is not None:
        answer.finish_reasons.append(choice.finish_reason)
        answer.stop_reason = choice.stop_reason


def _list_logprobs(logprobs: Any) -> Iterator[float]:
    """Yield the logprob of every token after checking it against its neighbours."""
    if logprobs is None:
        return
    if getattr(logprobs, "content", None) is not None:
        for entry in logprobs.content:
            assert len(entry.top_logprobs) == TOP_LOGPROBS
            assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
            yield entry.logprob
        return
    for own, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert own <= max(top.values()) <= 0
        yield own
