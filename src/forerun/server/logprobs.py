"""Logprobs as the two endpoints and vLLM's `prompt_logprobs` spell them.

A token on its own need not be whole characters, so its text has U+FFFD for the rest; chat gives the
bytes too. `TextOffsets` says where each token begins in the text the client sees.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from forerun.core import TokenLogprobs
from forerun.server.context import ServerTokenizer

# JSON has no -inf; this is what OpenAI and vLLM send instead.
_LOWEST_LOGPROB = -9999.0


class TextOffsets:
    """Counts characters token by token; a token inside a character starts where that does."""

    def __init__(self, tokenizer: ServerTokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else ()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0

    def advance(self, token_id: int) -> int:
        """Return where this token begins, and move past it."""
        offset = self._num_chars
        if token_id not in self._skipped:
            data = self._tokenizer.token_bytes(token_id)
            self._num_chars += len(self._decoder.decode(data))
        return offset


def build_chat_logprobs(
    tokenizer: ServerTokenizer, entries: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice or delta."""

    def describe(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        text = data.decode("utf-8", errors="replace")
        return {"token": text, "logprob": _as_json(logprob), "bytes": list(data)}

    return {
        "content": [
            describe(entry.token_id, entry.logprob)
            | {"top_logprobs": [describe(token, value) for token, value in entry.top]}
            for entry in entries
        ]
    }


def build_completion_logprobs(
    tokenizer: ServerTokenizer,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    offsets: TextOffsets,
) -> dict[str, Any]:
    """Return the `logprobs` of a text completion; entry None is the first token of a prompt."""
    texts = [_get_text(tokenizer, token) for token in token_ids]
    return {
        "tokens": texts,
        "token_logprobs": [None if e is None else _as_json(e.logprob) for e in entries],
        "top_logprobs": [None if e is None else _build_top(tokenizer, e) for e in entries],
        "text_offset": [offsets.advance(token) for token in token_ids],
    }


def build_prompt_logprobs(
    tokenizer: ServerTokenizer, entries: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: per position, token id -> logprob, rank and text."""
    return [None if entry is None else _build_ranked(tokenizer, entry) for entry in entries]


def _build_ranked(tokenizer: ServerTokenizer, entry: TokenLogprobs) -> dict[str, Any]:
    ranked = {token: (value, rank) for rank, (token, value) in enumerate(entry.top, 1)}
    ranked[entry.token_id] = (entry.logprob, entry.rank)
    return {
        str(token): {
            "logprob": _as_json(value),
            "rank": rank,
            "decoded_token": _get_text(tokenizer, token),
        }
        for token, (value, rank) in ranked.items()
    }


def _build_top(tokenizer: ServerTokenizer, entry: TokenLogprobs) -> dict[str, float]:
    """Return the likeliest tokens by text, the emitted one among them.

    Tokens that are different parts of characters share a text; the likeliest of them keeps it.
    """
    top: dict[str, float] = {}
    for token, value in [*entry.top, (entry.token_id, entry.logprob)]:
        top.setdefault(_get_text(tokenizer, token), _as_json(value))
    return top


def _get_text(tokenizer: ServerTokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def _as_json(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
