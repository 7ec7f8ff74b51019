"""The load generator against a scripted server: what is stamped, counted and kept."""

from __future__ import annotations

import asyncio

import pytest

from forerun.bench.client.load import Load, LoadGenerator
from forerun.bench.records import RequestRecord
from forerun.errors import ConfigError
from unit.bench.scenario import CONCURRENCY, SCRIPTS, SPECULATION
from unit.bench.scripted_server import (
    Script,
    ScriptedServer,
    VirtualClock,
    as_event,
    make_endpoint,
    make_event,
    make_rows,
    play_scripts,
)

DONE = make_event(1, finish_reason="stop")


def test_events_are_stamped_with_the_read_that_brought_them() -> None:
    r0, r1, r2, r3 = play_scripts(SCRIPTS, CONCURRENCY)
    assert (r0.sent_s, r0.event_s, r0.event_tokens) == (0.0, [0.5, 0.7, 1.5], [1, 3, 1])
    assert (r1.sent_s, r1.event_s, r1.event_tokens) == (0.0, [1.0, 1.1, 1.1], [1, 2, 2])
    assert (r2.sent_s, r2.event_s, r2.event_tokens) == (1.1, [3.1, 3.5], [2, 2])
    assert (r3.sent_s, r3.event_s, r3.end_s) == (1.5, [1.6], 1.8)


def test_a_place_that_becomes_free_is_the_intent_of_the_next_request() -> None:
    records = play_scripts(SCRIPTS, CONCURRENCY)
    assert [record.intent_s for record in records] == [0.0, 0.0, 1.1, 1.5]
    assert [record.ready_s for record in records] == [0.0, 0.0, 1.1, 1.5]


def test_a_record_holds_usage_finish_reason_and_speculation() -> None:
    r0 = play_scripts(SCRIPTS, CONCURRENCY)[0]
    assert (r0.prompt_tokens, r0.cached_tokens, r0.output_tokens) == (10, 4, 5)
    assert (r0.finish_reason, r0.token_source, r0.error) == ("stop", "token_ids", None)
    assert r0.speculation == SPECULATION


def test_a_hang_up_is_an_error_and_keeps_what_had_come() -> None:
    r3 = play_scripts(SCRIPTS, CONCURRENCY)[3]
    assert r3.error == "the server closed the connection"
    assert r3.event_tokens == [1]


def test_open_loop_keeps_the_intent_while_all_places_are_taken() -> None:
    scripts = [Script.of_events((1.0, DONE)), Script.of_events((1.0, DONE))]
    _, second = play_scripts(scripts, concurrency=1, arrivals_s=[0.0, 0.25])
    assert (second.intent_s, second.ready_s, second.sent_s) == (0.25, 1.25, 1.25)


def test_an_error_status_and_an_error_event_name_the_servers_message() -> None:
    body = b'{"error": {"message": "queue is full"}}'
    refusal = b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    failure = as_event({"error": {"message": "engine died"}})
    scripts = [Script([(0.1, refusal)]), Script.of_events((0.1, failure))]
    refused, failed = play_scripts(scripts, concurrency=1)
    assert refused.error == "HTTP 503: queue is full"
    assert failed.error == "engine died"


def test_a_stream_that_stops_early_is_no_success() -> None:
    (record,) = play_scripts(
        [
            Script(
                [(0.1, Script.of_events((0, make_event(1)), ends=False).steps[0][1] + b"0\r\n\r\n")]
            )
        ],
        concurrency=1,
    )
    assert record.error == "the stream ended before a finish reason"


def test_a_plain_answer_is_not_taken_for_a_stream() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
    (record,) = play_scripts([Script([(0.1, answer)])], concurrency=1)
    assert record.error == "no event stream came back: b'hello'"


def test_a_dead_server_fails_the_rest_and_keeps_the_finished() -> None:
    async def play() -> list[RequestRecord]:
        clock = VirtualClock()
        server = ScriptedServer([Script.of_events((0.5, DONE))], clock, concurrency=1)
        listener, base_url = await server.start()
        records: list[RequestRecord] = []

        def on_finished(record: RequestRecord) -> None:
            records.append(record)
            listener.close()
            for transport in transports:
                transport.abort()

        transports = []
        schedule = server._schedule

        def spy(writer: asyncio.StreamWriter) -> None:
            transports.append(writer.transport)
            if len(transports) == 1:
                schedule(writer)

        server._schedule = spy
        load = Load(max_concurrency=1)
        generator = LoadGenerator(make_endpoint(base_url), load, on_finished, clock=clock)
        await asyncio.gather(server.play(), generator.run(make_rows(3)))
        return records

    first, *rest = asyncio.run(play())
    assert first.error is None
    assert len(rest) == 2
    assert all(record.error is not None for record in rest)


def test_a_request_without_an_end_is_given_up() -> None:
    async def play() -> list[RequestRecord]:
        async def ignore(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
            await asyncio.Event().wait()

        listener = await asyncio.start_server(ignore, "127.0.0.1", 0)
        base_url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        records: list[RequestRecord] = []
        load = Load(max_concurrency=1, timeout_s=0.01)
        await LoadGenerator(make_endpoint(base_url), load, records.append).run(make_rows(1))
        listener.close()
        return records

    (record,) = asyncio.run(play())
    assert record.error == "no end after 0.01 s"


def test_a_failing_listener_ends_the_load_with_its_own_error() -> None:
    def refuse(_record: RequestRecord) -> None:
        raise ConfigError("disk full")

    async def play() -> None:
        clock = VirtualClock()
        server = ScriptedServer([Script.of_events((0.5, DONE))], clock, concurrency=1)
        listener, base_url = await server.start()
        generator = LoadGenerator(
            make_endpoint(base_url), Load(max_concurrency=1), refuse, clock=clock
        )
        async with listener:
            await asyncio.gather(server.play(), generator.run(make_rows(1)))

    with pytest.raises(ConfigError, match="disk full"):
        asyncio.run(play())


def test_connections_are_used_again() -> None:
    async def play() -> int:
        clock = VirtualClock()
        server = ScriptedServer([Script.of_events((0.1, DONE))] * 5, clock, concurrency=1)
        peers = set()
        schedule = server._schedule

        def spy(writer: asyncio.StreamWriter) -> None:
            peers.add(writer.get_extra_info("peername"))
            schedule(writer)

        server._schedule = spy
        listener, base_url = await server.start()
        generator = LoadGenerator(
            make_endpoint(base_url), Load(max_concurrency=1), lambda _: None, clock=clock
        )
        async with listener:
            await asyncio.gather(server.play(), generator.run(make_rows(5)))
        return len(peers)

    assert asyncio.run(play()) == 1
