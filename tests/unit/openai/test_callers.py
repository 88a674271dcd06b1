"""Tokens, roles, tenants and TLS equal those of gRPC: one table, one file of tokens, one certificate."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx2
import openai
import pytest
import pytest_asyncio
from blockyard.deploy.commands.status import _cluster_info
from blockyard.proto.security.tls_files import ServerTls
from blockyard.router.admission.token_entries import new_token
from blockyard.router.server import RouterServer

from .rig import (
    CHAT,
    HELLO,
    Answer,
    Authority,
    Gateway,
    Router,
    Script,
    Tokens,
    config,
    running_gateway,
    served_by,
    until,
    worker_of_model,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(tokens: Tokens) -> AsyncIterator[Gateway]:
    async with running_gateway(auth_file=str(tokens.path)) as running:
        yield running


async def test_a_token_is_required_everywhere_but_for_health(guarded: Gateway, tokens: Tokens) -> None:
    for path in ("/v1/models", "/v1/models/demo", "/nowhere"):
        answer = await guarded.get(path)
        assert (answer.status, answer.error["type"]) == (401, "authentication_error")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic eA=="}):
        answer = await guarded.post(b"no JSON at all", **headers)
        assert (answer.status, answer.error["code"]) == (401, "unauthenticated")
    answer = await guarded.post({"messages": HELLO}, authorization="Bearer sn\u00f6wman")
    assert answer.status == 401
    answer = await guarded.post({"messages": HELLO}, X_Request_Id="two words")
    assert answer.status == 401, "who has no token is told nothing of his headers"
    assert (await guarded.get("/health")).status == 503, "there is no worker; but nobody asked who calls"


async def test_roles_are_those_of_grpcs_methods(guarded: Gateway, tokens: Tokens) -> None:
    async with served_by(guarded, worker_of_model("a")):
        for name, may in (("ann", True), ("ada", True), ("vic", False)):
            async with guarded.client(api_key=tokens.of[name]) as client:
                call = client.chat.completions.create(model="demo", messages=HELLO, max_tokens=2)
                if may:
                    assert (await call).usage.completion_tokens == 2
                    assert (await client.models.list()).data[0].id == "demo"
                else:
                    with pytest.raises(openai.PermissionDeniedError):
                        await call


async def test_a_call_is_its_tokens_tenants_and_names_no_other(guarded: Gateway, tokens: Tokens) -> None:
    async with served_by(guarded, worker_of_model("a")) as worker:
        ann, ada = (f"Bearer {tokens.of[name]}" for name in ("ann", "ada"))
        body = {"messages": HELLO, "max_tokens": 2}
        assert (await guarded.post(body, authorization=ann)).status == 200
        assert (await guarded.post(body, authorization=ann, blockyard_tenant="bravo")).status == 403
        assert (await guarded.post(body, authorization=ada, blockyard_tenant="bravo")).status == 200
        bad = await guarded.post(body, authorization=ada, blockyard_tenant="two words")
        assert (bad.status, bad.error["param"]) == (400, "blockyard-tenant")
        one, other = worker.submits
        assert one.tenant != other.tenant
        assert one.block_names != other.block_names, "prefixes are a tenant's own"


async def test_one_connections_calls_are_each_their_own_tokens(guarded: Gateway, tokens: Tokens) -> None:
    async with served_by(guarded, worker_of_model("a")), httpx2.AsyncClient() as http:
        url = f"http://{guarded.address}{CHAT}"
        for name, status in (("ann", 200), ("", 401), ("vic", 403), ("bob", 200)):
            headers = {"authorization": f"Bearer {tokens.of[name]}"} if name else {}
            answer = await http.post(url, json={"messages": HELLO, "max_tokens": 1}, headers=headers)
            assert answer.status_code == status


async def test_the_same_id_may_run_for_two_tenants(guarded: Gateway, tokens: Tokens) -> None:
    stuck = worker_of_model("a", script=lambda submit: Script(step_seconds=60.0))
    async with served_by(guarded, stuck):
        connections = []
        for name in ("ann", "bob"):
            reader, writer = await guarded.connect()
            head = (
                f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-request-id: same\r\n"
            )
            body = b'{"messages": [{"role": "user", "content": "x"}]}'
            token = f"authorization: Bearer {tokens.of[name]}\r\n"
            writer.write(f"{head}{token}content-length: {len(body)}\r\n\r\n".encode() + body)
            connections.append((reader, writer))
        await until(lambda: len(stuck.submits) == 2)
        for _, writer in connections:
            writer.close()
        await until(lambda: len(stuck.cancelled) == 2)


async def test_an_auth_file_that_cannot_be_read_is_503_until_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockyard.router.admission.token_file.POLL_SECONDS", 0.05)
    monkeypatch.setattr("blockyard.router.admission.token_file.GRACE_SECONDS", 1.0)
    path, (token, made) = tmp_path / "tokens.json", new_token("ann", "admin")
    path.touch(mode=0o600)
    path.write_text(json.dumps([made]))
    async with running_gateway(auth_file=str(path)) as guarded, served_by(guarded, worker_of_model("a")):

        async def ask(token: str = token) -> Answer:
            return await guarded.post({"messages": HELLO, "max_tokens": 1}, authorization=f"Bearer {token}")

        async def answers(status: int) -> bool:
            return (await ask()).status == status

        async def reading(name: str, value: object) -> None:
            await until(lambda: guarded.router.server.readings.get(name) == value, seconds=10.0)

        assert await answers(200)
        await reading("auth_file_valid", 1)
        path.chmod(0o644)
        await until(lambda: answers(503), seconds=10.0)
        error = (await ask()).error
        assert (error["message"], error["code"]) == ("the auth file cannot be read", "auth_unavailable")
        assert (await ask("by-wrong")).status == 401
        trouble = await asyncio.to_thread(_cluster_info, guarded.router.address, 5.0, {"token": token})
        assert trouble == "the auth file cannot be read"
        await reading("auth_file_valid", 0)
        path.chmod(0o600)
        await until(lambda: answers(200), seconds=10.0)
        await reading("auth_file_valid", 1)


async def test_tls_and_mtls_guard_this_port_too(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    server, known = ca.pair("server"), ca.pair("client")
    other = Authority(tmp_path, "other").pair("stranger")
    tls = ServerTls(cert=server.cert, key=server.key, client_ca=ca.ca)
    async with running_https(tls) as gateway:
        trusting = ssl.create_default_context(cafile=ca.ca)
        with pytest.raises(openai.APIConnectionError):
            await listed(gateway, trusting)
        trusting.load_cert_chain(other.cert, other.key)
        with pytest.raises(openai.APIConnectionError):
            await listed(gateway, trusting)
        trusting.load_cert_chain(known.cert, known.key)
        assert await listed(gateway, trusting) == ["demo"]
        with pytest.raises(openai.APIConnectionError):
            await listed(gateway, ssl.create_default_context())
        with pytest.raises(openai.APIConnectionError):
            async with gateway.client() as plain:
                await plain.models.list()


@asynccontextmanager
async def running_https(tls: ServerTls) -> AsyncIterator[Gateway]:
    """Yield a gateway without workers and without a gRPC client, which would need a certificate too."""
    server = RouterServer(config(tls=tls, http_port=0))
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield Gateway(router=Router(server, address, channel, None, None))
    await server.stop(0.0)


async def listed(gateway: Gateway, context: ssl.SSLContext) -> list[str]:
    http = httpx2.AsyncClient(verify=context)
    async with gateway.client(base_url=f"https://{gateway.address}/v1", http_client=http) as client:
        return [model.id for model in (await client.models.list()).data]
