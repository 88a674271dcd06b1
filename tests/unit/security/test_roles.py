"""A whole router with an auth file, over the wire: every method of the server, with and without tokens of each role."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from blockyard.router.admission.auth import METHOD_ROLES, OPEN, Role
from google.protobuf import descriptor_pb2

from tests.unit.router.rig import Router, reason_of, running_router, until

from .conftest import PEOPLE, Tokens
from .methods import SECONDS, all_methods

WRITE_FAILED = "Internal error from Core"
"""Text of grpc.aio for a status that arrives before the client's own message has left."""
TRIES = 10


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(tokens: Tokens) -> AsyncIterator[Router]:
    async with running_router(auth_file=str(tokens.path), no_worker_seconds=0.0) as running:
        yield running


async def status_of(
    router: Router, method: descriptor_pb2.MethodDescriptorProto, metadata: Any
) -> grpc.aio.AioRpcError | None:
    """Return the error that ends a call with an empty message. None: the call was admitted and goes on or has
    answered."""
    for _ in range(TRIES):
        error = await _status_of(router, method, metadata)
        if error is None or error.details() != WRITE_FAILED:
            break
    return error


async def _status_of(
    router: Router, method: descriptor_pb2.MethodDescriptorProto, metadata: Any
) -> grpc.aio.AioRpcError | None:
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call = getattr(router.channel, kind)(method.name)
    message = iter([b""]) if method.client_streaming else b""
    rpc = call(message, metadata=metadata, timeout=SECONDS)
    try:
        if method.server_streaming:
            await rpc.read()
        else:
            await rpc
    except grpc.aio.AioRpcError as error:
        return error
    finally:
        rpc.cancel()
    return None


def was_denied(error: grpc.aio.AioRpcError | None) -> bool:
    return error is not None and error.code() in (
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_every_method_of_every_service_is_in_the_table_and_nothing_else_is(
    router: Router, tokens: Tokens
) -> None:
    served = {method.name for method in await all_methods(router.channel, tokens.metadata("ada"))}
    assert {"/grpc.health.v1.Health/Watch", "/blockyard.v1.InferenceService/GenerateStream"} <= served
    assert served == set(METHOD_ROLES)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ["nobody", "unknown", "ann", "vic", "ada"])
async def test_every_method_is_open_to_its_roles_and_to_no_other(
    router: Router, tokens: Tokens, name: str
) -> None:
    shown = {"nobody": (), "unknown": (("authorization", "Bearer by-unknown"),)}
    metadata = shown[name] if name in shown else tokens.metadata(name)
    refusal = "UNAUTHENTICATED" if name in shown else "PERMISSION_DENIED"
    for method in await all_methods(router.channel, tokens.metadata("ada")):
        error = await status_of(router, method, metadata)
        roles = METHOD_ROLES[method.name]
        if roles is OPEN or (name in PEOPLE and Role(PEOPLE[name][0]) in roles):
            assert not was_denied(error), method.name
        else:
            assert error is not None, method.name
            assert (error.code().name, reason_of(error)) == (refusal, refusal), method.name


@pytest.mark.asyncio(loop_scope="module")
async def test_a_method_that_does_not_exist_is_denied_like_one_that_nobody_may_call(
    router: Router, tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    method = descriptor_pb2.MethodDescriptorProto(name="/blockyard.v1.InferenceService/Steal")
    error = await status_of(router, method, ())
    assert error is not None
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    with caplog.at_level("INFO", logger="blockyard.audit"):
        error = await status_of(router, method, tokens.metadata("ada"))
    assert error is not None
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "Steal" not in caplog.text
    assert "ada as admin" in caplog.text


@pytest.mark.asyncio(loop_scope="module")
async def test_a_revoked_token_is_refused_and_a_new_one_let_in_while_the_router_runs(tokens: Tokens) -> None:
    own = Tokens(tokens.path.with_name("changing.json"))
    own.add("old", "viewer")
    own.write()
    async with running_router(auth_file=str(own.path)) as router:
        method = descriptor_pb2.MethodDescriptorProto(name="/blockyard.v1.ClusterService/ListWorkers")
        assert await status_of(router, method, own.metadata("old")) is None
        old = own.metadata("old")
        own.entries.clear()
        own.add("new", "viewer", "a-longer-name-than-before")
        own.write()

        async def is_let_in() -> bool:
            return await status_of(router, method, own.metadata("new")) is None

        await until(is_let_in, seconds=20)
        error = await status_of(router, method, old)
        assert error is not None
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_router_does_not_start_with_a_bad_auth_file(tokens: Tokens) -> None:
    bad = tokens.path.with_name("bad.json")
    bad.touch(mode=0o600)
    bad.write_text("{}")
    with pytest.raises(ValueError, match=r"auth file .*bad\.json: it must be a JSON list"):
        async with running_router(auth_file=str(bad)):
            pass
