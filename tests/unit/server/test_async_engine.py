"""AsyncEngine: streams, batching of messages, aborts, death and shutdown."""

from __future__ import annotations

import asyncio

import pytest

from fake_engine import FakeEngine, Script, failed, make_params, open_engine
from forerun.core import RequestOutput
from forerun.engine.messages import LoadingMessage, NewRequest, StepMessage
from forerun.errors import ConfigError, RequestError
from forerun.transport.async_engine import AsyncEngine, EngineStartError

pytestmark = pytest.mark.anyio


async def read_text(stream) -> str:
    return "".join([output.text async for output in stream])


async def wait_until(fake: FakeEngine, is_true) -> None:
    await asyncio.to_thread(fake.wait_until, is_true)


async def test_a_stream_ends_after_its_last_choice() -> None:
    async with open_engine(FakeEngine(Script(("one", "three!")))) as engine:
        texts = {0: "", 1: ""}
        reasons = []
        async for output in engine.submit("a", [1], make_params(n=2)):
            texts[output.choice_index] += output.text
            reasons.append(output.finish_reason)
        assert texts == {0: "one", 1: "three!"}
        assert [reason for reason in reasons if reason] == ["stop", "stop"]


async def test_requests_that_arrive_during_a_send_travel_in_one_message() -> None:
    fake = FakeEngine()
    async with open_engine(fake) as engine:
        streams = [engine.submit(f"r{i}", [1], make_params()) for i in range(20)]
        await asyncio.gather(*(read_text(stream) for stream in streams))
        assert [len(m.new_requests) for m in fake.sent] == [20]


async def test_prompts_submitted_together_share_a_stream() -> None:
    requests = [
        NewRequest(request_id=name, prompt_token_ids=[1], params=make_params()) for name in "ab"
    ]
    async with open_engine(FakeEngine(Script(("xy",)))) as engine:
        seen = [output.request_id async for output in engine.submit_all(requests)]
        assert sorted(set(seen)) == ["a", "b"]


async def test_abort_ends_the_stream_and_reaches_the_engine() -> None:
    fake = FakeEngine(Script(("x",), holds=True))
    async with open_engine(fake) as engine:
        stream = engine.submit("a", [1], make_params())
        assert (await anext(stream)).text == "x"
        engine.abort("a")
        assert [output async for output in stream] == []
        await wait_until(fake, lambda f: f.aborted_ids == ["a"])
        engine.abort("a")
        engine.abort("unknown")
        assert await read_text(engine.submit("b", [1], make_params(max_tokens=1))) == "x"
        assert fake.aborted_ids == ["a"]


async def test_a_request_aborted_before_it_was_sent_never_reaches_the_engine() -> None:
    fake = FakeEngine()
    async with open_engine(fake) as engine:
        stream = engine.submit("a", [1], make_params())
        engine.abort("a")
        assert [output async for output in stream] == []
        await read_text(engine.submit("b", [1], make_params()))
        assert list(fake.received) == ["b"]
        assert fake.aborted_ids == []


async def test_aborting_one_of_two_prompts_leaves_the_other_running() -> None:
    fake = FakeEngine(Script(("x",), holds=True))
    requests = [
        NewRequest(request_id=name, prompt_token_ids=[1], params=make_params()) for name in "ab"
    ]
    async with open_engine(fake) as engine:
        stream = engine.submit_all(requests)
        await wait_until(fake, lambda f: len(f.received) == 2)
        engine.abort("a")
        fake.release()
        ended = [o.request_id async for o in stream if o.finish_reason is not None]
        assert ended == ["b"]


async def test_an_error_output_raises_and_aborts_the_sibling_choices() -> None:
    fake = FakeEngine()
    error = RequestError("no room", status=503, retry_after_s=1)
    async with open_engine(fake) as engine:
        fake.script = Script(("x",), holds=True)
        stream = engine.submit("a", [1], make_params(n=2))
        await anext(stream)
        output = RequestOutput(request_id="a", choice_index=1, error=error)
        fake.say(StepMessage(outputs=[output], stats=fake._count()))
        with pytest.raises(RequestError, match="no room"):
            await read_text(stream)
        await wait_until(fake, lambda f: f.aborted_ids == ["a"])


