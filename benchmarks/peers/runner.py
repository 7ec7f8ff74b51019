"""Interleaved blocks: every row of a block is measured by every peer in turn, the order rotated.

Rows that run engines come first, then rows over HTTP, each phase with its own programs, so that no
more than one set of models is in memory. A peer that does not start, or fails a cell, gets its
reason into the cell; the others go on. What was measured before an interrupt is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.peers.adapters.base import Adapter, Work
from benchmarks.peers.adapters.group import PeerError
from benchmarks.peers.rows import Row

from forerun.bench.paired.plan import Arm, order_arms


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One measurement: tokens per second, or why there is none."""

    row: str
    peer: str
    block: int
    order: int
    value: float | None = None
    num_output_tokens: int | None = None
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class Measured:
    """Everything one model's run has produced so far; one bandwidth per block that decodes."""

    cells: list[Cell] = field(default_factory=list)
    bandwidths: list[float] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)


Factories = Mapping[str, Callable[[], Adapter]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Rows that share programs, and how to start each program (`Row.program_of`)."""

    name: str
    rows: Sequence[Row]
    peers_of: Callable[[Row], Sequence[str]]
    factories: Factories


def rotate(peers: Sequence[str], turn: int) -> list[str]:
    """Return the order of a turn: first rotated by one each time, then the other way round."""
    return [arm.name for arm in order_arms([Arm(name=peer) for peer in peers], turn)]


class BlockRunner:
    """Runs phases; `measured` is true at any time."""

    def __init__(
        self,
        *,
        num_blocks: int,
        build_work: Callable[[Row, int], Work],
        read_bandwidth: Callable[[], float],
        note: Callable[[str], None],
        advance: Callable[[], None],
    ) -> None:
        self._num_blocks = num_blocks
        self._build_work = build_work
        self._read_bandwidth = read_bandwidth
        self._note = note
        self._advance = advance
        self.measured = Measured()

    def run(self, phase: Phase) -> None:
        """Start the phase's peers, run its blocks and stop the peers."""
        with self._open(phase) as adapters:
            for block in range(self._num_blocks):
                if any(row.kind == "decode" for row in phase.rows):
                    self.measured.bandwidths.append(self._read_bandwidth())
                for index, row in enumerate(phase.rows):
                    order = rotate(phase.peers_of(row), block + index)
                    self._run_row(row, block, order, adapters)

    def _run_row(
        self,
        row: Row,
        block: int,
        order: Sequence[str],
        adapters: Mapping[str, Adapter | PeerError],
    ) -> None:
        work = self._build_work(row, block)
        for position, peer in enumerate(order):
            self._note(f"block {block + 1}/{self._num_blocks}, {row.name}, {peer}")
            cell = Cell(row=row.name, peer=peer, block=block, order=position)
            adapter = adapters[row.program_of(peer)]
            self.measured.cells.append(measure_cell(cell, adapter, work))
            self._advance()

    @contextlib.contextmanager
    def _open(self, phase: Phase) -> Iterator[dict[str, Adapter | PeerError]]:
        """Start one program after the other; a failed start stands in the program's place."""
        needed = {row.program_of(peer) for row in phase.rows for peer in phase.peers_of(row)}
        adapters: dict[str, Adapter | PeerError] = {}
        with contextlib.ExitStack() as stack:
            for program in (name for name in phase.factories if name in needed):
                self._note(f"starting {program} ({phase.name})")
                facts: dict[str, Any]
                try:
                    adapter = phase.factories[program]()
                except PeerError as error:
                    adapters[program] = error
                    facts = {"error": str(error)}
                else:
                    stack.callback(adapter.stop)
                    adapters[program] = adapter
                    facts = adapter.facts
                self.measured.facts.setdefault(program, {})[phase.name] = facts
            yield adapters


def measure_cell(cell: Cell, adapter: Adapter | PeerError, work: Work) -> Cell:
    """Return the cell with its value or its error."""
    if isinstance(adapter, PeerError):
        return replace(cell, error=f"did not start: {adapter}")
    try:
        rate, num_output_tokens = adapter.measure(work)
    except PeerError as error:
        return replace(cell, error=str(error))
    return replace(cell, value=rate, num_output_tokens=num_output_tokens)
