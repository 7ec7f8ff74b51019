"""/v1/completions: prompts of every kind, echo, logprobs with offsets."""

from __future__ import annotations

import json

import pytest

from fake_engine import BOS, FakeEngine, Script, open_client

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"


async def read_choices(client, body) -> list[dict]:
    response = await client.post(PATH, json=body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


async def test_a_whole_answer_has_openai_shape() -> None:
    async with open_client() as client:
        answer = (await client.post(PATH, json={"prompt": "hi"})).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    choice = {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}
    assert answer["choices"] == [choice | {"stop_reason": None}]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 6


async def test_max_tokens_is_16_by_default_and_ends_with_length() -> None:
    async with open_client(FakeEngine(Script(("x" * 50,)))) as client:
        answer = (await client.post(PATH, json={"prompt": "hi"})).json()
    assert answer["choices"][0]["text"] == "x" * 16
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "received"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98]], [[97], [98]]),
    ],
)
async def test_prompts_of_every_kind(prompt, received) -> None:
    fake = FakeEngine()
    async with open_client(fake) as client:
        answer = (await client.post(PATH, json={"prompt": prompt})).json()
    assert [r.prompt_token_ids for r in fake.received.values()] == received
    assert [c["index"] for c in answer["choices"]] == list(range(len(received)))


async def test_special_tokens_can_be_left_out_of_the_prompt() -> None:
    fake = FakeEngine()
    async with open_client(fake) as client:
        await client.post(PATH, json={"prompt": "ab", "add_special_tokens": False})
    (request,) = fake.received.values()
    assert request.prompt_token_ids == [97, 98]


async def test_choices_are_numbered_over_all_prompts() -> None:
    fake = FakeEngine()
    fake.scripts = {"one": Script(("1a", "1b")), "two": Script(("2a", "2b"))}
    body = {"prompt": ["one", "two"], "n": 2}
    async with open_client(fake) as client:
        answer = (await client.post(PATH, json=body)).json()
        streamed = await read_choices(client, body)
    assert [c["text"] for c in answer["choices"]] == ["1a", "1b", "2a", "2b"]
    assert answer["usage"]["prompt_tokens"] == 8
    assert answer["usage"]["completion_tokens"] == 12
    texts = ["".join(c["text"] for c in streamed if c["index"] == i) for i in range(4)]
    assert texts == ["1a", "1b", "2a", "2b"]


@pytest.mark.parametrize(("prompt", "shown"), [("hi", "hi"), ([104, 105, BOS], "hi")])
async def test_echo_puts_the_prompt_before_the_answer_once(prompt, shown) -> None:
    body = {"prompt": prompt, "echo": True, "n": 2}
    async with open_client() as client:
        answer = (await client.post(PATH, json=body)).json()
        streamed = await read_choices(client, body)
    assert [c["text"] for c in answer["choices"]] == [shown + "Hello"] * 2
    for index in range(2):
        assert "".join(c["text"] for c in streamed if c["index"] == index) == shown + "Hello"
    assert answer["usage"]["completion_tokens"] == 12


async def test_logprobs_have_completions_shape_and_offsets_into_the_text() -> None:
    fake = FakeEngine(Script(("a\u00e9b",)), tokens_per_step=1)
    async with open_client(fake) as client:
        answer = (await client.post(PATH, json={"prompt": "hi", "logprobs": 1})).json()
        streamed = await read_choices(client, {"prompt": "hi", "logprobs": 1})
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "\ufffd", "\ufffd", "b", "<eos>"]
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert logprobs["top_logprobs"][0] == {"a": -0.5}
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    for key, values in logprobs.items():
        assert [v for c in streamed if c["logprobs"] for v in c["logprobs"][key]] == values


async def test_zero_logprobs_still_name_the_emitted_token() -> None:
    async with open_client(FakeEngine(Script(("a",)))) as client:
        answer = (await client.post(PATH, json={"prompt": "hi", "logprobs": 0})).json()
    assert answer["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -0.5}


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_scores_the_prompt_too(stream) -> None:
    body = {"prompt": [104, 105], "echo": True, "logprobs": 1}
    async with open_client(FakeEngine(Script(("a",)))) as client:
        if stream:
            choices = await read_choices(client, body)
        else:
            choices = (await client.post(PATH, json=body)).json()["choices"]
    logprobs = [c["logprobs"] for c in choices if c["logprobs"]]
    assert [token for item in logprobs for token in item["tokens"]] == ["h", "i", "a", "<eos>"]
    assert [p for item in logprobs for p in item["token_logprobs"]] == [None, -0.5, -0.5, -0.5]
    assert [o for item in logprobs for o in item["text_offset"]] == [0, 1, 2, 3]


async def test_prompt_logprobs_and_token_ids_are_on_each_choice() -> None:
    body = {"prompt": [[104, 105], [106]], "prompt_logprobs": 0, "return_token_ids": True}
    async with open_client() as client:
        choices = (await client.post(PATH, json=body)).json()["choices"]
    assert [c["prompt_token_ids"] for c in choices] == [[104, 105], [106]]
    assert [len(c["prompt_logprobs"]) for c in choices] == [2, 1]
    assert choices[0]["token_ids"] == [*b"Hello", 256]


async def test_a_stream_with_token_ids_opens_with_those_of_the_prompt() -> None:
    async with open_client() as client:
        choices = await read_choices(client, {"prompt": [104], "return_token_ids": True})
    assert choices[0]["prompt_token_ids"] == [104]
    assert [t for c in choices for t in c["token_ids"]] == [*b"Hello", 256]


async def test_more_choices_than_may_ever_wait_are_a_400_not_a_503() -> None:
    """Nine prompts where eight may wait answered 503 with Retry-After, each time again."""
    fake = FakeEngine()
    async with open_client(fake) as client:
        for body in ({"prompt": ["a"] * 9}, {"prompt": ["a"] * 3, "n": 3}):
            response = await client.post(PATH, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "prompt"
            assert "9 choices" in response.json()["error"]["message"]
        assert not fake.received
        assert (await client.post(PATH, json={"prompt": ["a"] * 4, "n": 2})).status_code == 200


async def test_numbers_too_large_for_a_float_are_a_400() -> None:
    """They were a 500: the range check converted them to float."""
    async with open_client() as client:
        for name in ("max_tokens", "n", "seed", "top_k", "min_tokens", "logprobs"):
            response = await client.post(PATH, content=f'{{"prompt": "a", "{name}": {10**400}}}')
            assert response.status_code == 400
            assert response.json()["error"]["param"] == name
