"""Tenants share no prefixes and no request ids once clients authenticate, and cannot find out those of others."""

from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from blockyard.proto.naming.block_hash import split_names
from blockyard.proto.v1 import cluster_pb2, inference_pb2
from blockyard.router.generation.generation import scoped_session

from tests.unit.router.fake_worker import FakeWorker
from tests.unit.router.rig import (
    FOREVER,
    Router,
    fields_of,
    reason_of,
    refused,
    request,
    running_router,
    worker_of_model,
)

from .conftest import Tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "def f(x):\n    return x + 1\n" * 8
"""Several blocks."""
TENANT_KEY = "blockyard-tenant"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> AsyncIterator[FakeWorker]:
    async with worker_of_model("a") as only:
        yield only


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(tokens: Tokens, worker: FakeWorker) -> AsyncIterator[Router]:
    async with running_router(auth_file=str(tokens.path), workers=(worker.address,)) as running:
        yield running


async def names_of(
    router: Router, worker: FakeWorker, metadata: object, **fields: object
) -> tuple[bytes, ...]:
    """Return the names that the worker gets for the blocks of PROMPT: the root, then each block."""
    await router.inference.Generate(request(PROMPT, **fields), metadata=metadata)
    names = tuple(split_names(worker.submits[-1].block_names))
    assert len(names) > 3
    return names


async def test_tenants_share_no_name_and_users_of_one_tenant_share_all(
    router: Router, worker: FakeWorker, tokens: Tokens
) -> None:
    ann, amy, bob = [await names_of(router, worker, tokens.metadata(name)) for name in ("ann", "amy", "bob")]
    assert ann == amy
    assert not set(ann) & set(bob)


async def test_public_prefixes_are_shared_and_are_what_they_are_without_authentication(
    router: Router, worker: FakeWorker, tokens: Tokens
) -> None:
    ann, bob = [
        await names_of(router, worker, tokens.metadata(name), public_prefix=True) for name in ("ann", "bob")
    ]
    assert ann == bob
    assert not set(ann) & set(await names_of(router, worker, tokens.metadata("ann")))
    async with running_router(workers=(worker.address,)) as open_router:
        assert await names_of(open_router, worker, ()) == ann
        named = ((TENANT_KEY, "acme"),)
        assert await names_of(open_router, worker, named) == ann, "an unproven tenant is no salt"


async def test_a_salt_divides_a_tenant_further_and_imitates_no_other(
    router: Router, worker: FakeWorker, tokens: Tokens
) -> None:
    roots = [
        (await names_of(router, worker, tokens.metadata(name), **fields))[0]
        for name, fields in (
            ("ann", {}),
            ("bob", {}),
            ("ann", {"cache_salt": "bravo"}),
            ("bob", {"cache_salt": "acme"}),
            ("ann", {"cache_salt": "acme", "public_prefix": True}),
            ("ann", {"public_prefix": True}),
        )
    ]
    assert len(set(roots)) == len(roots)


async def test_an_admin_acts_for_a_tenant_and_nobody_else_does(
    router: Router, worker: FakeWorker, tokens: Tokens
) -> None:
    for_acme = ((TENANT_KEY, "acme"),)
    ann = await names_of(router, worker, tokens.metadata("ann"))
    assert await names_of(router, worker, tokens.metadata("ann") + for_acme) == ann
    assert await names_of(router, worker, tokens.metadata("ada") + for_acme) == ann
    assert await names_of(router, worker, tokens.metadata("ada")) != ann
    error = await refused(router.inference.Generate(request(), metadata=tokens.metadata("bob") + for_acme))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    question = cluster_pb2.LookupPrefixRequest(prompt=PROMPT)
    other = ((TENANT_KEY, "bravo"),)
    assert await router.cluster.LookupPrefix(question, metadata=tokens.metadata("vic"))
    error = await refused(router.cluster.LookupPrefix(question, metadata=tokens.metadata("vic") + other))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    explained = cluster_pb2.ExplainPlacementRequest(prompt=PROMPT)
    error = await refused(router.cluster.ExplainPlacement(explained, metadata=tokens.metadata("vic") + other))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_tenant_ends_its_own_requests_and_learns_nothing_of_anothers(
    router: Router, tokens: Tokens
) -> None:
    ann, amy, bob = (tokens.metadata(name) for name in ("ann", "amy", "bob"))
    running = router.inference.GenerateStream(request(request_id="r1", sampling=FOREVER), metadata=ann)
    await anext(aiter(running))
    abort = inference_pb2.AbortRequest(request_id="r1")
    unknown = inference_pb2.AbortRequest(request_id="nothing-runs-under-this")
    of_other, of_nobody = [
        await refused(router.inference.Abort(question, metadata=bob)) for question in (abort, unknown)
    ]
    assert of_other.code() is grpc.StatusCode.NOT_FOUND
    assert (of_other.details(), of_other.trailing_metadata()) == (
        of_nobody.details(),
        of_nobody.trailing_metadata(),
    )
    # The same id is free for another tenant, and taken within this one.
    assert (await router.inference.Generate(request(request_id="r1"), metadata=bob)).request_id == "r1"
    taken = await refused(router.inference.Generate(request(request_id="r1"), metadata=amy))
    assert taken.code() is grpc.StatusCode.ALREADY_EXISTS
    await router.inference.Abort(abort, metadata=amy)
    ended = await refused(running)
    assert ended.code() is grpc.StatusCode.CANCELLED


async def test_an_admin_ends_anybodys(router: Router, tokens: Tokens) -> None:
    running = [
        router.inference.GenerateStream(
            request(request_id="r2", sampling=FOREVER), metadata=tokens.metadata(name)
        )
        for name in ("ann", "bob")
    ]
    for stream in running:
        await anext(aiter(stream))
    await router.inference.Abort(
        inference_pb2.AbortRequest(request_id="r2"), metadata=(*tokens.metadata("ada"), (TENANT_KEY, "acme"))
    )
    assert reason_of(await refused(running[0])) == "ABORTED"
    assert not running[1].done()
    running[1].cancel()


async def test_a_session_of_the_same_name_is_another_one_for_another_tenant() -> None:
    """Otherwise ExplainPlacement would say where another tenant's conversation runs."""
    names = [
        scoped_session(session, realm) for session in ("talk", "a", "") for realm in ("acme", "bravo", "")
    ]
    assert len(set(names)) == 7, "without a session there is none to share, whoever asks"
    assert scoped_session("talk", "") == "talk"


async def test_a_wrong_tenant_name_is_told_by_its_field(router: Router, tokens: Tokens) -> None:
    metadata = (*tokens.metadata("ada"), (TENANT_KEY, "no/name"))
    error = await refused(router.inference.Generate(request(), metadata=metadata))
    assert fields_of(error) == [TENANT_KEY]
