"""Runs Dynamo's offline simulator or its radix index. bench/peers/dynamo.py runs it with the Python of its environment.

Imports nothing from Blockyard. Without arguments, it reads one JSON object with settings from stdin. It answers with
one object on stdout: `summary` and `version`, or `error` with a message.

    DYN_LOG=error python -I bench/peers/dynamo_run.py --radix

With `--radix`, it measures the time in which the index matches 450 blocks, of which eight workers hold 375.

Without `-I`, the file dynamo.py in this folder would hide the package of that name.
"""

import json
import os
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGE = "ai-dynamo-runtime"
CHAIN_BLOCKS, HELD_BLOCKS, NUM_WORKERS, NUM_LOOKUPS = 450, 375, 8, 2000


def replay(request: dict[str, Any]) -> dict[str, Any]:
    try:
        from dynamo._core import KvRouterConfig, run_mocker_trace_replay
    except ImportError as error:
        return {
            "error": f"{PACKAGE} or its run_mocker_trace_replay is missing from {sys.executable} ({error})"
        }
    try:
        result = run_mocker_trace_replay(
            [request["trace"]],
            extra_engine_args={"engine": request["engine"]},
            router_config=KvRouterConfig(**request["router"]),
            num_workers=request["num_workers"],
            router_mode=request["router_mode"],
            trace_block_size=request["trace_block_tokens"],
        )
    except Exception as error:
        # The peer raises plain Exception for most wrong arguments. Its message is what the user needs.
        return {"error": f"{PACKAGE} {version(PACKAGE)} refused: {error}"}
    return {"summary": dict(result.summary), "version": version(PACKAGE)}


def measure_radix() -> dict[str, Any]:
    """Measure one find_matches from Python in microseconds, including the hand-over to the index's own thread."""
    from dynamo._core import RadixTree

    tree = RadixTree()
    blocks = [{"block_hash": 10_000 + number, "tokens_hash": number} for number in range(HELD_BLOCKS)]
    stored = {"event_id": 1, "dp_rank": 0, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
    for worker in range(NUM_WORKERS):
        tree.apply_event(worker, json.dumps(stored).encode())
    chain = list(range(CHAIN_BLOCKS))
    scores = tree.find_matches(chain).scores
    if len(scores) != NUM_WORKERS or set(scores.values()) != {HELD_BLOCKS}:
        raise RuntimeError(f"the radix index found {scores} instead of {HELD_BLOCKS} blocks on each worker")
    microseconds = []
    for _ in range(NUM_LOOKUPS):
        started = time.perf_counter_ns()
        tree.find_matches(chain)
        microseconds.append((time.perf_counter_ns() - started) / 1000)
    return {
        "blocks": CHAIN_BLOCKS,
        "workers": NUM_WORKERS,
        "microseconds_p50": statistics.median(microseconds),
        "microseconds_p99": statistics.quantiles(microseconds, n=100)[98],
        "version": version(PACKAGE),
    }


def main() -> None:
    if sys.argv[1:] == ["--radix"]:
        try:
            print(json.dumps(measure_radix()))
        except (ImportError, PackageNotFoundError) as error:
            sys.exit(f"{PACKAGE} is missing from {sys.executable} ({error})")
        return
    if sys.argv[1:]:
        sys.exit("the only argument is --radix; a replay reads its request from stdin")
    # The answer goes to the real stdout. Output of the peer goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(replay(json.loads(sys.stdin.read()))), file=answers, flush=True)


if __name__ == "__main__":
    main()
