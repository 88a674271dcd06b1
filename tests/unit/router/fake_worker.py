"""A scripted EngineService over real gRPC: the worker's side of the session, with faults on demand.

Its tokens depend on seed and position alone, as the contract demands. So a test knows the tokens of any request,
wherever and however often it is placed. Only the router's unit tests use it.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from blockyard.proto.index.contract import WorkerRecord
from blockyard.proto.naming.block_hash import unpack_tokens
from blockyard.proto.security.cluster_identity import record_proof
from blockyard.proto.security.tls import listen, session_channels, session_server_credentials
from blockyard.proto.v1 import admin_pb2, cluster_pb2, inference_pb2, session_pb2
from blockyard.proto.v1.session_pb2_grpc import EngineServiceServicer, add_EngineServiceServicer_to_server
from blockyard.router.cluster.link import CHANNEL_OPTIONS
from google.protobuf.message import Message

SECRET = "a-cluster-secret"
open_session = session_channels(None, secret=SECRET, cluster="default", options=CHANNEL_OPTIONS)
BLOCK_SIZE = 16
FIRST_TOKEN = 300
KIND: dict[str, Any] = {"kv_layout": "layers=2xplain/1", "kv_arithmetic": "kernels=torch"}
"""Fields of Hello without which a worker exchanges no blocks."""


def signed(record: WorkerRecord, *, secret: str = SECRET, cluster: str = "default") -> WorkerRecord:
    """Return the record with the proof of a worker that knows this secret."""
    return replace(record, proof=record_proof(record, secret=secret, cluster=cluster))


def expected_tokens(seed: int, count: int, index: int = 0) -> list[int]:
    """Return the tokens that every worker generates for this output of a request with this seed."""
    return [FIRST_TOKEN + (seed * 31 + index * 101 + position * 7) % 1000 for position in range(count)]


def expected_logprob(token_id: int) -> float:
    """Exact in a float32."""
    return -(token_id % 64) / 16


def expected_embedding(token_ids: Sequence[int], size: int) -> list[float]:
    """Return the embedding of length 1 that every worker makes of a prompt. Each number is exact in a float32."""
    values, at = [0.0] * size, sum(token_ids)
    values[at % size], values[(at + 1) % size] = -0.6000000238418579, 0.800000011920929
    return values


def token_logprobs(token_ids: Sequence[int], num_top: int) -> list[inference_pb2.TokenLogprob]:
    return [
        inference_pb2.TokenLogprob(
            token_id=token_id,
            logprob=expected_logprob(token_id),
            rank=1 + token_id % 3,
            top=[inference_pb2.TopLogprob(token_id=rank, logprob=-rank) for rank in range(num_top)],
        )
        for token_id in token_ids
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Script of one request: what the fake worker does with it."""

    reject: int | None = None
    """RejectReason at once."""
    reject_detail: str = ""
    fail_after: int | None = None
    """Number of tokens after which a step fails, for `fail_reason`."""
    fail_reason: int = session_pb2.REJECT_REASON_INTERNAL
    die_after: int | None = None
    """Number of tokens after which the whole stream ends."""
    exit_after: int | None = None
    """Number of tokens after which the whole worker ends."""
    hang_after: int | None = None
    """Number of tokens after which the stream carries nothing more, not even pongs."""
    repeat_tokens: int = 0
    """Number of tokens by which each row begins too early."""
    skip_token: bool = False
    """Whether the second row leaves out a token."""
    step_seconds: float = 0.002
    tokens_a_step: int = 1
    stop_token_at: int | None = None
    """Ends with this many tokens by the stop token that the last one is."""
    lengths: tuple[int, ...] = ()
    """Number of tokens of each output. Outputs without an entry have as many as max_tokens allows."""
    silent_output: int | None = None
    """Never gets a token."""
    omit_logprobs: bool = False
    """Leaves out what was asked for."""
    omit_embedding: bool = False
    embedding_size: int = 64
    tokens: tuple[int, ...] = ()
    """Tokens of each output, in place of those that every worker generates."""
    pull_report: session_pb2.PullReport | None = None
    """Report of the request's pull, sent before the first token. None: it pulls nothing."""


@dataclass(slots=True, eq=False)
class _Stream:
    outgoing: asyncio.Queue[session_pb2.ToRouter | None] = field(default_factory=asyncio.Queue)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    cancelled_outputs: set[tuple[int, int]] = field(default_factory=set)
    hung: bool = False

    def send(self, **message: Any) -> None:
        if not self.hung:
            self.outgoing.put_nowait(session_pb2.ToRouter(**message))


