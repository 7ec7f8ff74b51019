"""/v1/chat/completions: whole and streamed answers, usage, choices, logprobs, metrics."""

from __future__ import annotations

import json

import pytest

from fake_engine import FakeEngine, FakeTokenizer, Script, open_client
from forerun.errors import RequestError

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = "<user>hi<assistant>"


async def read_events(client, body, path=PATH) -> list:
    """Return the payloads of a stream; the last one is the string [DONE] if it came."""
    response = await client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    payloads = [line.removeprefix("data: ") for line in lines]
    return [p if p == "[DONE]" else json.loads(p) for p in payloads]


def join_deltas(events, index=0) -> str:
    choices = [c for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


async def test_a_whole_answer_has_openai_shape_and_exact_usage() -> None:
    async with open_client(FakeEngine(Script(("Hello",), num_cached_tokens=8))) as client:
        answer = (await client.post(PATH, json=CHAT)).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "fake"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    assert answer["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 6,
        "total_tokens": len(PROMPT) + 6,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


async def test_a_stream_begins_with_the_role_and_ends_with_reason_usage_and_done() -> None:
    options = {"stream_options": {"include_usage": True}}
    async with open_client() as client:
        events = await read_events(client, CHAT | options)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[0]["object"] == "chat.completion.chunk"
    assert join_deltas(events) == "Hello"
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 6
    assert events[-3]["choices"][0]["finish_reason"] == "stop"
    assert all(e["usage"] is None for e in events[:-2])
    assert len({e["id"] for e in events[:-1]}) == 1
    reasons = [c["finish_reason"] for e in events[:-1] for c in e["choices"]]
    assert [reason for reason in reasons if reason] == ["stop"]


async def test_without_usage_asked_for_a_stream_has_none() -> None:
    async with open_client() as client:
        events = await read_events(client, CHAT)
    assert all("usage" not in e for e in events[:-1])
    assert events[-2]["choices"]


async def test_continuous_usage_counts_committed_tokens_not_chunks() -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with open_client(FakeEngine(Script(("Hello",)), tokens_per_step=3)) as client:
        events = await read_events(client, CHAT | options)
    counts = [e["usage"]["completion_tokens"] for e in events[:-1]]
    assert counts == [0, 3, 6, 6]


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 7])
async def test_streamed_text_never_splits_a_character_and_equals_the_whole(tokens_per_step) -> None:
    text = "caf\u00e9 \u4f60\u597d \U0001f600!"
    fake = FakeEngine(Script((text,)), tokens_per_step=tokens_per_step)
    async with open_client(fake) as client:
        events = await read_events(client, CHAT)
        whole = (await client.post(PATH, json=CHAT)).json()
    assert join_deltas(events) == whole["choices"][0]["message"]["content"] == text
    pieces = [c["delta"].get("content") for e in events[1:-1] for c in e["choices"]]
    assert all(piece is None or "\ufffd" not in piece for piece in pieces)


async def test_outputs_without_text_are_sent_only_when_their_tokens_were_asked_for() -> None:
    fake = FakeEngine(Script(("\U0001f600",)), tokens_per_step=1)
    async with open_client(fake) as client:
        plain = await read_events(client, CHAT)
        with_ids = await read_events(client, CHAT | {"return_token_ids": True})
    assert len(plain) == len(["role", "text", "reason", "done"])
    token_ids = [t for e in with_ids[:-1] for c in e["choices"] for t in c.get("token_ids", [])]
    assert bytes(token_ids[:-1]).decode() == "\U0001f600"
    assert with_ids[0]["prompt_token_ids"] == list(PROMPT.encode())
    assert all("prompt_token_ids" not in e for e in with_ids[1:-1])


async def test_token_ids_of_a_whole_answer() -> None:
    async with open_client() as client:
        answer = (await client.post(PATH, json=CHAT | {"return_token_ids": True})).json()
    assert answer["prompt_token_ids"] == list(PROMPT.encode())
    assert answer["choices"][0]["token_ids"] == [*b"Hello", 256]


async def test_two_choices_interleave_and_each_is_whole() -> None:
    fake = FakeEngine(Script(("first", "second one")))
    options = {"n": 2, "stream_options": {"include_usage": True}}
    async with open_client(fake) as client:
        events = await read_events(client, CHAT | options)
        whole = (await client.post(PATH, json=CHAT | {"n": 2})).json()
    assert [c["message"]["content"] for c in whole["choices"]] == ["first", "second one"]
    assert join_deltas(events, 0) == "first"
    assert join_deltas(events, 1) == "second one"
    order = [c["index"] for e in events[:-1] for c in e["choices"]]
    assert order[:6] == [0, 1, 0, 1, 0, 1]
    assert events[-2]["usage"]["completion_tokens"] == 6 + 11
    assert events[-2]["usage"]["prompt_tokens"] == len(PROMPT)
    assert whole["metrics"]["speculative_decoding"] is None


