"""The engine's own process: build, announce, then answer one message per step until told to stop.

Spawned by the API process, which never imports torch. The pipe closing means the parent is gone:
the engine stops by itself, so nothing is ever left running.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from forerun.config import EngineConfig
from forerun.engine.messages import (
    ClientMessage,
    FailedMessage,
    LoadingMessage,
    ReadyMessage,
)
from forerun.errors import ConfigError
from forerun.logs import configure_logging, get_logger

if TYPE_CHECKING:
    from forerun.engine.engine import Engine

logger = get_logger(__name__)

# A client that asks again within this time does not wait for the check of the cache.
_IDLE_CHECK_DELAY_S = 1.0


def run_engine(connection: Connection, config: EngineConfig) -> None:
    """Entry point of the spawned process."""
    configure_logging("engine")
    # NOTE: a terminal's Ctrl-C goes to the whole group; draining is the API process's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        engine = _start(connection, config)
        if engine is not None:
            _serve(connection, engine)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        logger.info("the API process is gone; stopping")


def _start(connection: Connection, config: EngineConfig) -> Engine | None:
    """Build and announce the engine; None if that failed, which has then been said."""
    try:
        from forerun.engine.build import build_engine

        def report(stage: str, done: int, total: int) -> None:
            connection.send(LoadingMessage(stage=stage, done=done, total=total))

        engine, _, info = build_engine(config, progress=report)
    except ConfigError as error:
        connection.send(FailedMessage(message=str(error), is_config_error=True))
        return None
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        logger.exception("the engine could not start")
        message = f"the engine could not start: {type(error).__name__}: {error}"
        connection.send(FailedMessage(message=message, is_config_error=False))
        return None
    info["engine_pid"] = os.getpid()
    connection.send(ReadyMessage(limits=engine.limits, info=info))
    return engine


def _serve(connection: Connection, engine: Engine) -> None:
    """Step while there is work. A bug in the loop itself ends the process, and says why."""
    try:
        while _receive(connection, engine):
            if engine.has_work:
                connection.send(engine.step())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        logger.exception("the engine loop failed")
        message = f"{type(error).__name__}: {error}"
        connection.send(FailedMessage(message=message, is_config_error=False))


def _check_while_idle(connection: Connection, engine: Engine) -> None:
    """Assert that nothing leaked, unless a message comes first.

    About 1 ms per 3000 KV blocks. A leak ends the process: serving on would end in wrong output.
    """
    if not connection.poll(_IDLE_CHECK_DELAY_S):
        engine.check_integrity()
        logger.debug("idle: the cache is whole")


def _receive(connection: Connection, engine: Engine) -> bool:
    """Take in what the client said, waiting only when idle; False means shut down."""
    while not engine.has_work or connection.poll(0):
        if not engine.has_work:
            _check_while_idle(connection, engine)
        message: ClientMessage = connection.recv()
        if message.shutdown:
            engine.abort_all()
            return False
        for new in message.new_requests:
            engine.add(new)
        for request_id in message.aborted_ids:
            engine.abort(request_id)
        if message.reset_prefix_cache:
            engine.reset_prefix_cache()
    return True
