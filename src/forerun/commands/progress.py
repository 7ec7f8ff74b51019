"""What the terminal shows while a model is fetched and loaded: a bar if stderr is a terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from forerun.logs import get_logger

logger = get_logger(__name__)


class LoadingBar:
    """A context manager around loading; without a terminal, notes go to the log instead."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        self._progress = Progress(
            *columns,
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not self._is_shown,
        )
        self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> LoadingBar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bar; harmless when it is gone."""
        self._progress.stop()

    def note(self, text: str) -> None:
        """Say what is going on."""
        if self._is_shown:
            self._progress.update(self._task, description=text)
        else:
            logger.info(text)

    def update(self, stage: str, done: int, total: int) -> None:
        """Show how far a stage of starting is."""
        self._progress.update(self._task, description=stage, completed=done, total=total)
