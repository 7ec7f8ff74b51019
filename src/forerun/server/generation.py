"""The engine requests behind one HTTP request, and what their choices have become so far.

An HTTP request has one or more prompts with n choices each; choice `index` counts over all of them.
Whoever holds a Generation closes it, however the request ends: closing aborts what still runs.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request

from forerun.core import (
    FinishReason,
    RequestOutput,
    SamplingParams,
    SpecRequestStats,
    TokenLogprobs,
)
from forerun.engine.messages import NewRequest
from forerun.logs import get_logger
from forerun.server.context import ServerContext

logger = get_logger(__name__)

T = TypeVar("T")


class ClientDisconnectedError(Exception):
    """The client hung up before its answer began."""


@dataclass(slots=True, kw_only=True)
class Choice:
    """One answer as committed so far."""

    index: int
    prompt_index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    num_output_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    spec_stats: SpecRequestStats | None = None

    def add(self, output: RequestOutput) -> None:
        """Append what one step brought."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs += output.prompt_logprobs or ()
        self.num_output_tokens = output.num_output_tokens
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.spec_stats = output.spec_stats


class Generation:
    """Runs prompts on the engine. Use `collect`, or `wait_first` and then iterate `outputs`."""

    def __init__(
        self,
        context: ServerContext,
        *,
        request_id: str,
        prompts: Sequence[list[int]],
        params: SamplingParams,
    ) -> None:
        self.context = context
        self.request_id = request_id
        self.prompts = prompts
        self.params = params
        self.created_s = int(time.time())
        self.num_cached_tokens = [0] * len(prompts)
        self.choices = [
            Choice(index=index, prompt_index=index // params.n)
            for index in range(len(prompts) * params.n)
        ]
        now_s = time.monotonic()
        self._requests = {
            f"{request_id}-{index}": NewRequest(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=prompt,
                params=params,
                arrival_s=now_s,
            )
            for index, prompt in enumerate(prompts)
        }
        self._prompt_index = {name: index for index, name in enumerate(self._requests)}
        self._stream = context.engine.submit_all(list(self._requests.values()))
        for request in self._requests.values():
            context.metrics.begin(request)
        self._first: RequestOutput | None = None

    async def wait_first(self) -> None:
        """Wait for the first output, so that a refusal still gets an HTTP status of its own."""
        self._first = await anext(self._stream, None)

    async def outputs(self) -> AsyncIterator[tuple[Choice, RequestOutput]]:
        """Yield each output with its choice, which already includes it."""
        if self._first is not None:
            first, self._first = self._first, None
            yield self._record(first), first
        async for output in self._stream:
            yield self._record(output), output

    async def collect(self) -> None:
        """Run to the end."""
        async for _ in self.outputs():
            pass

    def close(self) -> None:
        """Abort whatever still runs; harmless when all is done."""
        for request_id in self._requests:
            self.context.engine.abort(request_id)
            self.context.metrics.end(request_id)

    def count_usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object, from committed tokens."""
        num_prompt = sum(len(prompt) for prompt in self.prompts)
        num_output = sum(choice.num_output_tokens for choice in self.choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(self.num_cached_tokens)},
        }

    def _record(self, output: RequestOutput) -> Choice:
        prompt_index = self._prompt_index[output.request_id]
        choice = self.choices[prompt_index * self.params.n + output.choice_index]
        choice.add(output)
        if output.choice_index == 0:
            # Later choices of a prompt share its blocks; that is no hit the client caused.
            self.num_cached_tokens[prompt_index] = output.num_cached_tokens
        return choice


def make_request_id(prefix: str, request: Request) -> str:
    """Return a new id, and log which X-Request-Id of the client it stands for."""
    request_id = f"{prefix}-{uuid.uuid4().hex}"
    given = request.headers.get("X-Request-Id")
    if given is not None:
        logger.debug("request %s is X-Request-Id %r", request_id, given[:128])
    return request_id


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it and raise if the client hangs up first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_disconnect(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()


async def _wait_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
