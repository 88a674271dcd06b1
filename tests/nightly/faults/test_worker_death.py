"""Workers that die: their requests move to other workers, each token exactly once, until the budget is used."""

import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from blockyard.proto.v1 import inference_pb2
from blockyard.router.client import AsyncClient

from tests.pauses import watched_pauses
from tests.system.load import READY, answers, holders, load, states, streams, until, until_ready
from tests.system.processes import SIMULATED, Process, Processes, processes

from .invariants import Baseline, all_is_as_before, each_ended_once, same_tokens
from .rig import busiest, cost, error_info, is_serving, raw_inference, victims, whole

NUM_STREAMS, MANY_STREAMS = 12, 200
NUM_TOKENS = 200
"""Tokens of each stream: four seconds, so that all of them still run when a worker dies."""
STEP = ("--simulated-step-seconds", "0.02")
DETECTION_SECONDS = 0.5
"""Ten times the bound, as everywhere: a killed worker is out of rotation within 50 ms."""
GAP_SECONDS = 5.0
MARKER_TOKEN = 3333
CONTROL_GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("death"), with_redis=True) as cluster:
        workers = [cluster.add_worker(f"w{number}", *SIMULATED, *STEP) for number in range(3)]
        cluster.start(*workers, cluster.add_router("r0", "--no-worker-seconds", "120"))
        yield cluster


Lose = Callable[[AsyncClient, Process], Awaitable[str]]
"""A way to end a worker. It returns a note for the report."""


async def _go_on_without_the_busiest(cluster: Processes, measured: dict[str, Any], lose: Lose) -> None:
    """Run streams, lose one worker, and check that all streams end with each token once."""
    async with whole(cluster) as client:
        reference = await answers(client, streams(NUM_STREAMS, max_tokens=NUM_TOKENS))
        baseline = Baseline.of(cluster)
        async with load(client, streams(NUM_STREAMS, max_tokens=NUM_TOKENS)) as running:
            await running.until_tokens(5)
            held = await holders(client)
            lost = busiest(held)
            at = time.monotonic()
            note = await lose(client, cluster.workers[lost])
            finished = await running.finished()
        touched = victims(finished, held, lost)
        measured.update(cost(touched, lost, at=at), note=note)
        same_tokens(finished, reference)
        each_ended_once(finished)
        assert measured["migrated"] == len(touched) > 0
        assert measured["recovery_seconds"] < GAP_SECONDS
        await all_is_as_before(cluster, baseline, client)


@pytest.mark.fault(16)
async def test_streams_of_a_killed_worker_go_on_elsewhere_with_each_token_once(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    async def kill(client: AsyncClient, worker: Process) -> str:
        worker.kill()

        async def is_out() -> bool:
            return (await states(client)).get(worker.name) != READY

        async with watched_pauses() as pauses:
            began = time.monotonic()
            detected = await until(is_out, "the dead worker is out of rotation", every=0.002)
        assert detected < DETECTION_SECONDS + pauses.seconds(began, began + detected)
        return f"out of rotation after {1e3 * detected:.0f} ms"

    await _go_on_without_the_busiest(cluster, measured, kill)


@contextmanager
def no_more_memory(pid: int) -> Iterator[None]:
    """Refuse the process all new pages from now on. The kernel kills it when it asks for one."""
    group = CONTROL_GROUPS / f"blockyard-test-{pid}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of memory can be made: {error.strerror}")
    try:
        (group / "memory.limit_in_bytes").write_text("65536")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        group.rmdir()


