"""A client that stops reading: it is cut off, no other client waits for it, and the data kept for it is bounded."""

import itertools
from collections.abc import Iterator, Sequence
from statistics import quantiles
from typing import Any

import grpc
import pytest
from blockyard.proto.v1 import inference_pb2
from blockyard.router.client import AsyncClient

from tests.system.load import CANARY, Stream, answers, load, streams, until
from tests.system.processes import SIMULATED, Process, Processes, processes

from .invariants import Baseline, Usage, all_is_as_before, each_ended_once, same_tokens
from .rig import raw_inference, whole

STEP_SECONDS = 0.02
SLOW_READER_SECONDS = 2.0
CUT_SECONDS = 30.0
OTHERS_TOKENS = 250
"""Five seconds of tokens: longer than the router waits for a reader."""
WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
"""Small window, so that the router soon has to wait for its client."""
MAX_HELD_BYTES = 16 * 2**20
"""Bound on the data held. By default gRPC alone keeps 4 to 5 MB of each such stream, and without a bound nothing ends
it."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    options = (*SIMULATED, "--simulated-step-seconds", str(STEP_SECONDS))
    with processes(tmp_path_factory.mktemp("slow-readers")) as cluster:
        worker = cluster.add_worker("w0", *options)
        patience = ("--slow-reader-seconds", str(SLOW_READER_SECONDS))
        cluster.start(worker, cluster.add_router("r0", *patience, workers=[worker.address]))
        yield cluster


@pytest.mark.fault(9)
async def test_a_client_that_stops_reading_is_cut_off_and_holds_nobody_up(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    """Log-probabilities make its answer large."""
    router = cluster.routers["r0"]
    async with whole(cluster) as client, raw_inference(router, *WINDOW) as stub:
        reference = await answers(client, streams(2, prefix="other", max_tokens=OTHERS_TOKENS))
        baseline = Baseline.of(cluster)
        async with load(client, streams(2, prefix="other", max_tokens=OTHERS_TOKENS)) as others:
            await others.until_tokens(2)
            wanted = inference_pb2.GenerateRequest(
                prompt=f"def stall(x): # {CANARY}",
                sampling={"max_tokens": 1900, "ignore_eos": True, "seed": 7, "logprobs": 20},
            )
            call = stub.GenerateStream(wanted, timeout=120.0)
            await call.read()
            cut_seconds, held_bytes = await _until_cut_off(client, router)
            finished = await others.finished()
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await _read_all(call)
        before, beside = _slow_pause(reference), _slow_pause(finished)
        measured.update(
            recovery_seconds=cut_seconds,
            note=f"cut off after that, of which it may be silent for {SLOW_READER_SECONDS:g} s; others' 95th "
            f"percentile between tokens {1e3 * before:.0f} -> {1e3 * beside:.0f} ms; router "
            f"+{held_bytes / 2**20:.1f} MiB",
        )
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        same_tokens(finished, reference)
        each_ended_once(finished)
        assert beside < 10 * before
        assert held_bytes < MAX_HELD_BYTES
        await all_is_as_before(cluster, baseline, client)


async def _until_cut_off(client: AsyncClient, router: Process) -> tuple[float, int]:
    """Return the seconds until it was cut off, and the router's largest growth."""
    (held,) = [r.request_id for r in await client.list_requests() if not r.request_id.startswith("other")]
    before, most = Usage.of(router.pid).resident_bytes, 0

    async def is_cut_off() -> bool:
        nonlocal most
        most = max(most, Usage.of(router.pid).resident_bytes - before)
        return held not in {request.request_id for request in await client.list_requests()}

    took = await until(is_cut_off, "it is cut off", seconds=CUT_SECONDS, every=0.05)
    return took, most


def _slow_pause(finished: Sequence[Stream]) -> float:
    """Return the 95th percentile of the pauses between two pieces of a stream."""
    pauses = [
        later - earlier for stream in finished for earlier, later in itertools.pairwise(stream.arrivals)
    ]
    return quantiles(pauses, n=20)[-1]


async def _read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
