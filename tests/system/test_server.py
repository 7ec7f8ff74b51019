"""The real server on the default model: a storm of streams, shutdown, a killed engine, bad input.

Everything here talks HTTP to `forerun serve` in processes of its own, in float32 with a KV pool
small enough that requests are preempted and prefixes evicted. Nothing measures time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest

from system.server_process import ServerProcess, wait_until
from system.server_traffic import (
    MODEL,
    NUM_ABORTED_TOKENS,
    STOPS,
    Case,
    Reply,
    ask,
    build_cases,
    make_client,
    stream,
)

pytestmark = pytest.mark.network

OPTIONS = (
    *("--dtype", "float32", "--kv-cache-memory", "128M"),
    *("--max-num-seqs", "32", "--max-waiting-requests", "96"),
)
ENDLESS: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 2000,
    "ignore_eos": True,
}
PREFIX = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 4


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server for the whole module; it must end well after everything that was done to it."""
    with ServerProcess(*OPTIONS) as running:
        yield running
        running.wait_idle()
        running.terminate()
        assert running.wait() == 0, running.log
        assert not running.has_engine
        assert "Traceback" not in running.log


def test_half_of_64_streams_can_vanish_without_a_trace(server) -> None:
    prefix_text, _ = ask_prefix(server)
    assert ask_prefix(server)[0] == prefix_text
    cases = build_cases()
    replies = asyncio.run(send(server, stream, cases))
    server.wait_idle()
    kept = [(c, r) for c, r in zip(cases, replies, strict=True) if c.abort_after is None]
    assert len(kept) == 32
    check_aborts(server, cases, kept)
    for case, reply in kept:
        check_stream(case, reply)
        check_text(server, case, reply)
    check_variety(kept)
    check_repeats(server, [(c, r) for c, r in kept if c.kind != "unseeded"])
    server.wait_idle()
    assert ask_prefix(server)[0] == prefix_text
    text, num_cached = ask_prefix(server)
    assert text == prefix_text
    assert num_cached > 0
    server.http.post("/reset_prefix_cache").raise_for_status()
    assert ask_prefix(server) == (prefix_text, 0)


async def send(server: ServerProcess, sender: Any, cases: Sequence[Case]) -> list[Reply]:
    """Send all cases at once."""
    async with make_client(server.url) as client:
        return await asyncio.gather(*(sender(client, case) for case in cases))


def ask_prefix(server: ServerProcess) -> tuple[str, int]:
    """Return the greedy continuation of a long prompt, and how much of that was cached."""
    body = {"prompt": PREFIX, "max_tokens": 8, "temperature": 0}
    answer = server.http.post("/v1/completions", json=body).raise_for_status().json()
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], cached


def check_aborts(
    server: ServerProcess, cases: Sequence[Case], kept: Sequence[tuple[Case, Reply]]
) -> None:
    """Every choice that was cut off counts as aborted, and was not computed to its end."""
    num_choices = sum(case.num_choices for case in cases if case.abort_after is not None)
    metrics = server.metrics()
    assert metrics["vllm:request_success_total/abort"] == num_choices
    num_kept_tokens = sum(reply.usage.completion_tokens for _, reply in kept)
    num_wasted = metrics["forerun:committed_tokens_total"] - num_kept_tokens
    assert num_wasted < num_choices * NUM_ABORTED_TOKENS / 2


def check_stream(case: Case, reply: Reply) -> None:
    """Every choice ended once, the stream said so, and the counts agree."""
    assert reply.tail.endswith(b"data: [DONE]\n\n")
    num_tokens = 0
    for answer in reply.answers:
        assert answer.finish_reasons in (["stop"], ["length"])
        is_full = len(answer.token_ids) == case.options["max_tokens"]
        assert is_full or answer.finish_reasons == ["stop"]
        wants_logprobs = case.kind == "logprobs"
        assert len(answer.logprobs) == (len(answer.token_ids) if wants_logprobs else 0)
        num_tokens += len(answer.token_ids)
    assert reply.usage.completion_tokens == num_tokens


def check_text(server: ServerProcess, case: Case, reply: Reply) -> None:
    """The text is that of the tokens decoded at once, cut before the first stop string."""
    for answer in reply.answers:
        is_eos = answer.finish_reasons == ["stop"] and answer.stop_reason is None
        tokens = answer.token_ids[:-1] if is_eos else answer.token_ids
        decoded = server.http.post("/detokenize", json={"tokens": tokens})
        whole = decoded.raise_for_status().json()["prompt"]
        cuts = {whole.find(text): text for text in case.options.get("stop", ()) if text in whole}
        if answer.stop_reason is not None:
            assert cuts
            assert answer.stop_reason == cuts[min(cuts)]
        assert answer.text == whole[: min(cuts, default=None)]


