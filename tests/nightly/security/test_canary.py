"""A canary word that clients send in every text field reaches only the model and its output.

Real router, workers and Redis, with every process at its most verbose, through good requests, refused ones and a worker
that dies. The cluster's secrets are not found either: its own, the password of Redis, clients' tokens.
"""

import asyncio
import socket
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import grpc
import pytest
from blockyard.proto.naming.block_hash import pack_tokens
from blockyard.proto.text import load_tokenizer
from blockyard.proto.v1 import admin_pb2, cluster_pb2, inference_pb2
from blockyard.proto.v1.admin_pb2_grpc import AdminServiceStub
from blockyard.proto.v1.cluster_pb2_grpc import ClusterServiceStub
from blockyard.proto.v1.inference_pb2_grpc import InferenceServiceStub
from blockyard.router.client import AsyncClient
from google.protobuf.descriptor_pb2 import MethodDescriptorProto
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from redis import Redis

from tests.system.load import until_ready
from tests.system.processes import SECRET, SIMULATED, Processes, processes
from tests.unit.router.rig import MODEL
from tests.unit.security.conftest import Tokens
from tests.unit.security.methods import all_methods, message_class

CANARY = "kanarienvogel7Zq9"
SENTENCE = f"The {CANARY} sings. " * 6
"""More than two blocks of tokens."""
LONG = {"max_tokens": 300, "ignore_eos": True}
LOOKS = ("blockyard.v1.ClusterService", "blockyard.v1.InferenceService")
ACTS = ("blockyard.v1.AdminService",)
CARRY_TEXT = {"Generate", "GenerateStream", "Embed", "Tokenize", "Detokenize", "Abort", "PullPrefix"}
CARRY_TEXT |= {"AddAdapter", "RemoveAdapter"}
"""Methods whose answer is the text itself. An Abort ends a request, no prefix can be pulled here, no text embedded, and
no adapter served."""
FIELDS = {
    "worker_id": "worker-1",
    "page_size": 1000,
    "block_ids": range(64),
    "prompt": SENTENCE,
    "force": True,
}
"""Values for the fields of any request that has them."""


@dataclass(slots=True, kw_only=True)
class Talkative:
    """A cluster and everything that it has told any client, by where."""

    processes: Processes
    metrics_ports: list[int]
    told: dict[str, bytes] = field(default_factory=dict)

    def look_around(self) -> None:
        """Read logs, pool maps, metrics and Redis as they are now."""
        for path in (*self.processes.logs(), *self.processes.folder.rglob("*.map")):
            self.told[path.name] = path.read_bytes()
        for port in self.metrics_ports:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                    self.told[f"metrics of {port}"] = answer.read()
            except OSError:
                continue  # of the worker that was killed
        assert self.processes.redis is not None
        with Redis.from_url(self.processes.redis.url) as redis:
            keys = redis.keys("*")
            assert keys
            for key in keys:
                self.told[f"Redis key {key!r}"] = key + (redis.dump(key) or b"")
                if redis.type(key) == b"hash":
                    self.told[f"Redis hash {key!r}"] = repr(redis.hgetall(key)).encode()

    def where(self, secret: bytes) -> list[str]:
        return [place for place, text in self.told.items() if secret.lower() in text.lower()]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tokens: Tokens) -> Iterator[Talkative]:
    folder = tmp_path_factory.mktemp("talkative")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("BLOCKYARD_LOG_LEVEL", "debug")
        environment.setenv("GRPC_VERBOSITY", "debug")
        environment.setenv("PYTHONASYNCIODEBUG", "1")
        with processes(folder, with_redis=True) as running:
            ports = [free_port(), free_port()]
            for number, port in enumerate(ports):
                running.add_worker(
                    f"worker-{number}",
                    *SIMULATED,
                    *("--metrics-port", str(port), "--pool-map-path", str(folder / f"{number}.map")),
                    *("--log-format", ("text", "json")[number]),
                )
            running.add_router("router-0", "--auth-file", str(tokens.path), "--log-format", "json")
            running.start(*running.workers.values(), *running.routers.values())
            yield Talkative(processes=running, metrics_ports=ports)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True, kw_only=True)
