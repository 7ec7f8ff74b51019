"""Chat templates: what Hugging Face templates rely on, and what bad conversations get."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from forerun.errors import RequestError
from forerun.tokenization.tokenizer import Tokenizer, TokenizerInfo

CHAT = [{"role": "user", "content": "hi"}]


def make_tokenizer(template: str | None) -> Tokenizer:
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    info = TokenizerInfo(chat_template=template, template_tokens={"eos_token": "</s>"})
    return Tokenizer(backend, info)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}\n  {{ m.role }}:{{ m['content'] }}\n{% endfor %}", "  user:hi\n"),
        ("{% if add_generation_prompt %}assistant{{ eos_token }}{% endif %}", "assistant</s>"),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{{ {'b': '<\u00e9>', 'a': 1} | tojson }}", '{"b": "<\u00e9>", "a": 1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% if tools %}T{% endif %}{{ mode }}", "thinking"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_templates_render_as_in_transformers(template: str, expected: str) -> None:
    assert make_tokenizer(template).apply_chat_template(CHAT, mode="thinking") == expected


def test_generation_prompt_can_be_left_out() -> None:
    tokenizer = make_tokenizer("{{ add_generation_prompt }}")
    assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=False) == "False"


def test_text_parts_are_joined_by_line() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    tokenizer = make_tokenizer("{{ messages[0].content }}")
    assert tokenizer.apply_chat_template([{"role": "user", "content": parts}]) == "one\ntwo"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].content.nothing.deeper }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{% broken",
    ],
)
def test_template_errors_name_messages(template: str) -> None:
    with pytest.raises(RequestError) as caught:
        make_tokenizer(template).apply_chat_template(CHAT)
    assert caught.value.param == "messages"
    assert caught.value.status == 400


def test_the_templates_own_complaint_reaches_the_user() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        make_tokenizer("{{ raise_exception('roles must alternate') }}").apply_chat_template(CHAT)


def test_model_without_template_points_to_completions() -> None:
    tokenizer = make_tokenizer(None)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="/v1/completions") as caught:
        tokenizer.encode_chat(CHAT)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "non-empty list"),
        ("hi", "non-empty list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "hi"}], r"messages\[0\]\.role"),
        ([*CHAT, {"role": "user"}], r"messages\[1\]\.content"),
        ([{"role": "user", "content": 3}], "got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\].*'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text"),
        ([{"role": "user", "content": ["hi"]}], r"content\[0\]"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        make_tokenizer("x").apply_chat_template(messages)
    assert caught.value.param == "messages"
