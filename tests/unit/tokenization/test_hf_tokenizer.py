"""Tokenizers of Hugging Face folders, written by the tokenizers library into a temporary folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    decoders,
    models,
    pre_tokenizers,
    processors,
)
from tokenizers import (
    Tokenizer as Backend,
)

from forerun.errors import ConfigError, RequestError
from forerun.tokenization import load_tokenizer

VOCAB = {"a": 0, "b": 1, "\u0120": 2, "ab": 3, "<s>": 4, "</s>": 5, "<turn>": 6}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def write_folder(folder: Path, config: dict[str, Any], *, adds_bos: bool = False) -> Path:
    backend = Backend(models.BPE(vocab=VOCAB, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text) for text in ("<s>", "</s>", "<turn>")])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=["<s>", "$A"], special_tokens=[("<s>", 4)]
        )
    backend.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    write_json(folder / "tokenizer_config.json", {**named, **config})
    return folder


def test_end_tokens_come_from_tokenizer_and_generation_config(tmp_path: Path) -> None:
    write_folder(tmp_path, {})
    write_json(tmp_path / "config.json", {"eos_token_id": 0})
    generation = {"eos_token_id": [5, 6], "temperature": 0.7, "top_k": 20, "do_sample": True}
    write_json(tmp_path / "generation_config.json", generation)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == {5, 6}
    assert tokenizer.bos_token_id == 4
    assert tokenizer.generation_defaults == {"temperature": 0.7, "top_k": 20}


def test_end_tokens_come_from_config_without_a_generation_config(tmp_path: Path) -> None:
    write_folder(tmp_path, {})
    write_json(tmp_path / "config.json", {"eos_token_id": 6})
    assert load_tokenizer(tmp_path).eos_token_ids == {5, 6}


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("flag", [True, False, None])
def test_bos_follows_the_config_and_else_the_tokenizer_file(
    tmp_path: Path, adds_bos: bool, flag: bool | None
) -> None:
    config = {} if flag is None else {"add_bos_token": flag}
    tokenizer = load_tokenizer(write_folder(tmp_path, config, adds_bos=adds_bos))
    expected = adds_bos if flag is None else flag
    assert tokenizer.encode("ab") == ([4, 3] if expected else [3])
    assert tokenizer.encode("ab", add_special_tokens=False) == [3]


def test_chat_does_not_double_bos(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = write_folder(tmp_path, {"chat_template": template}, adds_bos=True)
    assert load_tokenizer(folder).encode_chat([{"role": "user", "content": "ab"}]) == [4, 3]


def test_template_file_wins_over_config_and_named_lists_use_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = write_folder(tmp_path, {"chat_template": named})
    chat = [{"role": "user", "content": "x"}]
    assert load_tokenizer(folder).apply_chat_template(chat) == "D"
    (folder / "chat_template.jinja").write_text("F")
    assert load_tokenizer(folder).apply_chat_template(chat) == "F"


def test_tokens_only_listed_in_the_config_are_added(tmp_path: Path) -> None:
    listed = {"7": {"content": "<late>", "special": True}, "4": {"content": "<s>", "special": True}}
    tokenizer = load_tokenizer(write_folder(tmp_path, {"added_tokens_decoder": listed}))
    assert tokenizer.encode("a<late>") == [0, 7]
    assert 7 in tokenizer.special_token_ids
    assert tokenizer.vocab_size == 8


def test_truncation_and_padding_stored_by_training_are_off(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {})
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=4)
    backend.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode("a" * 5) == [0] * 5
    assert load_tokenizer(folder).encode("a") == [0]


def test_bad_folders_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(tmp_path)
    write_folder(tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_tokenizer(tmp_path)


def test_decoders_that_do_not_join_bytes_are_refused(tmp_path: Path) -> None:
    backend = Backend(models.BPE(vocab=VOCAB, merges=[]))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="WordPiece"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["\udcff", "a\ud800", None])
def test_what_is_no_unicode_text_is_a_request_error(tmp_path: Path, text: Any) -> None:
    """`forerun generate` with bytes that are no UTF-8 ended in the bindings' TypeError."""
    tokenizer = load_tokenizer(write_folder(tmp_path, {}))
    with pytest.raises(RequestError, match="valid Unicode") as caught:
        tokenizer.encode(text)
    assert caught.value.param == "prompt"
