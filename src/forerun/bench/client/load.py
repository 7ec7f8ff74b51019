"""The load: sends every row when its time has come and a place is free, and records what came back.

Places are a queue of the times at which they became free, so a record tells how long the client
itself took to fill one. Streams are read by `connection`; they are taken apart here after their
last byte, one answer at a time and a few events per turn, so that no other stream waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from forerun.bench.client.connection import Clock, ConnectionPool, Reply
from forerun.bench.client.endpoint import Endpoint
from forerun.bench.client.stream import Answer, AnswerReader, describe_refusal, iter_events
from forerun.bench.records import RequestRecord
from forerun.bench.workload import Row
from forerun.errors import ConfigError

_EVENTS_PER_TURN = 16

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """How requests arrive. Without `arrivals_s` each is due as soon as a place is free."""

    max_concurrency: int | None = None
    arrivals_s: Sequence[float] | None = None
    timeout_s: float = 3600.0


class LoadGenerator:
    """Runs one load. Finished records go to `on_finished` at once, so an interrupt loses none."""

    def __init__(
        self,
        endpoint: Endpoint,
        load: Load,
        on_finished: Callable[[RequestRecord], None],
        *,
        clock: Clock = time.perf_counter,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._endpoint = endpoint
        self._load = load
        self._on_finished = on_finished
        self._clock = clock
        self._sleep = sleep
        self._start_s = 0.0
        self._places: asyncio.Queue[float] | None = None
        self._reading = asyncio.Lock()
        self._pool = ConnectionPool(endpoint.base_url, clock)

    async def run(self, rows: Sequence[Row]) -> None:
        """Send every row and wait for the last answer."""
        requests = [self._endpoint.build_request(row, index) for index, row in enumerate(rows)]
        self._start_s = self._clock()
        if self._load.max_concurrency is not None:
            self._places = asyncio.Queue()
            for _ in range(self._load.max_concurrency):
                self._places.put_nowait(self._start_s)
        try:
            async with asyncio.TaskGroup() as tasks:
                for index, row in enumerate(rows):
                    intent_s = await self._wait_due(index)
                    tasks.create_task(self._run_one(row, requests[index], intent_s))
        except* ConfigError as group:
            raise group.exceptions[0] from None
        finally:
            self._pool.close()

    async def _wait_due(self, index: int) -> float | None:
        """Return the intended time of an open-loop request once it has come."""
        if self._load.arrivals_s is None:
            return None
        intent_s = self._start_s + self._load.arrivals_s[index]
        delay_s = intent_s - self._clock()
        if delay_s > 0:
            await self._sleep(delay_s)
        return intent_s

    async def _run_one(self, row: Row, request: bytes, intent_s: float | None) -> None:
        free_s = self._start_s if self._places is None else await self._places.get()
        intent_s = free_s if intent_s is None else intent_s
        reply = await self._pool.exchange(request, self._load.timeout_s)
        if self._places is not None:
            self._places.put_nowait(reply.end_s)
        async with self._reading:
            answer = await read_answer(reply)
        times = {"intent_s": intent_s, "ready_s": max(intent_s, free_s)}
        times |= {"sent_s": reply.sent_s, "end_s": reply.end_s}
        self._on_finished(self._build_record(row, times, answer))

    def _build_record(self, row: Row, times: dict[str, float], answer: Answer) -> RequestRecord:
        return RequestRecord(
            request_id=row.row_id,
            category=row.category,
            max_tokens=row.max_tokens,
            **{name: self._to_run_time(value) for name, value in times.items()},
            event_s=[self._to_run_time(value) for value in answer.event_s],
            event_tokens=answer.event_tokens,
            token_source=answer.token_source,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            finish_reason=answer.finish_reason,
            error=answer.error,
            speculation=answer.speculation,
        )

    def _to_run_time(self, now_s: float) -> float:
        return round(now_s - self._start_s, 7)


async def read_answer(reply: Reply) -> Answer:
    """Take a reply apart, giving way to other streams every few events."""
    if reply.status >= 400:
        return Answer(error=describe_refusal(reply.status, reply.read_body()))
    reader = AnswerReader()
    num_events = 0
    for now_s, data in iter_events(reply.pieces):
        reader.add(now_s, data)
        num_events += 1
        if num_events % _EVENTS_PER_TURN == 0:
            await asyncio.sleep(0)
    answer = reader.finish()
    if reply.error is not None:
        answer.error = reply.error
    elif num_events == 0:
        answer.error = f"no event stream came back: {reply.read_body()[:120]!r}"
    return answer
