"""Two models and their LoRA adapters on real workers: tokens equal those of merged weights, whatever is killed."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.cli import main
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import (
    AsyncClient,
    BlockyardError,
    Completion,
    Delta,
    InvalidRequestError,
    NotFoundError,
)
from click.testing import CliRunner
from openai import AsyncOpenAI

from tests.system.load import until, until_ready
from tests.system.processes import MODEL, Processes, free_port, processes
from tests.unit.worker.adapters import make_adapter, merge
from tests.unit.worker.checkpoints import make_checkpoint

from .rig import NUM_TOKENS, PROMPT, expected

WORKERS = ("w0", "w1", "tiny-0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the folders `model`, `adapters/sql`, `adapters/law`, and `merged-sql` and `merged-law` for comparison. Of a
    second model it has `tiny`, `adapters/poem` and `merged-poem`."""
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copytree(MODEL, folder / "model")
    make_checkpoint(folder / "tiny", "LlamaForCausalLM", vocab_size=4096)
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder / "tiny")
    for seed, (name, model) in enumerate((("sql", "model"), ("law", "model"), ("poem", "tiny"))):
        make_adapter(folder / "adapters" / name, folder / model, seed=seed)
        merge(folder / model, folder / "adapters" / name, folder / f"merged-{name}")
    return folder


@pytest.fixture(scope="module")
def http_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, folder: Path, http_port: int) -> Iterator[Processes]:
    memory = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory", str(24 * 2**20))
    loras = ("--max-loras", "2", "--adapter-dir", str(folder / "adapters"))
    with processes(tmp_path_factory.mktemp("cluster"), with_redis=True) as cluster:
        workers = [cluster.add_worker(name, *memory, *loras, model=folder / "model") for name in ("w0", "w1")]
        tiny = ("--index-model", "tiny")
        workers.append(cluster.add_worker("tiny-0", *memory, *loras, *tiny, model=folder / "tiny"))
        further = ("--further-model", str(folder / "tiny"))
        http = ("--http-port", str(http_port), "--no-worker-seconds", "0.5")
        router = cluster.add_router("r0", *http, *further, model=folder / "model")
        cluster.start(*workers, router)
        yield cluster