class Caller:
    """A caller of every service of a router, with all rights. It keeps errors."""

    channel: grpc.aio.Channel
    metadata: Any
    told: dict[str, bytes]
    num_failed: int = 0

    async def call(self, method: str, request: Any, *, metadata: Any = None) -> Any:
        service, _, name = method.partition(".")
        stub = {
            "Inference": InferenceServiceStub,
            "Cluster": ClusterServiceStub,
            "Admin": AdminServiceStub,
        }[service](self.channel)
        return await self._finished(
            method, getattr(stub, name)(request, metadata=metadata or self.metadata, timeout=30)
        )

    async def raw(self, path: str, message: bytes) -> Any:
        return await self._finished(
            path, self.channel.unary_unary(path)(message, metadata=self.metadata, timeout=30)
        )

    async def look(self, method: MethodDescriptorProto, request: Message) -> bytes:
        """Return the answer, or the first of them."""
        kind = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
        rpc = kind(method.name)(request.SerializeToString(), metadata=self.metadata, timeout=30)
        try:
            return await (rpc.read() if method.server_streaming else rpc)
        finally:
            rpc.cancel()

    async def fails(self, method: str, request: Any, **options: Any) -> None:
        before = self.num_failed
        await self.call(method, request, **options)
        assert self.num_failed == before + 1, f"{method} did not fail"

    async def _finished(self, name: str, rpc: Any) -> Any:
        try:
            return [message async for message in rpc] if hasattr(rpc, "__aiter__") else await rpc
        except grpc.aio.AioRpcError as error:
            self.num_failed += 1
            trailing = [f"{key}: {value!r}" for key, value in error.trailing_metadata() or ()]
            told = [error.code().name, error.details() or "", *trailing, error.debug_error_string()]
            self.told[f"error {self.num_failed} of {name}"] = "\n".join(told).encode()
            return None


@asynccontextmanager
async def caller(cluster: Talkative, tokens: Tokens) -> AsyncIterator[Caller]:
    (router,) = cluster.processes.routers.values()
    async with AsyncClient(router.address, token=tokens.of["ada"]) as client:
        await until_ready(client, *cluster.processes.workers, seconds=60.0)
    async with grpc.aio.insecure_channel(router.address) as channel:
        yield Caller(channel=channel, metadata=tokens.metadata("ada"), told=cluster.told)


def generation(**fields: Any) -> inference_pb2.GenerateRequest:
    sampling = {"max_tokens": 8, **fields.pop("sampling", {})}
    return inference_pb2.GenerateRequest(sampling=sampling, **fields)


async def good_requests(caller: Caller) -> None:
    chat = {"messages": [{"role": "system", "content": SENTENCE}, {"role": "user", "content": SENTENCE}]}
    for fields in (
        {"prompt": SENTENCE},
        {"chat": chat},
        {"prompt": "x", "sampling": {"stop": [CANARY], "n": 2, "logprobs": 1}},
    ):
        assert await caller.call("Inference.GenerateStream", generation(**fields))
        assert await caller.call("Inference.Generate", generation(**fields))
    asked = inference_pb2.TokenizeRequest(prompt=SENTENCE)
    tokens = (await caller.call("Inference.Tokenize", asked)).token_ids
    asked = inference_pb2.DetokenizeRequest(token_ids=tokens)
    assert CANARY in (await caller.call("Inference.Detokenize", asked)).text


async def failing_requests(caller: Caller) -> None:
    structured = inference_pb2.StructuredOutput
    schema = f'{{"properties": {{"{CANARY}": {{"not": {{"const": "{CANARY}"}}}}}}}}'
    for fields in (
        {"prompt": SENTENCE * 400},
        {"prompt": SENTENCE, "model": f"{CANARY} {CANARY}"},
        {"prompt": SENTENCE, "request_id": f"{CANARY} {CANARY}"},
        {"prompt": SENTENCE, "cache_salt": f"{CANARY}\n"},
        {"prompt": SENTENCE, "session_id": f"{CANARY}/"},
        {"prompt": SENTENCE, "sampling": {"stop": [CANARY * 100]}},
        {"prompt": SENTENCE, "sampling": {"temperature": float("nan")}},
        {"prompt": SENTENCE, "sampling": {"structured_output": structured(json_schema=schema)}},
        {"prompt": SENTENCE, "sampling": {"structured_output": structured(json_schema=CANARY)}},
        {"prompt": SENTENCE, "sampling": {"structured_output": structured(regex=f"({CANARY}")}},
        {"chat": {"messages": [{"role": CANARY, "content": SENTENCE}]}},
        {"chat": {"messages": [{"role": "assistant", "content": SENTENCE}]}},
    ):
        await caller.fails("Inference.Generate", generation(**fields))
        await caller.fails("Inference.GenerateStream", generation(**fields))
    await caller.fails("Inference.Generate", generation(prompt=SENTENCE, model=CANARY))
    # Its answer alone may repeat the name, to the client that sent it.
    name = caller.told.pop(f"error {caller.num_failed} of Inference.Generate")
    assert CANARY.encode() in name
    await caller.fails("Inference.Abort", inference_pb2.AbortRequest(request_id=CANARY))
    for worker_id in (CANARY, "worker-1"):
        pull = admin_pb2.PullPrefixRequest(prompt=SENTENCE, worker_id=worker_id)
        await caller.fails("Admin.PullPrefix", pull)
    for adapter in ({"name": SENTENCE, "path": "tuned"}, {"name": "tuned", "path": SENTENCE}):
        await caller.fails("Admin.AddAdapter", admin_pb2.AddAdapterRequest(**adapter))
    for name in (SENTENCE, "tuned"):
        await caller.fails("Admin.RemoveAdapter", admin_pb2.RemoveAdapterRequest(name=name))
    await caller.fails("Cluster.GetBlockPool", cluster_pb2.GetBlockPoolRequest(worker_id=CANARY))
    token = cluster_pb2.ListBlocksRequest(worker_id="worker-0", page_token=CANARY)
    await caller.fails("Cluster.ListBlocks", token)
    shown = (("authorization", f"Bearer {CANARY}"),)
    await caller.fails("Inference.Generate", generation(prompt=SENTENCE), metadata=shown)
    named = (*caller.metadata, ("blockyard-tenant", f"{CANARY} {CANARY}"))
    await caller.fails("Inference.Generate", generation(prompt=SENTENCE), metadata=named)
    for message in (
        CANARY.encode(),
        b"\x12\x20" + CANARY.encode() + b"\xff" * 15,
        b"\x12\x7f" + CANARY.encode(),
    ):
        await caller.raw("/blockyard.v1.InferenceService/Generate", message)
    await caller.raw(f"/{CANARY}/{CANARY}", SENTENCE.encode())


