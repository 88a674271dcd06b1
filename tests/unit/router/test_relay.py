"""Each token arrives exactly once, whatever workers do: real links to scripted workers, without a router's server."""

import asyncio
import time
from collections.abc import Callable

import pytest
from blockyard.proto.naming.block_hash import unpack_tokens
from blockyard.proto.v1 import inference_pb2, session_pb2
from blockyard.router.cluster.link import EngineLink
from blockyard.router.cluster.worker_view import WorkerState
from blockyard.router.errors import (
    EngineFailed,
    NoWorkers,
    PoisonRequest,
    RequestTooLarge,
    WorkerLost,
)
from blockyard.router.generation.attempt import Progress
from blockyard.router.generation.joined_outputs import TokenChunk
from blockyard.router.generation.relay import MAX_PREEMPTIONS, Generation

from simulation.virtual_time import in_virtual_time

from .fake_worker import BLOCK_SIZE, FakeWorker, Script, expected_tokens
from .relay_rig import Rig, generation, rig, virtual_rig

Scripts = Callable[[session_pb2.Submit], Script]


async def collect(
    rig: Rig, request: Generation, progress: Progress | None = None
) -> tuple[list[int], TokenChunk]:
    """All tokens, proven contiguous, and the last chunk."""
    tokens: list[int] = []
    chunks: list[TokenChunk] = []

    def take(chunk: TokenChunk) -> bool:
        assert chunk.offset == len(tokens)
        tokens.extend(chunk.token_ids)
        chunks.append(chunk)
        return False

    async with asyncio.timeout(10):
        await rig.relay.run(request, progress or Progress(), take)
    assert chunks[-1].finish is not None
    return tokens, chunks[-1]


def only_first(script: Script, number: int = 1) -> Scripts:
    """The first requests meet the script, later ones fare well."""
    met: list[int] = []

    def choose(submit: session_pb2.Submit) -> Script:
        met.append(submit.handle)
        return script if len(met) <= number else Script()

    return choose


def workers_of(script: Script | Scripts, names: str = "a") -> list[FakeWorker]:
    scripts = script if callable(script) else lambda submit: script
    return [FakeWorker(name, script=scripts) for name in names]


async def whole(made: Rig, seed: int = 1) -> Progress:
    """Run a request, which gets all its tokens, until nothing is left of it."""
    progress = Progress()
    assert (await collect(made, generation(seed), progress))[0] == expected_tokens(seed, 20)
    await made.until_quiet()
    return progress


async def test_tokens_come_in_order_with_finish_and_cached_tokens() -> None:
    async with rig(FakeWorker("a")) as made:
        progress = Progress()
        tokens, last = await collect(made, generation(3), progress)
        assert tokens == expected_tokens(3, 20)
        assert last.finish is not None
        assert last.finish.reason == inference_pb2.FINISH_REASON_LENGTH
        assert (progress.worker_id, progress.cached_tokens, progress.num_generated) == ("a", 32, 20)
        await made.until_quiet()


@pytest.mark.parametrize("after", [0, 1, 7, 19])
@pytest.mark.parametrize("kind", ["die", "hang"])
async def test_a_worker_that_dies_or_hangs_costs_no_token_and_doubles_none(kind: str, after: int) -> None:
    fault = Script(die_after=after) if kind == "die" else Script(hang_after=after)
    async with rig(*workers_of(only_first(fault), "ab"), lost_seconds=1.0) as made:
        assert (await whole(made, 5)).num_migrations == 1
        submits = [submit for worker in made.workers for submit in worker.submits]
        replay = max(submits, key=lambda submit: len(submit.token_ids))
        assert replay.prompt_tokens == 40
        assert unpack_tokens(replay.token_ids)[40:] == expected_tokens(5, after)
        assert {submit.sampling.seed for submit in submits} == {5}


@pytest.mark.parametrize(
    "scripts",
    [
        Script(repeat_tokens=3),
        Script(tokens_a_step=7),
        Script(repeat_tokens=2, tokens_a_step=5),
        only_first(Script(skip_token=True)),
    ],
)
async def test_rows_are_joined_by_offset_and_a_worker_that_skips_a_token_is_not_believed(scripts):
    async with rig(*workers_of(scripts)) as made:
        await whole(made, 2)


