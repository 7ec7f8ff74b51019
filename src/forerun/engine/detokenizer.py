"""Turns committed tokens into text, one at a time: whole characters, stop strings held back.

Text is the bytes of the tokens read as UTF-8 (see tokenization/tokenizer.py), so each token is
decoded once and only a partial character or a possible start of a stop string is kept: at most
three bytes and one character less than the longest stop string. No token is ever decoded again.

Which stop string wins depends on the text alone, not on how it was cut into tokens: the one that is
complete first and, among those complete at the same character, the longest.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.tokenization import Tokenizer

# A partial UTF-8 character has at most three bytes, so four tell where the last one starts.
_CONTEXT_BYTES = 4
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class PushResult:
    """Text that became certain, and the stop string that ended it, if one did."""

    text_delta: str
    stop_string: str | None = None


class IncrementalDetokenizer:
    """The text of one choice.

    Deltas plus `finish()` equal what decoding prompt and output together adds to decoding the
    prompt. A character that the prompt began is emitted whole. A token that ends generation and
    should leave no text is simply not pushed. After a stop string, push nothing more.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
        stop: tuple[str, ...],
        include_stop_str_in_output: bool,
        min_tokens: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._stops = stop
        self._includes_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_pushed = 0
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        context = self._read_context(prompt_token_ids)
        self._decoder.decode(context)
        self._continues_character = bool(self._decoder.getstate()[0])
        self._drops_first_space = tokenizer.strips_first_space and not context

    def _read_context(self, prompt_token_ids: Sequence[int]) -> bytes:
        """Return the last bytes of the prompt's text; empty only if it has no text."""
        context = b""
        for token in reversed(prompt_token_ids):
            if token not in self._skipped:
                context = self._tokenizer.token_bytes(token) + context
            if len(context) >= _CONTEXT_BYTES:
                break
        return context

    def push(self, token_id: int) -> PushResult:
        """Take one committed token; return the text it settles."""
        self._num_pushed += 1
        data = b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)
        return self._take(self._decode(data))

    def finish(self) -> str:
        """Return what was held back; no more text can follow. Empty after a stop string."""
        text, self._held = self._held + self._decode(b"", final=True), ""
        return text

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if text and self._drops_first_space:
            self._drops_first_space = False
            text = text.removeprefix(" ")
        if text and self._continues_character:
            self._continues_character = False
            # The prompt's text already shows a replacement character for what stayed invalid.
            text = text.removeprefix(_REPLACEMENT)
        return text

    def _take(self, new_text: str) -> PushResult:
        text, num_old = self._held + new_text, len(self._held)
        if self._num_pushed >= self._min_tokens:
            found = find_first_stop(text, self._stops, num_old)
            if found is not None:
                start, stop = found
                end = start + len(stop) if self._includes_stop else start
                self._held = ""
                self._decoder.reset()
                return PushResult(text[:end], stop)
        num_held = count_held_characters(text, self._stops)
        self._held = text[len(text) - num_held :]
        return PushResult(text[: len(text) - num_held])


def find_first_stop(text: str, stops: tuple[str, ...], num_old: int) -> tuple[int, str] | None:
    """Return (start, stop string) of the first match that ends after `num_old` characters.

    First means: complete first; of those complete at the same character, the longest.
    """
    best: tuple[int, int, str] | None = None
    for stop in stops:
        start = text.find(stop, max(0, num_old - len(stop) + 1))
        if start >= 0:
            match = (start + len(stop), start, stop)
            best = match if best is None else min(best, match)
    return None if best is None else (best[1], best[2])


def count_held_characters(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest suffix that a longer text could make a stop string of."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        suffix = text[-length:]
        if any(len(stop) > length and stop.startswith(suffix) for stop in stops):
            return length
    return 0
