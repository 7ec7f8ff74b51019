"""The real openai client against a real uvicorn on a free port; the engine is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import openai
import pytest

from fake_engine import FakeEngine, Script, make_context
from forerun.commands.serve import HttpServer, StopSignals, bind_socket, listen, serve_http
from forerun.config import ServerConfig
from forerun.errors import RequestError
from forerun.server.app import build_app
from forerun.transport.async_engine import AsyncEngine

TEXT = "Caf\u00e9 \u4f60\u597d \U0001f600"


class RunningServer:
    """A server on a thread of its own. `signal` does what SIGTERM does to the real one."""

    def __init__(self, fake: FakeEngine) -> None:
        self.fake = fake
        self.exit_code: int | None = None
        self._is_listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> RunningServer:
        self._thread.start()
        assert self._is_listening.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.signal()
            self.signal()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def signal(self) -> None:
        """Deliver one stop signal."""
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self._loop.call_soon_threadsafe(self._signals.on_signal)

    def join(self) -> int | None:
        """Wait for the server to end and return its exit code."""
        self._thread.join(30)
        return self.exit_code

    def client(self, **options) -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key="secret", max_retries=0, **options)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._signals = StopSignals()
        engine = AsyncEngine(lambda: self.fake)
        await engine.start()
        config = ServerConfig(port=0)
        with contextlib.closing(bind_socket(config)) as listener:
            listen(listener, config)
            self.port = listener.getsockname()[1]
            app = build_app(make_context(engine, api_key="secret"))
            http = HttpServer(app, self._is_listening.set)
            self.exit_code = await serve_http(http, engine, listener, self._signals, 30.0)
        await engine.shutdown()


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with RunningServer(FakeEngine(Script((TEXT, "second")))) as running:
        yield running


def ask(client: openai.OpenAI, **options):
    messages = [{"role": "user", "content": "hi"}]
    return client.chat.completions.create(model="fake", messages=messages, **options)


def test_whole_and_streamed_answers_agree(server) -> None:
    client = server.client()
    whole = ask(client, n=2, seed=1)
    chunks = list(ask(client, n=2, stream=True, stream_options={"include_usage": True}))
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices] == [TEXT, "second"]
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == len(TEXT.encode()) + 1 + 7


def test_logprobs_and_text_completions_parse(server) -> None:
    client = server.client()
    chat = ask(client, logprobs=True, top_logprobs=1)
    assert "".join(e.token for e in chat.choices[0].logprobs.content[:3]) == "Caf"
    text = client.completions.create(model="fake", prompt=["a", "b"], logprobs=1, max_tokens=3)
    assert [choice.text for choice in text.choices] == ["Caf", "Caf"]
    assert text.choices[0].logprobs.text_offset == [0, 1, 2]
    assert text.choices[1].finish_reason == "length"


def test_errors_arrive_as_the_clients_own_exceptions(server) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError) as info:
        ask(client, temperature=-1)
    assert info.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        ask(server.client().with_options(api_key="wrong"))
    server.fake.refusal = RequestError("full", status=503, code="queue_full", retry_after_s=3)
    with pytest.raises(openai.InternalServerError) as full:
        ask(client, stream=True)
    assert full.value.status_code == 503
    assert full.value.response.headers["retry-after"] == "3"


def test_a_failure_in_mid_stream_raises_in_the_client(server) -> None:
    server.fake.script = Script(("part",), fails_with=RequestError("broken", status=500))
    received = ""
    with pytest.raises(openai.APIError, match="broken"):  # noqa: PT012 - the loop is what raises
        for chunk in ask(server.client(), stream=True):
            received += chunk.choices[0].delta.content or ""
    assert received == "pa"


def test_closing_a_stream_aborts_its_request(server) -> None:
    server.fake.script = Script(("xy",), holds=True)
    stream = ask(server.client(), stream=True)
    assert any(chunk.choices[0].delta.content for chunk in stream_until_text(stream))
    stream.close()
    server.fake.wait_until(lambda fake: fake.aborted_ids == list(fake.received))


def ask_until_refused(server: RunningServer) -> None:
    """Send requests: those that come before the signal took effect are still served."""
    while True:
        with ask(server.client(), stream=True):
            pass


def stream_until_text(stream) -> Iterator:
    for chunk in stream:
        yield chunk
        if chunk.choices[0].delta.content:
            return


def test_many_requests_at_once_get_their_own_answers(server) -> None:
    server.fake.scripts = {f"<{i}>": Script((f"answer {i}",)) for i in range(32)}

    async def main() -> list[str]:
        client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="secret", max_retries=0
        )

        async def one(i: int) -> str:
            messages = [{"role": "user", "content": f"<{i}>"}]
            stream = await client.chat.completions.create(
                model="fake", messages=messages, stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        async with client:
            return await asyncio.gather(*(one(i) for i in range(32)))

    assert asyncio.run(main()) == [f"answer {i}" for i in range(32)]
    assert len(server.fake.received) == 32


def test_a_stop_signal_finishes_what_runs_and_refuses_what_comes() -> None:
    fake = FakeEngine(Script(("xy",), holds=True))
    with RunningServer(fake) as server, server.client() as client:
        stream = ask(client, stream=True)
        list(stream_until_text(stream))
        server.signal()
        with pytest.raises(openai.InternalServerError, match="shutting down") as info:
            ask_until_refused(server)
        assert info.value.status_code == 503
        fake.release()
        assert [c.choices[0].finish_reason for c in stream][-1] == "stop"
        assert server.join() == 0


def test_a_second_stop_signal_ends_at_once() -> None:
    fake = FakeEngine(Script(("xy",), holds=True))
    with RunningServer(fake) as server, server.client() as client:
        stream = ask(client, stream=True)
        list(stream_until_text(stream))
        server.signal()
        server.signal()
        with pytest.raises(openai.APIError):
            list(stream)
        assert server.join() == 1