async def looks_of_operators(caller: Caller, moment: str, *services: str) -> None:
    """Call every method that the server names, so that methods of a later version are included."""
    for method in await all_methods(caller.channel, caller.metadata):
        _, service, name = method.name.split("/")
        if service in services and name not in CARRY_TEXT:
            asked, told = message_class(method.input_type), message_class(method.output_type)
            known = asked.DESCRIPTOR.fields_by_name
            request = asked(**{field: value for field, value in FIELDS.items() if field in known})
            answer = told.FromString(await caller.look(method, request))
            places = (answer.SerializeToString(), str(answer).encode(), str(MessageToDict(answer)).encode())
            caller.told[f"{method.name} {moment}"] = b"\n".join(places)


async def a_worker_dies_under(caller: Caller, cluster: Talkative) -> None:
    """Kill a worker, because replays appear in logs too."""
    streams = [
        asyncio.create_task(
            caller.call("Inference.GenerateStream", generation(prompt=f"{number} {SENTENCE}", sampling=LONG))
        )
        for number in range(8)
    ]
    listed: Any = None
    async with asyncio.timeout(30):
        while listed is None or {request.worker_id for request in listed.requests} != {
            "worker-0",
            "worker-1",
        }:
            listed = await caller.call("Cluster.ListRequests", cluster_pb2.ListRequestsRequest())
            await asyncio.sleep(0.01)
    await looks_of_operators(caller, "while requests run", *LOOKS)
    cluster.processes.workers["worker-0"].kill()
    assert all(await asyncio.gather(*streams)), "every stream goes on elsewhere"


async def test_what_clients_say_is_found_nowhere(cluster: Talkative, tokens: Tokens) -> None:
    async with caller(cluster, tokens) as calls:
        await good_requests(calls)
        await failing_requests(calls)
        assert calls.num_failed > 30
        await a_worker_dies_under(calls, cluster)
        await looks_of_operators(calls, "afterwards", *LOOKS)
        await looks_of_operators(calls, "at last", *ACTS)
        served = {method.name.split("/")[1] for method in await all_methods(calls.channel, calls.metadata)}
        assert {service for service in served if service.startswith("blockyard.")} == {*LOOKS, *ACTS}
    cluster.look_around()
    log = cluster.told["router-0.log"]
    assert b'"level": "debug"' in log
    assert b'"request_id": "req-' in log
    assert b"lost worker" in log
    for method in ("WatchWorkers", "FindBlocks", "ListSequences"):
        assert cluster.told[f"/{LOOKS[0]}/{method} while requests run"]
    assert any(place.startswith("Redis hash") for place in cluster.told), "the index has entries"
    assert cluster.where(CANARY.encode()) == []
    token_ids = load_tokenizer(MODEL).encode(CANARY, add_special_tokens=False)
    assert len(token_ids) > 4
    inner = token_ids[1:-1]
    for disguise in (
        pack_tokens(inner),
        ", ".join(map(str, inner)).encode(),
        CANARY.encode().hex().encode(),
    ):
        assert cluster.where(disguise) == []


def test_the_clusters_secrets_are_found_nowhere(cluster: Talkative, tokens: Tokens) -> None:
    cluster.look_around()
    digests = (entry["token_sha256"] for entry in tokens.entries)
    for secret in chain((SECRET,), tokens.of.values(), digests):
        assert cluster.where(secret.encode()) == []
    for process in (*cluster.processes.workers.values(), *cluster.processes.routers.values()):
        assert not any(SECRET in word for word in process.command), "anybody may read it there"
