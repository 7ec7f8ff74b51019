"""The small endpoints, and what a client that hangs up leaves behind."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

import forerun
from fake_engine import (
    FakeEngine,
    Script,
    make_context,
    open_client,
    open_engine,
)
from forerun.server.app import build_app

pytestmark = pytest.mark.anyio


async def test_models_can_be_listed_and_looked_up() -> None:
    async with open_client() as client:
        listed = (await client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["fake"]
        assert listed["data"][0]["max_model_len"] == 200
        assert (await client.get("/v1/models/fake")).json() == listed["data"][0]
        assert (await client.get("/v1/models/some/other")).status_code == 404


async def test_server_info_tells_what_the_engine_said() -> None:
    async with open_client() as client:
        info = (await client.get("/server_info")).json()
    assert info["policy"] == "fixed"
    assert info["version"] == forerun.__version__


async def test_health_and_readiness_follow_the_engine() -> None:
    fake = FakeEngine()
    async with open_engine(fake) as engine:
        app = build_app(make_context(engine))
        async with open_asgi(app) as client:
            assert (await client.get("/ready")).status_code == 200
            await engine.shutdown()
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200


async def test_health_is_503_once_the_engine_died() -> None:
    fake = FakeEngine(Script(("x",), holds=True))
    body = {"prompt": "hi"}
    async with open_client(fake) as client:
        waiting = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await asyncio.to_thread(fake.wait_until, lambda f: f.received)
        fake.die("killed by SIGKILL")
        response = await waiting
        assert response.status_code == 500
        assert "engine died: killed by SIGKILL" in response.json()["error"]["message"]
        health = await client.get("/health")
        assert health.status_code == 503
        assert "killed by SIGKILL" in health.json()["error"]["message"]
        assert (await client.post("/v1/completions", json=body)).status_code == 503


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with open_client() as client:
        body = {"prompt": "h\u00e9", "return_token_strs": True}
        answer = (await client.post("/tokenize", json=body)).json()
        assert answer["tokens"] == [257, 104, 0xC3, 0xA9]
        assert answer["count"] == 4
        assert answer["token_strs"][:2] == ["<bos>", "h"]
        back = (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json()
        assert back == {"prompt": "<bos>h\u00e9"}
        messages = [{"role": "user", "content": "x"}]
        chat = (await client.post("/tokenize", json={"messages": messages})).json()
        assert bytes(chat["tokens"]).decode() == "<user>x<assistant>"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
    ],
)
async def test_token_endpoints_refuse_by_name(path, body, param) -> None:
    async with open_client() as client:
        response = await client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_reset_prefix_cache_reaches_the_engine() -> None:
    fake = FakeEngine()
    async with open_client(fake) as client:
        assert (await client.post("/reset_prefix_cache")).status_code == 200
        await asyncio.to_thread(fake.wait_until, lambda f: f.num_resets == 1)


async def test_the_clients_request_id_is_logged_with_ours() -> None:
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("forerun.server.generation")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        async with open_client() as client:
            headers = {"X-Request-Id": "abc\n123"}
            answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert lines == [f"request {answer.json()['id']} is X-Request-Id 'abc\\n123'"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_aborts_its_request(stream) -> None:
    fake = FakeEngine(Script(("xy",), holds=True))
    async with open_engine(fake) as engine:
        app = build_app(make_context(engine))
        body = {"prompt": ["a", "b"], "stream": stream}
        sent = await hang_up_after(app, fake, body, num_requests=2)
        await asyncio.to_thread(fake.wait_until, lambda f: len(f.aborted_ids) == 2)
        assert sorted(fake.aborted_ids) == sorted(fake.received)
        assert ("200" in sent) == stream
        metrics = app.state.context.metrics.render().decode()
        assert (
            'vllm:request_success_total{finished_reason="abort",model_name="fake"} 2.0' in metrics
        )


async def test_a_client_that_hangs_up_before_the_first_token_aborts_too() -> None:
    fake = FakeEngine(Script(("",), holds=True))
    async with open_engine(fake) as engine:
        app = build_app(make_context(engine))
        sent = await hang_up_after(app, fake, {"prompt": "a", "stream": True}, num_requests=1)
        await asyncio.to_thread(fake.wait_until, lambda f: len(f.aborted_ids) == 1)
        assert "200" not in sent


def open_asgi(app):
    import httpx

    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


async def hang_up_after(app, fake: FakeEngine, body: dict, *, num_requests: int) -> list[str]:
    """Post a completion and disconnect once its requests run; return the statuses sent."""
    sent: list[str] = []
    is_streaming = asyncio.Event()
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict:
        if messages:
            return messages.pop(0)
        await asyncio.to_thread(fake.wait_until, lambda f: len(f.received) == num_requests)
        if body["stream"] and fake.script.texts != ("",):
            await is_streaming.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        if message["type"] == "http.response.start":
            sent.append(str(message["status"]))
        elif b"xy" in message["body"]:
            is_streaming.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"content-type", b"application/json")],
        "server": ("test", 80),
        "client": ("test", 1),
    }
    await app(scope, receive, send)
    return sent


async def test_a_wrong_method_is_told_the_right_one() -> None:
    async with open_client() as client:
        response = await client.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["message"] == "GET /v1/completions: Method Not Allowed"
