"""Progress bar of ended requests, on stderr and only on a terminal."""

from types import TracebackType

from blockyard.deploy.bench.measures import Sample
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class RequestProgress:
    """Progress bar: `with RequestProgress(64) as progress:`, then `progress.ended(sample)` for each request."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("requests", total=total)
        self._num_failed = 0

    def __enter__(self) -> "RequestProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def ended(self, sample: Sample) -> None:
        self._num_failed += bool(sample.error)
        description = f"requests, {self._num_failed} failed" if self._num_failed else "requests"
        self._bar.update(self._task, advance=1, description=description)
