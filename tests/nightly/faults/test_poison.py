"""Requests that break the step that computes them: no other request may notice. test_worker_death.py has those that
kill workers."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from blockyard.proto.v1 import inference_pb2
from blockyard.router.client import AsyncClient
from safetensors.torch import load_file, save_file

from tests.system.load import answers, load, streams, until_ready
from tests.system.processes import DETERMINISTIC, MODEL, SIMULATED, Process, Processes, processes

from .invariants import Baseline, all_is_as_before, each_ended_once, same_tokens
from .rig import raw_inference

MARKER_TOKEN = 3333
NUM_STREAMS = 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("poison")) as cluster:
        yield cluster


def marked(*, max_tokens: int = 4, length: int = 40) -> inference_pb2.GenerateRequest:
    """A prompt with the marker in front, over more than two blocks: none of them is sound, however it is chunked."""
    tokens = [MARKER_TOKEN, *(10 + number for number in range(length - 1))]
    return inference_pb2.GenerateRequest(
        prompt_token_ids={"ids": tokens}, sampling={"max_tokens": max_tokens, "seed": 1}
    )


async def code_of_poison(router: Process) -> grpc.StatusCode:
    async with raw_inference(router) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.Generate(marked(), timeout=60.0)
    code: grpc.StatusCode = failure.value.code()
    return code


@pytest.mark.fault(25)
async def test_a_step_that_raises_ends_the_failing_request_alone(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    options = (*SIMULATED, "--simulated-step-seconds", "0.02", "--simulated-fault", f"{MARKER_TOKEN}:raise")
    workers = [cluster.add_worker(f"raises{number}", *options) for number in range(2)]
    patient = ("--suspect-seconds", "60", "--lost-seconds", "90")
    router = cluster.add_router("r25", *patient, workers=[worker.address for worker in workers])
    with cluster.extra(*workers, router):
        async with AsyncClient(router.address, retries=0) as client:
            await until_ready(client, *(worker.name for worker in workers))
            reference = await answers(client, streams(NUM_STREAMS, max_tokens=100))
            baseline = Baseline.of(cluster)
            async with load(client, streams(NUM_STREAMS, max_tokens=100)) as running:
                await running.until_tokens(5)
                code = await code_of_poison(router)
                finished = await running.finished()
            failed = sum(stream.error is not None for stream in finished)
            migrated = sum(stream.finish.migrations for stream in finished if stream.finish is not None)
            measured.update(failed=failed, migrated=migrated, note="of those beside it")
            assert code is grpc.StatusCode.INTERNAL
            # The step runs again in halves, so no other request has to move.
            assert migrated == 0
            same_tokens(finished, reference)
            each_ended_once(finished)
            assert all(worker.is_running for worker in workers)
            await all_is_as_before(cluster, baseline, client)


@pytest.fixture(scope="module")
def spoilt_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with NaN as the marker's embedding. The head is separate, and sound."""
    folder = tmp_path_factory.mktemp("spoilt") / "model"
    shutil.copytree(MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding.clone()
    embedding[MARKER_TOKEN] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return folder


@pytest.mark.fault(27)
async def test_a_request_whose_logits_are_no_numbers_ends_alone_and_leaves_no_prefix(
    cluster: Processes, spoilt_model: Path, measured: dict[str, Any]
) -> None:
    worker = cluster.add_worker("spoilt", *DETERMINISTIC, model=spoilt_model)
    router = cluster.add_router("r27", workers=[worker.address], model=spoilt_model)
    wanted = {"temperature": 0.0, "max_tokens": 60, "bad_token_ids": [MARKER_TOKEN]}
    with cluster.extra(worker, router):
        async with AsyncClient(router.address, retries=0) as client:
            await until_ready(client, worker.name)
            reference = await answers(client, streams(NUM_STREAMS, **wanted))
            baseline, cached = Baseline.of(cluster), await _cached_names(client, worker)
            async with load(client, streams(NUM_STREAMS, **wanted)) as running:
                await running.until_tokens(3)
                code = await code_of_poison(router)
                finished = await running.finished()
            measured.update(
                failed=sum(stream.error is not None for stream in finished), note="of those beside it"
            )
            assert code is grpc.StatusCode.INTERNAL
            same_tokens(finished, reference)
            each_ended_once(finished)
            await all_is_as_before(cluster, baseline, client)
            # The streams beside it are those of the reference. Blocks beyond theirs belong to the failing request.
            assert await _cached_names(client, worker) == cached


async def _cached_names(client: AsyncClient, worker: Process) -> set[bytes]:
    """Return the names of the prefixes that a look-up could find."""
    return {block.name for block in await client.list_blocks(worker.name) if block.name}
