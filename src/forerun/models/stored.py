"""A model's stored tensors, whatever the files, and how they get into its weights.

Every tensor is copied into its slot, a view of the final weight, so weights are resident once, and
a merged or reordered weight needs no rule here. What stays quantised goes to its layer as blocks
instead, when the model is packed. Names and shapes are checked before any weight is read. Every
defect is a ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Protocol

from torch import Tensor

from forerun.errors import ConfigError
from forerun.models.layer import WeightSlot
from forerun.quantisation.formats import BlockFormat, BlockTensor

Progress = Callable[[int, int], None]
Shape = tuple[int, ...]


class StoredTensors(Protocol):
    """The files of one model; `name` is always a local weight name (`layers.0.q.weight`)."""

    path: Path
    num_threads: int  # that may fill slots at once

    def stored_name(self, name: str) -> str:
        """Return the files' name of a weight."""
        ...

    def read_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that must have a place, by the files' names."""
        ...

    def find_type(self, name: str) -> str:
        """Return how a weight is stored, by ggml's name (F16, Q4_1)."""
        ...

    def split_fill(self, name: str, slot: WeightSlot) -> Sequence[Callable[[], None]]:
        """Return jobs that together fill a slot, in any order."""
        ...

    def read_blocks(self, name: str, kind: BlockFormat) -> BlockTensor:
        """Return a weight in blocks, as it is stored or made from floats, rows in our order."""
        ...

    def release(self, name: str) -> None:
        """Give back memory that reading a weight took and that its blocks may have been part of."""
        ...


class ProgressCounter:
    """Reports progress as (done, total)."""

    def __init__(self, report: Progress | None, total: int) -> None:
        self._report = report
        self._total = total
        self._done = 0

    def advance(self) -> None:
        """Count one more piece as done."""
        self._done += 1
        if self._report is not None:
            self._report(self._done, self._total)


def check_tensors(stored: StoredTensors, slots: Mapping[str, WeightSlot]) -> None:
    """Raise ConfigError naming missing, unused or wrongly shaped tensors."""
    wanted = {stored.stored_name(name): slot.shape for name, slot in slots.items()}
    check_shapes(stored.path, stored.read_shapes(), wanted)


def check_shapes(path: Path, shapes: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    """Raise ConfigError unless the stored tensors are the wanted ones."""
    missing = [name for name in wanted if name not in shapes]
    if missing:
        raise ConfigError(f"{path} lacks {_list_names(missing)}; the weights are incomplete.")
    unused = [name for name in shapes if name not in wanted]
    if unused:
        raise ConfigError(
            f"{path} has {_list_names(unused)} that its configuration has no place for; "
            "configuration and weights do not belong together."
        )
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise ConfigError(
                f"{path}: tensor {name} has shape {list(shapes[name])}; the configuration says "
                f"{list(shape)}."
            )


def fill_slots(
    stored: StoredTensors, slots: Mapping[str, WeightSlot], report: Progress | None, num_more: int
) -> ProgressCounter:
    """Fill slots, on a few threads; return the progress, with `num_more` pieces to come."""
    jobs = [job for name, slot in slots.items() for job in stored.split_fill(name, slot)]
    progress = ProgressCounter(report, len(jobs) + num_more)
    with ThreadPoolExecutor(stored.num_threads) as pool:
        for future in as_completed([pool.submit(job) for job in jobs]):
            future.result()
            progress.advance()
    return progress


def fill(slot: WeightSlot, tensor: Tensor) -> None:
    """Copy a whole tensor to where it goes."""
    destination = slot.destination
    if tensor.numel() == destination.numel():
        tensor = tensor.reshape(destination.shape)
    destination.copy_(tensor)


def _list_names(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{'tensor' if len(names) == 1 else 'tensors'} {shown}{rest}"
