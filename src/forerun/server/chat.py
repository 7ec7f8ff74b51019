"""/v1/chat/completions: a conversation through the model's chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from fastapi import Request, Response

from forerun.core import RequestOutput
from forerun.engine.admission import check_request
from forerun.errors import RequestError
from forerun.server.context import ServerContext, check_model, get_context
from forerun.server.errors import parse_body
from forerun.server.generation import Choice, Generation, make_request_id
from forerun.server.logprobs import build_chat_logprobs, build_prompt_logprobs
from forerun.server.params import build_chat_params, name_token_limit
from forerun.server.protocol import ChatBody, ChatMessage
from forerun.server.streaming import respond

_TEMPLATE_ARGUMENTS = ("messages", "add_generation_prompt")


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    context = get_context(request)
    body = await parse_body(request, ChatBody)
    check_model(context, body.model)
    params = build_chat_params(body, context.tokenizer.generation_defaults)
    prompt = await encode_messages(
        context, body.messages, body.add_generation_prompt, body.chat_template_kwargs
    )
    try:
        check_request(prompt, params, context.engine.limits, prompt_param="messages")
    except RequestError as error:
        raise name_token_limit(error, body) from error
    generation = Generation(
        context,
        request_id=make_request_id("chatcmpl", request),
        prompts=[prompt],
        params=params,
    )
    return await respond(request, generation, lambda: ChatShape(generation, body), body)


async def encode_messages(
    context: ServerContext,
    messages: list[ChatMessage],
    add_generation_prompt: bool,
    template_kwargs: dict[str, Any],
) -> list[int]:
    """Return the prompt ids of a conversation, without holding up other requests."""
    for name in _TEMPLATE_ARGUMENTS:
        if name in template_kwargs:
            raise RequestError(
                f"chat_template_kwargs must not hold {name!r}; it is a field of its own.",
                param="chat_template_kwargs",
            )
    return await asyncio.to_thread(
        context.tokenizer.encode_chat,
        [message.to_template() for message in messages],
        add_generation_prompt=add_generation_prompt,
        **template_kwargs,
    )


class ChatShape:
    """Chat answers: `message` when whole, `delta` when streamed, the role before any text."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, generation: Generation, body: ChatBody) -> None:
        self._generation = generation
        self._body = body
        self._tokenizer = generation.context.tokenizer

    def build_choice(self, choice: Choice) -> dict[str, Any]:
        """Return a finished choice."""
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return self._build(choice, choice, {"message": message})

    def build_frame(self) -> dict[str, Any]:
        """Return what belongs to the prompt."""
        frame: dict[str, Any] = {}
        if self._body.return_token_ids:
            frame["prompt_token_ids"] = self._generation.prompts[0]
        if self._body.prompt_logprobs is not None:
            entries = self._generation.choices[0].prompt_logprobs
            frame["prompt_logprobs"] = build_prompt_logprobs(self._tokenizer, entries)
        return frame

    def build_opening(self) -> Iterator[dict[str, Any]]:
        """Yield one chunk per choice that only says who speaks."""
        frame = self.build_frame()
        for choice in self._generation.choices:
            delta = {"role": "assistant", "content": ""}
            opening = {"index": choice.index, "delta": delta, "finish_reason": None}
            yield {"choices": [opening | {"logprobs": None}]} | frame
            frame = {}

    def build_delta(self, choice: Choice, output: RequestOutput) -> dict[str, Any]:
        """Return what one step adds."""
        delta = {"content": output.text} if output.text else {}
        return self._build(choice, output, {"delta": delta})

    def _build(
        self, choice: Choice, source: Choice | RequestOutput, content: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the fields that a whole choice and a delta share; `source` holds their share."""
        logprobs = None
        if self._body.logprobs and source.logprobs is not None:
            logprobs = build_chat_logprobs(self._tokenizer, source.logprobs)
        built = {"index": choice.index, **content, "logprobs": logprobs}
        built |= {"finish_reason": source.finish_reason, "stop_reason": source.stop_reason}
        return built | ({"token_ids": source.token_ids} if self._body.return_token_ids else {})
