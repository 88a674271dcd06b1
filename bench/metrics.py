"""Cost of metrics in a router for each piece of an output: `python -m bench.metrics`.

Compares it with making the piece's text, which every piece needs, and with prometheus_client's histogram.
"""

import time
from asyncio import current_task, run
from collections.abc import Callable

from blockyard.deploy.settings.options import model_path
from blockyard.proto.metrics.readings import Histogram, by_name
from blockyard.proto.metrics.table import METRICS
from blockyard.proto.text import TextOutput, load_tokenizer
from blockyard.router.generation.metrics import RequestMeter, RouterMetrics
from blockyard.router.generation.registry import RequestRecord
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as LibraryHistogram

PIECES = 20_000
REPEATS = 7
METRIC = by_name(METRICS)["inter_token_latency_seconds"]


def microseconds(work: Callable[[], object]) -> float:
    """Return the microseconds of one call of `work`, in CPU time of the thread: the mean of the fastest run."""
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.thread_time()
        for _ in range(PIECES):
            work()
        best = min(best, time.thread_time() - begin)
    return best / PIECES * 1e6


async def main() -> None:
    task = current_task()
    assert task is not None
    meter = RequestMeter(RouterMetrics(), RequestRecord(request_id="r", arrival=0.0, task=task))
    text = TextOutput(load_tokenizer(model_path("demo")), stop=(), min_tokens=0)
    ours = Histogram(METRIC)
    library = LibraryHistogram("gap", "gap", buckets=METRIC.buckets, registry=CollectorRegistry())
    for name, work in {
        "a piece's metrics": lambda: meter.piece(0, 1),
        "a piece's text": lambda: text.push([300], is_last=False),
        "a value in our histogram": lambda: ours.observe(0.02),
        "a value in prometheus_client's": lambda: library.observe(0.02),
    }.items():
        print(f"{name:32} {microseconds(work):7.2f} us")


if __name__ == "__main__":
    run(main())