@pytest.mark.fault(28)
async def test_a_worker_that_gets_no_memory_is_killed_and_its_streams_go_on(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    async def starve(client: AsyncClient, worker: Process) -> str:
        with no_more_memory(worker.pid):
            # It has spare pages for the work that it does already.
            async with load(client, streams(MANY_STREAMS)) as more:
                took = await until(lambda: not worker.is_running, "the kernel kills it")
                each_ended_once(await more.finished())
        assert worker.wait(1.0) == -signal.SIGKILL
        return f"killed after {took:.2f} s"

    await _go_on_without_the_busiest(cluster, measured, starve)


@pytest.mark.fault(15)
async def test_a_worker_killed_before_its_first_token_costs_latency_alone(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    async with whole(cluster) as client:
        reference = await answers(client, streams(NUM_STREAMS))
        baseline = Baseline.of(cluster)
        # A frozen worker takes requests and answers none, so all of them are killed before their first token.
        frozen = cluster.workers["w1"]
        frozen.signal(signal.SIGSTOP)
        async with load(client, streams(NUM_STREAMS)) as running:
            for stream in running.streams:
                await until(
                    lambda s=stream: s.num_tokens > 0 or time.monotonic() > s.started + 0.5, "a token"
                )
            held = await holders(client)
            at = time.monotonic()
            frozen.kill()
            finished = await running.finished()
        same_tokens(finished, reference)
        touched = [stream for stream in finished if held.get(stream.request_id) == "w1"]
        measured.update(cost(touched, "w1", at=at))
        # From the death on: before it they waited for a frozen worker, which the test itself caused.
        measured["recovery_seconds"] = max(stream.arrivals[0] - at for stream in touched)
        assert touched
        assert all(stream.arrivals[0] > at for stream in touched)
        each_ended_once(finished)
        assert measured["recovery_seconds"] < GAP_SECONDS
        await all_is_as_before(cluster, baseline, client)


@pytest.mark.fault(17)
async def test_a_used_budget_ends_a_stream_with_worker_lost_and_what_it_had(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    """Two deaths under a budget of one."""
    strict = cluster.add_router("strict", "--max-migrations", "1")
    async with whole(cluster) as _:
        baseline = Baseline.of(cluster)
        with cluster.extra(strict):
            async with whole(cluster, strict) as client, raw_inference(strict) as stub:
                wanted = inference_pb2.GenerateRequest(
                    prompt="def f(x):", sampling={"max_tokens": 400, "ignore_eos": True, "seed": 1}
                )
                call = stub.GenerateStream(wanted, timeout=60.0)
                tokens: list[int] = []
                kills: list[float] = []

                async def take() -> None:
                    async for message in call:
                        assert message.delta.token_offset == len(tokens)
                        tokens.extend(message.delta.token_ids)
                        if len(tokens) >= 5 * (len(kills) + 1) and len(kills) < 2:
                            # Tokens of a dead worker may still come before the router has noticed its death.
                            await until(lambda: _has_holder(cluster, client), "a worker runs it")
                            (holder,) = (await holders(client)).values()
                            kills.append(time.monotonic())
                            cluster.workers[holder].kill()

                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await take()
                told = time.monotonic() - kills[-1]
            measured.update(failed=1, migrated=1, recovery_seconds=told, note="the error is told after that")
            assert len(kills) == 2, "it was given up within its budget"
            assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
            info = error_info(failure.value)
            assert info.reason == "WORKER_LOST"
            assert info.metadata["tokens_emitted"] == str(len(tokens))
            assert told < GAP_SECONDS
    async with whole(cluster) as client:
        await all_is_as_before(cluster, baseline, client)


async def _has_holder(cluster: Processes, client: AsyncClient) -> bool:
    """Return whether a living worker runs the only request."""
    running = [name for name in (await holders(client)).values() if name]
    return len(running) == 1 and cluster.workers[running[0]].is_running


@pytest.mark.fault(19)
async def test_without_any_worker_requests_wait_and_all_recovers_by_itself(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    router = cluster.routers["r0"]
    impatient = cluster.add_router("impatient", "--no-worker-seconds", "0.5")
    with cluster.extra(impatient):
        async with whole(cluster, impatient) as other, whole(cluster) as client:
            reference = await answers(client, streams(NUM_STREAMS, max_tokens=100))
            async with load(client, streams(NUM_STREAMS, max_tokens=100)) as running:
                await running.until_tokens(5)
                at = time.monotonic()
                for worker in cluster.workers.values():
                    worker.signal(signal.SIGKILL)
                for worker in cluster.workers.values():
                    worker.wait(5.0)

                async def says_so() -> bool:
                    return not await is_serving(router)

                told = await until(says_so, "health says NOT_SERVING")
                (refused,) = await answers(other, streams(1, prefix="refused"))
                cluster.start(*cluster.workers.values())
                finished = await running.finished()
            await until_ready(client, *cluster.workers)
            assert await is_serving(router)
        measured.update(
            failed=0,
            migrated=len(finished),
            recovery_seconds=max(stream.longest_gap(at) for stream in finished),
            note=f"NOT_SERVING after {told:.2f} s; the pause is the workers' start",
        )
        same_tokens(finished, reference)
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKERS")
        assert refused.ended is not None
        assert refused.ended - refused.started < GAP_SECONDS
        each_ended_once([*finished, refused])


@pytest.mark.fault(26)
async def test_a_request_that_kills_workers_is_tried_on_no_third(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    with_fault = (*SIMULATED, *STEP, "--simulated-fault", f"{MARKER_TOKEN}:exit")
    brittle = [cluster.add_worker(f"brittle{number}", *with_fault) for number in range(3)]
    addresses = [worker.address for worker in brittle]
    router = cluster.add_router("r26", workers=addresses)
    for process in (*brittle, router):
        process.environment.pop("BLOCKYARD_REDIS_URL")
    with cluster.extra(*brittle, router):
        await _poisoned(router, brittle, measured)


async def _poisoned(router: Process, brittle: list[Process], measured: dict[str, Any]) -> None:
    async with AsyncClient(router.address, retries=0) as client:
        await until_ready(client, *(worker.name for worker in brittle))
        reference = await answers(client, streams(NUM_STREAMS, max_tokens=NUM_TOKENS))
        async with load(client, streams(NUM_STREAMS, max_tokens=NUM_TOKENS)) as running:
            await running.until_tokens(5)
            held = await holders(client)
            at = time.monotonic()
            async with raw_inference(router) as stub:
                poison = inference_pb2.GenerateRequest(
                    prompt_token_ids={"ids": [5, MARKER_TOKEN, 7]}, sampling={"max_tokens": 4}
                )
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await stub.Generate(poison, timeout=30.0)
                told = time.monotonic() - at
                with pytest.raises(grpc.aio.AioRpcError) as again:
                    await stub.Generate(poison, timeout=30.0)
            finished = await running.finished()
        dead = {worker.name for worker in brittle if not worker.is_running}
        moved = [stream for stream in finished if held[stream.request_id] in dead]
        measured.update(
            failed=sum(stream.error is not None for stream in finished),
            migrated=len(moved),
            recovery_seconds=max(stream.longest_gap(at) for stream in finished),
            note=f"POISON_REQUEST after {told:.2f} s",
        )
        assert len(dead) == 2
        for error in (failure.value, again.value):
            assert (error.code(), error_info(error).reason) == (grpc.StatusCode.INTERNAL, "POISON_REQUEST")
        same_tokens(finished, reference)
        each_ended_once(finished)
