"""`forerun serve [MODEL]`: the engine in its own process, the HTTP server in this one.

Order of events: check the flags and the port, fetch the model, start the engine, listen. On SIGTERM
or Ctrl-C: refuse new requests, finish the running ones, stop the engine; on a second signal stop at
once. No torch in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from forerun.commands.flags import (
    Parser,
    add_config_flags,
    add_engine_flags,
    build_engine_config,
    collect,
)
from forerun.commands.progress import LoadingBar
from forerun.config import EngineConfig, ServerConfig
from forerun.data.bundled import BUNDLED_MODELS, fetch_bundled_model, resolve_model_path
from forerun.errors import ConfigError
from forerun.logs import configure_logging, get_logger
from forerun.server.app import build_app
from forerun.server.context import ServerContext, ServerTokenizer
from forerun.server.prometheus import ServerMetrics, StatsLine
from forerun.transport.async_engine import AsyncEngine, EngineStartError

logger = get_logger(__name__)

STATS_INTERVAL_S = 10.0
_FLUSH_TIMEOUT_S = 5
_BACKLOG = 2048


def add_parser(subparsers: Any) -> Parser:
    """Add the subcommand and return its parser."""
    parser: Parser = subparsers.add_parser("serve", help="serve a model over the OpenAI API")
    parser.add_argument(
        "model_argument", metavar="MODEL", nargs="?", help="the same as --model", default=None
    )
    add_config_flags(parser, ServerConfig)
    add_engine_flags(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; return the exit code."""
    if args.model_argument is not None:
        if "model" in args:
            raise ConfigError("the model is given twice, as MODEL and as --model; give it once.")
        args.model = args.model_argument
    server = ServerConfig(**collect(args, [field.name for field in fields(ServerConfig)]))
    config = build_engine_config(args)
    started_s = time.monotonic()
    configure_logging("api")
    with LoadingBar() as bar, contextlib.closing(bind_socket(server)) as listener:
        path = locate_model(config.model.model, bar.note)
        return asyncio.run(_serve(config, server, path, bar, listener, started_s))


def bind_socket(server: ServerConfig) -> socket.socket:
    """Take the port before anything slow happens; raises ConfigError if it cannot be had."""
    try:
        info = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(info[0], info[1])
    except OSError as error:
        raise _explain_socket_error(error, server) from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(info[4])
    except OSError as error:
        listener.close()
        raise _explain_socket_error(error, server) from error
    return listener


def listen(listener: socket.socket, server: ServerConfig) -> None:
    """Accept connections from now on; another process may have been faster."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _explain_socket_error(error, server) from error


def _explain_socket_error(error: OSError, server: ServerConfig) -> ConfigError:
    where = f"{_format_host(server.host)}:{server.port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{where} is in use; stop what listens there or choose another --port.")
    return ConfigError(f"cannot listen on {where}: {error.strerror or error}.")


def locate_model(model: str, note: Callable[[str], None]) -> Path:
    """Return the model's file or folder, fetching a bundled model if needed."""
    if model in BUNDLED_MODELS and not Path(model).exists():
        return fetch_bundled_model(model, note)
    return resolve_model_path(model)


class StopSignals:
    """Counts SIGTERM and SIGINT: the first asks to drain, the second to stop at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.stop = asyncio.Event()

    def install(self) -> None:
        """Take over both signals of the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal)

    def on_signal(self) -> None:
        """Count one signal."""
        (self.stop if self.drain.is_set() else self.drain).set()


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling, telling when it listens."""

    def __init__(self, app: FastAPI, on_listening: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            backlog=_BACKLOG,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_FLUSH_TIMEOUT_S,
        )
        super().__init__(config)
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to StopSignals."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then say so."""
        await super().startup(sockets)
        self._on_listening()


