"""What the commands' tables have room for."""

from io import StringIO

from blockyard.deploy.views import workers_table
from blockyard.proto.v1 import cluster_pb2
from rich.console import Console


def lines_of(*loads: cluster_pb2.WorkerLoad) -> list[list[str]]:
    workers = [
        cluster_pb2.Worker(worker_id=f"w{number}", device="cpu", address="here", load=load)
        for number, load in enumerate(loads)
    ]
    output = StringIO()
    Console(file=output, width=200).print(workers_table(workers))
    return [line.split() for line in output.getvalue().splitlines()]


def test_host_memory_has_a_column_once_a_worker_keeps_blocks_there() -> None:
    plain, host = (cluster_pb2.WorkerLoad(used_blocks=3, host_cached_blocks=blocks) for blocks in (0, 17))
    assert "host" not in lines_of(plain)[0]
    headings, first, second = lines_of(plain, host)
    column = headings.index("host")
    assert (first[column], second[column]) == ("0", "17")


def test_preemptions_and_swaps_have_columns_once_a_worker_has_some() -> None:
    calm = cluster_pb2.WorkerLoad(used_blocks=3)
    crowded = cluster_pb2.WorkerLoad(used_blocks=3, preemptions=5, swaps=2)
    assert not {"preempted", "swapped"} & set(lines_of(calm)[0])
    headings, *rows = lines_of(calm, crowded)
    assert [[row[headings.index(name)] for name in ("preempted", "swapped")] for row in rows] == [
        ["0", "0"],
        ["5", "2"],
    ]