@pytest.mark.parametrize("budget", [0, 1, 3])
async def test_a_request_whose_budget_of_migrations_is_used_is_given_up(budget: int) -> None:
    async with rig(*workers_of(Script(die_after=2)), max_migrations=budget) as made:
        with pytest.raises(WorkerLost) as lost:
            await collect(made, generation(1))
        assert lost.value.metadata == {"tokens_emitted": "2"}
        assert len(made.workers[0].submits) == budget + 1
        assert (made.relay.num_migrations, made.relay.num_lost) == (budget, 1)
        await made.until_quiet()


async def test_a_request_that_kills_two_workers_is_tried_on_no_third_and_harms_no_other() -> None:
    def exit_on_poison(submit: session_pb2.Submit) -> Script:
        return Script(exit_after=0) if submit.sampling.seed == 666 else Script(step_seconds=0.01)

    workers = workers_of(exit_on_poison, "abc")
    async with rig(*workers) as made:
        async with asyncio.TaskGroup() as tasks:
            healthy = [tasks.create_task(collect(made, generation(seed, max_tokens=60))) for seed in range(9)]
            await made.until(lambda: sum(len(worker.started) for worker in workers) == 9)
            await asyncio.sleep(0.1)
            with pytest.raises(PoisonRequest):
                await collect(made, generation(666))
        assert [task.result()[0] for task in healthy] == [expected_tokens(seed, 60) for seed in range(9)]
        with pytest.raises(PoisonRequest):
            await collect(made, generation(666))
        assert sum(worker.has_exited for worker in workers) == 2
        assert (made.relay.num_quarantined, made.relay.num_lost) == (1, 0)
        await made.until_quiet()


@pytest.mark.parametrize(
    ("script", "names", "migrations"),
    [
        # The worker answers again with the same incarnation: it did not die.
        (lambda: only_first(Script(die_after=0), 3), "a", 3),
        (lambda: only_first(Script(fail_after=3)), "ab", 1),
    ],
    ids=["connections that break", "a failed step"],
)
async def test_no_request_is_given_up_for_what_it_did_not_cause(script, names, migrations):
    async with rig(*workers_of(script(), names)) as made:
        assert (await whole(made)).num_migrations == migrations


async def test_a_worker_whose_engine_finishes_no_step_is_left_although_it_answers() -> None:
    stalling = FakeWorker("a", script=only_first(Script(silent_output=0)))
    async with rig(stalling, FakeWorker("b", script=only_first(Script(silent_output=0)))) as made:
        task = asyncio.create_task(collect(made, generation(1)))
        await made.until(lambda: any(worker.submits for worker in made.workers))
        stalled = next(worker for worker in made.workers if worker.submits)
        stalled.stalled_seconds = 6.0
        other = next(worker for worker in made.workers if worker is not stalled)
        other.script = lambda submit: Script()
        assert (await task)[0] == expected_tokens(1, 20)
        await made.until(lambda: made.states()[stalled.address] is WorkerState.REFUSED)
        stalled.stalled_seconds = 0.0
        await made.until(lambda: made.states()[stalled.address] is WorkerState.READY, seconds=10)
        await made.until_quiet()


async def test_a_worker_that_says_it_drains_gets_nothing_new_and_keeps_what_it_has() -> None:
    workers = workers_of(Script(step_seconds=0.02), "ab")
    async with rig(*workers) as made:
        await made.until(lambda: set(made.states().values()) == {WorkerState.READY}, seconds=20)
        progress = Progress()
        running = asyncio.create_task(collect(made, generation(1), progress))
        await made.until(lambda: any(worker.started for worker in workers))
        worker, name, others = (workers[0], "a", "b") if workers[0].started else (workers[1], "b", "a")
        worker.tell_draining(True)
        await made.until(lambda: made.states()[worker.address] is WorkerState.DRAINING)
        for seed in range(2, 6):
            elsewhere = Progress()
            await collect(made, generation(seed), elsewhere)
            assert elsewhere.worker_id == others
        assert (await running)[0] == expected_tokens(1, 20)
        assert (progress.worker_id, progress.num_migrations) == (name, 0)
        worker.tell_draining(False)
        await made.until(lambda: made.states()[worker.address] is WorkerState.READY)
        made.placer.draining(worker.address)
        assert made.states()[worker.address] is WorkerState.DRAINING
        worker.pong_draining = False
        # A pong puts right what an overtaken refusal made the router believe.
        await made.until(lambda: made.states()[worker.address] is WorkerState.READY)
        await made.until_quiet()