def check_variety(kept: Sequence[tuple[Case, Reply]]) -> None:
    """The storm was one: foreign scripts came out, stops were hit, two choices differ."""
    answers = [answer for _, reply in kept for answer in reply.answers]
    assert sum(not answer.text.isascii() for answer in answers) >= 8
    assert {answer.stop_reason for answer in answers} & set(STOPS)
    pairs = [reply.answers for case, reply in kept if case.kind == "choices"]
    assert any(first.text != second.text for first, second in pairs)


def check_repeats(server: ServerProcess, streamed: Sequence[tuple[Case, Reply]]) -> None:
    """The same requests at once and not streamed: the same answers, and every token counted."""
    before = server.metrics()
    replies = asyncio.run(send(server, ask, [case for case, _ in streamed]))
    after = server.metrics()
    for (case, first), second in zip(streamed, replies, strict=True):
        for one, other in zip(first.answers, second.answers, strict=True):
            other.logprobs = one.logprobs = []  # equal up to rounding, which tokens settle
            assert other == one, case
    num_tokens = sum(reply.usage.completion_tokens for reply in replies)
    for name in ("forerun:committed_tokens_total", "vllm:generation_tokens_total"):
        assert after[name] - before[name] == num_tokens
    # Adaptive verification may find no draft worth its time in either round, not in both.
    assert after["forerun:accepted_tokens_total"] > 0


def test_a_client_that_gives_up_waiting_frees_its_blocks(server) -> None:
    before = server.metrics()
    impatient = httpx.Timeout(240.0, read=1.0)
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=ENDLESS, timeout=impatient)
    server.wait_idle()
    after = server.metrics()
    name = "vllm:request_success_total/abort"
    assert after[name] == before.get(name, 0) + 1
    name = "forerun:committed_tokens_total"
    assert after[name] - before[name] < ENDLESS["max_tokens"]


def test_a_full_queue_refuses_with_retry_after(server) -> None:
    error = asyncio.run(overfill(server))
    assert error.status_code == 503
    assert error.code == "queue_full"
    assert error.response.headers["retry-after"] == "1"
    server.wait_idle()


async def overfill(server: ServerProcess) -> openai.APIStatusError:
    """Take every seat and every place in the queue, and return what the next request gets."""
    async with make_client(server.url) as client:
        endless = {"model": MODEL, "prompt": "a", "max_tokens": 2000}
        endless["extra_body"] = {"ignore_eos": True}
        async with await client.completions.create(**endless, n=32, stream=True) as running:
            seated = set()
            while len(seated) < 32:
                seated.add((await anext(running)).choices[0].index)
            queued = asyncio.create_task(client.completions.create(**endless, n=96))
            is_full = lambda: server.metrics()["vllm:num_requests_waiting"] >= 96  # noqa: E731
            await asyncio.to_thread(wait_until, is_full, "the queue to fill")
            with pytest.raises(openai.InternalServerError) as info:
                await client.completions.create(model=MODEL, prompt="one too many")
            queued.cancel()
            await asyncio.gather(queued, return_exceptions=True)
        return info.value


def test_sigterm_finishes_what_runs_and_refuses_what_comes() -> None:
    body = {**ENDLESS, "max_tokens": 48, "stream": True, "return_token_ids": True}
    with ServerProcess(*OPTIONS) as server:
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            received = [next(lines)]
            server.terminate()
            refusal = ask_until_refused(server)
            assert server.http.get("/ready").status_code == 503
            received += lines
        assert refusal.status_code == 503
        assert refusal.json()["error"]["code"] == "shutting_down"
        assert int(refusal.headers["Retry-After"]) > 0
        choices = [choice for event in read_events(received) for choice in event["choices"]]
        assert sum(len(choice["token_ids"]) for choice in choices) == 48
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]
        assert received[-2:] == ["data: [DONE]", ""]
        assert server.wait() == 0
        assert not server.has_engine


def ask_until_refused(server: ServerProcess) -> httpx.Response:
    """Send requests until one fails: those that come before the signal are still served."""
    while True:
        answer = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        if answer.status_code != 200:
            return answer


