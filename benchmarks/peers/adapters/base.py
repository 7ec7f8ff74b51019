"""What the runner asks of a peer, and what a peer is given.

An adapter starts its programs when it is made, leaves them paused, and runs them only inside
`measure`. Whatever goes wrong with a peer is a PeerError whose message is the reason in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks.peers.rows import Row
from benchmarks.peers.weights import ModelFiles

from forerun.bench.options import BenchConfig

# Room for the longest prompt and its output, the same for every peer.
_CONTEXT_TOKENS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What adapters of one model share."""

    files: ModelFiles
    home: Path
    log_dir: Path
    num_threads: int
    note: Callable[[str], None]

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output, in tokens."""
        return min(_CONTEXT_TOKENS, self.files.max_model_len)

    @property
    def thread_environment(self) -> dict[str, str]:
        """Variables that set the number of threads of a program."""
        return {"OMP_NUM_THREADS": str(self.num_threads), "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One measurement: the row, and its prompts as ids. `bench` says how a client sends them."""

    row: Row
    prompts: Sequence[list[int]]
    bench: BenchConfig


class Measurement(NamedTuple):
    """Tokens per second and, over HTTP, how many tokens the answers had: equal work, or not."""

    rate: float
    num_output_tokens: int | None = None


class Adapter(Protocol):
    """One peer, started and paused. `facts` are versions and flags for the result."""

    facts: dict[str, Any]

    def measure(self, work: Work) -> Measurement:
        """Measure once; raises PeerError."""
        ...

    def stop(self) -> None:
        """End everything that was started."""
        ...
