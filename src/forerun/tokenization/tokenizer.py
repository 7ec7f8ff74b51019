"""The tokenizer every part of Forerun uses: ids, text, bytes of single tokens, chat prompts.

A token stands for bytes, and text is the concatenation of those bytes read as UTF-8, with U+FFFD
for what is not. That one rule defines `decode` here and the incremental detokenizer, so streamed
and whole text cannot differ. Two vocabularies follow it: byte-level BPE, which spells every byte as
a printable character, and SentencePiece BPE, which spells a space as U+2581 and falls back to
tokens named <0xNN>.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from forerun.errors import ConfigError, RequestError
from forerun.tokenization.chat import ChatTemplate, normalise_messages

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "\u2581"


def build_byte_alphabet() -> dict[int, str]:
    """Return the character that spells each byte in a byte-level vocabulary.

    Printable Latin-1 bytes spell themselves; the others take the characters from U+0100 on, in
    order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet)
    alphabet.update({byte: chr(0x100 + index) for index, byte in enumerate(others)})
    return alphabet


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerInfo:
    """What a model says about its tokenizer beside the vocabulary.

    `template_tokens` are the names a chat template may use (bos_token, eos_token, ...).
    """

    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    chat_template: str | None = None
    template_tokens: Mapping[str, str] = field(default_factory=dict)
    generation_defaults: Mapping[str, float] = field(default_factory=dict)


class Tokenizer:
    """A loaded vocabulary. Safe to share between threads; keeps no state per request."""

    def __init__(self, backend: tokenizers.Tokenizer, info: TokenizerInfo) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._info = info
        self._bytes_of: dict[int, bytes] = {}
        self._byte_values = {char: byte for byte, char in build_byte_alphabet().items()}
        self._is_byte_level, self._strips_first_space = _inspect_decoder(backend)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(key for key, token in added.items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The token that starts a sequence, whether or not `encode` adds it."""
        return self._info.bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends generation by the model's own word."""
        return self._info.eos_token_ids

    @property
    def generation_defaults(self) -> dict[str, float]:
        """Sampling parameters the model's author recommends, by their request field names."""
        return dict(self._info.generation_defaults)

    @property
    def has_chat_template(self) -> bool:
        """Whether chat requests can be served."""
        return self._info.chat_template is not None

    @property
    def strips_first_space(self) -> bool:
        """Whether the space before the first word of a whole text is not part of it."""
        return self._strips_first_space

    def save(self, path: Path) -> None:
        """Write vocabulary and algorithm as a tokenizer.json; templates and defaults stay out."""
        self._backend.save(str(path))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; special tokens written out in it become single ids."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # no string, or one with lone surrogates
            raise RequestError(
                "the prompt is not text in valid Unicode; send UTF-8.", param="prompt"
            ) from error
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token) for token in token_ids if token not in skipped)
        text = data.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._strips_first_space else text

    def id_to_token(self, token_id: int) -> str:
        """Return the vocabulary's own spelling; empty for ids that only pad the model's head."""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for, which need not be whole characters."""
        found = self._bytes_of.get(token_id)
        if found is None:
            spelling = self.id_to_token(token_id)
            found = self._bytes_of[token_id] = self._spelling_to_bytes(spelling)
        return found

    def token_text(self, token_id: int) -> str:
        """Return a token on its own as text, with U+FFFD for partial characters."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _spelling_to_bytes(self, spelling: str) -> bytes:
        if not self._is_byte_level:
            byte = _BYTE_TOKEN.fullmatch(spelling)
            if byte:
                return bytes.fromhex(byte[1])
            return spelling.replace(_SPACE_MARK, " ").encode("utf-8")
        values = self._byte_values
        # Added tokens may use characters outside the alphabet: they mean themselves.
        if any(char not in values for char in spelling):
            return spelling.encode("utf-8")
        return bytes(values[char] for char in spelling)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text of a conversation; `kwargs` are variables of the template."""
        checked = normalise_messages(messages)
        variables = {**self._info.template_tokens, **kwargs}
        return self._template.render(checked, variables, add_generation_prompt)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Return the prompt ids of a conversation; the template itself writes BOS if need be."""
        prompt = self.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, **kwargs
        )
        return self.encode(prompt, add_special_tokens=False)

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._info.chat_template is None:
            raise RequestError(
                "this model has no chat template; send a plain prompt to /v1/completions instead.",
                param="messages",
                code="no_chat_template",
            )
        return ChatTemplate(self._info.chat_template)


def _inspect_decoder(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Return whether the vocabulary is byte-level, and whether decoding drops a first space."""
    decoder = backend.decoder
    # The bindings offer no other way to look inside a decoder than its serialised form.
    state = decoder.__getstate__().decode("utf-8") if decoder is not None else ""
    if '"ByteLevel"' in state:
        return True, False
    if '"Metaspace"' in state:
        return False, '"prepend_scheme":"never"' not in state
    if '"ByteFallback"' in state:
        return False, '"Strip"' in state
    raise ConfigError(
        f"this tokenizer decodes with {state or 'nothing'}; supported are byte-level BPE and "
        "SentencePiece BPE with byte fallback."
    )