class FakeWorker(EngineServiceServicer):
    """`async with FakeWorker("w0") as worker`: serves at `worker.address`."""

    def __init__(
        self, worker_id: str, *, script: Callable[[session_pb2.Submit], Script] | None = None, **hello: Any
    ) -> None:
        self.script = script or (lambda submit: Script())
        self.address = ""
        self.load = cluster_pb2.WorkerLoad()
        # What the router has sent.
        self.submits: list[session_pb2.Submit] = []
        self.cancelled: list[int] = []
        self.cancelled_outputs: list[tuple[int, int]] = []
        self.admin_calls: list[Message] = []
        self.cancelled_drains = 0
        # Ids in the order in which they came to run.
        self.started: list[str] = []
        self.has_exited = False
        # What a test sets. Beyond max_running and max_waiting: BUSY.
        self.max_running: int | None = None
        self.max_waiting = 0
        # Stall of its engine that it reports, and draining flag of its pongs, which older workers leave unset.
        self.stalled_seconds = 0.0
        self.pong_draining: bool | None = None
        # Serializer of a worker of another version. Such a worker knows no call but Session.
        self.dialect: Callable[[Message], bytes] | None = None
        # Status with which each admin call fails. Drains last until the event is set.
        self.admin_failure: grpc.StatusCode | None = None
        self.drain_ends: asyncio.Event | None = None
        # Fingerprints of the adapters in its adapter folder, by path, and of those that it has read, by name.
        self.folders: dict[str, str] = {}
        self.adapters: dict[str, str] = {}
        self._exiting: asyncio.Task[None] | None = None
        self._turns: asyncio.Semaphore | None = None
        self._streams: set[_Stream] = set()
        self._server: grpc.aio.Server | None = None
        self._hello: dict[str, Any] = {
            "worker_id": worker_id,
            "incarnation": f"{worker_id}-life-1",
            "model_fingerprint": "model",
            "tokenizer_fingerprint": "tokenizer",
            "block_size": BLOCK_SIZE,
            "kv_dtype": "float32",
            "total_blocks": 1000,
            "max_model_len": 512,
            "vocab_size": 4096,
            **KIND,
            **hello,
        }

    async def __aenter__(self) -> "FakeWorker":
        self._server = grpc.aio.server()
        credentials = session_server_credentials(None, secret=SECRET, cluster="default")
        if self.dialect is None:
            add_EngineServiceServicer_to_server(self, self._server)
        else:
            self._server.add_generic_rpc_handlers((self._session_alone(self.dialect),))
        port = listen(self._server, "127.0.0.1:0", credentials)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    def _session_alone(self, dialect: Callable[[Message], bytes]) -> grpc.GenericRpcHandler:
        session: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            self.Session,
            request_deserializer=session_pb2.ToWorker.FromString,
            response_serializer=dialect,
        )
        return grpc.method_handlers_generic_handler("blockyard.v1.EngineService", {"Session": session})

    async def kill(self) -> None:
        """Stop as after SIGKILL: every stream breaks, and the port no longer listens."""
        self.has_exited = True
        if self._server is not None:
            await self._server.stop(None)

    def end_streams(self) -> None:
        """End every stream as a broken connection does. The worker still listens."""
        for stream in self._streams:
            stream.outgoing.put_nowait(None)

    def hang(self) -> None:
        for stream in self._streams:
            stream.hung = True

    def tell_draining(self, is_draining: bool) -> None:
        for stream in self._streams:
            stream.send(draining=session_pb2.Draining(is_draining=is_draining))

    def report(self) -> cluster_pb2.WorkerLoad:
        waiting = 0 if self.max_running is None else max(self.num_running - self.max_running, 0)
        self.load.waiting = max(waiting, int(self.is_full))
        return self.load

    @property
    def is_full(self) -> bool:
        return self.max_running is not None and self.num_running >= self.max_running + self.max_waiting

    @property
    def num_running(self) -> int:
        """Number of requests here, those included that wait to run."""
        return sum(len(stream.tasks) for stream in self._streams)

    async def Session(
        self, request_iterator: AsyncIterator[session_pb2.ToWorker], context: Any
    ) -> AsyncIterator[session_pb2.ToRouter]:
        stream = _Stream()
        self._streams.add(stream)
        stream.send(hello=session_pb2.Hello(**self._hello, stalled_seconds=self.stalled_seconds))
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while (message := await stream.outgoing.get()) is not None:
                yield message
        finally:
            self._streams.discard(stream)
            reader.cancel()
            for task in stream.tasks.values():
                task.cancel()

    async def GetBlockPool(self, request: Any, context: Any) -> Any:
        return cluster_pb2.BlockPool(worker_id=request.worker_id, total_blocks=7)

    async def ListBlocks(self, request: Any, context: Any) -> Any:
        if request.page_token not in ("", "next"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no page of mine")
        return cluster_pb2.ListBlocksResponse(next_page_token="next")

    async def FindBlocks(self, request: Any, context: Any) -> Any:
        return cluster_pb2.FindBlocksResponse(blocks=[{"block_id": block} for block in request.block_ids])

    async def ListSequences(self, request: Any, context: Any) -> Any:
        return cluster_pb2.ListSequencesResponse(sequences=[{"sequence_id": 5}])

    async def DrainWorker(self, request: Any, context: Any) -> Any:
        await self._administered(request, context)
        self.tell_draining(True)
        try:
            if self.drain_ends is not None:
                await self.drain_ends.wait()
        except asyncio.CancelledError:
            self.cancelled_drains += 1
            raise
        return admin_pb2.DrainWorkerResponse(moved=3)

    async def ResumeWorker(self, request: Any, context: Any) -> Any:
        await self._administered(request, context)
        self.tell_draining(False)
        return admin_pb2.ResumeWorkerResponse()

    async def FlushCache(self, request: Any, context: Any) -> Any:
        await self._administered(request, context)
        return admin_pb2.FlushCacheResponse(flushed_blocks=10, flushed_host_blocks=1)

    async def RebuildIndex(self, request: Any, context: Any) -> Any:
        await self._administered(request, context)
        return admin_pb2.RebuildIndexResponse(workers=1)

    async def AddAdapter(self, request: Any, context: Any) -> Any:
        await self._administered(request, context)
        if request.path not in self.folders:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{request.path} is no folder here")
        told = {"name": request.name, "fingerprint": self.folders[request.path], "path": request.path}
        self.adapters[request.name] = told["fingerprint"]
        return admin_pb2.AddAdapterResponse(adapter={**told, "rank": 8, "num_bytes": 1_000_000})

    async def RemoveAdapter(self, request: Any, context: Any) -> Any:
        await self._administered(request, context)
        self.adapters.pop(request.name, None)
        return admin_pb2.RemoveAdapterResponse()

    async def _administered(self, request: Message, context: Any) -> None:
        self.admin_calls.append(request)
        if self.admin_failure is not None:
            await context.abort(self.admin_failure, "what the worker says is its own business")

    async def _read(self, requests: AsyncIterator[session_pb2.ToWorker], stream: _Stream) -> None:
        async for message in requests:
            match message.WhichOneof("message"):
                case "ping":
                    pong = session_pb2.Pong(nonce=message.ping.nonce, load=self.report())
                    pong.stalled_seconds = self.stalled_seconds
                    if self.pong_draining is not None:
                        pong.is_draining = self.pong_draining
                    stream.send(pong=pong)
                case "cancel" if message.cancel.HasField("index"):
                    output = (message.cancel.handle, message.cancel.index)
                    self.cancelled_outputs.append(output)
                    stream.cancelled_outputs.add(output)
                case "cancel":
                    self.cancelled.append(message.cancel.handle)
                    if (task := stream.tasks.pop(message.cancel.handle, None)) is not None:
                        task.cancel()
                case "submit":
                    self._submit(stream, message.submit)

    def _submit(self, stream: _Stream, submit: session_pb2.Submit) -> None:
        self.submits.append(submit)
        script = self.script(submit)
        reject = script.reject
        if submit.lora_fingerprint and submit.lora_fingerprint not in self.adapters.values():
            reject = session_pb2.REJECT_REASON_ADAPTER
        if self.is_full:
            reject = session_pb2.REJECT_REASON_BUSY
        if reject is not None:
            detail = script.reject_detail
            stream.send(rejected=session_pb2.Rejected(handle=submit.handle, reason=reject, detail=detail))
        else:
            stream.tasks[submit.handle] = asyncio.create_task(self._run(stream, submit, script))

    async def _run(self, stream: _Stream, submit: session_pb2.Submit, script: Script) -> None:
        if self.max_running is None:
            await self._generate(stream, submit, script)
        else:
            self._turns = self._turns or asyncio.Semaphore(self.max_running)  # serves in order of arrival
            async with self._turns:
                await self._generate(stream, submit, script)

    async def _generate(self, stream: _Stream, submit: session_pb2.Submit, script: Script) -> None:
        self.started.append(submit.request_id)
        if script.pull_report is not None:
            report = session_pb2.PullReport(handle=submit.handle)
            report.MergeFrom(script.pull_report)
            stream.send(step=session_pb2.StepOutput(pulls=[report]))
        if submit.sampling.embeds:
            await self._embed(stream, submit, script)
            return
        rows = _rows(submit, script)
        while rows:
            await asyncio.sleep(script.step_seconds)
            most_done = max(row.done for row in rows)
            if self._has_failed(stream, submit, script, most_done):
                return
            rows = [row for row in rows if (submit.handle, row.index) not in stream.cancelled_outputs]
            step = self._step(submit, script, [row for row in rows if row.index != script.silent_output])
            rows = [row for row in rows if row.done < len(row.tokens)]
            if not rows:
                stream.tasks.pop(submit.handle, None)
            stream.send(step=step)

    def _has_failed(
        self, stream: _Stream, submit: session_pb2.Submit, script: Script, most_done: int
    ) -> bool:
        """Fail as the script says once so many tokens are done."""
        match script:
            case Script(die_after=int(after)) if most_done >= after:
                stream.outgoing.put_nowait(None)
            case Script(exit_after=int(after)) if most_done >= after:
                self._exiting = asyncio.create_task(self.kill())  # Not as a part of what it kills.
            case Script(hang_after=int(after)) if most_done >= after:
                self.hang()
            case Script(fail_after=int(after)) if most_done >= after:
                stream.tasks.pop(submit.handle, None)
                stream.send(step={"failed_handles": [submit.handle], "failed_reasons": [script.fail_reason]})
            case _:
                return False
        return True

    async def _embed(self, stream: _Stream, submit: session_pb2.Submit, script: Script) -> None:
        await asyncio.sleep(script.step_seconds)
        stream.tasks.pop(submit.handle, None)
        if script.die_after is not None:
            stream.outgoing.put_nowait(None)
            return
        embedding = expected_embedding(unpack_tokens(submit.token_ids), script.embedding_size)
        packed = b"" if script.omit_embedding else struct.pack(f"<{len(embedding)}f", *embedding)
        row = {"handles": [submit.handle], "token_offsets": [0], "token_counts": [0], "stop_tokens": [0]}
        row |= {"finish_reasons": [inference_pb2.FINISH_REASON_STOP], "cached_tokens": [16]}
        stream.send(step={"load": self.report(), "details": [{"row": 0, "embedding": packed}], **row})

    def _step(self, submit: session_pb2.Submit, script: Script, rows: list["_Row"]) -> session_pb2.StepOutput:
        step = session_pb2.StepOutput(load=self.report())
        sampling = submit.sampling
        for row in rows:
            start = max(row.done - script.repeat_tokens, 0) + (1 if script.skip_token and row.done else 0)
            is_first = row.done == 0
            row.done = min(
                row.done + (10**9 if sampling.beam_width else script.tokens_a_step), len(row.tokens)
            )
            token_ids, is_last = row.tokens[start : row.done], row.done == len(row.tokens)
            stopped = is_last and script.stop_token_at is not None
            reason = inference_pb2.FINISH_REASON_STOP if stopped else inference_pb2.FINISH_REASON_LENGTH
            detail = session_pb2.RowDetails(row=len(step.handles))
            if sampling.HasField("logprobs") and not script.omit_logprobs:
                detail.logprobs.extend(token_logprobs(token_ids, sampling.logprobs))
            if sampling.HasField("prompt_logprobs") and row.index == 0 and is_first:
                prompt = unpack_tokens(submit.token_ids)[1 : submit.prompt_tokens]
                detail.prompt_logprobs.extend(token_logprobs(prompt, sampling.prompt_logprobs))
            if sampling.beam_width:
                detail.cumulative_logprob, detail.beam_score = -10.0 * row.index, -1.0 * row.index
            step.handles.append(submit.handle)
            step.indexes.append(row.index)
            step.token_offsets.append(start)
            step.token_counts.append(len(token_ids))
            step.token_ids.extend(token_ids)
            step.finish_reasons.append(reason if is_last else 0)
            step.stop_tokens.append(token_ids[-1] + 1 if stopped else 0)
            step.cached_tokens.append(32)
            if detail.logprobs or detail.prompt_logprobs or sampling.beam_width:
                step.details.append(detail)
        if not any(step.indexes):
            del step.indexes[:]
        return step


@dataclass(slots=True)
class _Row:
    """An output that runs."""

    index: int
    tokens: list[int]
    """All that it will have."""
    done: int


def _rows(submit: session_pb2.Submit, script: Script) -> list[_Row]:
    """Every output of a fresh submit, or those of a replay, each as far as it is."""
    sampling = submit.sampling
    given = unpack_tokens(submit.token_ids)[submit.prompt_tokens :]
    done = {c.index: unpack_tokens(c.token_ids) for c in submit.continuations}
    if not done:
        done = dict.fromkeys(range(sampling.n or 1), given)
    else:
        assert not given, "a continuation beside tokens after the prompt"
        assert all(done.values()), "a continuation without a token"
    rows = []
    for index, tokens in done.items():
        length = script.stop_token_at or (script.lengths[index] if script.lengths else sampling.max_tokens)
        row = _Row(
            index, list(script.tokens[:length]) or expected_tokens(sampling.seed, length, index), len(tokens)
        )
        assert row.tokens[: row.done] == tokens, "a replay of other tokens"
        rows.append(row)
    return rows
