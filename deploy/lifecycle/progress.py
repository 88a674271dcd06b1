"""Shows the stages of a long start on stderr.

A terminal gets a progress bar. Any other output gets a line for each stage, and another every ten seconds.
"""

import time
from types import TracebackType

from blockyard.deploy.lifecycle.serving import Progress
from blockyard.deploy.machine.interruption import discard_output
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

REPEAT_SECONDS = 10.0
"""Without a terminal, a line about a long stage is repeated this often."""


class _PipeTolerantConsole(Console):
    """Becomes silent once its reader has gone. By default rich would end the program, and with it a start."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # Otherwise the rest of the buffer would fail again when Python exits, with exit code 120.
        discard_output(self.file.fileno())


class StageProgress:
    """Shows the progress of a start: `with StageProgress() as progress: up(options, progress.report)`."""

    def __init__(self) -> None:
        self._console = _PipeTolerantConsole(stderr=True, highlight=False)
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._stage = ""
        self._task: TaskID | None = None
        self._started_at = self._stage_began_at = self._printed_at = time.monotonic()

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
        """Show progress and its warning. Call this at every poll, even without news."""
        if progress.stage != self._stage:
            self._begin_stage(progress)
        elif time.monotonic() - self._printed_at >= REPEAT_SECONDS:
            seconds = f"{time.monotonic() - self._stage_began_at:.0f} s so far"
            self._tell(f"{progress.stage}: {', '.join(filter(None, (progress.detail, seconds)))}")
        if progress.warning:
            self._console.print(
                f"warning: {progress.warning}",
                style="bold yellow",
                markup=False,
                soft_wrap=not self._console.is_terminal,
            )
        if self._task is not None:
            self._bars.update(
                self._task, completed=progress.done, total=progress.total, detail=progress.detail
            )

    def _begin_stage(self, progress: Progress) -> None:
        if self._task is not None:
            self._finish_stage()
        self._stage = progress.stage
        self._stage_began_at = time.monotonic()
        self._task = self._bars.add_task(progress.stage, total=progress.total, detail=progress.detail)
        self._tell(progress.stage)

    def _tell(self, line: str) -> None:
        self._printed_at = time.monotonic()
        if not self._console.is_terminal:
            self._console.print(
                f"[{self._printed_at - self._started_at:5.1f} s] {line}", markup=False, soft_wrap=True
            )

    def _finish_stage(self) -> None:
        assert self._task is not None
        self._bars.update(self._task, completed=1, total=1)
        self._bars.stop_task(self._task)
