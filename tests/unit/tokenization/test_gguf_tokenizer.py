"""GGUF tokenizers of real models against transformers, on varied text.

The one known difference: transformers 5.24 cuts `smollm` text with GPT-2's rule alone, so numbers
after two or more spaces differ from the model's own tokenizer, which isolates every digit first.
llama.cpp agrees with ours on all of these texts (checked by hand, 322 of 322).
"""

from __future__ import annotations

import random
import re
import subprocess
import sys

import pytest

from forerun.data.bundled import fetch_bundled_model
from forerun.tokenization import Tokenizer, load_tokenizer

pytestmark = pytest.mark.network

TEXTS = [
    "Hello world",
    "  lead",
    "trail  ",
    "",
    "a    b\t\tc\n\n\n   d\r\n x",
    "it's I'LL we'Ve",
    "na\u00efve caf\u00e9 \u4e16\u754c\u4f60\u597d \u3053\u3093\u306b\u3061\u306f "
    "\ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \U0001f642",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f3f3\ufe0f\u200d\U0001f308",
    "def f(x):\n\treturn {\n\t\t'a': 1,\n    }\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<bos><start_of_turn>user<end_of_turn><unused3>",
    "<tool_call>{}</tool_call>",
    " " * 50,
    "\n" * 40,
    "a" * 300,
    "e\u0301 \u200b\u00a0x\ufeff",
    "\x00\x01\x7f",
    "https://x.org/a?b=c&d#e",
    "<0x41> \u2581x \u0120y",
    "1234567890 12.5 2024-01-02",
]


def make_random_texts(alphabet: str) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choice(alphabet) for _ in range(60)) for _ in range(200)]


def assert_same_as_transformers(name: str, texts: list[str]) -> None:
    from transformers import AutoTokenizer

    path = fetch_bundled_model(name)
    reference = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    ours = load_tokenizer(path)
    for text in texts:
        for special in (True, False):
            expected = reference(text, add_special_tokens=special).input_ids
            assert ours.encode(text, add_special_tokens=special) == expected, text
        for skip in (True, False):
            expected_text = reference.decode(
                expected, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert ours.decode(expected, skip_special_tokens=skip) == expected_text
    assert ours.bos_token_id == reference.bos_token_id
    assert reference.eos_token_id in ours.eos_token_ids
    if reference.chat_template is not None:
        chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
        for generation in (True, False):
            expected_text = reference.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=generation
            )
            assert ours.apply_chat_template(chat, add_generation_prompt=generation) == expected_text


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(fetch_bundled_model("smollm2-135m-instruct"))


def test_smollm2_encodes_as_transformers_does() -> None:
    """Except for digits after several spaces, see the module docstring."""
    texts = TEXTS + make_random_texts("abc XYZ\n\t'.,\U0001f642\u4e16\u00e9<|>_-\u2581  ")
    assert not any(re.search(r"\s{2,}\d", text) for text in texts)
    assert_same_as_transformers("smollm2-135m-instruct", texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b-instruct", "gemma3-270m"])
def test_bigger_models_encode_as_transformers_does(name: str) -> None:
    alphabet = "abc XYZ 0 12\n\t'.,\U0001f642\u4e16\u00e9<|>_-\u2581  "
    assert_same_as_transformers(name, TEXTS + make_random_texts(alphabet))


def test_smollm2_isolates_every_digit(smollm2: Tokenizer) -> None:
    """Two spaces before a number stay one token: ids as llama.cpp gives them."""
    spellings = [smollm2.id_to_token(token) for token in smollm2.encode("x  2024")]
    assert spellings == ["x", "\u0120\u0120", "2", "0", "2", "4"]


def test_chat_markers_are_single_special_tokens(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("<|im_start|>user<|im_end|>")
    assert token_ids[0] == 1
    assert token_ids[-1] == 2
    assert {1, 2} <= smollm2.special_token_ids
    assert smollm2.decode(token_ids) == "user"
    assert smollm2.decode(token_ids, skip_special_tokens=False) == "<|im_start|>user<|im_end|>"
    assert smollm2.eos_token_ids == {2}


def test_token_bytes_join_to_the_text(smollm2: Tokenizer) -> None:
    text = "\u4e16\u754c caf\u00e9 \U0001f642"
    token_ids = smollm2.encode(text)
    assert b"".join(smollm2.token_bytes(token) for token in token_ids) == text.encode()
    assert all(smollm2.token_text(token) for token in token_ids)
    assert smollm2.token_bytes(smollm2.vocab_size + 7) == b""


def test_loading_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from forerun.data.bundled import resolve_model_path\n"
        "from forerun.tokenization import load_tokenizer\n"
        "tokenizer = load_tokenizer(resolve_model_path('smollm2-135m-instruct'))\n"
        "tokenizer.encode_chat([{'role': 'user', 'content': 'hi'}])\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
