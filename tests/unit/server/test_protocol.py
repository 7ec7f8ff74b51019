"""What the HTTP boundary refuses, and that every refusal names the field."""

from __future__ import annotations

import pytest

from fake_engine import FakeEngine, Script, open_client
from forerun.errors import RequestError

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


def check_error(response, status: int, param: str | None) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param
    return error


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT_PATH, {}, "messages"),
        (CHAT_PATH, {"messages": []}, "messages"),
        (CHAT_PATH, {"messages": "hi"}, "messages"),
        (CHAT_PATH, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT_PATH, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (CHAT_PATH, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            CHAT_PATH,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        (CHAT_PATH, {"messages": [{"role": "user", "contnt": "x"}]}, "messages[0].contnt"),
        (CHAT_PATH, CHAT | {"temperature": "hot"}, "temperature"),
        (CHAT_PATH, CHAT | {"temperature": -1}, "temperature"),
        (CHAT_PATH, CHAT | {"temperature": True}, "temperature"),
        (CHAT_PATH, CHAT | {"top_p": 0}, "top_p"),
        (CHAT_PATH, CHAT | {"n": 0}, "n"),
        (CHAT_PATH, CHAT | {"n": 1.5}, "n"),
        (CHAT_PATH, CHAT | {"max_tokens": 0}, "max_tokens"),
        (CHAT_PATH, CHAT | {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT_PATH, CHAT | {"max_completion_tokens": 9999}, "max_completion_tokens"),
        (
            CHAT_PATH,
            CHAT | {"max_completion_tokens": 3, "max_tokens": 4},
            "max_completion_tokens",
        ),
        (CHAT_PATH, CHAT | {"top_logprobs": 2}, "top_logprobs"),
        (CHAT_PATH, CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT_PATH, CHAT | {"logprobs": 3}, "logprobs"),
        (CHAT_PATH, CHAT | {"stop": ""}, "stop"),
        (CHAT_PATH, CHAT | {"stop": [1]}, "stop"),
        (CHAT_PATH, CHAT | {"logit_bias": {"x": 1}}, "logit_bias"),
        (CHAT_PATH, CHAT | {"logit_bias": {"1": 101}}, "logit_bias"),
        (CHAT_PATH, CHAT | {"logit_bias": {"9999": 1}}, "logit_bias"),
        (CHAT_PATH, CHAT | {"stop_token_ids": [-1]}, "stop_token_ids"),
        (CHAT_PATH, CHAT | {"seed": 2**63}, "seed"),
        (CHAT_PATH, CHAT | {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        (CHAT_PATH, CHAT | {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT_PATH, CHAT | {"stream_options": {"include_usage": True}}, "stream_options"),
        (
            CHAT_PATH,
            CHAT | {"stream": True, "stream_options": {"include_usge": True}},
            "stream_options.include_usge",
        ),
        (CHAT_PATH, CHAT | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT_PATH, CHAT | {"chat_template_kwargs": {"bad": 1}}, "messages"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
        (TEXT_PATH, {}, "prompt"),
        (TEXT_PATH, {"prompt": None}, "prompt"),
        (TEXT_PATH, {"prompt": []}, "prompt"),
        (TEXT_PATH, {"prompt": [[]]}, "prompt"),
        (TEXT_PATH, {"prompt": "", "add_special_tokens": False}, "prompt"),
        (TEXT_PATH, {"prompt": [1, "x"]}, "prompt"),
        (TEXT_PATH, {"prompt": [True]}, "prompt"),
        (TEXT_PATH, {"prompt": [5000]}, "prompt"),
        (TEXT_PATH, {"prompt": [-1]}, "prompt"),
        (TEXT_PATH, {"prompt": "x" * 300}, "prompt"),
        (TEXT_PATH, TEXT | {"best_of": 3}, "best_of"),
        (TEXT_PATH, TEXT | {"logprobs": 21}, "logprobs"),
        (TEXT_PATH, TEXT | {"logprobs": True}, "logprobs"),
        (TEXT_PATH, TEXT | {"max_tokens": 300}, "max_tokens"),
    ],
)
async def test_an_invalid_field_is_refused_by_name(path, body, param) -> None:
    async with open_client() as client:
        check_error(await client.post(path, json=body), 400, param)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("audio", {}),
        ("modalities", ["audio"]),
        ("parallel_tool_calls", True),
        ("suffix", "x"),
        ("reasoning_effort", "high"),
    ],
)
async def test_a_known_field_without_support_is_refused_by_name(field, value) -> None:
    async with open_client() as client:
        for path, body in ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT)):
            error = check_error(await client.post(path, json=body | {field: value}), 400, field)
            assert error["code"] == "unsupported_field"


async def test_unsupported_fields_that_ask_for_nothing_are_accepted() -> None:
    asks_for_nothing = {
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "temperature": None,
        "user": "someone",
    }
    async with open_client() as client:
        response = await client.post(CHAT_PATH, json=CHAT | asks_for_nothing)
        assert response.status_code == 200, response.text


async def test_an_unknown_field_is_refused_with_the_nearest_valid_one() -> None:
    async with open_client() as client:
        response = await client.post(CHAT_PATH, json=CHAT | {"temprature": 1})
        error = check_error(response, 400, "temprature")
        assert "did you mean 'temperature'?" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
)
async def test_a_malformed_body_is_a_400(body) -> None:
    async with open_client() as client:
        error = check_error(await client.post(TEXT_PATH, content=body), 400, None)
        assert error["code"] == "invalid_json"


async def test_an_unknown_model_is_a_404_and_the_served_one_is_not() -> None:
    async with open_client() as client:
        error = check_error(await client.post(TEXT_PATH, json=TEXT | {"model": "x"}), 404, "model")
        assert error["code"] == "model_not_found"
        response = await client.post(TEXT_PATH, json=TEXT | {"model": "fake"})
        assert response.status_code == 200


async def test_unknown_routes_and_methods_answer_in_the_same_shape() -> None:
    async with open_client() as client:
        check_error(await client.get("/v1/nothing"), 404, None)
        check_error(await client.get(TEXT_PATH), 405, None)


async def test_the_api_key_guards_everything_but_health_and_metrics() -> None:
    async with open_client(api_key="secret") as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            response = await client.post(TEXT_PATH, json=TEXT, headers=headers)
            error = check_error(response, 401, None)
            assert error["code"] == "invalid_api_key"
        right = {"Authorization": "Bearer secret"}
        assert (await client.post(TEXT_PATH, json=TEXT, headers=right)).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
        for path in ("/health", "/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_503_with_retry_after_also_for_streams(stream) -> None:
    fake = FakeEngine()
    fake.refusal = RequestError("the queue is full", status=503, code="queue_full", retry_after_s=2)
    async with open_client(fake) as client:
        response = await client.post(CHAT_PATH, json=CHAT | {"stream": stream})
        error = check_error(response, 503, None)
        assert error["code"] == "queue_full"
        assert response.headers["Retry-After"] == "2"


async def test_an_unforeseen_exception_is_a_500_in_the_same_shape() -> None:
    class BrokenTokenizer:
        generation_defaults = {}
        special_token_ids = ()

        def encode(self, text, *, add_special_tokens=True):
            raise ZeroDivisionError("broken")

    async with open_client(FakeEngine(Script()), tokenizer=BrokenTokenizer()) as client:
        error = check_error(await client.post(TEXT_PATH, json=TEXT), 500, None)
        assert error["code"] == "internal_error"
        assert "ZeroDivisionError" in error["message"]