async def test_logprobs_give_text_bytes_and_alternatives() -> None:
    options = {"logprobs": True, "top_logprobs": 2}
    async with open_client(FakeEngine(Script(("a\u00e9",)), tokens_per_step=1)) as client:
        whole = (await client.post(PATH, json=CHAT | options)).json()
        events = await read_events(client, CHAT | options)
        none_on_top = (await client.post(PATH, json=CHAT | {"logprobs": True})).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "\ufffd", "\ufffd", "<eos>"]
    assert [entry["bytes"] for entry in content][:3] == [[0x61], [0xC3], [0xA9]]
    assert content[0]["top_logprobs"] == [
        {"token": "a", "logprob": -0.5, "bytes": [0x61]},
        {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xFF]},
    ]
    streamed = [
        entry
        for e in events[:-1]
        for c in e["choices"]
        if c["logprobs"]
        for entry in c["logprobs"]["content"]
    ]
    assert streamed == content
    assert none_on_top["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_prompt_logprobs_have_vllm_shape() -> None:
    async with open_client() as client:
        answer = (await client.post(PATH, json=CHAT | {"prompt_logprobs": 1})).json()
    entries = answer["prompt_logprobs"]
    assert len(entries) == len(PROMPT)
    assert entries[0] is None
    assert entries[1] == {"117": {"logprob": -0.5, "rank": 1, "decoded_token": "u"}}


async def test_speculation_metrics_have_vllm_shape_with_steps_on_request() -> None:
    options = {"return_spec_stats": True}
    async with open_client(FakeEngine(Script(("Hello",)))) as client:
        summary = (await client.post(PATH, json=CHAT)).json()["metrics"]["speculative_decoding"]
        detailed = (await client.post(PATH, json=CHAT | options)).json()
        events = await read_events(client, CHAT | options)
    assert summary == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 2 / 9,
        "acceptance_histogram": [0, 2, 0, 0],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 2,
        "num_draft_tokens": 9,
        "num_verified_tokens": 4,
        "num_spec_tokens": 3,
    }
    steps = {"per_step_accepted": [1, 1], "per_step_drafted": [2, 2]}
    assert detailed["metrics"]["speculative_decoding"] == summary | steps
    assert events[-2]["metrics"]["speculative_decoding"] == summary | steps


async def test_without_a_drafter_there_are_no_speculation_metrics() -> None:
    async with open_client(num_speculative_tokens=0) as client:
        answer = (await client.post(PATH, json=CHAT)).json()
    assert answer["metrics"] == {"speculative_decoding": None}


async def test_a_failure_in_mid_stream_is_an_error_event_and_the_end() -> None:
    error = RequestError("the model step failed", status=500, code="step_failed")
    fake = FakeEngine(Script(("partial",), fails_with=error))
    async with open_client(fake) as client:
        events = await read_events(client, CHAT)
        whole = await client.post(PATH, json=CHAT)
    assert join_deltas(events[:-1]).startswith("parti")
    assert events[-1]["error"]["code"] == "step_failed"
    assert events[-1]["error"]["type"] == "server_error"
    assert whole.status_code == 500


async def test_params_reach_the_engine_with_the_models_defaults_filled_in() -> None:
    fake = FakeEngine()
    tokenizer = FakeTokenizer({"temperature": 0.2, "top_k": 7})
    options = {"top_k": 3, "seed": 9, "stop": "END", "logit_bias": {"65": -100}, "min_p": 0.1}
    async with open_client(fake, tokenizer=tokenizer) as client:
        await client.post(PATH, json=CHAT | options)
        await client.post(PATH, json=CHAT | {"temperature": 0, "max_completion_tokens": 5})
    first, second = (request.params for request in fake.received.values())
    assert (first.temperature, first.top_k, first.seed, first.min_p) == (0.2, 3, 9, 0.1)
    assert first.stop == ("END",)
    assert first.logit_bias == ((65, -100.0),)
    assert first.max_tokens is None
    assert (second.temperature, second.max_tokens) == (0, 5)


async def test_without_any_default_the_temperature_is_one() -> None:
    fake = FakeEngine()
    async with open_client(fake) as client:
        await client.post(PATH, json=CHAT)
    (request,) = fake.received.values()
    assert request.params.temperature == 1.0


async def test_text_parts_and_developer_messages_are_understood() -> None:
    fake = FakeEngine()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}]
    async with open_client(fake) as client:
        body = {"messages": messages, "add_generation_prompt": False}
        assert (await client.post(PATH, json=body)).status_code == 200
    (request,) = fake.received.values()
    assert bytes(request.prompt_token_ids).decode() == "<system>d<user>a\nb"


async def test_an_answer_can_be_sent_back_as_part_of_the_next_request() -> None:
    async with open_client() as client:
        message = (await client.post(PATH, json=CHAT)).json()["choices"][0]["message"]
        message |= {"tool_calls": None, "function_call": None, "annotations": []}
        messages = [*CHAT["messages"], message, *CHAT["messages"]]
        response = await client.post(PATH, json={"messages": messages})
    assert response.status_code == 200, response.text
