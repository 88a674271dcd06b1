"""The output of `blockyard index` for counts, and for missing counts."""

from io import StringIO

import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.views.index import derived, index_view
from blockyard.proto.v1.cluster_pb2 import IndexedWorker, IndexInfo, IndexState, WorkerIndex
from rich.console import Console

FULL = IndexInfo(
    state=IndexState.INDEX_STATE_DEGRADED,
    state_reason="w1 has 512 changes unconfirmed for 3.2 s",
    names=1_000,
    bytes=17_000,
    live_berths=3,
    dead_berths=1,
    stride_blocks=4,
    lookups=20,
    failed_lookups=2,
    skipped_lookups=5,
    lookup_p50_seconds=0.0002,
    lookup_p99_seconds=0.0011,
    promised_blocks=400,
    stale_blocks=10,
    workers=[
        IndexedWorker(worker_id="w0", index=WorkerIndex(state=IndexState.INDEX_STATE_EXACT, entries=700)),
        IndexedWorker(
            worker_id="w1",
            index=WorkerIndex(
                state=IndexState.INDEX_STATE_DEGRADED, pending=512, lag_seconds=3.2, resyncs=2, errors=9
            ),
        ),
        IndexedWorker(worker_id="w2"),
    ],
)


def lines_of(info: IndexInfo) -> list[list[str]]:
    output = StringIO()
    Console(file=output, width=200).print(index_view(info))
    return [line.split() for line in output.getvalue().splitlines()]


def test_everything_that_is_known_is_shown() -> None:
    lines = [" ".join(line) for line in lines_of(FULL)]
    assert lines[0] == "prefix index DEGRADED w1 has 512 changes unconfirmed for 3.2 s"
    assert "names 1,000, one for 4 blocks" in lines
    assert "bytes 17,000 (17.0 a name)" in lines
    assert "berths 3 live, 1 to be purged" in lines
    assert "lag 3.20 s at most" in lines
    assert "look-ups 20, 2 failed, 5 skipped; p50 0.20 ms, p99 1.10 ms" in lines
    assert "stale 2.50% of 400 blocks promised" in lines
    assert lines[-5:-2] == ["w0 EXACT 700 0 0.00 0 0", "w1 DEGRADED 0 512 3.20 2 9", "w2 - - - - - -"]
    assert lines[-2].startswith("entries: distinct block names")


def test_ratios_are_of_what_was_counted_and_absent_where_nothing_was() -> None:
    assert derived(FULL) == pytest.approx({"bytes_per_name": 17.0, "stale_ratio": 0.025, "lag_seconds": 3.2})
    assert derived(IndexInfo()) == {"bytes_per_name": None, "stale_ratio": None, "lag_seconds": 0.0}
    uncounted = lines_of(IndexInfo(state=IndexState.INDEX_STATE_DEGRADED))
    assert "look-ups 0, 0 failed, 0 skipped" in [" ".join(line) for line in uncounted]
    unknown = {line[0]: " ".join(line[1:]) for line in uncounted if line[1:2] == ["-"]}
    assert unknown == {
        **dict.fromkeys(
            ("names", "bytes", "berths"),
            "- (not counted: no worker that would publish to the index is ready)",
        ),
        "stale": "- (this router has placed no request by the index yet)",
    }


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (IndexState.INDEX_STATE_DEGRADED, "see the state above"),
        (
            IndexState.INDEX_STATE_EXACT,
            "Redis did not answer in time, or routers lack the right to count (see SECURITY.md)",
        ),
    ],
)
def test_what_was_not_counted_says_why(state: IndexState, why: str) -> None:
    lines = lines_of(IndexInfo(state=state, workers=[IndexedWorker(worker_id="w0")]))
    assert ["names", "-", "(not", "counted:", *f"{why})".split()] in lines
    assert " ".join(lines[-1]).startswith("- in a worker's row: it has not reported yet")


def test_every_row_is_explained_where_the_command_is() -> None:
    help_text = main.commands["index"].help or ""
    explained = {line.strip().removeprefix("- ").partition(":")[0] for line in help_text.splitlines()}
    headings = {line[0] for line in lines_of(FULL)[2:8]}
    assert headings | {"entries", "pending", "resyncs"} <= explained


def test_an_absent_index_is_one_line() -> None:
    absent = IndexInfo(
        state=IndexState.INDEX_STATE_ABSENT, state_reason="the routers were started without Redis"
    )
    assert [" ".join(line) for line in lines_of(absent)] == [
        "prefix index ABSENT the routers were started without Redis"
    ]