def lora(cluster: Processes, *words: str) -> object:
    """Run `blockyard lora` and return what it prints as JSON."""
    address = cluster.routers["r0"].address
    result = CliRunner().invoke(main, ["lora", *words, "--router", address, "--output", "json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


async def completed(
    client: AsyncClient, adapter: str | None, count: int = NUM_TOKENS, **arguments: Any
) -> Completion:
    return await client.generate(
        PROMPT, lora_name=adapter, max_tokens=count, ignore_eos=True, temperature=0.0, **arguments
    )


async def greedy(client: AsyncClient, adapter: str | None) -> list[int]:
    return list((await completed(client, adapter)).token_ids)


async def test_tokens_are_those_of_merged_weights_over_both_apis_and_after_a_restart_of_the_router(
    cluster: Processes, folder: Path, http_port: int
) -> None:
    async with AsyncClient(cluster.routers["r0"].address) as client:
        await until_ready(client, *WORKERS)
        for name in ("sql", "law"):
            added = await asyncio.to_thread(lora, cluster, "add", name, name)
            assert isinstance(added, dict)
            assert (added["name"], added["rank"]) == (name, 4)
        wanted = {name: expected(folder / f"merged-{name}") for name in ("sql", "law")}
        wanted |= {None: expected(folder / "model")}
        assert len({tuple(tokens) for tokens in wanted.values()}) == 3, "the adapters change nothing"
        for _ in range(2):  # the second time with cached prefixes
            found = await asyncio.gather(*(greedy(client, name) for name in wanted))
            assert dict(zip(wanted, found, strict=True)) == wanted
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{http_port}/v1", api_key="none") as openai:
            for name in ("sql", "law"):
                answer = await openai.completions.create(
                    model=name,
                    prompt=PROMPT,
                    max_tokens=NUM_TOKENS,
                    temperature=0.0,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )
                assert answer.choices[0].model_dump()["token_ids"] == wanted[name]
        listed = await asyncio.to_thread(lora, cluster, "list")
        assert isinstance(listed, list)
        assert [(one["name"], bool(one["workers"])) for one in listed] == [("law", True), ("sql", True)]
    router = cluster.routers["r0"]
    router.kill()
    cluster.start(router)
    async with AsyncClient(router.address) as client:
        await until_ready(client, *WORKERS)
        assert await greedy(client, "sql") == wanted["sql"]


async def test_a_worker_that_is_killed_in_the_middle_changes_no_token_and_comes_back_without_being_told(
    cluster: Processes, folder: Path
) -> None:
    async with AsyncClient(cluster.routers["r0"].address) as client:
        await until_ready(client, *WORKERS)
        many = 300
        running = asyncio.create_task(completed(client, "law", many))

        async def has_begun() -> bool:
            return any(request.generated_tokens > 5 for request in await client.list_requests())

        await until(has_begun, "the request has tokens", every=0.002)
        (request,) = await client.list_requests()
        victim = cluster.workers[request.worker_id]
        victim.kill()
        done = await running
        assert list(done.token_ids) == expected(folder / "merged-law", many)
        assert (done.finish.migrations, done.finish.worker_id == request.worker_id) == (1, False)
        cluster.start(victim)
        await until_ready(client, *WORKERS)
        answers = [await completed(client, "sql", policy="round_robin") for _ in range(4)]
        assert {answer.finish.worker_id for answer in answers} == {"w0", "w1"}
        assert {answer.token_ids for answer in answers} == {tuple(expected(folder / "merged-sql"))}


async def test_a_removed_adapter_is_unknown_and_another_content_under_its_name_gives_other_tokens(
    cluster: Processes, folder: Path
) -> None:
    async with AsyncClient(cluster.routers["r0"].address) as client:
        await until_ready(client, *WORKERS)
        await client.add_adapter("changing", "sql")
        assert await greedy(client, "changing") == expected(folder / "merged-sql")
        await client.add_adapter("changing", "law")
        assert await greedy(client, "changing") == expected(folder / "merged-law")
        await asyncio.to_thread(lora, cluster, "remove", "changing")
        with pytest.raises(NotFoundError):
            await greedy(client, "changing")
        result = CliRunner().invoke(
            main, ["lora", "add", "outside", "../model", "--router", cluster.routers["r0"].address]
        )
        assert result.exit_code == 1
        assert "path" in result.output


async def test_an_adapter_is_added_to_the_second_model_while_requests_of_both_run(
    cluster: Processes, folder: Path
) -> None:
    address = cluster.routers["r0"].address
    async with AsyncClient(address) as client:
        await until_ready(client, *WORKERS)
        await client.add_adapter("sql", "sql")
        many = 200
        running = {}

        async def have_begun() -> bool:
            begun = sum(request.generated_tokens > 0 for request in await client.list_requests())
            return begun == len(running)

        # The one that ends soonest begins last.
        for name in ("demo", "sql", "tiny"):
            running[name] = asyncio.create_task(
                client.generate(PROMPT, model=name, max_tokens=many, ignore_eos=True, temperature=0.0)
            )
            await until(have_begun, "requests of both models have tokens", every=0.002)
        added = await asyncio.to_thread(lora, cluster, "add", "poem", "poem", "--model", "tiny")
        assert isinstance(added, dict)
        assert (added["name"], added["model"]) == ("poem", "tiny")
        wanted = expected(folder / "merged-poem")
        assert wanted != expected(folder / "tiny"), "the adapter changes nothing"
        assert await greedy(client, "poem") == wanted
        answer = await client.generate(
            PROMPT, model="poem", max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0
        )
        assert (list(answer.token_ids), answer.finish.worker_id) == (wanted, "tiny-0")
        checkpoints = {"demo": "model", "sql": "merged-sql", "tiny": "tiny"}
        for name, done in running.items():
            assert list((await done).token_ids) == expected(folder / checkpoints[name], many)
        for name, model in (("sql", "tiny"), ("poem", "demo"), ("demo", "tiny"), ("tiny", "demo")):
            with pytest.raises(InvalidRequestError) as refused:
                await client.add_adapter(name, "poem" if model == "tiny" else "sql", model=model)
            assert refused.value.code.name == "ALREADY_EXISTS"
        with pytest.raises(NotFoundError):
            await client.generate(PROMPT, model="demo", lora_name="poem", max_tokens=1)
        # An adapter of the first model's shape is refused by the second one's workers, and its name stays free.
        with pytest.raises(InvalidRequestError) as refused:
            await client.add_adapter("wrong", "sql", model="tiny")
        assert refused.value.code.name == "INVALID_ARGUMENT"
        listed = await asyncio.to_thread(lora, cluster, "list", "--model", "tiny")
        assert isinstance(listed, list)
        assert [(one["name"], one["workers"]) for one in listed] == [("poem", ["tiny-0"])]
        assert "poem" not in [one.name for one in await client.list_adapters()]


async def test_the_second_models_adapters_outlive_its_worker_and_the_router(
    cluster: Processes, folder: Path
) -> None:
    router, worker = cluster.routers["r0"], cluster.workers["tiny-0"]
    async with AsyncClient(router.address) as client:
        await until_ready(client, *WORKERS)
        await client.add_adapter("poem", "poem", model="tiny")
    for process in (router, worker):
        process.kill()
    cluster.start(router, worker)
    async with AsyncClient(router.address) as client:
        await until_ready(client, *WORKERS)
        assert await greedy(client, "poem") == expected(folder / "merged-poem")
        await asyncio.to_thread(lora, cluster, "remove", "poem", "--model", "tiny")
        with pytest.raises(NotFoundError):
            await greedy(client, "poem")


async def test_each_model_has_an_index_of_its_own(cluster: Processes) -> None:
    assert cluster.redis is not None
    async with (
        AsyncClient(cluster.routers["r0"].address) as client,
        connect(cluster.redis.url, timeout_seconds=5.0) as redis,
    ):
        for model, workers in (("", ["w0", "w1"]), ("tiny", ["tiny-0"])):
            index = RedisPrefixIndex(redis, "default", model=model)
            assert sorted(record.worker_id for record in await index.directory()) == workers
            name = model or "demo"
            worker = (await client.generate(PROMPT, model=name, max_tokens=1)).finish.worker_id

            async def is_held(name: str = name, worker: str = worker) -> bool:
                found = await client.lookup_prefix(PROMPT, model=name)
                return worker in [holder.worker_id for holder in found.holders]

            await until(is_held, f"{worker} holds the prompt of {name}")
            info = await client.index_info(name)
            assert info.state == cluster_pb2.INDEX_STATE_EXACT
            assert sorted(one.worker_id for one in info.workers) == workers


async def test_the_death_of_one_models_workers_is_not_noticed_by_the_other(cluster: Processes) -> None:
    async with AsyncClient(cluster.routers["r0"].address, retries=0) as client:
        await until_ready(client, *WORKERS)

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
        await until_ready(client, *WORKERS)
        assert await ask("tiny") == 12
