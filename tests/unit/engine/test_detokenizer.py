"""The incremental detokenizer against decoding everything at once, and against naive stop search.

The SmolLM2 tests use its real vocabulary; the others build a byte-level vocabulary of all 256 bytes
plus a few words, or a SentencePiece one that adds a space before the text.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from forerun.data.bundled import fetch_default_model
from forerun.engine.detokenizer import IncrementalDetokenizer
from forerun.tokenization import Tokenizer, load_tokenizer
from forerun.tokenization.tokenizer import TokenizerInfo, build_byte_alphabet

WORDS = ["ab", "ba", "aab", "bba", "abab"]
SPECIAL = "<end>"


def build_byte_level() -> Tokenizer:
    alphabet = build_byte_alphabet()
    spellings = [alphabet[byte] for byte in range(256)] + WORDS + ["b" + alphabet[0xE4]]
    backend = Backend(models.BPE(vocab={s: i for i, s in enumerate(spellings)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(SPECIAL)])
    return Tokenizer(backend, TokenizerInfo())


def build_sentencepiece() -> Tokenizer:
    spellings = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", "\u2581a", "b", "\u4e16"]
    backend = Backend(models.BPE(vocab={s: i for i, s in enumerate(spellings)}, merges=[]))
    replace = decoders.Replace("\u2581", " ")
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens([AddedToken(SPECIAL)])
    return Tokenizer(backend, TokenizerInfo())


BYTE_LEVEL = build_byte_level()
SENTENCEPIECE = build_sentencepiece()
SMALL = {"byte-level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE}


def make_detokenizer(
    tokenizer: Tokenizer,
    *,
    prompt: list[int] | None = None,
    skip: bool = True,
    stop: tuple[str, ...] = (),
    include: bool = False,
    min_tokens: int = 0,
) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(
        tokenizer,
        prompt_token_ids=prompt or [],
        skip_special_tokens=skip,
        stop=stop,
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
    )


def run(detokenizer: IncrementalDetokenizer, token_ids: list[int]) -> tuple[str, str | None]:
    """Push until a stop string ends it; return all text and that string."""
    pieces = []
    for token in token_ids:
        pushed = detokenizer.push(token)
        pieces.append(pushed.text_delta)
        if pushed.stop_string is not None:
            return "".join(pieces) + detokenizer.finish(), pushed.stop_string
    return "".join(pieces) + detokenizer.finish(), None


def decode_after(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    """Return what decoding all adds to decoding the prompt; completed characters count whole."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    everything = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    if everything.startswith(before):
        return everything[len(before) :]
    assert before.endswith("\ufffd")
    return everything[len(before) - 1 :]


def assert_streams_as_decoded(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool
) -> None:
    text, stop = run(make_detokenizer(tokenizer, prompt=prompt, skip=skip), output)
    assert stop is None
    assert text == decode_after(tokenizer, prompt, output, skip)


def token_lists(vocab_size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, vocab_size - 1), max_size=30)


@pytest.mark.parametrize("kind", SMALL)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_stream_equals_decoding_at_once(kind: str, data: st.DataObject, skip: bool) -> None:
    """Random bytes, mostly invalid UTF-8, after random prompts."""
    tokenizer = SMALL[kind]
    lists = token_lists(tokenizer.vocab_size)
    assert_streams_as_decoded(tokenizer, data.draw(lists), data.draw(lists), skip)


@pytest.mark.parametrize("kind", SMALL)
@given(
    text=st.text(max_size=20),
    cut=st.integers(0, 80),
    specials=st.lists(st.integers(0, 100), max_size=3),
    skip=st.booleans(),
)
@example(text="\U0001f642", cut=2, specials=[3], skip=True)
@settings(max_examples=100, deadline=None)
def test_characters_cut_by_the_prompt_or_by_special_tokens_come_out_whole(
    kind: str, text: str, cut: int, specials: list[int], skip: bool
) -> None:
    tokenizer = SMALL[kind]
    token_ids = list(text.encode())
    for place in specials:
        token_ids.insert(place % (len(token_ids) + 1), tokenizer.vocab_size - 1)
    assert_streams_as_decoded(tokenizer, token_ids[:cut], token_ids[cut:], skip)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(fetch_default_model())


@pytest.mark.network
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_real_vocabulary_streams_as_decoded(
    smollm2: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    """Random tokens, with single bytes (ids 33..300 hold most) and special tokens mixed in."""
    ids = st.integers(0, 48) | st.integers(33, 300) | st.integers(0, smollm2.vocab_size - 1)
    lists = st.lists(ids, max_size=30)
    assert_streams_as_decoded(smollm2, data.draw(lists), data.draw(lists), skip)


@pytest.mark.network
def test_multi_byte_text_never_shows_replacement_characters(smollm2: Tokenizer) -> None:
    text = "\u4e16\u754c\U0001f642 caf\u00e9 \u0939\u093f\u0928\u094d\u0926\u0940 \U0001f469\u200d"
    detokenizer = make_detokenizer(smollm2, prompt=[1])
    deltas = [detokenizer.push(token).text_delta for token in smollm2.encode(text)]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == text
    assert "" in deltas


def test_invalid_bytes_appear_as_soon_as_they_are_certain() -> None:
    detokenizer = make_detokenizer(BYTE_LEVEL)
    assert detokenizer.push(0xE4).text_delta == ""
    assert detokenizer.push(ord("x")).text_delta == "\ufffdx"
    assert detokenizer.push(0xF0).text_delta == ""
    assert detokenizer.push(0x9F).text_delta == ""
    assert detokenizer.finish() == "\ufffd"


def test_first_space_is_dropped_only_when_nothing_came_before() -> None:
    word = SENTENCEPIECE.encode(SPECIAL)
    output = [257, 258]
    assert run(make_detokenizer(SENTENCEPIECE), output)[0] == "ab"
    assert run(make_detokenizer(SENTENCEPIECE, prompt=word), output)[0] == "ab"
    assert run(make_detokenizer(SENTENCEPIECE, prompt=word, skip=False), output)[0] == " ab"
    assert run(make_detokenizer(SENTENCEPIECE, prompt=[258]), output)[0] == " ab"


def search_naively(
    pieces: list[str], stops: tuple[str, ...], min_tokens: int
) -> tuple[int, int, str] | None:
    """Return (start, end, stop) of the match complete first; of several the longest."""
    text, num_tokens_at = "", []
    for number, piece in enumerate(pieces, 1):
        text += piece
        num_tokens_at += [number] * len(piece)
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and num_tokens_at[end - 1] >= min_tokens:
            longest = max(found, key=len)
            return end - len(longest), end, longest
    return None


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple)


