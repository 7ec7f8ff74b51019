"""Decoding by bytes equals what the tokenizers library decodes, wherever that keeps all bytes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from forerun.tokenization.tokenizer import Tokenizer, TokenizerInfo, build_byte_alphabet

# Added tokens may use characters outside the byte alphabet: a plain space, a wide bar.
ADDED = ["<end>", "  ", "<\uff5cx\uff5c>"]


def build_byte_level_backend() -> Backend:
    alphabet = build_byte_alphabet()
    spellings = [alphabet[byte] for byte in range(256)]
    backend = Backend(models.BPE(vocab={s: i for i, s in enumerate(spellings)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(ADDED[0])])
    backend.add_tokens([AddedToken(text) for text in ADDED[1:]])
    return backend


def test_byte_alphabet_spells_every_byte_once() -> None:
    alphabet = build_byte_alphabet()
    assert sorted(alphabet) == list(range(256))
    assert len(set(alphabet.values())) == 256
    assert (alphabet[ord("a")], alphabet[ord(" ")], alphabet[0]) == ("a", "\u0120", "\u0100")
    assert alphabet[0xAD] == "\u0143"


@given(token_ids=st.lists(st.integers(0, 258), max_size=20), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_byte_level_decoding_equals_the_librarys(token_ids: list[int], skip: bool) -> None:
    """Random bytes: both put one U+FFFD for each maximal invalid part."""
    backend = build_byte_level_backend()
    expected = backend.decode(token_ids, skip_special_tokens=skip)
    ours = Tokenizer(backend, TokenizerInfo())
    assert ours.decode(token_ids, skip_special_tokens=skip) == expected


@given(text=st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"])))
@settings(max_examples=200, deadline=None)
def test_byte_fallback_decoding_equals_the_librarys_on_text(text: str) -> None:
    spellings = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581"]
    backend = Backend(models.BPE(vocab={s: i for i, s in enumerate(spellings)}, merges=[]))
    replace, strip = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    token_ids = [256, *(256 if byte == ord(" ") else byte for byte in text.encode())]
    ours = Tokenizer(backend, TokenizerInfo())
    assert ours.decode(token_ids) == backend.decode(token_ids) == text


def test_metaspace_decoding_drops_the_first_space_only() -> None:
    backend = Backend(models.BPE(vocab={"\u2581a": 0, "b": 1}, merges=[]))
    backend.decoder = decoders.Metaspace()
    ours = Tokenizer(backend, TokenizerInfo())
    assert ours.decode([0, 1, 0]) == backend.decode([0, 1, 0]) == "ab a"
