"""The HTTP boundary: request bodies as pydantic models, strict about types and names.

A field left out or null takes the server's default. `UNSUPPORTED_FIELDS` are fields of OpenAI's or
vLLM's API that this server knows and refuses, except with a value that asks for nothing.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from forerun.core import MAX_LOGPROBS
from forerun.errors import RequestError

# Field name -> values that ask for nothing and are therefore accepted.
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "parallel_tool_calls": (None,),
    "functions": (None, []),
    "function_call": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "web_search_options": (None,),
    "verbosity": (None,),
    "store": (None, False),
    "metadata": (None, {}),
    "service_tier": (None, "auto", "default"),
    "suffix": (None, ""),
    "best_of": (None,),
    "echo": (None, False),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "early_stopping": (None, False),
    "truncate_prompt_tokens": (None,),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "spaces_between_special_tokens": (None, True),
    "return_tokens_as_token_ids": (None, False),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "priority": (None, 0),
    "prompt_embeds": (None,),
}

# What fields of several types may be, in words.
UNION_TYPES = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of lists of token ids",
    "stop": "a string or a list of strings",
    "content": 'a string or a list of parts such as {"type": "text", "text": "..."}',
}


class RequestBody(BaseModel):
    """What all bodies share: no unknown fields, no coercion between types."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        """Let null mean "left out", as OpenAI does."""
        if not isinstance(value, dict):
            return value
        return {name: given for name, given in value.items() if given is not None}


class StreamOptions(RequestBody):
    """What a stream reports besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(RequestBody):
    """What chat and text completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_spec_stats: bool = False
    user: str | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs cannot be streamed; set stream to false.", param="prompt_logprobs"
            )
        return self


class TextPart(RequestBody):
    """A part of a message; text is all this server reads."""

    type: Literal["text"]
    text: str


class ChatMessage(RequestBody):
    """One turn. Fields that clients copy from earlier answers may be there if they are empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = Field(None, max_length=0)

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise RequestError(f"a message with role {self.role!r} needs content.", param="content")
        return self

    def to_template(self) -> dict[str, str]:
        """Return the message as chat templates read it."""
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "\n".join(p.text for p in parts)
        message = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return message if self.name is None else message | {"name": self.name}


class ChatPrompt(RequestBody):
    """The part of a chat request that makes the prompt."""

    messages: list[ChatMessage] = Field(min_length=1)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class ChatBody(GenerationBody, ChatPrompt):
    """Body of /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise RequestError(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens "
                f"({self.max_completion_tokens}) differ; give one of them.",
                param="max_completion_tokens",
            )
        return self


class CompletionBody(GenerationBody):
    """Body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    add_special_tokens: bool = True
    echo: bool = False
    best_of: int | None = None
    logprobs: int | None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                f"best_of ({self.best_of}) must equal n ({self.n or 1}): this server does not rank "
                "extra choices.",
                param="best_of",
            )
        return self


class TokenizeBody(RequestBody):
    """Body of /tokenize: a prompt, or messages as chat would see them."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one_input(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages.", param="prompt")
        return self


class DetokenizeBody(RequestBody):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[int]
