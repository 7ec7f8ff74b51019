"""Builds a tokenizer from the metadata of a GGUF file.

A GGUF names its algorithm (`tokenizer.ggml.model`) and, for byte-level BPE, how text is cut before
merging (`tokenizer.ggml.pre`); the rules meant by those names are llama.cpp's. SentencePiece files
list no merges: they follow from the vocabulary, which takes seconds for 262,144 tokens, so that
result is kept in the cache folder as a tokenizer.json.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from forerun import env
from forerun.errors import ConfigError
from forerun.gguf_file import read_gguf
from forerun.logs import get_logger
from forerun.tokenization.tokenizer import Tokenizer, TokenizerInfo

logger = get_logger(__name__)

_CONTROL, _USER_DEFINED = 3, 4
_SPACE_MARK = "\u2581"
# Changes when what is built from the same file changes, so that old cache files are not used.
_CACHE_VERSION = 1

_WORDS = r"\p{L}+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2_SPLIT = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{_WORDS}|\p{{N}}{_TAIL}"
_LLAMA3_SPLIT = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{_WORDS}|\p{{N}}{{1,3}}{_TAIL}"

_SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_TEMPLATE_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer a GGUF file describes."""
    metadata = read_gguf(path).metadata
    if "tokenizer.ggml.tokens" not in metadata:
        raise ConfigError(f"{path} holds no tokenizer; convert the model again with its tokenizer.")
    try:
        return Tokenizer(_load_backend(path, metadata), _read_info(metadata))
    except ConfigError:
        raise
    except Exception as error:  # the bindings raise bare Exception on inconsistent vocabularies
        raise ConfigError(
            f"the tokenizer in {path} is inconsistent ({error!r}); convert the model again."
        ) from error


def _load_backend(path: Path, metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        return _build_byte_level(metadata)
    if model == "llama":
        return _load_or_build_sentencepiece(path, metadata)
    raise ConfigError(
        f"{path} has a tokenizer of type {model!r}; supported are gpt2 (byte-level BPE) and "
        "llama (SentencePiece)."
    )


def _read_info(metadata: Mapping[str, Any]) -> TokenizerInfo:
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")}
    named = {
        name: tokens[metadata[f"tokenizer.ggml.{key}"]]
        for name, key in _TEMPLATE_TOKENS.items()
        if f"tokenizer.ggml.{key}" in metadata
    }
    defaults = {
        name: metadata[f"general.sampling.{key}"]
        for key, name in _SAMPLING_KEYS.items()
        if f"general.sampling.{key}" in metadata
    }
    return TokenizerInfo(
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=frozenset(token for token in ids.values() if token is not None),
        chat_template=metadata.get("tokenizer.chat_template"),
        template_tokens=named,
        generation_defaults=defaults,
    )


def _build_pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """Return the rule that cuts text before merging; raises ConfigError for unknown names."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    known: dict[str, pre_tokenizers.PreTokenizer] = {
        "default": gpt2,
        "gpt-2": gpt2,
        "smollm": pre_tokenizers.Sequence([digits, gpt2]),
        "qwen2": _build_split(_QWEN2_SPLIT),
        "llama-bpe": _build_split(_LLAMA3_SPLIT),
    }
    if pre not in known:
        raise ConfigError(
            f"this GGUF cuts text by the rule {pre!r} (tokenizer.ggml.pre), which Forerun does not "
            f"know; it knows {', '.join(known)}. Use the model's Hugging Face folder instead."
        )
    return known[pre]


def _build_split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, to_bytes])


def _build_byte_level(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    is_llama3 = pre == "llama-bpe"
    pre_tokenizer = _build_pre_tokenizer(pre)
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [_split_merge(merge) for merge in metadata.get("tokenizer.ggml.merges", ())]
    # Llama 3 takes a whole word that is in the vocabulary without merging towards it.
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=is_llama3))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    _add_marked_tokens(backend, metadata)
    _add_sequence_ends(backend, metadata, bos_by_default=is_llama3)
    return backend


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _add_marked_tokens(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Make control tokens special, and user-defined ones whole; both match before any merging."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return
    control, user = [
        [tokens[index] for index in np.flatnonzero(np.asarray(types) == kind)]
        for kind in (_CONTROL, _USER_DEFINED)
    ]
    # What the vocabulary does not spell this way (runs of spaces in SentencePiece) is no new token.
    user = [token for token in user if backend.token_to_id(token) is not None]
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in user])


def _add_sequence_ends(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], *, bos_by_default: bool
) -> None:
    """Add BOS and EOS to encoded text where the file asks for them."""
    tokens = metadata["tokenizer.ggml.tokens"]
    pieces, specials = ["$A"], []
    for name, default, position in (("bos", bos_by_default, 0), ("eos", False, 2)):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            pieces.insert(position, tokens[token_id])
            specials.append((tokens[token_id], token_id))
    if specials:
        backend.post_processor = processors.TemplateProcessing(
            single=pieces, special_tokens=specials
        )


def _load_or_build_sentencepiece(path: Path, metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    cached = _cache_path(path)
    if cached.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(cached))
        except Exception as error:  # noqa: BLE001  # bare from the bindings; only a slow start
            logger.warning("ignoring the damaged file %s (%s)", cached, error)
    backend = _build_sentencepiece(metadata)
    # Two processes may build at once; each writes its own file and the renames are equivalent.
    partial = cached.with_name(f"{cached.name}.{os.getpid()}")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        backend.save(str(partial), pretty=False)
        partial.replace(cached)
    except OSError as error:
        logger.warning("tokenizer is not kept in %s (%s); starts stay slow", cached.parent, error)
    return backend


def _cache_path(path: Path) -> Path:
    status = path.stat()
    key = f"{_CACHE_VERSION} {path.resolve()} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    return env.cache_dir() / "tokenizers" / f"{digest}.json"


def _build_sentencepiece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    tokens = [_respell_spaces(token) for token in metadata["tokenizer.ggml.tokens"]]
    is_gemma = str(metadata.get("general.architecture")).startswith("gemma")
    # Gemma's scores are not in merge order; the order of its tokens is.
    ranks = range(len(tokens)) if is_gemma else -np.asarray(metadata["tokenizer.ggml.scores"])
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_derive_merges(tokens, ranks),
            unk_token=None if unknown_id is None else tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    _set_space_rules(backend, has_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True))
    _add_marked_tokens(backend, metadata)
    _add_sequence_ends(backend, metadata, bos_by_default=True)
    return backend


def _set_space_rules(backend: tokenizers.Tokenizer, *, has_prefix: bool) -> None:
    """Spell spaces as U+2581 and back; `has_prefix` adds one before the text and drops it again."""
    spelling: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE_MARK)]
    reading = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        spelling.insert(0, normalizers.Prepend(_SPACE_MARK))
        reading.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spelling)
    backend.decoder = decoders.Sequence(reading)


def _respell_spaces(token: str) -> str:
    """Spell a run of spaces as the text it will be compared with has it."""
    return _SPACE_MARK * len(token) if token and not token.strip(" ") else token


def _derive_merges(tokens: list[str], ranks: Any) -> list[tuple[str, str]]:
    """Return every pair of tokens that makes a token, best result first.

    Pairs of one result are ordered by the ids of their halves.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    found: list[tuple[float, int, int]] = []
    for token, rank in zip(tokens, ranks, strict=True):
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((rank, left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, left, right in found]
