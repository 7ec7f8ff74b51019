"""The engine's process as the API process sees it: a failed start, a kill, and no orphans."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from forerun.config import EngineConfig, ModelConfig
from forerun.errors import ConfigError
from forerun.transport.async_engine import AsyncEngine
from forerun.transport.pipe import ProcessTransport


def test_an_engine_that_cannot_find_its_model_says_so_and_is_gone() -> None:
    config = EngineConfig(model=ModelConfig(model="/no/such/model"))

    async def main() -> None:
        engine = AsyncEngine.for_config(config)
        try:
            await engine.start()
        finally:
            await engine.shutdown()

    with pytest.raises(ConfigError, match="'/no/such/model' is neither"):
        asyncio.run(main())
    assert multiprocessing.active_children() == []


def test_a_killed_engine_ends_the_conversation_and_names_the_signal() -> None:
    transport = ProcessTransport(EngineConfig())
    (child,) = multiprocessing.active_children()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EOFError):
        receive_all(transport)
    assert transport.describe_exit() == "the engine process was killed by SIGKILL"
    transport.close(0.0)
    assert multiprocessing.active_children() == []


def test_every_thread_that_asks_how_the_engine_ended_is_told() -> None:
    transport = ProcessTransport(EngineConfig())
    (child,) = multiprocessing.active_children()
    assert child.pid is not None
    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(transport.describe_exit) for _ in range(8)]
        os.kill(child.pid, signal.SIGKILL)
    assert {answer.result() for answer in answers} == {"the engine process was killed by SIGKILL"}
    transport.close(0.0)
    assert multiprocessing.active_children() == []


def receive_all(transport: ProcessTransport) -> None:
    """Read to the end; the engine may have said something before it was killed."""
    while True:
        transport.receive()
