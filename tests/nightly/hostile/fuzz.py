"""A fuzzer that knows the schema: each method of each service gets messages that are nearly right.

`python -m tests.nightly.hostile.fuzz --minutes 10 --seed 7`. A message is a function of the seed and its
number, so `--seed S --only NUMBER` sends a finding again.

Its oracle: the method answers in time, with a status that it may have and that repeats nothing of the message. At
intervals it also checks that the processes live and blocks are conserved. A request that runs beside it must get its
usual tokens.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Set
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import grpc
from blockyard.proto.naming.block_hash import chain, pack_tokens
from blockyard.proto.security.tls import session_channels
from blockyard.proto.v1 import admin_pb2, cluster_pb2, inference_pb2, session_pb2
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from .messages import mangled, random_message, vary
from .rig import (
    CALL_SECONDS,
    CANARY,
    CHANNEL_OPTIONS,
    SECRET,
    House,
    Outcome,
    assert_discreet,
    outcome_of,
    running_house,
)

AT_ONCE = 8
ROUND = 64
"""Messages between two checks of the house."""
PATIENCE_SECONDS = 1.0
"""Deadline of a call. A generation may last as long as it asks for, and then its deadline passes."""
LISTEN_SECONDS = 0.1
Code = grpc.StatusCode
REFUSALS = {Code.OK, Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED, Code.UNIMPLEMENTED}
LATE, LACKING, GONE = Code.DEADLINE_EXCEEDED, Code.FAILED_PRECONDITION, Code.NOT_FOUND
ALLOWED: dict[str, Set[Code]] = {
    "Generate": {GONE, Code.ALREADY_EXISTS, LACKING, LATE, Code.CANCELLED},
    **dict.fromkeys(
        ("Embed", "Detokenize", "Abort", "GetBlockPool", "ListBlocks", "FindBlocks"), frozenset({GONE})
    ),
    **dict.fromkeys(("ListSequences", "GetIndexInfo"), frozenset({GONE})),
    **dict.fromkeys(("Tokenize", "LookupPrefix", "ExplainPlacement"), frozenset({GONE, LATE})),
    "PullPrefix": {GONE, LACKING, LATE},
    "PullBlocks": {Code.ABORTED, LACKING},
    # No worker here has slots for adapters.
    "AddAdapter": {LACKING, Code.ALREADY_EXISTS},
    "RemoveAdapter": {GONE, LACKING},
    "ListAdapters": {LACKING},
    # Both end only by their deadline.
    "WatchWorkers": {LATE},
}
"""Codes allowed besides REFUSALS. Never UNKNOWN, INTERNAL or UNAVAILABLE."""
ALLOWED["GenerateStream"] = ALLOWED["Generate"]
LEFT_OUT = {"DrainWorker", "ResumeWorker", "FlushCache", "RebuildIndex"}
"""Methods that affect every client. They get only mangled bytes and wrong names."""
SERVICES = tuple(
    file.services_by_name[name]
    for file, name in (
        (inference_pb2.DESCRIPTOR, "InferenceService"),
        (cluster_pb2.DESCRIPTOR, "ClusterService"),
        (admin_pb2.DESCRIPTOR, "AdminService"),
        (session_pb2.DESCRIPTOR, "EngineService"),
    )
)


@dataclass(frozen=True, slots=True)
class Shot:
    """One message, or several for a session."""

    number: int
    method: MethodDescriptor
    raw: tuple[bytes, ...]

    @property
    def path(self) -> str:
        return f"/{self.method.containing_service.full_name}/{self.method.name}"

    @property
    def is_for_worker(self) -> bool:
        return self.method.containing_service.name == "EngineService"


@dataclass(frozen=True, slots=True)
class Finding:
    shot: Shot
    what: str


@dataclass(slots=True)
class Tally:
    codes: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)


@cache
def methods() -> tuple[MethodDescriptor, ...]:
    """Return all methods. Those with more that can be wrong occur more often."""
    weights = {
        "Generate": 8,
        "GenerateStream": 8,
        "Session": 8,
        "Tokenize": 3,
        "LookupPrefix": 2,
        "ListBlocks": 2,
    }
    return tuple(
        method
        for service in SERVICES
        for method in service.methods
        for _ in range(weights.get(method.name, 1))
    )


def shot(seed: int, number: int) -> Shot:
    random = Random(f"{seed}:{number}")
    method = random.choice(methods())
    count = random.randint(1, 6) if method.client_streaming else 1
    return Shot(number, method, tuple(_raw(random, method) for _ in range(count)))


def _raw(random: Random, method: MethodDescriptor) -> bytes:
    if method.name in LEFT_OUT:
        message = random_message(random, method.input_type)
        message.worker_id = CANARY  # type: ignore[attr-defined]
        raw = message.SerializeToString()
        return raw if method.containing_service.name == "AdminService" else b"\xff" + raw
    if random.random() < 0.3:
        message = random_message(random, method.input_type)
    else:
        message = good(random, method)
        vary(random, message, random.choice((0, 1, 1, 2, 4)))
    _shorten(message)
    if "model" in method.input_type.fields_by_name and random.random() < 0.9:
        message.ClearField("model")  # its refusal comes before all others
    raw = message.SerializeToString()
    return mangled(random, raw) if random.random() < 0.3 else raw


def _shorten(message: Message) -> None:
    """Shorten generations, so that thousands take minutes. A short one may run to its end."""
    sampling = getattr(message, "sampling", None)
    if sampling is not None and sampling.max_tokens in range(65, 2**24):
        sampling.max_tokens = 5


def good(random: Random, method: MethodDescriptor) -> Message:
    """Return a message that the method accepts."""
    tokens = [random.randrange(3, 4096) for _ in range(random.choice((1, 20, 40)))]
    inputs: tuple[dict[str, Any], ...] = (
        {"prompt": f"def {CANARY}"},
        {"chat": {"messages": [{"role": "user", "content": CANARY}]}},
        {"prompt_token_ids": {"ids": tokens}},
    )
    of_worker = {"worker_id": "worker-0"}
    match method.name:
        case "Generate" | "GenerateStream":
            sampling = {"max_tokens": 4, **random.choice(SAMPLINGS)}
            return inference_pb2.GenerateRequest(**random.choice(inputs), sampling=sampling)
        case "Embed":
            return inference_pb2.EmbedRequest(**random.choice(inputs[::2]))
        case "Tokenize":
            return inference_pb2.TokenizeRequest(**random.choice(inputs[:2]))
        case "Detokenize":
            return inference_pb2.DetokenizeRequest(token_ids=tokens)
        case "LookupPrefix" | "ExplainPlacement":
            return GetMessageClass(method.input_type)(**random.choice(inputs))
        case "GetBlockPool":
            return cluster_pb2.GetBlockPoolRequest(**of_worker)
        case "ListBlocks" | "ListSequences":
            return GetMessageClass(method.input_type)(**of_worker, page_size=3)
        case "FindBlocks":
            return cluster_pb2.FindBlocksRequest(**of_worker, block_ids=tokens, names=[random.randbytes(16)])
        case "Session":
            return _to_worker(random, tokens)
        case _:
            return random_message(random, method.input_type)


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"n": 3, "logprobs": 2},
    {"beam_width": 3, "n": 2},
    {"top_p": 0.5, "top_k": 7, "min_p": 0.1, "presence_penalty": 1.0, "repetition_penalty": 1.3},
    {"stop": ["\n", "a"], "stop_token_ids": [5], "min_tokens": 2},
    {"structured_output": {"regex": "[a-z]{1,3}"}},
    {"structured_output": {"json_schema": '{"type": "integer"}'}},
    {"prompt_logprobs": 3, "allowed_token_ids": [5, 6, 7], "bad_token_ids": [6]},
)


def _to_worker(random: Random, tokens: list[int]) -> session_pb2.ToWorker:
    handle = random.randint(1, 4)
    root = bytes(16)
    kind = random.random()
    if kind < 0.1:
        return session_pb2.ToWorker(ping={"nonce": 7})
    if kind < 0.25:
        return session_pb2.ToWorker(cancel={"handle": handle})
    submit = session_pb2.Submit(
        handle=handle,
        request_id=f"fuzz-{handle}",
        token_ids=pack_tokens(tokens),
        prompt_tokens=len(tokens),
        block_names=b"".join((root, *chain(root, tokens, 16))),
        sampling={"temperature": 1.0, "top_p": 1.0, "max_tokens": 4, "length_penalty": 1.0},
    )
    if random.random() < 0.2:
        submit.sampling.n = 3
        submit.continuations.add(index=1, token_ids=pack_tokens(tokens[:1]))
    return session_pb2.ToWorker(submit=submit)


class Fuzzer:
    """Sends shots to one house and judges what comes back."""

    def __init__(self, house: House, seed: int) -> None:
        self.tally = Tally()
        self._house = house
        self._seed = seed
        self._reference = house.tokens(max_tokens=24)

    async def run(self, numbers: Iterator[int]) -> None:
        """Send the shots until they end, or until a finding says that the house is gone."""
        open_session = session_channels(None, secret=SECRET, cluster="default", options=CHANNEL_OPTIONS)
        async with (
            grpc.aio.insecure_channel(self._house.router.address, options=CHANNEL_OPTIONS) as router,
            open_session(self._house.worker.address) as worker,
        ):
            while batch := [number for _, number in zip(range(ROUND), numbers, strict=False)]:
                waiting = iter(batch)
                async with asyncio.TaskGroup() as tasks:
                    victim = tasks.create_task(asyncio.to_thread(self._house.tokens, max_tokens=24))
                    for _ in range(AT_ONCE):
                        tasks.create_task(self._send_all(waiting, router, worker))
                assert victim.result() == self._reference, (
                    f"a victim's tokens, among {batch[0]} to {batch[-1]}"
                )
                await asyncio.to_thread(self._house.check)

    async def _send_all(
        self, numbers: Iterator[int], router: grpc.aio.Channel, worker: grpc.aio.Channel
    ) -> None:
        for number in numbers:
            made = shot(self._seed, number)
            outcome = await _outcome(made, worker if made.is_for_worker else router)
            self.tally.codes[made.method.name, outcome.code.name] += 1
            if problem := problem_with(made, outcome):
                self.tally.findings.append(Finding(made, problem))


async def _outcome(made: Shot, channel: grpc.aio.Channel) -> Outcome:
    try:
        if made.method.client_streaming:
            open_stream = partial(channel.stream_stream(made.path), timeout=PATIENCE_SECONDS)
            return await _session(made, open_stream)
        if made.method.server_streaming:
            seconds = 0.3 if made.method.name == "WatchWorkers" else PATIENCE_SECONDS
            async for _ in channel.unary_stream(made.path)(made.raw[0], timeout=seconds):
                pass
        else:
            seconds = PATIENCE_SECONDS if made.method.name == "Generate" else CALL_SECONDS
            await channel.unary_unary(made.path)(made.raw[0], timeout=seconds)
    except grpc.aio.AioRpcError as error:
        return outcome_of(error)
    return Outcome(Code.OK)


async def _session(made: Shot, open_stream: Any) -> Outcome:
    """Send everything, listen for a moment, and cancel."""

    is_over = asyncio.Event()

    async def requests() -> AsyncIterator[bytes]:
        for raw in made.raw:
            yield raw
        await is_over.wait()

    call = open_stream(requests())
    try:
        async with asyncio.timeout(LISTEN_SECONDS):
            async for _ in call:
                pass
    except TimeoutError:
        call.cancel()
    except grpc.aio.AioRpcError as error:
        # The client's own reaction to a write on a stream that the server has just ended, not the server's answer.
        if error.details() != "Internal error from Core":
            raise
    finally:
        is_over.set()
    return Outcome(Code.OK)


def problem_with(made: Shot, outcome: Outcome) -> str | None:
    allowed = REFUSALS | ALLOWED.get(made.method.name, set())
    if made.method.name in LEFT_OUT or made.method.containing_service.name == "AdminService":
        allowed = allowed | {Code.NOT_FOUND}
    if outcome.code not in allowed:
        return f"{outcome.code.name}: {outcome.details[:200]}"
    try:
        assert_discreet(outcome)
    except AssertionError as indiscretion:
        return f"says too much: {str(indiscretion)[:300]}"
    return None


def fuzz(house: House, seed: int, numbers: Iterator[int]) -> Tally:
    fuzzer = Fuzzer(house, seed)
    asyncio.run(fuzzer.run(numbers))
    return fuzzer.tally


def _numbers(goes_on: Callable[[], bool]) -> Iterator[int]:
    number = 0
    while goes_on():
        yield number
        number += 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.hostile.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of shots to send again")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    numbers = iter(arguments.only) if arguments.only else _numbers(lambda: time.monotonic() < end)
    with tempfile.TemporaryDirectory() as folder, running_house(Path(folder)) as house:
        tally = fuzz(house, arguments.seed, numbers)
        house.check_logs()
    for (method, code), count in sorted(tally.codes.items()):
        print(f"{count:8} {method} {code}")
    for finding in tally.findings[:50]:
        print(f"{arguments.seed}:{finding.shot.number} {finding.shot.method.name}: {finding.what}")
    print(f"{sum(tally.codes.values())} messages, {len(tally.findings)} findings, seed {arguments.seed}")
    return int(bool(tally.findings))


if __name__ == "__main__":
    sys.exit(main())