async def wait_in_line(places: int, num_requests: int, pause: float) -> tuple[int, int]:
    """Return how many submits it took, and how far from its place in the order of arrival any request started."""
    (worker,) = workers_of(Script(step_seconds=0.005))
    worker.max_running = worker.max_waiting = places
    deadline = asyncio.get_running_loop().time() + 30
    async with virtual_rig(worker) as made:
        running = []
        async with asyncio.TaskGroup() as tasks:
            for seed in range(num_requests):
                asked = generation(seed, max_tokens=10, deadline=deadline)
                running.append(tasks.create_task(collect(made, asked)))
                await asyncio.sleep(pause)
        assert all(task.result()[0] == expected_tokens(seed, 10) for seed, task in enumerate(running))
        await made.until_quiet()
    order = [int(request_id.removeprefix("request-")) for request_id in worker.started]
    return len(worker.submits), max(abs(place - seed) for place, seed in enumerate(order))


@in_virtual_time
async def test_busy_workers_make_requests_wait_in_order_and_lose_none() -> None:
    submits, displaced = await wait_in_line(places=8, num_requests=300, pause=0.004)
    assert submits <= 330, "a busy worker must not be hammered"
    assert displaced <= 8


@in_virtual_time
async def test_a_burst_beyond_the_places_keeps_its_order() -> None:
    _, displaced = await wait_in_line(places=4, num_requests=60, pause=0.0)
    assert displaced <= 16


async def test_a_link_that_is_down_already_counts_as_no_death() -> None:
    """The view takes such a worker for ready until its silence shows; no request ever reaches it."""
    worker = FakeWorker("b")
    worker.load.queued_prefill_tokens = 1_000_000
    async with rig(worker, lost_seconds=1.0) as made:
        hello = session_pb2.Hello(worker_id="down", block_size=BLOCK_SIZE, total_blocks=1000)
        made.fleet.links["down:1"] = EngineLink("down:1", made.fleet, lost_seconds=1.0)
        made.fleet.view.accepted("down:1", hello)
        progress = await whole(made)
        assert (progress.worker_id, progress.num_migrations) == ("b", 0)


async def test_a_draining_worker_is_left_for_another() -> None:
    draining = workers_of(Script(reject=session_pb2.REJECT_REASON_DRAINING))
    async with rig(*draining, FakeWorker("b")) as made:
        for seed in range(6):
            progress = await whole(made, seed)
            assert (progress.worker_id, progress.num_migrations) == ("b", 0)


PREEMPTED = Script(fail_after=2, fail_reason=session_pb2.REJECT_REASON_PREEMPTED)


@pytest.mark.fault(82)
async def test_a_request_that_all_workers_preempt_moves_four_times_and_then_stays() -> None:
    def preempts(submit: session_pb2.Submit) -> Script:
        return PREEMPTED if submit.HasField("preemptions") else Script()

    async with rig(*workers_of(preempts, "ab")) as made:
        progress = await whole(made)
        assert (progress.num_preemptions, progress.num_migrations) == (MAX_PREEMPTIONS, 0)
        told = sorted(submit.preemptions for worker in made.workers for submit in worker.submits)
        assert told == [0, 0, 1, 2, 3], "the last Submit says nothing"


@pytest.mark.parametrize(
    ("script", "names", "error", "num_submits"),
    [
        (Script(reject=session_pb2.REJECT_REASON_TOO_LARGE), "ab", RequestTooLarge, 1),
        (Script(reject=session_pb2.REJECT_REASON_INVALID), "ab", EngineFailed, 1),
        (Script(fail_after=0), "abc", EngineFailed, 2),
        (PREEMPTED, "a", EngineFailed, MAX_PREEMPTIONS + 1),
        (Script(reject=session_pb2.REJECT_REASON_HANDED_OVER), "a", EngineFailed, 2),
    ],
    ids=["too large", "invalid", "every engine fails", "gives back what it must keep", "or has not begun"],
)
async def test_what_no_other_worker_would_cure_is_soon_given_up(script, names, error, num_submits):
    async with rig(*workers_of(script, names)) as made:
        with pytest.raises(error):
            await collect(made, generation())
        assert sum(len(worker.submits) for worker in made.workers) == num_submits
        assert made.relay.num_splits == 0
        await made.until_quiet()


