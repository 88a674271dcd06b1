"""The capture of decode graphs is a bar on a terminal and log lines elsewhere, and its end is one log line."""

import io
import logging
import sys

import pytest
from blockyard.worker.execution.capture_progress import ERASE, LOG_EVERY, WIDTH, CaptureProgress, bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="blockyard.worker.execution.capture_progress")


def capture(total: int) -> None:
    with CaptureProgress(total) as progress:
        for _ in range(total):
            progress.advance()


def capture_until_it_fails() -> None:
    with CaptureProgress(9) as progress:
        progress.advance()
        raise MemoryError


@pytest.mark.parametrize(
    ("done", "total", "filled"), [(0, 35, 0), (17, 35, 11), (34, 35, 23), (35, 35, WIDTH), (0, 0, 0)]
)
def test_a_bar_is_full_when_all_is_done_and_not_before(done: int, total: int, filled: int) -> None:
    assert bar(done, total) == f"[{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{total}"


def test_a_terminal_has_a_bar_that_goes_and_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    capture(20)
    shown = terminal.getvalue()
    assert "\n" not in shown
    assert [f" {done}/20 " in shown for done in (0, 1, 19, 20)] == [True] * 4
    assert shown.endswith(ERASE)
    (line,) = caplog.messages
    assert line.startswith("decode graphs: 20 captured in ")


def test_elsewhere_it_is_lines_of_the_log_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    capture(2 * LOG_EVERY)
    assert not file.getvalue()
    *before, last = caplog.messages
    assert before == ["decode graphs: 8 of 16 captured"]
    assert last.startswith("decode graphs: 16 captured in ")


def test_a_capture_that_fails_takes_its_bar_away_and_claims_no_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(MemoryError):
        capture_until_it_fails()
    assert terminal.getvalue().endswith(ERASE)
    assert not caplog.messages


def test_a_process_without_stderr_captures_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    capture(3)
