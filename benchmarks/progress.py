"""What long benchmarks show meanwhile: a bar if stderr is a terminal, else notes in the log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from forerun.logs import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who is told how the run goes."""

    note: Callable[[str], None]
    advance: Callable[[], None]


@contextmanager
def show_progress(total: int) -> Iterator[Watcher]:
    """Yield a watcher of `total` pieces of work."""
    if not sys.stderr.isatty():
        yield Watcher(logger.info, lambda: None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    task = progress.add_task("starting", total=total)
    with progress:
        yield Watcher(
            lambda text: progress.update(task, description=text), lambda: progress.advance(task)
        )
