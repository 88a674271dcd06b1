"""A call that the router refuses for its load or its caller's limits reads neither Redis nor the disk."""

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from blockyard.deploy.machine.redis_server import start_private_redis
from blockyard.router import sealed_records
from blockyard.router.admission.ledger import AdmissionLedger
from blockyard.router.admission.rate_limits import RateLimit
from blockyard.router.admission.token_entries import new_token
from blockyard.router.openai.batches.store import TenantStore
from blockyard.router.sealed_records import SealedRecords

from .rig import CHAT, Gateway, running_gateway, served_by, worker_of_model
from .test_batches import ended, started

pytestmark = pytest.mark.asyncio


def ledger_of(gateway: Gateway) -> AdmissionLedger:
    groups = gateway.router.server._groups
    assert groups is not None
    return groups.default.parts.ledger


def noting(name: str, noted: list[str]) -> Any:
    """Return this method of a tenant's store, which notes each call."""
    read = getattr(TenantStore, name)

    def called(self: TenantStore, *ids: str) -> Any:
        noted.append(name)
        return read(self, *ids)

    return called


@pytest.mark.ci
async def test_a_response_that_is_refused_reads_no_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Any] = []
    get = SealedRecords.get

    async def noted(self: SealedRecords, name: Any) -> bytes | None:
        reads.append(name)
        return await get(self, name)

    monkeypatch.setattr(SealedRecords, "get", noted)
    monkeypatch.setattr(sealed_records, "TIMEOUT_SECONDS", 20.0)
    few, entry = new_token("few", "user", None, limit=RateLimit(requests_per_minute=3))
    tokens = tmp_path / "tokens.json"
    tokens.touch(mode=0o600)
    tokens.write_text(json.dumps({"tokens": [entry]}))
    process = start_private_redis(tmp_path / "redis")
    try:
        async with AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(
                running_gateway(redis_url=process.url, auth_file=str(tokens), max_requests=4)
            )
            await stack.enter_async_context(served_by(gateway, worker_of_model("a")))
            client = await stack.enter_async_context(gateway.client(api_key=few))
            first = await client.responses.create(model="demo", input="one", max_output_tokens=3)
            asked: dict[str, Any] = {
                "model": "demo",
                "input": "two",
                "previous_response_id": first.id,
                "max_output_tokens": 3,
            }
            ledger = ledger_of(gateway)
            with ledger.charge(1, outputs=4, tenant="another"):
                with pytest.raises(openai.RateLimitError) as full:
                    await client.responses.create(**asked)
                assert (full.value.code, reads) == ("overloaded", [])
            for _ in range(2):
                await client.responses.create(**asked)
            assert len(reads) == 2, "a read takes nothing of the limit: three calls were allowed"
            with pytest.raises(openai.RateLimitError) as limited:
                await client.responses.create(**asked)
            assert (limited.value.code, len(reads)) == ("rate_limited", 2)
    finally:
        process.stop()


async def test_a_router_that_is_full_reads_no_records_of_files_and_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        running_gateway(batch_dir=str(tmp_path), max_requests=4) as gateway,
        gateway.client() as client,
    ):
        # A batch that has ended, so that nothing but the calls below reads a record or holds a request.
        batch = await ended(client, await started(client, b"nonsense\n"))
        reads: list[str] = []
        for name in ("file", "files", "batch", "batches"):
            monkeypatch.setattr(TenantStore, name, noting(name, reads))
        reads.clear()
        ledger = ledger_of(gateway)
        source = batch.input_file_id
        with ledger.charge(1, outputs=4, tenant="another"):
            for call in (
                client.files.list(),
                client.files.retrieve(source),
                client.files.content(source),
                client.files.delete(source),
                client.batches.list(),
                client.batches.retrieve(batch.id),
                client.batches.create(input_file_id=source, endpoint=CHAT, completion_window="24h"),
            ):
                with pytest.raises(openai.RateLimitError) as refused:
                    await call
                assert refused.value.code == "overloaded"
            assert reads == []
            with pytest.raises(openai.ConflictError):  # a cancellation is heard at any load
                await client.batches.cancel(batch.id)
        assert (await client.files.retrieve(source)).id == source
        assert "file" in reads
