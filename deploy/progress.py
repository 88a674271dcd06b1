"""Shows the stages of a long start: a bar on a terminal, one line a stage elsewhere. On stderr, which is not
output."""

import time
from types import TracebackType

from blockyard.deploy.serving import Progress
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class _PipeTolerantConsole(Console):
    """Falls silent when its reader has gone. rich would end the program, and with it a start or a `down`."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class StageProgress:
    """`with StageProgress() as progress: up(options, progress.report)`."""

    def __init__(self) -> None:
        self._console = _PipeTolerantConsole(stderr=True, highlight=False)
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._stage = ""
        self._task: TaskID | None = None
        self._started_at = time.monotonic()

    def __enter__(self) -> "StageProgress":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None and error is None:
            self._finish_stage()
        self._bars.stop()

    def report(self, progress: Progress) -> None:
        """Called as often as there is news, and while there is none."""
        if progress.stage != self._stage:
            self._begin_stage(progress)
        if progress.warning:
            self._console.print(f"warning: {progress.warning}", style="bold yellow", markup=False)
        if self._task is not None:
            self._bars.update(self._task, completed=progress.done, total=progress.total)

    def _begin_stage(self, progress: Progress) -> None:
        if self._task is not None:
            self._finish_stage()
        self._stage = progress.stage
        self._task = self._bars.add_task(progress.stage, total=progress.total)
        if not self._console.is_terminal:
            elapsed_seconds = time.monotonic() - self._started_at
            self._console.print(f"[{elapsed_seconds:5.1f} s] {progress.stage}", markup=False)

    def _finish_stage(self) -> None:
        assert self._task is not None
        self._bars.update(self._task, completed=1, total=1)
        self._bars.stop_task(self._task)
