"""A request with a grammar starts once that is compiled; other requests do not wait; a cancelled one never starts."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc.aio
import pytest
from blockyard.proto.naming.block_hash import pack_tokens
from blockyard.proto.security.tls import listen, session_server_credentials
from blockyard.proto.v1.inference_pb2 import StructuredOutput
from blockyard.proto.v1.session_pb2 import Cancel, Continuation, Hello, RejectReason, ToWorker
from blockyard.worker.engine import Engine
from blockyard.worker.engine_thread import EngineThread
from blockyard.worker.grammar.compiler import GrammarsBusy
from blockyard.worker.grammar.grammar import GrammarError
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.sequences.step_plan import StepPlan, StepTokens
from blockyard.worker.session.session import SessionService
from blockyard.worker.simulated.runner import SimulatedRunner

from .serving import SECRET, Session

PATIENCE_SECONDS = 60


class Compiler:
    """Compiles once the gate is open: a grammar is its own expression."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, wanted: StructuredOutput, client: int) -> object:
        self.started.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if wanted.regex == "(":
            raise GrammarError("a group is not closed" + "." * 300)
        if wanted.regex == "no file":
            raise ValueError("there is no /srv/model/tokenizer.json")
        if wanted.regex == "busy":
            raise GrammarsBusy("too many grammars wait")
        if wanted.regex == "crash":
            raise RuntimeError("the compiler is gone")
        return wanted.regex


class Recorder(SimulatedRunner):
    """Remembers the grammars that reached it."""

    def __init__(self) -> None:
        super().__init__(vocab_size=100, prefill_tokens_per_second=1e6, step_seconds=0.002)
        self.seen: set[object] = set()

    def execute(self, plan: StepPlan) -> StepTokens:
        self.seen |= {row.sequence.grammar for row in plan.rows}
        return super().execute(plan)


@dataclass(frozen=True, slots=True)
class Stand:
    """A session service over a simulated engine."""

    address: str
    compiler: Compiler
    runner: Recorder = field(default_factory=Recorder)


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    compiler, runner = Compiler(), Recorder()
    service = SessionService(
        hello=Hello(block_size=16, total_blocks=64, max_model_len=1024),
        vocab_size=100,
        max_waiting=4,
        compile_grammar=compiler,
    )
    engine = Engine(SchedulerConfig(max_model_len=512), runner, num_blocks=64)
    thread = EngineThread(engine, service.on_step)
    service.attach(thread, engine.load())
    thread.start()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((service.handler(),))
    credentials = session_server_credentials(None, secret=SECRET, cluster="default")
    port = listen(server, "127.0.0.1:0", credentials)
    await server.start()
    yield Stand(f"127.0.0.1:{port}", compiler, runner)
    await server.stop(0)
    await asyncio.to_thread(thread.stop)


def following(regex: str) -> dict[str, StructuredOutput]:
    return {"structured_output": StructuredOutput(regex=regex)}


async def started(stand: Stand) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await stand.compiler.started.wait()


async def test_others_do_not_wait_for_a_grammar_and_it_reaches_the_engine(stand: Stand) -> None:
    async with Session(stand.address) as session:
        await session.submit(1, sampling=following("a+"))
        await session.submit(2)
        assert len((await session.tokens_of(2))[2]) == 6
        assert stand.runner.seen == {None}
        stand.compiler.gate.set()
        assert len((await session.tokens_of(1))[1]) == 6
        assert stand.runner.seen == {None, "a+"}


async def test_a_cancel_ends_the_wait_and_nothing_starts(stand: Stand) -> None:
    async with Session(stand.address) as session:
        await session.submit(1, sampling=following("a+"))
        await started(stand)
        await session.call.write(ToWorker(cancel=Cancel(handle=1)))
        await session.submit(2)
        await session.tokens_of(2)
        assert stand.compiler.cancelled.is_set()
        stand.compiler.gate.set()
        await session.submit(1, sampling=following("b+"))
        await session.tokens_of(1)
        assert stand.runner.seen == {None, "b+"}


async def test_the_end_of_a_stream_ends_the_wait_and_nothing_starts(stand: Stand) -> None:
    async with Session(stand.address) as other:
        async with Session(stand.address) as session:
            await session.submit(1, sampling=following("a+"))
            await started(stand)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await stand.compiler.cancelled.wait()
        stand.compiler.gate.set()
        await other.submit(1)
        await other.tokens_of(1)
        assert stand.runner.seen == {None}


async def test_a_cancel_of_one_output_while_it_compiles_is_kept_for_later(stand: Stand) -> None:
    async with Session(stand.address) as session:
        parts = [Continuation(index=index, token_ids=pack_tokens([7])) for index in range(2)]
        await session.submit(1, max_tokens=60, sampling={"n": 2} | following("a+"), continuations=parts)
        await started(stand)
        await session.call.write(ToWorker(cancel=Cancel(handle=1, index=0)))
        await session.submit(2)
        await session.tokens_of(2)
        stand.compiler.gate.set()
        ended: list[int] = []
        while not ended:
            step = await session.read_until("step")
            ended += [i for i, finish in zip(step.indexes, step.finish_reasons, strict=True) if finish]
        assert ended == [1]


@pytest.mark.parametrize(
    ("regex", "reason", "detail"),
    [
        ("(", "GRAMMAR", "a group is not closed" + "." * 179),
        ("no file", "GRAMMAR", ""),
        ("busy", "BUSY", ""),
        ("crash", "INTERNAL", ""),
    ],
)
async def test_what_cannot_be_compiled_is_rejected_and_the_next_one_served(
    stand: Stand, regex: str, reason: str, detail: str
) -> None:
    """The client is told what is wrong with its grammar, shortly, and nothing of what is wrong with the worker."""
    stand.compiler.gate.set()
    async with Session(stand.address) as session:
        await session.submit(1, sampling=following(regex))
        rejected = await session.read_until("rejected")
        assert (rejected.handle, RejectReason.Name(rejected.reason)) == (1, f"REJECT_REASON_{reason}")
        assert rejected.detail == detail
        await session.submit(1, sampling=following("a+"))
        await session.tokens_of(1)


async def test_the_deadline_counts_while_a_grammar_compiles(stand: Stand) -> None:
    async with Session(stand.address) as session:
        await session.submit(1, sampling=following("a+"), deadline_seconds=0.05)
        rejected = await session.read_until("rejected")
        assert rejected.reason == RejectReason.REJECT_REASON_DEADLINE
        assert stand.compiler.cancelled.is_set()


async def test_a_bad_submit_is_refused_before_it_is_compiled(stand: Stand) -> None:
    async with Session(stand.address) as session:
        await session.submit(1, sampling=following("a+") | {"stop_token_ids": [100]})
        rejected = await session.read_until("rejected")
        assert rejected.reason == RejectReason.REJECT_REASON_INVALID
        assert not stand.compiler.started.is_set()


async def test_too_many_that_wait_for_the_compiler_are_rejected_as_busy(stand: Stand) -> None:
    async with Session(stand.address) as session:
        for handle in range(1, 6):
            await session.submit(handle, sampling=following("a+"))
        rejected = await session.read_until("rejected")
        assert (rejected.handle, rejected.reason) == (5, RejectReason.REJECT_REASON_BUSY)
        stand.compiler.gate.set()
        await session.tokens_of(1, 2, 3, 4)
