"""Progress of a long start without a terminal: each stage is one line, and a long one gets more, with its count."""

import pytest
from blockyard.deploy.lifecycle import progress, serving
from blockyard.deploy.lifecycle.progress import StageProgress
from blockyard.deploy.lifecycle.serving import (
    COMPILING,
    DOWNLOADING,
    LOADING,
    STAGES,
    STARTING,
    WARMING,
    Progress,
    data_types,
    next_stage,
)
from blockyard.deploy.supervision.replicas import Kind, Phase, Replica
from hypothesis import given
from hypothesis import strategies as st

from .rig import report_of


def told(capsys: pytest.CaptureFixture[str], *reports: Progress) -> list[str]:
    """The lines, each without its time."""
    with StageProgress() as shown:
        for report in reports:
            shown.report(report)
    return [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]


def loading(num_serving: int) -> Progress:
    return Progress(stage="loading", done=num_serving, total=2, detail=f"{num_serving} of 2 serve")


def test_a_short_stage_is_one_line_however_often_it_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, loading(0), loading(1), loading(1), Progress(stage="joining"))
    assert lines == ["loading", "joining"]


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


def look(*phases: Phase) -> list[Replica]:
    """Workers that run; without a phase, one that has no process yet."""
    workers = [Replica(name="worker-0", kind="worker", phase=phase, pid=7) for phase in phases]
    return [
        Replica(name="router-0", kind="router", pid=8),
        *(workers or [Replica(name="worker-0", kind="worker")]),
    ]


def test_a_first_start_says_that_kernels_are_compiled_and_then_that_it_warms_up() -> None:
    stage, stages = STARTING, []
    for replicas, is_compiling in (
        (look(), False),
        (look("starting", "downloading"), False),
        (look("starting"), False),
        (look("starting"), True),
        (look("starting"), False),
        (look("serving"), False),
    ):
        stage = next_stage(stage, replicas, is_compiling=is_compiling)
        stages.append(stage)
    assert stages == [STARTING, DOWNLOADING, LOADING, COMPILING, WARMING, WARMING]


phases = st.lists(st.sampled_from(("starting", "downloading", "serving", "waiting")), max_size=2)


@given(st.lists(st.tuples(phases, st.booleans())))
def test_stages_go_forward_only(looks: list[tuple[list[Phase], bool]]) -> None:
    stage = STARTING
    for workers, is_compiling in looks:
        before = stage
        stage = next_stage(stage, look(*workers), is_compiling=is_compiling)
        assert STAGES.index(stage) >= STAGES.index(before)


def test_workers_and_routers_are_counted_apart() -> None:
    phases: list[tuple[str, Kind, Phase]] = [
        ("worker-0", "worker", "serving"),
        ("worker-1", "worker", "starting"),
        ("router-0", "router", "serving"),
    ]
    replicas = [Replica(name=name, kind=kind, phase=phase) for name, kind, phase in phases]
    assert serving._who_serves(replicas) == "1 of 2 workers and 1 of 1 router serve"


@pytest.mark.parametrize(
    ("models", "told"),
    [
        (("demo",), ("float32: as --dtype says",)),
        (("demo", "coder"), ("demo: float32: as --dtype says", "coder: float32: as --dtype says")),
    ],
)
def test_each_data_type_names_its_model_where_several_are_served(
    models: tuple[str, ...], told: tuple[str, ...]
) -> None:
    of_model = ("", *models[1:])
    workers = [
        Replica(name=f"worker-{number}", kind="worker", model=model, dtype="float32: as --dtype says")
        for number, model in enumerate((*of_model, of_model[-1]))
    ]
    report = report_of(*workers, Replica(name="router-0", kind="router"), models=models)
    assert data_types(report) == told
