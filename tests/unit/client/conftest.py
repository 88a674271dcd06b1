"""A real gRPC server with a scripted servicer, and one driver for both clients."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from blockyard.proto.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from .drivers import AsyncDriver, Driver, SyncDriver

Message = inference_pb2.GenerateStreamResponse


def delta(text: str, token_ids: list[int], offset: int, index: int = 0, **fields: Any) -> Message:
    return Message(
        request_id="r",
        delta=inference_pb2.OutputDelta(
            text=text, token_ids=token_ids, token_offset=offset, index=index, **fields
        ),
    )


def last(num_tokens: int, index: int = 0, **fields: Any) -> Message:
    return Message(
        request_id="r",
        delta=inference_pb2.OutputDelta(index=index),
        finish=inference_pb2.Finish(
            reason=inference_pb2.FINISH_REASON_STOP,
            stop_reason="\n",
            usage=inference_pb2.Usage(prompt_tokens=7, completion_tokens=num_tokens, cached_tokens=4),
            seed=-3,
            timing=inference_pb2.Timing(time_to_first_token_seconds=0.25, total_seconds=0.5),
            worker_id="w1",
            **fields,
        ),
    )


def logprob(token_id: int) -> inference_pb2.TokenLogprob:
    """Exact in a float32."""
    top = [inference_pb2.TopLogprob(token_id=token_id, logprob=-token_id / 4)]
    return inference_pb2.TokenLogprob(token_id=token_id, logprob=-token_id / 4, rank=1, top=top)


GOOD_SCRIPT = (delta("Hel", [1, 2], 0), delta("", [3], 2), delta("lo", [4], 3), last(4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """A scripted failure, with the details that the router would send."""

    code: grpc.StatusCode
    reason: str = "SOME_REASON"
    retry_delay_seconds: float | None = None
    violations: tuple[tuple[str, str], ...] = ()

    def status(self) -> status_pb2.Status:
        details: list[Any] = [error_details_pb2.ErrorInfo(reason=self.reason, domain="blockyard")]
        if self.violations:
            violations = [{"field": name, "description": text} for name, text in self.violations]
            details.append(error_details_pb2.BadRequest(field_violations=violations))
        if self.retry_delay_seconds is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMicroseconds(round(self.retry_delay_seconds * 1e6))
            details.append(retry)
        packed = [any_pb2.Any() for _ in details]
        for slot, detail in zip(packed, details, strict=True):
            slot.Pack(detail)
        code = code_pb2.Code.Value(self.code.name)
        return status_pb2.Status(code=code, message="as scripted", details=packed)


class Hang:
    """A scripted silence: until the client goes."""


Step = Message | Fail | Hang


@dataclass
class ScriptedRouter(inference_pb2_grpc.InferenceServiceServicer, cluster_pb2_grpc.ClusterServiceServicer):
    """Plays one script a GenerateStream, in order, the last one over and over; other calls have fixed answers."""

    scripts: list[tuple[Step, ...]] = field(default_factory=lambda: [GOOD_SCRIPT])
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    arrived_at: list[float] = field(default_factory=list)
    metadata: dict[str, str | bytes] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: list[str] = field(default_factory=list)
    holds_request: str = ""

    async def GenerateStream(self, request, context):
        self.requests.append(request)
        self.arrived.set()
        self.arrived_at.append(asyncio.get_running_loop().time())
        self.metadata = dict(context.invocation_metadata())
        script = self.scripts[min(len(self.requests), len(self.scripts)) - 1]
        try:
            for step in script:
                match step:
                    case Fail():
                        await context.abort_with_status(rpc_status.to_status(step.status()))
                    case Hang():
                        await asyncio.Event().wait()
                    case _:
                        yield step
        except (asyncio.CancelledError, GeneratorExit):
            # gRPC closes a generator that is cancelled while a message of it is being sent.
            self.cancelled.set()
            raise

    async def Tokenize(self, request, context):
        assert request.WhichOneof("input") == "chat"
        return inference_pb2.TokenizeResponse(token_ids=[len(m.content) for m in request.chat.messages])

    async def Embed(self, request, context):
        values = list(map(float, request.prompt_token_ids.ids)) or [float(len(request.prompt))]
        return inference_pb2.EmbedResponse(
            request_id=request.request_id,
            embedding=values[: request.dimensions or None],
            usage=inference_pb2.Usage(prompt_tokens=7, cached_tokens=4),
            timing=inference_pb2.Timing(total_seconds=0.5),
            worker_id="w1",
            migrations=2,
        )

    async def Detokenize(self, request, context):
        return inference_pb2.DetokenizeResponse(text=",".join(map(str, request.token_ids)))

    async def ListModels(self, request, context):
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id="demo", vocab_size=4096)])

    async def Abort(self, request, context):
        self.aborted.append(request.request_id)
        if request.request_id != self.holds_request:
            await context.abort_with_status(
                rpc_status.to_status(Fail(code=grpc.StatusCode.NOT_FOUND, reason="NO_SUCH_REQUEST").status())
            )
        return inference_pb2.AbortResponse()

    async def GetClusterInfo(self, request, context):
        return cluster_pb2.ClusterInfo(cluster="test", workers_ready=2)

    async def ListWorkers(self, request, context):
        return cluster_pb2.ListWorkersResponse(workers=[cluster_pb2.Worker(worker_id="w1")])

    async def WatchWorkers(self, request, context):
        for count in (1, 2):
            yield cluster_pb2.ListWorkersResponse(
                workers=[cluster_pb2.Worker(worker_id=f"w{number}") for number in range(count)]
            )

    async def GetBlockPool(self, request, context):
        return cluster_pb2.BlockPool(worker_id=request.worker_id, total_blocks=9)

    async def ListBlocks(self, request, context):
        start = int(request.page_token or 0)
        return cluster_pb2.ListBlocksResponse(
            blocks=[cluster_pb2.Block(block_id=start), cluster_pb2.Block(block_id=start + 1)],
            next_page_token=str(start + 2) if start < 4 else "",
        )

    async def FindBlocks(self, request, context):
        blocks = [cluster_pb2.Block(block_id=block) for block in request.block_ids]
        return cluster_pb2.FindBlocksResponse(
            blocks=blocks + [cluster_pb2.Block(name=name) for name in request.names]
        )

    async def ListSequences(self, request, context):
        if request.HasField("sequence_id"):
            known = [request.sequence_id] if request.sequence_id == 7 else []
        else:
            known = [int(request.page_token or 1)]
        return cluster_pb2.ListSequencesResponse(
            sequences=[cluster_pb2.SequenceInfo(sequence_id=known_id) for known_id in known],
            next_page_token="2" if known == [1] else "",
        )

    async def LookupPrefix(self, request, context):
        return cluster_pb2.LookupPrefixResponse(prompt_tokens=len(request.prompt_token_ids.ids))

    async def ExplainPlacement(self, request, context):
        return cluster_pb2.ExplainPlacementResponse(chosen_worker_id=request.cache_salt)

    async def ListRequests(self, request, context):
        return cluster_pb2.ListRequestsResponse(requests=[cluster_pb2.RequestInfo(request_id="r")])


@asynccontextmanager
async def serve(router: ScriptedRouter) -> AsyncIterator[str]:
    """Its address on loopback."""
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.fixture
async def router() -> ScriptedRouter:
    return ScriptedRouter()


@pytest.fixture
async def address(router: ScriptedRouter) -> AsyncIterator[str]:
    async with serve(router) as address:
        yield address


@pytest.fixture
async def dead_address() -> str:
    """Return an address at which no server listens any more."""
    async with serve(ScriptedRouter()) as address:
        pass
    return address


@pytest.fixture(params=[SyncDriver, AsyncDriver], ids=["sync", "async"])
async def connect(request: pytest.FixtureRequest):
    drivers: list[Driver] = []

    def connect(addresses: str | list[str], **options: Any) -> Driver:
        drivers.append(request.param(addresses, **options))
        return drivers[-1]

    yield connect
    for driver in drivers:
        await driver.close()
