"""Batches whose router dies: each line is answered once, whatever happened in the middle."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from blockyard.router.client import AsyncClient

from tests.system.load import until, until_ready
from tests.system.processes import SIMULATED, Process, Processes, free_port, processes

from .invariants import blocks_are_free

NUM_LINES = 300
STEP = ("--simulated-step-seconds", "0.01")
ENDED = {"completed", "failed", "expired", "cancelled"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("batches")) as cluster:
        cluster.start(*(cluster.add_worker(f"w{number}", *SIMULATED, *STEP) for number in range(2)))
        yield cluster


def batching_router(cluster: Processes, name: str, folder: Path) -> tuple[Process, str]:
    """Add a router with a folder of batches. Return it and the URL of its gateway."""
    port = str(free_port())
    addresses = [worker.address for worker in cluster.workers.values()]
    options = ("--http-port", port, "--batch-dir", str(folder))
    return cluster.add_router(name, *options, workers=addresses), f"http://127.0.0.1:{port}/v1"


def requests(count: int) -> bytes:
    def line(number: int) -> dict[str, Any]:
        body = {"model": "demo", "prompt": f"def f{number}(x):", "max_tokens": 20, "seed": number + 1}
        body["ignore_eos"] = True
        return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}

    return b"".join(json.dumps(line(number)).encode() + b"\n" for number in range(count))


async def started(http: httpx2.AsyncClient, url: str, content: bytes) -> dict[str, Any]:
    files = {"file": ("in.jsonl", content)}
    source = (await http.post(f"{url}/files", data={"purpose": "batch"}, files=files)).json()
    body = {"input_file_id": source["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch: dict[str, Any] = (await http.post(f"{url}/batches", json=body)).json()
    return batch


async def batch_of(http: httpx2.AsyncClient, url: str, batch_id: str) -> dict[str, Any]:
    batch: dict[str, Any] = (await http.get(f"{url}/batches/{batch_id}")).json()
    return batch


def written(folder: Path) -> int:
    """Return the number of answers on disk, of which the last may be unfinished."""
    return sum(path.read_bytes().count(b"batch_req_") for path in folder.glob("*/files/*.jsonl"))


def cut_last_lines(folder: Path) -> None:
    """Leave what a write leaves that is interrupted in the middle."""
    for path in folder.glob("*/files/*.jsonl"):
        if b"batch_req_" in path.read_bytes():
            path.write_bytes(path.read_bytes()[:-7])


async def ended(http: httpx2.AsyncClient, url: str, batch_id: str) -> dict[str, Any]:
    batch: dict[str, Any] = {}

    async def has_ended() -> bool:
        batch.update(await batch_of(http, url, batch_id))
        return batch["status"] in ENDED

    await until(has_ended, "the batch has ended", seconds=60)
    return batch


async def check_answers(http: httpx2.AsyncClient, url: str, batch: dict[str, Any]) -> None:
    """Check that each line has one answer, with all of its tokens."""
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    assert batch["error_file_id"] is None
    text = (await http.get(f"{url}/files/{batch['output_file_id']}/content")).text
    answers = [json.loads(line) for line in text.splitlines()]
    assert Counter(answer["custom_id"] for answer in answers) == {
        f"r{number}": 1 for number in range(NUM_LINES)
    }
    assert {answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers} == {20}


@pytest.mark.fault(83)
async def test_a_batch_whose_router_is_killed_again_and_again_answers_each_line_once(
    cluster: Processes, tmp_path: Path, measured: dict[str, Any]
) -> None:
    router, url = batching_router(cluster, "killed", tmp_path)
    recoveries = []
    with cluster.extra(router):
        async with httpx2.AsyncClient(timeout=30) as http:
            batch = await started(http, url, requests(NUM_LINES))
            for part in (1, 2, 3):
                await until(
                    lambda part=part: written(tmp_path) >= part * NUM_LINES // 5, "lines are answered"
                )
                router.kill()
                before = written(tmp_path)
                assert before < NUM_LINES
                cut_last_lines(tmp_path)
                at = time.monotonic()
                cluster.start(router)
                await until(lambda before=before: written(tmp_path) > before, "the batch goes on")
                recoveries.append(time.monotonic() - at)
            done = await ended(http, url, batch["id"])
            await check_answers(http, url, done)
        async with AsyncClient(router.address, retries=0) as client:
            await until_ready(client, *cluster.workers)
        await asyncio.gather(*(blocks_are_free(worker) for worker in cluster.workers.values()))
    measured.update(failed=0, recovery_seconds=max(recoveries), note=f"killed 3 times in {NUM_LINES} lines")


@pytest.mark.fault(84)
async def test_another_router_of_the_folder_goes_on_with_a_batch(
    cluster: Processes, tmp_path: Path, measured: dict[str, Any]
) -> None:
    first, _ = batching_router(cluster, "first", tmp_path)
    second, other_url = batching_router(cluster, "second", tmp_path)
    with cluster.extra(first), cluster.extra(second):
        async with httpx2.AsyncClient(timeout=30) as http:
            batch = await started(http, other_url, requests(NUM_LINES))
            await until(lambda: written(tmp_path) >= NUM_LINES // 3, "lines are answered")
            first.kill()
            before = written(tmp_path)
            assert before < NUM_LINES
            took = await until(lambda: written(tmp_path) > before, "the batch goes on")
            await check_answers(http, other_url, await ended(http, other_url, batch["id"]))
    measured.update(failed=0, recovery_seconds=took)
