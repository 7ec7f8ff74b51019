"""Loads the tokenizer of a Hugging Face folder from its JSON files.

`tokenizer.json` holds the algorithm and vocabulary; `tokenizer_config.json` names the special
tokens and may carry the chat template, which newer folders keep in `chat_template.jinja`;
`generation_config.json` (or, without it, `config.json`) lists the tokens that end generation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from forerun.errors import ConfigError
from forerun.tokenization.tokenizer import Tokenizer, TokenizerInfo

_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def load_hf_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model folder."""
    config = _read_json(folder / "tokenizer_config.json")
    backend = _load_backend(folder)
    _add_listed_tokens(backend, config)
    named = _read_named_tokens(folder, config)
    bos = named.get("bos_token")
    wants_bos = config.get("add_bos_token")
    if bos is not None and isinstance(wants_bos, bool):
        _set_bos(backend, bos, wanted=wants_bos)
    generation = _read_json(folder / "generation_config.json")
    ends = generation or _read_json(folder / "config.json")
    eos = named.get("eos_token")
    eos_ids = {None if eos is None else backend.token_to_id(eos), *_as_list(ends, "eos_token_id")}
    info = TokenizerInfo(
        bos_token_id=None if bos is None else backend.token_to_id(bos),
        eos_token_ids=frozenset(token for token in eos_ids if token is not None),
        chat_template=_read_chat_template(folder, config),
        template_tokens=named,
        generation_defaults=_read_generation_defaults(generation),
    )
    return Tokenizer(backend, info)


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json; save the tokenizer in the fast format "
            "(save_pretrained of a recent transformers writes it)."
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the bindings raise bare Exception on bad files
        raise ConfigError(f"{path} cannot be read ({error}); get the file again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); get the file again.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object; get the file again.")
    return value


def _add_listed_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Add the tokens that only `tokenizer_config.json` lists, where their id is the next free."""
    listed = config.get("added_tokens_decoder", {})
    for token_id, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if backend.id_to_token(int(token_id)) is None:
            token = AddedToken(
                entry["content"],
                single_word=entry.get("single_word", False),
                lstrip=entry.get("lstrip", False),
                rstrip=entry.get("rstrip", False),
                normalized=entry.get("normalized", False),
                special=entry.get("special", False),
            )
            backend.add_tokens([token])


def _read_named_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    sources = {**_read_json(folder / "special_tokens_map.json"), **config}
    named = {}
    for name in _TEMPLATE_TOKENS:
        value = sources.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[name] = text
    return named


def _set_bos(backend: tokenizers.Tokenizer, bos: str, *, wanted: bool) -> None:
    """Make `encode` add BOS, or not, as the config says; tokenizer.json may say otherwise."""
    bos_id = backend.token_to_id(bos)
    adds = bos_id in backend.encode("").ids
    if wanted and not adds:
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, bos_id)]
        )
    elif adds and not wanted:
        backend.post_processor = processors.TemplateProcessing(single=["$A"], special_tokens=[])


def _read_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    given = config.get("chat_template")
    if isinstance(given, list):
        by_name = {entry["name"]: entry["template"] for entry in given}
        given = by_name.get("default")
    return given if isinstance(given, str) else None


def _read_generation_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    return {name: generation[name] for name in _SAMPLING_KEYS if generation.get(name) is not None}


def _as_list(config: Mapping[str, Any], key: str) -> list[Any]:
    value = config.get(key)
    return value if isinstance(value, list) else [value]
