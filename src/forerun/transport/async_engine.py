"""The API process's side of the engine: start it, feed it, hand its outputs to waiting streams.

One message per step each way. A reader thread turns every engine message into one callback on the
event loop; a sender task batches everything said since its last send into one ClientMessage. The
transport is injected: a spawned process behind a pipe, or a scripted engine in tests. No torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from forerun.config import EngineConfig
from forerun.core import RequestOutput, SamplingParams
from forerun.engine.messages import (
    ClientMessage,
    EngineLimits,
    FailedMessage,
    LoadingMessage,
    NewRequest,
    ReadyMessage,
    StepMessage,
)
from forerun.errors import ConfigError, RequestError
from forerun.logs import get_logger
from forerun.transport.pipe import EXIT_GRACE_S, EngineMessage, ProcessTransport, Transport

logger = get_logger(__name__)

StatsListener = Callable[[StepMessage], None]
Progress = Callable[[str, int, int], None]


class EngineStartError(RuntimeError):
    """The engine could not start, and not because of the user's configuration."""


class OutputStream:
    """Outputs of one API request in order of arrival; ends after the last choice finished.

    Owned by the event loop. Raises the RequestError that ended the request, if one did.
    """

    def __init__(self, requests: Sequence[NewRequest]) -> None:
        self.num_open_choices = {r.request_id: r.params.n for r in requests}
        self._queue: asyncio.Queue[RequestOutput | RequestError | None] = asyncio.Queue()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        item = await self._queue.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, RequestError):
            raise item
        return item

    def push(self, output: RequestOutput) -> None:
        """Queue an output; the last one of the last choice ends the stream."""
        self._queue.put_nowait(output)
        if output.finish_reason is not None:
            self.num_open_choices[output.request_id] -= 1
            self._finish_if_complete()

    def drop(self, request_id: str) -> None:
        """Stop waiting for a request."""
        self.num_open_choices[request_id] = 0
        self._finish_if_complete()

    def finish(self, error: RequestError | None = None) -> None:
        """End the stream after what is queued."""
        self._queue.put_nowait(error)

    def _finish_if_complete(self) -> None:
        if not any(self.num_open_choices.values()):
            self.finish()


