"""Two models of real workers behind one router: tokens as of each alone, an index for each, and deaths apart."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import AsyncClient, BlockyardError, Delta
from blockyard.worker.llm import LLM, SamplingParams

from tests.system.load import until, until_ready
from tests.system.processes import DETERMINISTIC, MODEL, Processes, free_port, processes
from tests.unit.worker.checkpoints import make_checkpoint

PROMPT = "def main():\n    " + "print('hello')\n    " * 12
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "LlamaForCausalLM", vocab_size=4096)
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def http_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny: Path, http_port: int) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("several"), with_redis=True) as cluster:
        demo = cluster.add_worker("demo-0", *DETERMINISTIC)
        other = cluster.add_worker("tiny-0", *DETERMINISTIC, "--index-model", "tiny", model=tiny)
        http = ("--http-port", str(http_port), "--no-worker-seconds", "0.5")
        router = cluster.add_router("r0", "--further-model", str(tiny), *http)
        cluster.start(demo, other, router)
        yield cluster


def alone(model: Path) -> list[int]:
    (answer,) = LLM(str(model), device="cpu", deterministic=True, kv_cache_memory=36 * 2**20).generate(
        PROMPT, GREEDY
    )
    return list(answer.token_ids)


async def test_each_model_answers_as_alone_over_grpc_and_http(
    cluster: Processes, tiny: Path, http_port: int
) -> None:
    async with AsyncClient(cluster.routers["r0"].address) as client, aiohttp.ClientSession() as session:
        await until_ready(client, "demo-0", "tiny-0")
        for name, folder in (("demo", MODEL), ("tiny", tiny)):
            expected = alone(folder)
            answer = await client.generate(PROMPT, model=name, max_tokens=12, temperature=0.0)
            assert list(answer.token_ids) == expected
            body = {
                "model": name,
                "prompt": PROMPT,
                "max_tokens": 12,
                "temperature": 0,
                "return_token_ids": True,
            }
            async with session.post(f"http://127.0.0.1:{http_port}/v1/completions", json=body) as response:
                found = await response.json()
            assert (found["model"], found["choices"][0]["token_ids"]) == (name, expected)
        with pytest.raises(BlockyardError, match="`nothing` does not exist"):
            await client.generate(PROMPT, model="nothing", max_tokens=1)


async def test_each_model_has_an_index_of_its_own(cluster: Processes) -> None:
    assert cluster.redis is not None
    async with (
        AsyncClient(cluster.routers["r0"].address) as client,
        connect(cluster.redis.url, timeout_seconds=5.0) as redis,
    ):
        for model, worker in (("", "demo-0"), ("tiny", "tiny-0")):
            index = RedisPrefixIndex(redis, "default", model=model)
            assert [record.worker_id for record in await index.directory()] == [worker]
            name = model or "demo"

            async def holders(name: str = name) -> list[str]:
                found = await client.lookup_prefix(PROMPT, model=name)
                return [holder.worker_id for holder in found.holders]

            async def is_held(worker: str = worker) -> bool:
                return await holders() == [worker]

            await until(is_held, f"{worker} holds the prompt of {name}")
            explained = await client.explain_placement(PROMPT, model=name)
            assert explained.chosen_worker_id == worker
            info = await client.index_info(name)
            assert (info.state, [one.worker_id for one in info.workers]) == (
                cluster_pb2.INDEX_STATE_EXACT,
                [worker],
            )


async def test_the_death_of_one_models_workers_is_not_noticed_by_the_other(cluster: Processes) -> None:
    async with AsyncClient(cluster.routers["r0"].address, retries=0) as client:
        await until_ready(client, "demo-0", "tiny-0")

        async def ask(model: str) -> int:
            return len((await client.generate(PROMPT, model=model, max_tokens=12, ignore_eos=True)).token_ids)

        # Each has begun, and none can have ended: all run while the other model's worker dies.
        streams = [client.stream(PROMPT, model="demo", max_tokens=48, ignore_eos=True) for _ in range(4)]
        first = [await anext(stream) for stream in streams]
        cluster.workers["tiny-0"].kill()

        async def rest(stream: AsyncIterator[Delta]) -> int:
            return sum([len(delta.token_ids) async for delta in stream])

        numbers = await asyncio.gather(*map(rest, streams))
        assert [len(one.token_ids) + more for one, more in zip(first, numbers, strict=True)] == [48] * 4
        with pytest.raises(BlockyardError) as refused:
            await ask("tiny")
        assert refused.value.code.name == "UNAVAILABLE"
        cluster.start(cluster.workers["tiny-0"])
        await until_ready(client, "demo-0", "tiny-0")
        assert await ask("tiny") == 12
