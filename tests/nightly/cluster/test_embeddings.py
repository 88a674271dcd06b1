"""Embeddings of real workers and a router: equal to transformers' over HTTP and gRPC, also where a worker is killed."""

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from blockyard.proto.text import load_tokenizer
from blockyard.router.client import AsyncClient
from openai import AsyncOpenAI

from tests.system.load import until, until_ready
from tests.system.processes import MODEL, Processes, free_port, processes
from tests.unit.worker.checkpoints import make_embedding_checkpoint, reference_embedding

WORKER = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory", str(24 * 2**20))
SMALL_STEPS = ("--max-num-batched-tokens", "32", "--max-num-seqs", "8")
"""A prompt of 300 tokens takes ten steps."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedder") / "model"
    make_embedding_checkpoint(folder, "Qwen3ForCausalLM", vocab_size=4096)
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def http_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path, http_port: int) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("embeddings"), with_redis=True) as cluster:
        workers = [cluster.add_worker(name, *WORKER, *SMALL_STEPS, model=model) for name in ("w0", "w1")]
        names = ("--model-name", "Qwen3-Embedding-0.6B")
        router = cluster.add_router("r0", "--http-port", str(http_port), *names, model=model)
        cluster.start(*workers, router)
        yield cluster


def assert_equal(values: list[float], model: Path, text: str) -> None:
    expected = reference_embedding(model, load_tokenizer(model).encode(text)).numpy()
    np.testing.assert_allclose(np.array(values, np.float32), expected, atol=1e-5, rtol=0)


def text_of(number: int, lines: int = 40) -> str:
    return "".join(f"value_{number}_{line} = {line}\n" for line in range(lines))


async def test_http_and_grpc_equal_transformers_and_reuse_what_is_cached(
    cluster: Processes, http_port: int, model: Path
) -> None:
    async with (
        AsyncClient(cluster.routers["r0"].address) as ours,
        AsyncOpenAI(base_url=f"http://127.0.0.1:{http_port}/v1", api_key="none") as theirs,
    ):
        await until_ready(ours, "w0", "w1")
        texts = ["import os", "x", text_of(0), text_of(1)]
        answer = await theirs.embeddings.create(model="demo", input=texts)
        for text, item in zip(texts, answer.data, strict=True):
            assert_equal(item.embedding, model, text)
        again = await ours.embed(text_of(0))
        assert_equal(list(again.values), model, text_of(0))
        assert again.prompt_tokens - again.cached_tokens <= 16
        half = await ours.embed("import os", dimensions=32)
        expected = reference_embedding(model, load_tokenizer(model).encode("import os")).numpy()[:32]
        np.testing.assert_allclose(half.values, expected / np.linalg.norm(expected), atol=1e-5)


def test_the_program_of_the_document_runs(cluster: Processes, http_port: int) -> None:
    text = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (program,) = (program for program in programs if "embeddings.create" in program)
    program = program.replace("127.0.0.1:8000", f"127.0.0.1:{http_port}").replace(
        "dimensions=256", "dimensions=32"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("[32, 32] ")


async def test_a_worker_that_is_killed_in_the_middle_changes_no_answer(
    cluster: Processes, http_port: int, model: Path
) -> None:
    async with (
        AsyncClient(cluster.routers["r0"].address) as ours,
        AsyncOpenAI(base_url=f"http://127.0.0.1:{http_port}/v1", api_key="none", max_retries=0) as theirs,
    ):
        await until_ready(ours, "w0", "w1")
        texts = [text_of(number) for number in range(10, 74)]
        running = asyncio.create_task(theirs.embeddings.create(model="demo", input=texts, timeout=120))

        async def w0_computes() -> bool:
            return any(request.worker_id == "w0" for request in await ours.list_requests())

        await until(w0_computes, "w0 has a request", every=0.002)
        cluster.workers["w0"].kill()
        assert not running.done()
        answer = await running
        for text, item in zip(texts, answer.data, strict=True):
            assert_equal(item.embedding, model, text)
        info = await ours.cluster_info()
        assert info.migrations > 0