def read_events(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return the JSON events of a stream."""
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_without_its_engine_the_server_answers_503_until_it_is_told_to_stop() -> None:
    with ServerProcess(*OPTIONS) as server:
        body = {**ENDLESS, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            received = [next(lines)]
            os.kill(server.engine_pid, signal.SIGKILL)
            received += lines
        assert read_events(received)[-1]["error"]["code"] == "engine_died"
        assert "data: [DONE]" not in received
        assert server.http.get("/ready").status_code == 503
        health = server.http.get("/health")
        assert health.status_code == 503
        assert "killed by SIGKILL" in health.json()["error"]["message"]
        refusal = server.http.post("/v1/completions", json={"prompt": "a"})
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "engine_died")
        server.terminate()
        assert server.wait() == 1
        assert not server.has_engine


CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
BAD_REQUESTS = [
    (TEXT, b"{", None, "not valid JSON"),
    (TEXT, b"", None, "not valid JSON"),
    (TEXT, b'{"prompt": "\xff"}', None, "not valid JSON"),
    (TEXT, b'{"prompt": "\\ud83d"}', None, "not valid JSON"),
    (TEXT, b'{"prompt": "a", "temperature": NaN}', None, "not valid JSON"),
    (TEXT, b"[" * 10_000, None, "not valid JSON"),
    (TEXT, [1], None, "JSON object"),
    (TEXT, {}, "prompt", "missing"),
    (TEXT, {"prompt": ""}, "prompt", "empty"),
    (TEXT, {"prompt": []}, "prompt", "empty"),
    (TEXT, {"prompt": ["a", ""]}, "prompt", "empty"),
    (TEXT, {"prompt": 7}, "prompt", "must be a string"),
    (TEXT, {"prompt": [1, "a"]}, "prompt", "must be a string"),
    (TEXT, {"prompt": [0, 49152]}, "prompt", "ids are 0..49151"),
    (TEXT, {"prompt": [-1]}, "prompt", "ids are 0..49151"),
    (TEXT, {"prompt": [10**30]}, "prompt", "ids are 0..49151"),
    (TEXT, {"prompt": "word " * 9000}, "prompt", "the context is 8192"),
    (TEXT, {"prompt": "a", "max_tokens": 9000}, "max_tokens", "the context is 8192"),
    (TEXT, {"prompt": "a", "max_tokens": 4000}, "max_tokens", "(251 blocks)"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens", "must be in [1"),
    (TEXT, {"prompt": "a", "max_tokens": 10**30}, "max_tokens", "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": "8"}, "max_tokens", "integer"),
    (TEXT, {"prompt": "a", "max_tokens": True}, "max_tokens", "integer"),
    (TEXT, {"prompt": "a", "min_tokens": 17}, "min_tokens", "must not exceed"),
    (TEXT, {"prompt": "a", "temperature": -0.1}, "temperature", "must be in [0"),
    (TEXT, {"prompt": "a", "top_p": 0}, "top_p", "must be in (0"),
    (TEXT, {"prompt": "a", "top_k": -2}, "top_k", "must be in [-1"),
    (TEXT, {"prompt": "a", "min_p": 1.5}, "min_p", "must be in [0"),
    (TEXT, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "must be in (0"),
    (TEXT, {"prompt": "a", "presence_penalty": 3}, "presence_penalty", "must be in [-2"),
    (TEXT, {"prompt": "a", "frequency_penalty": -3}, "frequency_penalty", "must be in [-2"),
    (TEXT, {"prompt": "a", "logit_bias": {"49152": 1}}, "logit_bias", "ids are 0..49151"),
    (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "keys are token ids"),
    (TEXT, {"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias", "must be in [-100"),
    (TEXT, {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids", "ids are 0..49151"),
    (TEXT, {"prompt": "a", "stop": ["x"] * 17}, "stop", "at most 16"),
    (TEXT, {"prompt": "a", "stop": ""}, "stop", "empty"),
    (TEXT, {"prompt": "a", "n": 0}, "n", "must be in [1"),
    (TEXT, {"prompt": "a", "n": 129}, "n", "must be in [1"),
    (TEXT, {"prompt": "a", "seed": 2**63}, "seed", "seed"),
    (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs", "must be in [0"),
    (TEXT, {"prompt": "a", "best_of": 2}, "best_of", "must equal n"),
    (TEXT, {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    (TEXT, {"prompt": "a", "max_token": 1}, "max_token", "did you mean 'max_tokens'?"),
    (TEXT, {"prompt": "a", "stream_options": {}}, "stream_options", "stream"),
    (CHAT, {"messages": []}, "messages", "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "content"),
    (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role", "'user'"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    (CHAT, {"messages": HI, "tools": [{}]}, "tools", "not supported"),
    (CHAT, {"messages": HI, "max_completion_tokens": 8192}, "max_completion_tokens", "8192"),
    ("/tokenize", {}, "prompt", "prompt or messages"),
    ("/detokenize", {"tokens": [49152]}, "tokens", "ids are 0..49151"),
]


@pytest.mark.parametrize(("path", "body", "param", "said"), BAD_REQUESTS)
def test_a_bad_request_is_refused_by_name(server, path, body, param, said) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.http.post(path, content=content)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert said in error["message"]


def test_without_max_tokens_a_context_larger_than_the_pool_is_no_obstacle(server) -> None:
    answer = server.http.post(CHAT, json={"messages": HI, "temperature": 0, "stop": ["."]})
    assert answer.raise_for_status().json()["choices"][0]["finish_reason"] == "stop"


def test_what_does_not_exist_is_not_found(server) -> None:
    answers = [
        server.http.post(CHAT, json={"messages": HI, "model": "gpt-5"}),
        server.http.get("/v1/models/gpt-5"),
        server.http.get("/v1/nothing"),
    ]
    assert [answer.status_code for answer in answers] == [404] * 3
    errors = [answer.json()["error"] for answer in answers]
    assert [error["param"] for error in errors] == ["model", "model", None]
    assert server.http.get(CHAT).status_code == 405