async def _serve(
    config: EngineConfig,
    server: ServerConfig,
    path: Path,
    bar: LoadingBar,
    listener: socket.socket,
    started_s: float,
) -> int:
    """Start the engine and serve until told to stop; return the exit code."""
    signals = StopSignals()
    signals.install()
    bar.note("starting the engine")
    engine = AsyncEngine.for_config(config, bar.update)
    try:
        start = asyncio.ensure_future(_start(engine, path))
        if not await _finishes_before(start, signals.drain):
            return 0
        bar.stop()
        context = build_context(config, server, engine, start.result())
        listen(listener, server)
        url = f"http://{_format_host(server.host)}:{listener.getsockname()[1]}"

        def report() -> None:
            logger.info("ready in %.1f s at %s", time.monotonic() - started_s, url)

        http = HttpServer(build_app(context), report)
        async with _log_stats(engine):
            return await serve_http(http, engine, listener, signals, server.drain_timeout_s)
    except EngineStartError as error:
        logger.error("%s", error)
        return 1
    finally:
        await engine.shutdown()


async def _start(engine: AsyncEngine, path: Path) -> ServerTokenizer:
    """Load the tokenizer while the engine starts.

    The engine's complaint comes first: it reads the configuration before it reads the tokenizer,
    and both before any weights.
    """
    from forerun.tokenization import load_tokenizer

    loading = asyncio.to_thread(load_tokenizer, path)
    failure, tokenizer = await asyncio.gather(engine.start(), loading, return_exceptions=True)
    if failure is not None:
        raise failure
    if isinstance(tokenizer, BaseException):
        raise tokenizer
    return tokenizer


async def _finishes_before(task: asyncio.Future[Any], event: asyncio.Event) -> bool:
    """Wait for either; cancel the task and return False if the event came first."""
    waiter = asyncio.ensure_future(event.wait())
    await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if task.done():
        return True
    task.cancel()
    await asyncio.wait({task})
    return False


def build_context(
    config: EngineConfig, server: ServerConfig, engine: AsyncEngine, tokenizer: ServerTokenizer
) -> ServerContext:
    """Return what the application needs to serve a started engine."""
    model_name = server.served_model_name or config.model.model
    return ServerContext(
        engine=engine,
        tokenizer=tokenizer,
        metrics=ServerMetrics(model_name),
        model_name=model_name,
        num_speculative_tokens=config.speculative.max_draft_tokens,
        api_key=server.api_key,
    )


async def serve_http(
    http: HttpServer,
    engine: AsyncEngine,
    listener: socket.socket,
    signals: StopSignals,
    drain_timeout_s: float,
) -> int:
    """Serve until a signal, then drain; return 0, or 1 if a second signal cut that short.

    Without its engine the server goes on answering 503, until a signal ends it with 1.
    """
    serving = asyncio.ensure_future(http.serve(sockets=[listener]))
    waiter = asyncio.ensure_future(signals.drain.wait())
    await asyncio.wait({serving, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if serving.done():
        serving.result()
        return 1
    logger.info("stopping: finishing running requests, up to %.0f s", drain_timeout_s)
    draining = asyncio.ensure_future(engine.shutdown(drain_timeout_s))
    is_drained = await _finishes_before(draining, signals.stop)
    if not is_drained:
        logger.warning("stopping at once")
        http.force_exit = True
        await engine.shutdown()
    http.should_exit = True
    await serving
    return 0 if is_drained and engine.death is None else 1


@contextlib.asynccontextmanager
async def _log_stats(engine: AsyncEngine) -> AsyncIterator[None]:
    """Log a line every few seconds while the engine works."""
    line = StatsLine()
    engine.add_stats_listener(line.on_step)
    task = asyncio.ensure_future(_log_lines(line))
    try:
        yield
    finally:
        task.cancel()


async def _log_lines(line: StatsLine) -> None:
    while True:
        await asyncio.sleep(STATS_INTERVAL_S)
        text = line.take(STATS_INTERVAL_S)
        if text is not None:
            logger.info(text)


def _format_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
