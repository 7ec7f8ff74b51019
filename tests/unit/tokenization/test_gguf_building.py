"""GGUF tokenizers built from tiny files: rules, refusals, damaged files, the cached copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from forerun.errors import ConfigError
from forerun.tokenization import Tokenizer, load_tokenizer
from forerun.tokenization import gguf as gguf_module

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6

BYTE_LEVEL_TOKENS = ["a", "b", "1", "2", "\u0120", "ab", "12", "\u0120\u0120", "<end>", "<think>"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", "<0xE4>", "<0xB8>", "<0x96>", "\u2581", "a", "b", "\u2581a"]
SPM_TOKENS += ["ab", "\u2581ab", "  ", "aa"]

Fill = Callable[[gguf.GGUFWriter], None]


def write_gguf(path: Path, fill: Fill, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def fill_byte_level(writer: gguf.GGUFWriter, pre: str = "gpt-2") -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(BYTE_LEVEL_TOKENS)
    writer.add_token_types([NORMAL] * 8 + [CONTROL, USER])
    writer.add_token_merges(["a b", "1 2", "\u0120 \u0120"])
    writer.add_eos_token_id(8)


def fill_spm(writer: gguf.GGUFWriter, *, prefix: bool = True) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(SPM_TOKENS)
    writer.add_token_scores([0.0] * 7 + [-9.0, -9.0, -2.0, -3.0, -1.0, -1.0, -2.5])
    writer.add_token_types([UNKNOWN, CONTROL, CONTROL] + [BYTE] * 3 + [NORMAL] * 8)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path


def spell(tokenizer: Tokenizer, text: str, *, special: bool = True) -> list[str]:
    token_ids = tokenizer.encode(text, add_special_tokens=special)
    return [tokenizer.id_to_token(token) for token in token_ids]


def test_digit_rules_follow_the_named_pre_tokenizer(folder: Path) -> None:
    whole = load_tokenizer(write_gguf(folder / "a.gguf", fill_byte_level))
    single = load_tokenizer(
        write_gguf(folder / "b.gguf", lambda writer: fill_byte_level(writer, "smollm"))
    )
    assert spell(whole, "ab12") == ["ab", "12"]
    assert spell(single, "ab12") == ["ab", "1", "2"]


def test_marked_tokens_stay_whole_and_only_control_is_special(folder: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(folder / "a.gguf", fill_byte_level))
    token_ids = tokenizer.encode("a<think>b<end>")
    assert token_ids == [0, 9, 1, 8]
    assert tokenizer.decode(token_ids) == "a<think>b"
    assert tokenizer.special_token_ids == {8}


def test_unknown_pre_tokenizer_is_refused_by_name(folder: Path) -> None:
    path = write_gguf(folder / "a.gguf", lambda writer: fill_byte_level(writer, "exotic"))
    with pytest.raises(ConfigError, match="'exotic'.*default, gpt-2, smollm, qwen2, llama-bpe"):
        load_tokenizer(path)


def test_unknown_tokenizer_model_is_refused_by_name(folder: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_token_list(["a"])

    with pytest.raises(ConfigError, match="'bert'.*gpt2"):
        load_tokenizer(write_gguf(folder / "a.gguf", fill))


def test_file_without_a_tokenizer_is_refused(folder: Path) -> None:
    path = write_gguf(folder / "a.gguf", lambda writer: writer.add_name("empty"))
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        load_tokenizer(path)


@pytest.mark.parametrize("keep_bytes", [0, 3, 10, 60, 200])
def test_cut_off_header_is_refused_in_one_sentence(folder: Path, keep_bytes: int) -> None:
    path = write_gguf(folder / "a.gguf", fill_byte_level)
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(ConfigError, match="a.gguf"):
        load_tokenizer(path)


def test_merge_of_tokens_that_do_not_exist_is_refused(folder: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a"])
        writer.add_token_merges(["a z"])

    with pytest.raises(ConfigError, match="inconsistent"):
        load_tokenizer(write_gguf(folder / "a.gguf", fill))


def test_sentencepiece_merges_best_score_first_and_falls_back_to_bytes(folder: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(folder / "a.gguf", fill_spm))
    assert spell(tokenizer, "ab") == ["<s>", "\u2581ab"]
    assert spell(tokenizer, "a\u4e16", special=False) == ["\u2581a", "<0xE4>", "<0xB8>", "<0x96>"]


def test_prefix_space_is_added_and_taken_away_again(folder: Path) -> None:
    with_prefix = load_tokenizer(write_gguf(folder / "a.gguf", fill_spm))
    without = load_tokenizer(
        write_gguf(folder / "b.gguf", lambda writer: fill_spm(writer, prefix=False))
    )
    assert with_prefix.decode(with_prefix.encode("ab a")) == "ab a"
    assert spell(without, "aab", special=False) == ["aa", "b"]
    assert without.decode(without.encode(" ab")) == " ab"


def test_all_end_tokens_and_sampling_defaults_are_read(folder: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        fill_byte_level(writer)
        writer.add_eot_token_id(9)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 7)

    tokenizer = load_tokenizer(write_gguf(folder / "a.gguf", fill))
    assert tokenizer.eos_token_ids == {8, 9}
    assert tokenizer.generation_defaults == {"temperature": 0.5, "top_k": 7}
    assert not tokenizer.has_chat_template


def test_second_load_uses_the_kept_copy_and_a_changed_file_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(folder / "a.gguf", fill_spm)
    first = load_tokenizer(path)
    built: list[int] = []
    build = gguf_module._build_sentencepiece

    def build_and_count(metadata: dict[str, object]) -> object:
        built.append(1)
        return build(metadata)

    monkeypatch.setattr(gguf_module, "_build_sentencepiece", build_and_count)
    again = load_tokenizer(path)
    assert built == []
    assert again.encode(" ab a\u4e16") == first.encode(" ab a\u4e16")
    assert again.special_token_ids == first.special_token_ids
    write_gguf(path, lambda writer: fill_spm(writer, prefix=False))
    load_tokenizer(path)
    assert built == [1]


def test_damaged_kept_copy_is_built_again(folder: Path) -> None:
    path = write_gguf(folder / "a.gguf", fill_spm)
    expected = load_tokenizer(path).encode("ab")
    (kept,) = (folder / "cache" / "tokenizers").glob("*.json")
    kept.write_text("{")
    assert load_tokenizer(path).encode("ab") == expected
    assert kept.stat().st_size > 1


def test_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_tokenizer(tmp_path / "nothing")