@given(
    token_ids=st.lists(st.sampled_from([97, 98, *range(256, 256 + len(WORDS))]), max_size=12),
    stop=STOPS,
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
@example(token_ids=[256], stop=("ab", "a"), include=True, min_tokens=0)
@example(token_ids=[260], stop=("abab", "ba"), include=False, min_tokens=0)
@settings(max_examples=400, deadline=None)
def test_stop_strings_match_a_naive_search(
    token_ids: list[int], stop: tuple[str, ...], include: bool, min_tokens: int
) -> None:
    detokenizer = make_detokenizer(BYTE_LEVEL, stop=stop, include=include, min_tokens=min_tokens)
    pieces = [BYTE_LEVEL.token_text(token) for token in token_ids]
    found = search_naively(pieces, stop, min_tokens)
    text, stopped_by = run(detokenizer, token_ids)
    whole = "".join(pieces)
    if found is None:
        assert (text, stopped_by) == (whole, None)
    else:
        start, end, expected = found
        assert (text, stopped_by) == (whole[: end if include else start], expected)


@given(
    token_ids=st.lists(st.sampled_from([97, 98, 99, 256, 258]), max_size=12),
    stop=STOPS,
    min_tokens=st.sampled_from([0, 100]),
)
@example(token_ids=[256], stop=("ab", "cccc"), min_tokens=100)
@settings(max_examples=200, deadline=None)
def test_exactly_the_longest_possible_start_of_a_stop_is_held(
    token_ids: list[int], stop: tuple[str, ...], min_tokens: int
) -> None:
    """Also while stops are ignored: a complete one is then just text."""
    detokenizer = make_detokenizer(BYTE_LEVEL, stop=stop, min_tokens=min_tokens)
    whole = emitted = ""
    for token in token_ids:
        whole += BYTE_LEVEL.token_text(token)
        pushed = detokenizer.push(token)
        if pushed.stop_string is not None:
            return
        emitted += pushed.text_delta
        starts = {text[:length] for text in stop for length in range(1, len(text))}
        held = max((len(start) for start in starts if whole.endswith(start)), default=0)
        assert emitted == whole[: len(whole) - held]


def test_stop_string_of_multi_byte_text_spans_tokens() -> None:
    text = "say \u4e16\u754c! now"
    token_ids = list(text.encode())
    assert run(make_detokenizer(BYTE_LEVEL, stop=("\u4e16\u754c",)), token_ids) == (
        "say ",
        "\u4e16\u754c",
    )


def test_stop_is_found_in_the_text_of_a_special_token_only_when_it_is_shown() -> None:
    token_ids = [97, BYTE_LEVEL.vocab_size - 1, 98]
    hidden = make_detokenizer(BYTE_LEVEL, stop=("end",))
    shown = make_detokenizer(BYTE_LEVEL, stop=("end",), skip=False)
    assert run(hidden, token_ids) == ("ab", None)
    assert run(shown, token_ids) == ("a<", "end")


def test_partial_character_after_a_stop_string_leaves_no_trace() -> None:
    half_character = 256 + len(WORDS)
    assert BYTE_LEVEL.token_bytes(half_character) == b"b\xe4"
    assert run(make_detokenizer(BYTE_LEVEL, stop=("b",)), [97, half_character]) == ("a", "b")


def test_min_tokens_counts_tokens_without_text() -> None:
    """A stop completed by exactly the min_tokens-th token counts; one before it never does."""
    end = BYTE_LEVEL.vocab_size - 1
    late = make_detokenizer(BYTE_LEVEL, stop=("b",), min_tokens=2)
    assert run(late, [end, 98, 97]) == ("", "b")
    early = make_detokenizer(BYTE_LEVEL, stop=("b",), min_tokens=3)
    assert run(early, [end, 98, 97]) == ("ba", None)


class CountingTokenizer:
    """Counts how often tokens are decoded."""

    special_token_ids: frozenset[int] = frozenset()
    strips_first_space = False

    def __init__(self) -> None:
        self.num_decoded = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.num_decoded += 1
        return BYTE_LEVEL.token_bytes(token_id)


def test_every_token_is_decoded_once_and_little_is_kept() -> None:
    counting = CountingTokenizer()
    stop = ("abababab!",)
    detokenizer = make_detokenizer(counting, prompt=[97] * 1000, stop=stop)  # type: ignore[arg-type]
    num_for_prompt = counting.num_decoded
    assert num_for_prompt == 4
    for _ in range(500):
        detokenizer.push(256)
        assert len(detokenizer._held) < len(stop[0])
    assert counting.num_decoded == num_for_prompt + 500
