"""From a checked body to SamplingParams: the model's own defaults, then what the request says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from forerun.core import SamplingParams
from forerun.errors import RequestError
from forerun.server.protocol import ChatBody, CompletionBody, GenerationBody

DEFAULT_COMPLETION_TOKENS = 16

# A model's generation config may set these; everything else in it is not about sampling.
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_COPIED = (
    *_MODEL_DEFAULTS,
    "n",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
    "min_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)


def build_chat_params(body: ChatBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the params of a chat request; without max_tokens, the rest of the context."""
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
    try:
        params = _build(body, defaults, max_tokens)
    except RequestError as error:
        raise name_token_limit(error, body) from error
    return replace(params, logprobs=body.top_logprobs or 0) if body.logprobs else params


def build_completion_params(body: CompletionBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the params of a text completion; `echo` with logprobs scores the prompt too."""
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    params = replace(_build(body, defaults, max_tokens), logprobs=body.logprobs)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=body.logprobs)
    return params


def name_token_limit(error: RequestError, body: GenerationBody) -> RequestError:
    """Blame the field the client used: max_tokens may have come as max_completion_tokens."""
    given = getattr(body, "max_completion_tokens", None)
    if error.param != "max_tokens" or given is None:
        return error
    message = error.message.replace("max_tokens", "max_completion_tokens")
    return RequestError(
        message, status=error.status, param="max_completion_tokens", code=error.code
    )


def _build(
    body: GenerationBody, defaults: Mapping[str, Any], max_tokens: int | None
) -> SamplingParams:
    values = {name: defaults[name] for name in _MODEL_DEFAULTS if name in defaults}
    values |= {name: value for name in _COPIED if (value := getattr(body, name)) is not None}
    stop = () if body.stop is None else body.stop
    return SamplingParams(
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_parse_logit_bias(body.logit_bias or {}),
        **values,
    )


def _parse_logit_bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    biases = []
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise RequestError(
                f"logit_bias has the key {key[:40]!r}; keys are token ids such as '42'.",
                param="logit_bias",
            )
        biases.append((int(key), bias))
    return tuple(biases)