class AsyncEngine:
    """The engine as the server sees it. All methods run on the event loop that called `start`.

    `_streams` maps every unfinished request id to its stream; several ids may share one. An id
    leaves the map when its choices finished, failed or were aborted; later outputs are dropped.
    """

    def __init__(
        self, connect: Callable[[], Transport], *, progress: Progress | None = None
    ) -> None:
        self._connect = connect
        self._progress = progress
        self._transport: Transport | None = None
        self._ready: asyncio.Future[ReadyMessage] | None = None
        self._sender: asyncio.Task[None] | None = None
        self._pending = ClientMessage()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._streams: dict[str, OutputStream] = {}
        self._listeners: list[StatsListener] = []
        self._death: str | None = None
        self._is_draining = False
        self._is_closing = False

    @classmethod
    def for_config(cls, config: EngineConfig, progress: Progress | None = None) -> AsyncEngine:
        """Build an engine that will run in a process of its own.

        `progress(stage, done, total)` is called while it starts.
        """
        return cls(lambda: ProcessTransport(config), progress=progress)

    @property
    def death(self) -> str | None:
        """Why the engine died, or None."""
        return self._death

    @property
    def is_ready(self) -> bool:
        """Whether a request submitted now would be accepted."""
        return self._is_started and self._death is None and not self._is_draining

    @property
    def limits(self) -> EngineLimits:
        """Limits of the running engine; only after `start`."""
        return self._ready_message.limits

    @property
    def info(self) -> dict[str, object]:
        """The engine's part of /server_info; only after `start`."""
        return self._ready_message.info

    @property
    def _is_started(self) -> bool:
        ready = self._ready
        if ready is None or not ready.done() or ready.cancelled():
            return False
        return ready.exception() is None

    @property
    def _ready_message(self) -> ReadyMessage:
        assert self._ready is not None, "the engine was not started"
        return self._ready.result()

    async def start(self) -> None:
        """Start the engine and wait until it can serve; raises ConfigError or EngineStartError."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._transport = self._connect()
        reader = threading.Thread(
            target=self._read, args=(loop, self._transport), name="engine-reader", daemon=True
        )
        reader.start()
        self._sender = loop.create_task(self._send_batches(self._transport))
        await self._ready

    def add_stats_listener(self, listener: StatsListener) -> None:
        """Call `listener` with every StepMessage, after its outputs were handed out."""
        self._listeners.append(listener)

    def submit(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> OutputStream:
        """Queue one prompt; all its choices share the returned stream."""
        request = NewRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            arrival_s=time.monotonic(),
        )
        return self.submit_all([request])

    def submit_all(self, requests: Sequence[NewRequest]) -> OutputStream:
        """Queue several prompts that share one stream; raises RequestError when not serving."""
        self._check_serving()
        stream = OutputStream(requests)
        for request in requests:
            assert request.request_id not in self._streams, f"{request.request_id} is in use"
            self._streams[request.request_id] = stream
        self._idle.clear()
        self._pending.new_requests.extend(requests)
        self._wake.set()
        return stream

    def abort(self, request_id: str) -> None:
        """Stop a request and end its stream; finished or unknown ids are ignored."""
        stream = self._forget(request_id)
        if stream is None:
            return
        stream.drop(request_id)
        waiting = self._pending.new_requests
        unsent = [r for r in waiting if r.request_id != request_id]
        if len(unsent) < len(waiting):
            self._pending.new_requests = unsent
            return
        self._pending.aborted_ids.append(request_id)
        self._wake.set()

    def reset_prefix_cache(self) -> None:
        """Ask the engine to forget cached prefixes."""
        self._check_serving()
        self._pending.reset_prefix_cache = True
        self._wake.set()

    async def shutdown(self, drain_timeout_s: float = 0.0) -> None:
        """Refuse new requests, wait for running ones, then end the engine. May be repeated."""
        self._is_draining = True
        if self._streams and drain_timeout_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_timeout_s)
        self._fail_all(_shutting_down())
        if self._transport is None or self._is_closing:
            return
        self._is_closing = True
        # An engine still loading would not read the message; a dead one will not answer it.
        grace_s = EXIT_GRACE_S if self._is_started and self._death is None else 0.0
        self._pending.shutdown = True
        self._wake.set()
        await asyncio.to_thread(self._transport.close, grace_s)
        if self._sender is not None:
            self._sender.cancel()

    def _check_serving(self) -> None:
        if self._death is not None:
            raise RequestError(
                f"engine died: {self._death}", status=503, code="engine_died", retry_after_s=30
            )
        if self._is_draining:
            raise _shutting_down()

    def _read(self, loop: asyncio.AbstractEventLoop, transport: Transport) -> None:
        """Hand every engine message to the loop. Runs on the reader thread until the end."""
        is_loop_open = True
        while is_loop_open:
            try:
                message = transport.receive()
            except EOFError:
                _call_on_loop(loop, self._die, transport.describe_exit(), False)
                return
            except Exception as error:  # noqa: BLE001 - an unreadable pipe is a dead engine
                reason = f"its message could not be read: {type(error).__name__}: {error}"
                _call_on_loop(loop, self._die, reason, False)
                return
            is_loop_open = _call_on_loop(loop, self._handle, message)

    async def _send_batches(self, transport: Transport) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            message, self._pending = self._pending, ClientMessage()
            try:
                await asyncio.to_thread(transport.send, message)
            except OSError:
                return  # the reader sees the end of the engine too, and reports it
            if message.shutdown:
                return

    def _handle(self, message: EngineMessage) -> None:
        if isinstance(message, StepMessage):
            self._dispatch(message)
        elif isinstance(message, FailedMessage):
            self._die(message.message, message.is_config_error)
        elif isinstance(message, LoadingMessage):
            if self._progress is not None:
                self._progress(message.stage, message.done, message.total)
        elif self._ready is not None and not self._ready.done():
            self._ready.set_result(message)

    def _dispatch(self, message: StepMessage) -> None:
        for output in message.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # aborted while the engine was computing it
            if output.error is not None:
                self._fail(stream, output.error)
                continue
            stream.push(output)
            if stream.num_open_choices[output.request_id] == 0:
                self._forget(output.request_id)
        for listener in self._listeners:
            listener(message)

    def _die(self, reason: str, is_config_error: bool) -> None:
        if self._death is not None or self._is_closing:
            return
        self._death = reason
        if self._ready is not None and not self._ready.done():
            error = ConfigError(reason) if is_config_error else EngineStartError(reason)
            self._ready.set_exception(error)
            return
        logger.error("engine died: %s", reason)
        self._fail_all(RequestError(f"engine died: {reason}", status=500, code="engine_died"))

    def _fail(self, stream: OutputStream, error: RequestError) -> None:
        """End a whole stream with an error; what else it was waiting for is aborted."""
        for request_id, num_open in stream.num_open_choices.items():
            if num_open > 0 and self._forget(request_id) is not None:
                self._pending.aborted_ids.append(request_id)
        self._wake.set()
        stream.finish(error)

    def _fail_all(self, error: RequestError) -> None:
        for stream in set(self._streams.values()):
            self._fail(stream, error)

    def _forget(self, request_id: str) -> OutputStream | None:
        stream = self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()
        return stream


def _call_on_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object
) -> bool:
    """Schedule a call from another thread; False once the loop is closed (the server ended)."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        return False
    return True


def _shutting_down() -> RequestError:
    return RequestError(
        "the server is shutting down; try another replica or retry later.",
        status=503,
        code="shutting_down",
        retry_after_s=5,
    )
