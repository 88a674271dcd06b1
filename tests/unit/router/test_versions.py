"""A router with workers of other versions: older ones send fewer fields, newer ones send unknown fields."""

from collections.abc import Callable

import grpc
import pytest
from blockyard.proto.v1 import admin_pb2, cluster_pb2
from blockyard.proto.v1.admin_pb2_grpc import AdminServiceStub
from google.protobuf.message import Message

from tests.unit.proto.old_session import as_newer, as_old

from .fake_worker import Script, expected_tokens
from .rig import reason_of, refused, request, running_router, worker_of_model

READY = cluster_pb2.WORKER_STATE_READY


@pytest.mark.parametrize("dialect", [as_old, as_newer])
async def test_a_worker_of_another_version_serves_beside_one_of_this(dialect: Callable[[Message], bytes]):
    other, same = worker_of_model("other"), worker_of_model("same")
    other.dialect = dialect
    async with running_router(policy="round_robin") as router, router.workers(other, same):
        for seed in range(4):
            wanted = request(sampling={"seed": seed, "logprobs": 1})
            answer = await router.inference.Generate(wanted)
            assert list(answer.outputs[0].token_ids) == expected_tokens(seed, 20)
        assert min(len(other.submits), len(same.submits)) > 0
        other.script = lambda submit: Script(die_after=5)
        for seed in range(4):
            answer = await router.inference.Generate(request(sampling={"seed": seed}))
            assert list(answer.outputs[0].token_ids) == expected_tokens(seed, 20)


async def test_an_older_worker_says_that_it_knows_no_drain() -> None:
    older = worker_of_model("older")
    older.dialect = as_old
    async with running_router() as router, router.workers(older):
        stub = AdminServiceStub(router.channel)  # type: ignore[no-untyped-call]
        error = await refused(stub.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="older", force=True)))
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "WORKER_UNREACHABLE")
        assert error.details() == "the worker is too old for this call"
        assert await router.states() == {older.address: READY}


async def test_a_word_that_only_newer_workers_say_is_a_sign_of_life_and_no_more() -> None:
    worker = worker_of_model("newer")
    worker.dialect = lambda message: message.SerializeToString() or bytes((0xC2, 0x3E, 0))
    async with running_router() as router, router.workers(worker):
        for stream in worker._streams:
            stream.send()
        answer = await router.inference.Generate(request())
        assert list(answer.outputs[0].token_ids) == expected_tokens(1, 20)
