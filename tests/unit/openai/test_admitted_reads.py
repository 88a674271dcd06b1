"""A call that the router refuses for its load or its caller's limits reads neither Redis nor the disk."""

from pathlib import Path
from typing import Any

import openai
import pytest
from blockyard.router.openai.batches.store import TenantStore

from .rig import CHAT, ended, ledger_of, running_gateway, started

pytestmark = pytest.mark.asyncio


def noting(name: str, noted: list[str]) -> Any:
    """Return this method of a tenant's store, which notes each call."""
    read = getattr(TenantStore, name)

    def called(self: TenantStore, *ids: str) -> Any:
        noted.append(name)
        return read(self, *ids)

    return called


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
