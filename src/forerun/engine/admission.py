"""Which requests can be served at all. Used by the API process, the offline LLM and the engine.

No torch. Every refusal is a RequestError naming the field, what was given and what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core import SamplingParams
from forerun.engine.messages import EngineLimits
from forerun.errors import RequestError


def check_request(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    limits: EngineLimits,
    *,
    prompt_param: str = "prompt",
) -> None:
    """Raise RequestError if this request could never run."""
    _check_prompt(prompt_token_ids, limits, prompt_param)
    if params.n > limits.max_waiting_requests:
        raise RequestError(
            f"n is {params.n}, but only {limits.max_waiting_requests} choices may wait at once; "
            "ask for fewer, or start with a larger --max-waiting-requests.",
            param="n",
        )
    _check_token_ids("logit_bias", [token for token, _ in params.logit_bias], limits)
    _check_token_ids("stop_token_ids", params.stop_token_ids, limits)
    num_prompt = len(prompt_token_ids)
    room = limits.max_model_len - num_prompt
    if params.min_tokens > room:
        raise RequestError(
            f"min_tokens ({params.min_tokens}) does not fit: the prompt has {num_prompt} tokens "
            f"and the context is {limits.max_model_len}.",
            param="min_tokens",
        )
    # Without max_tokens the pool is one more limit on the output; it only has to hold the least.
    least = max(1, params.min_tokens)
    wanted = num_prompt + (least if params.max_tokens is None else params.max_tokens)
    if params.max_tokens is not None and wanted > limits.max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens and max_tokens is {params.max_tokens}, together "
            f"{wanted}; the context is {limits.max_model_len}. Shorten the prompt or ask for at "
            f"most {room} tokens.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    _check_pool(wanted, limits, prompt_param if params.max_tokens is None else "max_tokens")


def _check_prompt(prompt_token_ids: Sequence[int], limits: EngineLimits, param: str) -> None:
    if not prompt_token_ids:
        raise RequestError("the prompt is empty; give at least one token.", param=param)
    if len(prompt_token_ids) >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt_token_ids)} tokens; the context is "
            f"{limits.max_model_len} and must leave room for one output token.",
            param=param,
            code="context_length_exceeded",
        )
    _check_token_ids(param, prompt_token_ids, limits)


def _check_token_ids(param: str, token_ids: Sequence[int], limits: EngineLimits) -> None:
    for token in token_ids:
        if not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"{param} holds token id {token}; ids are 0..{limits.vocab_size - 1}.",
                param=param,
                code="token_id_out_of_range",
            )


def _check_pool(num_tokens: int, limits: EngineLimits, param: str) -> None:
    needed = -(-num_tokens // limits.kv_block_size)
    if needed > limits.num_kv_blocks:
        raise RequestError(
            f"this request may need {num_tokens} tokens of KV cache ({needed} blocks); the pool "
            f"has {limits.num_kv_tokens} ({limits.num_kv_blocks} blocks). "
            "Lower max_tokens, shorten the prompt, or start with a larger --kv-cache-memory.",
            param=param,
            code="kv_cache_too_small",
        )