async def test_the_death_of_the_engine_fails_open_streams_and_later_requests() -> None:
    fake = FakeEngine(Script(("x",), holds=True))
    async with open_engine(fake) as engine:
        stream = engine.submit("a", [1], make_params())
        await anext(stream)
        fake.die("killed by SIGKILL")
        with pytest.raises(RequestError, match="engine died: killed by SIGKILL") as info:
            await read_text(stream)
        assert info.value.status == 500
        assert engine.death == "killed by SIGKILL"
        assert not engine.is_ready
        with pytest.raises(RequestError) as info:
            engine.submit("b", [1], make_params())
        assert info.value.status == 503


async def test_a_fatal_message_after_start_is_a_death() -> None:
    fake = FakeEngine(Script(("x",), holds=True))
    async with open_engine(fake) as engine:
        stream = engine.submit("a", [1], make_params())
        fake.say(failed("out of memory", is_config_error=False))
        with pytest.raises(RequestError, match="engine died: out of memory"):
            await read_text(stream)


async def test_an_unreadable_message_is_a_death() -> None:
    fake = FakeEngine()
    async with open_engine(fake) as engine:
        stream = engine.submit("a", [1], make_params())
        fake._step = None  # calling it raises TypeError, as a broken pickle would
        with pytest.raises(RequestError, match="could not be read: TypeError"):
            await read_text(stream)


@pytest.mark.parametrize(
    ("is_config_error", "kind"), [(True, ConfigError), (False, EngineStartError)]
)
async def test_a_failed_start_raises_what_the_engine_said(is_config_error, kind) -> None:
    message = failed("no such model", is_config_error=is_config_error)
    fake = FakeEngine(first_message=message)
    with pytest.raises(kind, match="no such model"):
        async with open_engine(fake):
            pass


async def test_an_engine_that_ends_while_loading_fails_the_start() -> None:
    fake = FakeEngine(first_message=LoadingMessage(stage="loading weights", done=1, total=2))
    seen = []
    engine = AsyncEngine(lambda: fake, progress=lambda *args: seen.append(args))
    start = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    fake.die("killed by SIGKILL")
    with pytest.raises(EngineStartError, match="killed by SIGKILL"):
        await start
    await engine.shutdown()
    assert seen == [("loading weights", 1, 2)]
    assert fake.is_closed


async def test_shutdown_waits_for_running_requests_and_refuses_new_ones() -> None:
    fake = FakeEngine(Script(("x",), holds=True))
    async with open_engine(fake) as engine:
        stream = engine.submit("a", [1], make_params())
        await anext(stream)
        closing = asyncio.ensure_future(engine.shutdown(60))
        await asyncio.sleep(0)
        with pytest.raises(RequestError) as info:
            engine.submit("b", [1], make_params())
        assert info.value.status == 503
        assert info.value.code == "shutting_down"
        assert not fake.is_closed
        fake.release()
        assert [o.finish_reason async for o in stream] == ["stop"]
        await closing
        assert fake.is_closed


async def test_shutdown_gives_up_on_requests_after_the_drain_timeout() -> None:
    fake = FakeEngine(Script(("x",), holds=True))
    async with open_engine(fake) as engine:
        stream = engine.submit("a", [1], make_params())
        await anext(stream)
        await engine.shutdown(0.01)
        with pytest.raises(RequestError) as info:
            await anext(stream)
        assert info.value.status == 503
        assert fake.sent[-1].shutdown or fake.is_closed


async def test_a_second_shutdown_cuts_the_first_short() -> None:
    fake = FakeEngine(Script(("x",), holds=True))
    async with open_engine(fake) as engine:
        stream = engine.submit("a", [1], make_params())
        await anext(stream)
        closing = asyncio.ensure_future(engine.shutdown(3600))
        await asyncio.sleep(0)
        await engine.shutdown()
        await closing
        assert fake.is_closed


async def test_listeners_get_every_step_message() -> None:
    committed = []
    async with open_engine(FakeEngine(Script(("abc",)))) as engine:
        engine.add_stats_listener(lambda m: committed.append(m.stats.num_committed_tokens))
        outputs = [o async for o in engine.submit("a", [1], make_params())]
        assert sum(committed) == sum(len(o.token_ids) for o in outputs) == 4
