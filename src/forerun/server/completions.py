"""/v1/completions: raw prompts, as text or token ids, one or many."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, cast

from fastapi import Request, Response

from forerun.core import RequestOutput, TokenLogprobs
from forerun.engine.admission import check_request
from forerun.engine.messages import EngineLimits
from forerun.errors import RequestError
from forerun.server.context import ServerContext, check_model, get_context
from forerun.server.errors import parse_body
from forerun.server.generation import Choice, Generation, make_request_id
from forerun.server.logprobs import (
    TextOffsets,
    build_completion_logprobs,
    build_prompt_logprobs,
)
from forerun.server.params import build_completion_params
from forerun.server.protocol import CompletionBody
from forerun.server.streaming import respond


async def create_completion(request: Request) -> Response:
    """Complete prompts."""
    context = get_context(request)
    body = await parse_body(request, CompletionBody)
    check_model(context, body.model)
    params = build_completion_params(body, context.tokenizer.generation_defaults)
    prompts = await asyncio.to_thread(_encode_prompts, context, body)
    for prompt in prompts:
        check_request(prompt, params, context.engine.limits)
    _check_choices(len(prompts), params.n, context.engine.limits)
    generation = Generation(
        context, request_id=make_request_id("cmpl", request), prompts=prompts, params=params
    )
    return await respond(request, generation, lambda: CompletionShape(generation, body), body)


def _check_choices(num_prompts: int, n: int, limits: EngineLimits) -> None:
    """Refuse what can never be queued as a whole: a 503 would make the client try for ever."""
    if num_prompts * n > limits.max_waiting_requests:
        raise RequestError(
            f"{num_prompts} prompts with n = {n} make {num_prompts * n} choices, but only "
            f"{limits.max_waiting_requests} may wait at once; send fewer prompts per request, or "
            "start with a larger --max-waiting-requests.",
            param="prompt",
        )


def _encode_prompts(context: ServerContext, body: CompletionBody) -> list[list[int]]:
    """Return the ids of each prompt of the request."""
    encoded = []
    for prompt in _split_prompts(body.prompt):
        if isinstance(prompt, str):
            special = body.add_special_tokens
            encoded.append(context.tokenizer.encode(prompt, add_special_tokens=special))
        else:
            encoded.append(prompt)
    return encoded


def _split_prompts(
    given: str | list[str] | list[int] | list[list[int]],
) -> Sequence[str | list[int]]:
    """Return one item per prompt; a list of ids is one prompt, other lists are many."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError("prompt is an empty list; give at least one prompt.", param="prompt")
    if isinstance(given[0], int):
        return [given]
    return cast("list[str | list[int]]", given)


class CompletionShape:
    """Text answers. With `echo`, a choice begins with its prompt and the prompt's logprobs."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, generation: Generation, body: CompletionBody) -> None:
        self._generation = generation
        self._body = body
        self._tokenizer = generation.context.tokenizer
        self._echoes: dict[int, str] = {}
        skip = generation.params.skip_special_tokens
        self._offsets = [
            TextOffsets(self._tokenizer, skip_special_tokens=skip) for _ in generation.choices
        ]
        if body.echo:
            texts = [self._get_prompt_text(index) for index in range(len(generation.prompts))]
            self._echoes = {c.index: texts[c.prompt_index] for c in generation.choices}

    def build_choice(self, choice: Choice) -> dict[str, Any]:
        """Return a finished choice."""
        built = self._build(choice, choice)
        if self._body.prompt_logprobs is not None:
            entries = choice.prompt_logprobs
            built["prompt_logprobs"] = build_prompt_logprobs(self._tokenizer, entries)
        if self._body.return_token_ids:
            built["prompt_token_ids"] = self._generation.prompts[choice.prompt_index]
        return built

    def build_frame(self) -> dict[str, Any]:
        """Return nothing: everything about a prompt is on its choices."""
        return {}

    def build_opening(self) -> Iterator[dict[str, Any]]:
        """Yield the prompt ids if asked for; text needs no opening."""
        if self._body.return_token_ids:
            for choice in self._generation.choices:
                prompt = self._generation.prompts[choice.prompt_index]
                opening = {"index": choice.index, "text": "", "logprobs": None}
                opening |= {"finish_reason": None, "prompt_token_ids": prompt, "token_ids": []}
                yield {"choices": [opening]}

    def build_delta(self, choice: Choice, output: RequestOutput) -> dict[str, Any]:
        """Return what one step adds; the first delta of a choice carries its echo."""
        return self._build(choice, output)

    def _build(self, choice: Choice, source: Choice | RequestOutput) -> dict[str, Any]:
        """Return the fields that a whole choice and a delta share; `source` holds their share."""
        is_first = choice.index in self._echoes
        logprobs = None
        if self._body.logprobs is not None and source.logprobs is not None:
            logprobs = self._build_logprobs(choice, source.logprobs, with_prompt=is_first)
        built: dict[str, Any] = {
            "index": choice.index,
            "text": self._echoes.pop(choice.index, "") + source.text,
            "logprobs": logprobs,
            "finish_reason": source.finish_reason,
            "stop_reason": source.stop_reason,
        }
        return built | ({"token_ids": source.token_ids} if self._body.return_token_ids else {})

    def _build_logprobs(
        self, choice: Choice, generated: Sequence[TokenLogprobs], *, with_prompt: bool
    ) -> dict[str, Any]:
        token_ids = [entry.token_id for entry in generated]
        entries: list[TokenLogprobs | None] = list(generated)
        if with_prompt:
            token_ids = self._generation.prompts[choice.prompt_index] + token_ids
            entries = choice.prompt_logprobs + entries
        offsets = self._offsets[choice.index]
        return build_completion_logprobs(self._tokenizer, token_ids, entries, offsets)

    def _get_prompt_text(self, prompt_index: int) -> str:
        given = _split_prompts(self._body.prompt)[prompt_index]
        if isinstance(given, str):
            return given
        skip = self._generation.params.skip_special_tokens
        return self._tokenizer.decode(given, skip_special_tokens=skip)
