"""vLLM's CPU build: its engine in a worker, and its OpenAI server, in an environment of its own.

Threads are bound to all cores and 4 GiB are set aside for K/V. Intel's OpenMP is loaded first, as
vLLM's documentation asks for. `vllm serve` of this package stops at its missing metadata, so the
server is started as the module behind it.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.adapters.base import Adapter, Setup
from benchmarks.peers.adapters.server import KeptServer
from benchmarks.peers.adapters.worker import WorkerAdapter
from benchmarks.peers.install import VLLM, install, python_of

_KV_CACHE_GIB = 4


def start_engine(setup: Setup) -> Adapter:
    """Return the engine in a worker."""
    environment = install(VLLM, setup.home, setup.note)
    return WorkerAdapter(
        python_of(environment),
        "vllm_worker",
        [setup.files.folder, setup.max_model_len],
        log_path=setup.log_dir / "vllm-engine.log",
        environment=_build_variables(environment, setup.num_threads),
    )


def start_server(setup: Setup) -> Adapter:
    """Return the server."""
    environment = install(VLLM, setup.home, setup.note)
    command = [str(python_of(environment)), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(setup.files.folder), "--dtype", "bfloat16"]
    command += ["--max-model-len", str(setup.max_model_len), "--no-enable-prefix-caching"]
    return KeptServer(
        lambda port: [*command, "--host", "127.0.0.1", "--port", str(port)],
        log_path=setup.log_dir / "vllm-server.log",
        environment=_build_variables(environment, setup.num_threads),
        facts={"command": command},
    )


def _build_variables(environment: Path, num_threads: int) -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
        "TOKENIZERS_PARALLELISM": "false",
        "LD_PRELOAD": str(environment / "lib" / "libiomp5.so"),
    }
