"""`python -m blockyard.worker` in this process: its metrics, its end by SIGTERM, and its end by itself."""

import asyncio
import os
import re
import signal
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from blockyard.worker import __main__ as command
from blockyard.worker.simulated import faults

from .serving import KV_BYTES, SECRET, Session, engine_settings

PATIENCE_SECONDS = 30


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("BLOCKYARD_CLUSTER_SECRET", SECRET)
    monkeypatch.setattr(command, "configure_logging", lambda *_, **__: None)
    caplog.set_level("INFO", logger="blockyard")


async def told(caplog: pytest.LogCaptureFixture, pattern: str) -> str:
    """Wait until the command has logged this, and return the pattern's group."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (match := re.search(pattern, caplog.text)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return match[1]


@asynccontextmanager
async def served(
    caplog: pytest.LogCaptureFixture, *options: str, exit_code: int = 0
) -> AsyncIterator[Session]:
    """Serve as the command does, until it ends by itself. Yield a router's session."""
    model = engine_settings().model
    arguments = ["--model", model, "--engine", "simulated", "--kv-cache-memory", str(KV_BYTES), *options]
    serving = asyncio.create_task(command.serve(command.parse(arguments)))
    async with Session(await told(caplog, r"serves at (\S+)")) as session:
        yield session
        assert await asyncio.wait_for(serving, PATIENCE_SECONDS) == exit_code


async def test_it_serves_metrics_and_sigterm_lets_what_runs_finish(caplog: pytest.LogCaptureFixture) -> None:
    async with served(caplog, "--simulated-step-seconds", "0.02") as session:
        url = await told(caplog, r"metrics at (http\S+)")
        answer = await asyncio.to_thread(urllib.request.urlopen, url, timeout=10)
        text = answer.read().decode()
        assert re.search(r'blockyard_blocks_free\{cluster="default",.*worker="worker-0"\} 64\.0', text)
        assert re.search(r'blockyard_generated_tokens_total\{.*worker="worker-0"\} 0\.0', text)
        await session.submit(1, max_tokens=60)
        first = await session.step_with(lambda step: step.token_ids)
        os.kill(os.getpid(), signal.SIGTERM)
        received, was_told, has_ended = len(first.token_ids), False, False
        while not has_ended:
            message = await session.read()
            was_told |= message.draining.is_draining
            received += len(message.step.token_ids)
            has_ended = any(message.step.finish_reasons)
        assert (was_told, received) == (True, 60)


async def test_sigterm_gives_back_what_outlives_the_grace(caplog: pytest.LogCaptureFixture) -> None:
    options = ("--simulated-step-seconds", "0.02", "--grace-seconds", "0.2", "--metrics-port", "-1")
    async with served(caplog, *options) as session:
        await session.submit(1, max_tokens=450)
        await session.until_runs()
        os.kill(os.getpid(), signal.SIGTERM)
        await session.step_with(lambda step: step.failed_handles)


async def test_a_worker_whose_engine_hangs_ends_itself_with_status_1(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "HANG_SECONDS", 2.0)
    options = ("--simulated-fault", "7:hang", "--stall-seconds", "0.5", "--metrics-port", "-1")
    async with served(caplog, *options, exit_code=1) as session:
        await session.submit(1, token=7)
    assert "has finished no step" in caplog.text


def test_a_model_that_no_worker_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    monkeypatch.setattr("sys.argv", ["worker", "--model", str(tmp_path)])
    assert command.main() == 1
    assert "BertModel" in caplog.text
