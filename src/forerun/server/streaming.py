"""One way from a Generation to an HTTP answer, whole or as server-sent events.

Chat and text completions differ only in a `Shape`: what a choice, a delta and the frame around them
look like. Text of a stream concatenates to the text of the whole answer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from forerun.core import RequestOutput, SpecRequestStats
from forerun.errors import RequestError
from forerun.logs import get_logger
from forerun.server.errors import error_body, internal_error
from forerun.server.generation import (
    Choice,
    ClientDisconnectedError,
    Generation,
    run_until_disconnect,
)
from forerun.server.protocol import GenerationBody, StreamOptions

logger = get_logger(__name__)

_CLIENT_CLOSED_REQUEST = 499


class Shape(Protocol):
    """How one endpoint spells its answers. Holds per-request state; used for one answer."""

    object_name: str
    chunk_object_name: str

    def build_choice(self, choice: Choice) -> dict[str, Any]:
        """Return a finished choice of a whole answer."""
        ...

    def build_frame(self) -> dict[str, Any]:
        """Return further top-level fields of a whole answer."""
        ...

    def build_opening(self) -> Iterator[dict[str, Any]]:
        """Yield chunks that come before any output, without their common fields."""
        ...

    def build_delta(self, choice: Choice, output: RequestOutput) -> dict[str, Any]:
        """Return one choice of a chunk."""
        ...


async def respond(
    request: Request,
    generation: Generation,
    make_shape: Callable[[], Shape],
    body: GenerationBody,
) -> Response:
    """Answer with everything at once, or with a stream once the first output is there.

    Owns the generation from here on: whatever goes wrong, it is closed.
    """
    is_handed_over = False
    try:
        shape = make_shape()
        if body.stream:
            await run_until_disconnect(request, generation.wait_first())
            is_handed_over = True
            return EventStreamResponse(generation, shape, body)
        await run_until_disconnect(request, generation.collect())
        return JSONResponse(_build_answer(generation, shape, body))
    except ClientDisconnectedError:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        if not is_handed_over:
            generation.close()


class EventStreamResponse(StreamingResponse):
    """A stream that owns its generation: however it ends, the generation is closed."""

    def __init__(self, generation: Generation, shape: Shape, body: GenerationBody) -> None:
        events = _stream_events(generation, shape, body)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; a client that hangs up ends this early."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


async def _stream_events(
    generation: Generation, shape: Shape, body: GenerationBody
) -> AsyncIterator[str]:
    """Yield the events of a stream. A failure becomes an error event and ends it."""
    try:
        async for chunk in _build_chunks(generation, shape, body):
            yield _format_event(chunk)
    except RequestError as error:
        yield _format_event(error_body(error))
        return
    except Exception as error:
        logger.exception("the stream of %s failed", generation.request_id)
        yield _format_event(error_body(internal_error(error)))
        return
    yield "data: [DONE]\n\n"


async def _build_chunks(
    generation: Generation, shape: Shape, body: GenerationBody
) -> AsyncIterator[dict[str, Any]]:
    options = body.stream_options or StreamOptions()
    common = _build_common(generation, shape.chunk_object_name)

    def build_chunk(content: dict[str, Any]) -> dict[str, Any]:
        if options.continuous_usage_stats:
            return common | content | {"usage": generation.count_usage()}
        return common | content | ({"usage": None} if options.include_usage else {})

    for opening in shape.build_opening():
        yield build_chunk(opening)
    async for choice, output in generation.outputs():
        if _is_worth_sending(output, body):
            yield build_chunk({"choices": [shape.build_delta(choice, output)]})
    if options.include_usage or body.return_spec_stats:
        final = {"choices": [], "usage": generation.count_usage()}
        yield common | final | _build_metrics(generation, body)


def _is_worth_sending(output: RequestOutput, body: GenerationBody) -> bool:
    """Whether an output has anything to show; held-back text alone is not worth a chunk."""
    if output.text or output.finish_reason is not None:
        return True
    return bool(output.token_ids) and (body.return_token_ids or output.logprobs is not None)


def _build_answer(generation: Generation, shape: Shape, body: GenerationBody) -> dict[str, Any]:
    choices = [shape.build_choice(choice) for choice in generation.choices]
    answer = _build_common(generation, shape.object_name) | {"choices": choices}
    answer |= {"usage": generation.count_usage()} | shape.build_frame()
    return answer | _build_metrics(generation, body)


def _build_common(generation: Generation, object_name: str) -> dict[str, Any]:
    return {
        "id": generation.request_id,
        "object": object_name,
        "created": generation.created_s,
        "model": generation.context.model_name,
    }


def _build_metrics(generation: Generation, body: GenerationBody) -> dict[str, Any]:
    """Return vLLM's per-request `metrics`: null speculation unless it ran for a single choice."""
    stats = generation.choices[0].spec_stats
    num_spec_tokens = generation.context.num_speculative_tokens
    if len(generation.choices) > 1 or stats is None or num_spec_tokens == 0:
        return {"metrics": {"speculative_decoding": None}}
    summary = summarise_speculation(stats, num_spec_tokens)
    if body.return_spec_stats:
        summary["per_step_accepted"] = stats.accepted_per_step
        summary["per_step_drafted"] = stats.verified_per_step
    return {"metrics": {"speculative_decoding": summary}}


def summarise_speculation(stats: SpecRequestStats, num_spec_tokens: int) -> dict[str, Any]:
    """Return vLLM's summary, with our verified count beside it.

    mean_acceptance_length = 1 + accepted / steps; draft_acceptance_rate = accepted / drafted;
    acceptance_histogram[j] = steps that accepted j draft tokens. Steps are those that verified.
    """
    histogram = [0] * (num_spec_tokens + 1)
    for accepted in stats.accepted_per_step:
        histogram[accepted] += 1
    return {
        "mean_acceptance_length": 1 + stats.num_accepted_tokens / max(1, stats.num_spec_steps),
        "draft_acceptance_rate": stats.num_accepted_tokens / max(1, stats.num_draft_tokens),
        "acceptance_histogram": histogram,
        "num_spec_steps": stats.num_spec_steps,
        "num_accepted_draft_tokens": stats.num_accepted_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_verified_tokens": stats.num_verified_tokens,
        "num_spec_tokens": num_spec_tokens,
    }


def _format_event(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n"
