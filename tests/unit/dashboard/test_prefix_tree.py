"""The tree of cached prefixes holds every block of every pool once, under its parent block."""

from blockyard.deploy.dashboard.prefix_tree import MAX_RUNS, prefix_tree
from blockyard.proto.v1 import cluster_pb2
from hypothesis import given
from hypothesis import strategies as st

Path = tuple[int, ...]
"""A prefix: which way it takes at each block."""


def name_of(path: Path) -> bytes:
    return bytes(path).rjust(16, b"\xff") if path else b""


def pool_of(paths: set[Path], *, references: int = 0, age_seconds: float = 1.0) -> list[cluster_pb2.Block]:
    """The blocks of a pool that caches these prefixes, and a free one."""
    held = {path[:depth] for path in paths for depth in range(1, len(path) + 1)}
    blocks = [
        cluster_pb2.Block(
            block_id=number,
            name=name_of(path),
            parent=name_of(path[:-1]),
            references=references,
            age_seconds=age_seconds,
        )
        for number, path in enumerate(sorted(held))
    ]
    return [*blocks, cluster_pb2.Block(block_id=len(blocks), state=cluster_pb2.BLOCK_STATE_FREE)]


PATHS = st.sets(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), max_size=12)


@given(st.dictionaries(st.sampled_from(["w0", "w1", "w2"]), PATHS))
def test_each_block_is_in_one_run_at_its_depth_with_its_workers(pools: dict[str, set[Path]]) -> None:
    held = {
        worker: {path[:depth] for path in paths for depth in range(1, len(path) + 1)}
        for worker, paths in pools.items()
    }
    found = prefix_tree({worker: pool_of(paths) for worker, paths in pools.items()})
    every = set[Path]().union(*held.values())
    by_name = {name_of(path).hex(): path for path in every}
    assert found["blocks"] == len(every)
    assert found["prefixes"] == len({path for path in every if len(path) == 1})
    if found["hidden"]:
        return
    assert sum(run["blocks"] for run in found["runs"]) == len(every)
    levels = [-1]
    for run in found["runs"]:
        path = by_name[run["name"]]
        assert run["first_block"] == len(path) - 1
        assert run["workers"] == sorted(worker for worker, paths in held.items() if path in paths)
        below = sum(other[: len(path)] == path for other in every)
        assert run["blocks"] + run["blocks_below"] == below
        assert run["level"] <= levels[-1] + 1, "each run comes after its parent"
        levels.append(run["level"])


def test_the_hottest_runs_are_shown_and_the_others_counted() -> None:
    cold = pool_of({(way, 1) for way in range(2 * MAX_RUNS)}, age_seconds=600.0)
    hot = pool_of({(200, 1, 2), (200, 1, 3)}, references=4)
    found = prefix_tree({"w0": [*cold, *hot], "w1": pool_of({(200, 1)}, references=1), "w2": None})
    assert (found["silent"], len(found["runs"])) == (["w2"], MAX_RUNS)
    assert found["hidden"] == 2 * MAX_RUNS + 3 - MAX_RUNS
    first = found["runs"][0]
    assert (first["blocks"], first["blocks_below"]) == (2, 2)
    assert (first["workers"], first["sequences"], first["age_seconds"]) == (["w0", "w1"], 5, 1.0)


def test_a_block_whose_parent_is_not_known_begins_a_run_of_its_own() -> None:
    orphan = cluster_pb2.Block(name=name_of((1, 2)), parent=name_of((1,)), age_seconds=1)
    found = prefix_tree({"w0": [orphan]})
    assert [(run["level"], run["blocks"]) for run in found["runs"]] == [(0, 1)]


def test_a_chain_as_long_as_a_context_is_one_run() -> None:
    names = [number.to_bytes(16, "big") for number in range(20_000)]
    blocks = [
        cluster_pb2.Block(name=name, parent=parent, age_seconds=1)
        for parent, name in zip([b"", *names], names, strict=False)
    ]
    (run,) = prefix_tree({"w0": blocks})["runs"]
    assert run["blocks"] == len(names)
