"""What a long start says where nobody has a terminal: each stage once, and a long one again with its count."""

import pytest
from blockyard.deploy import progress, serving
from blockyard.deploy.progress import StageProgress
from blockyard.deploy.serving import Progress
from blockyard.kernels import cpu_extension


def told(capsys: pytest.CaptureFixture[str], *reports: Progress) -> list[str]:
    """The lines, each without its time."""
    with StageProgress() as shown:
        for report in reports:
            shown.report(report)
    return [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]


def loading(num_serving: int) -> Progress:
    return Progress(stage="loading", done=num_serving, total=2, detail=f"{num_serving} of 2 serve")


def test_a_short_stage_is_one_line_however_often_it_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, loading(0), loading(1), loading(1), Progress(stage="joining")) == [
        "loading",
        "joining",
    ]


def test_a_long_stage_is_told_again_with_its_count_and_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "REPEAT_SECONDS", 0.0)
    lines = told(capsys, loading(0), loading(1), Progress(stage="joining"), Progress(stage="joining"))
    assert lines == ["loading", "loading: 1 of 2 serve, 0 s so far", "joining", "joining: 0 s so far"]


def test_a_long_line_is_not_folded_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    stage, warning = "loading " + "x" * 200, "slow " * 60
    with StageProgress() as shown:
        shown.report(Progress(stage=stage, warning=warning))
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(stage)
    assert second.rstrip() == f"warning: {warning}".rstrip()


def test_a_first_start_says_that_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_extension, "is_being_built", lambda: True)
    assert serving._loading(False, 0, 2).stage == "compiling kernels (first start on this machine)"
    assert serving._loading(True, 0, 2).stage == "downloading the model"
    monkeypatch.setattr(cpu_extension, "is_being_built", lambda: False)
    assert serving._loading(False, 1, 2).stage == "loading the model"
    assert serving._loading(False, 1, 2).detail == "1 of 2 serve"