async def test_silence_makes_no_poison() -> None:
    hanging = [FakeWorker(name, script=only_first(Script(hang_after=0))) for name in "ab"]
    async with rig(*hanging, lost_seconds=1.0) as made:
        assert (await whole(made)).num_migrations == 2


async def test_cancelling_the_run_cancels_on_the_worker_at_once() -> None:
    async with rig(FakeWorker("a")) as made:
        progress = Progress()
        running = asyncio.create_task(
            made.relay.run(generation(1, max_tokens=500), progress, lambda chunk: False)
        )
        await made.until(lambda: progress.num_generated > 3)
        running.cancel()
        await made.until(lambda: made.workers[0].cancelled == [1])
        await made.until_quiet()


async def test_a_failure_of_the_taker_ends_its_own_request_and_no_other() -> None:
    def fail(chunk: TokenChunk) -> bool:
        raise ZeroDivisionError

    async with rig(FakeWorker("a")) as made:
        other = asyncio.create_task(collect(made, generation(1, max_tokens=60)))
        await made.until(lambda: made.workers[0].num_running > 0)
        with pytest.raises(ZeroDivisionError):
            await made.relay.run(generation(2), Progress(), fail)
        assert (await other)[0] == expected_tokens(1, 60)
        assert other.result()[1].finish is not None
        await made.until_quiet()


async def test_without_workers_requests_end_within_one_bound_together() -> None:
    now = time.monotonic()
    async with rig(FakeWorker("a"), no_worker_seconds=10.0, clock=lambda: now) as made:
        await made.workers[0].kill()
        await made.until(lambda: not made.fleet.view.ready())
        waiting = [asyncio.create_task(collect(made, generation(seed))) for seed in range(6)]
        done, _ = await asyncio.wait(waiting, timeout=0.2)
        assert not done
        now += 10.0  # the bound, for all six together
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [NoWorkers] * 6
        assert all(outcome.retry_after_seconds is not None for outcome in outcomes)


async def test_a_worker_that_comes_within_the_bound_serves_all_who_waited() -> None:
    async with rig(FakeWorker("a")) as made, FakeWorker("b") as other:
        await made.workers[0].kill()
        await made.until(lambda: not made.fleet.view.ready())
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(collect(made, generation(seed))) for seed in range(6)]
            await asyncio.sleep(0.2)
            made.fleet.set_addresses([other.address])
        assert all(task.result()[0] == expected_tokens(seed, 20) for seed, task in enumerate(waiting))


async def test_a_worker_of_another_kind_is_refused_with_a_reason() -> None:
    async with rig(FakeWorker("a")) as made:
        for hello, reason in (
            ({"model_fingerprint": "other"}, "model"),
            ({"tokenizer_fingerprint": "other"}, "tokenizer"),
            ({"block_size": 32}, "block size"),
            ({"kv_dtype": "int8"}, "KV dtype"),
            ({"max_model_len": 100}, "context"),
        ):
            async with FakeWorker("b", **hello) as other:
                made.fleet.set_addresses([made.workers[0].address, other.address])
                await made.until(
                    lambda address=other.address: made.states().get(address) is WorkerState.REFUSED
                )
                view = made.fleet.view.at(other.address)
                assert view is not None
                assert reason in view.reason
                await whole(made)
                assert other.submits == []


async def test_a_wrong_secret_opens_no_session() -> None:
    async with rig(FakeWorker("a"), secret="not-it", no_worker_seconds=0.5) as made:
        with pytest.raises(NoWorkers):
            await made.placer.identity()
        assert "the cluster secret" in made.fleet.view.workers()[0].reason


async def test_an_address_no_longer_named_is_dropped_only_with_its_connection() -> None:
    async with rig(FakeWorker("a"), FakeWorker("b")) as made:
        first, second = (worker.address for worker in made.workers)
        made.fleet.set_addresses([second])
        await asyncio.sleep(0.05)
        assert set(made.states()) == {first, second}
        await made.workers[0].kill()
        await made.until(lambda: set(made.states()) == {second})
