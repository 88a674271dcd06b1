"""The capture of decode graphs is a bar on a terminal and log lines elsewhere, and its end is one log line."""

import io
import logging
import sys

import pytest
from blockyard.worker.execution.capture_progress import ERASE, LOG_EVERY, WIDTH, CaptureProgress, bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def capture(total: int, fail_after: int | None = None) -> None:
    with CaptureProgress(total) as progress:
        for number in range(total):
            if number == fail_after:
                raise MemoryError
            progress.advance()


def test_a_bar_is_full_when_all_is_done_and_not_before() -> None:
    for done, total, filled in ((0, 35, 0), (17, 35, 11), (34, 35, 23), (35, 35, WIDTH), (0, 0, 0)):
        assert bar(done, total) == f"[{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{total}"


def test_progress_is_a_bar_on_a_terminal_and_lines_of_the_log_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="blockyard.worker.execution.capture_progress")
    for stderr in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stderr)
        caplog.clear()
        capture(2 * LOG_EVERY)
        *before, last = caplog.messages
        assert last.startswith("decode graphs: 16 captured in ")
        shown = stderr.getvalue()
        if isinstance(stderr, Terminal):
            assert not before
            assert "\n" not in shown
            assert all(f" {done}/16 " in shown for done in (0, 1, 15, 16))
            assert shown.endswith(ERASE)
        else:
            assert before == ["decode graphs: 8 of 16 captured"]
            assert not shown
    monkeypatch.setattr(sys, "stderr", None)
    capture(3)


def test_a_capture_that_fails_takes_its_bar_away_and_claims_no_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with pytest.raises(MemoryError):
        capture(9, fail_after=1)
    assert terminal.getvalue().endswith(ERASE)
    assert not caplog.messages
