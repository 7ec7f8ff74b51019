"""How each peer is driven: processes, workers over pipes, servers over HTTP.

Two registries of lazy factories, one per phase: ENGINES run prompts of token ids, SERVERS answer
the evaluation workload (transformers has no server and answers in static batches). Forerun has an
engine per mode (`Row.program_of`). A factory installs what its peer needs, starts it and leaves it
paused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.adapters.base import Adapter, Setup
from benchmarks.peers.adapters.server import KeptServer
from benchmarks.peers.adapters.worker import WorkerAdapter

__all__ = ["ENGINES", "PEERS", "SERVERS", "Adapter", "Setup"]


def _start_forerun(setup: Setup) -> Adapter:
    return _start_forerun_worker(setup, setup.files.folder, "exact")


def _start_forerun_int8(setup: Setup) -> Adapter:
    return _start_forerun_worker(setup, setup.files.native, "int8")


def _start_forerun_worker(setup: Setup, model: Path, quantization: str) -> Adapter:
    return WorkerAdapter(
        sys.executable,
        "forerun_worker",
        [model, setup.max_model_len, quantization],
        log_path=setup.log_dir / f"forerun-{quantization}.log",
        environment=setup.thread_environment,
    )


def _start_transformers(setup: Setup) -> Adapter:
    return WorkerAdapter(
        sys.executable,
        "transformers_worker",
        [setup.files.folder],
        log_path=setup.log_dir / "transformers.log",
        environment=setup.thread_environment,
    )


def _start_vllm(setup: Setup) -> Adapter:
    from benchmarks.peers.adapters.vllm import start_engine

    return start_engine(setup)


def _start_llama_cpp(setup: Setup) -> Adapter:
    from benchmarks.peers.adapters.llama_cpp import start_engine

    return start_engine(setup)


def _serve_forerun(setup: Setup) -> Adapter:
    flags = ["--dtype", "bfloat16", "--quantization", "exact"]
    flags += ["--max-model-len", str(setup.max_model_len)]
    flags += ["--speculative-config", '{"method": "none"}', "--no-enable-prefix-caching"]
    command = [sys.executable, "-m", "forerun", "serve", str(setup.files.folder), *flags]
    return KeptServer(
        lambda port: [*command, "--port", str(port)],
        log_path=setup.log_dir / "forerun-server.log",
        environment=setup.thread_environment,
        facts={"command": command},
    )


def _serve_vllm(setup: Setup) -> Adapter:
    from benchmarks.peers.adapters.vllm import start_server

    return start_server(setup)


def _serve_llama_cpp(setup: Setup) -> Adapter:
    from benchmarks.peers.adapters.llama_cpp import start_server

    return start_server(setup)


ENGINES: dict[str, Callable[[Setup], Adapter]] = {
    "forerun": _start_forerun,
    "forerun int8": _start_forerun_int8,
    "llama.cpp": _start_llama_cpp,
    "vllm": _start_vllm,
    "transformers": _start_transformers,
}
SERVERS: dict[str, Callable[[Setup], Adapter]] = {
    "forerun": _serve_forerun,
    "llama.cpp": _serve_llama_cpp,
    "vllm": _serve_vllm,
    "transformers": _start_transformers,
}
PEERS = tuple(SERVERS)
