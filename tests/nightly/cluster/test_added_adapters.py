"""Adapters of a model that `blockyard model add` has added, on real Ray processes. The tests run in order."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess, start_private_redis
from blockyard.router.client import InvalidRequestError, NotFoundError
from redis import Redis

from tests.system.harness import UP, Cluster, Command, running
from tests.system.processes import MODEL
from tests.unit.worker.adapters import make_adapter, merge
from tests.unit.worker.checkpoints import make_checkpoint

from .rig import NUM_TOKENS, PROMPT, expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the model `tiny`, its adapter `adapters/poem`, and `merged-poem` for comparison."""
    folder = make_checkpoint(
        tmp_path_factory.mktemp("added") / "tiny", "LlamaForCausalLM", vocab_size=4096
    ).parent
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder / "tiny")
    make_adapter(folder / "adapters" / "poem", folder / "tiny", seed=1)
    merge(folder / "tiny", folder / "adapters" / "poem", folder / "merged-poem")
    return folder


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    started = start_private_redis(tmp_path_factory.mktemp("redis"), password="of-the-admin")
    yield started
    started.stop()


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, redis_server: RedisProcess
) -> Iterator[Cluster]:
    memory = ("--workers", "1", "--cpus-per-worker", "0.5", "--dtype", "float32")
    loras = ("--max-loras", "1", "--adapter-dir", str(folder / "adapters"))
    command = Command(home=tmp_path_factory.mktemp("home"), cluster="added")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("BLOCKYARD_REDIS_URL", redis_server.url)
        with running(command, *UP, *memory, *loras) as cluster:
            yield cluster


def logs(server: RedisProcess) -> list[bytes]:
    with Redis.from_url(server.url) as operator:
        return list(operator.scan_iter("*adapters:*"))


def lora(cluster: Cluster, *words: str) -> list[str]:
    """Return the names that `lora list` prints, after another command if there are words."""
    if words:
        cluster.command.json("lora", *words, "--model", "tiny")
    return [one["name"] for one in cluster.command.json("lora", "list", "--model", "tiny")]


def test_an_added_model_serves_adapters_of_its_own_and_takes_them_with_it(
    cluster: Cluster, folder: Path, redis_server: RedisProcess
) -> None:
    tiny = str(folder / "tiny")
    own = ("--max-loras", "2", "--max-lora-rank", "8", "--max-model-len", "100", "--cpus-per-worker", "0.25")
    cluster.command.json("model", "add", tiny, *own)
    with cluster.client() as client:
        slots = {worker.worker_id: worker.max_loras for worker in client.list_workers()}
        assert slots == {"worker-0": 1, "tiny-worker-0": 2}
        with pytest.raises(InvalidRequestError, match="100"):
            client.generate(100 * PROMPT, model="tiny", max_tokens=1)
        assert lora(cluster, "add", "poem", "poem") == ["poem"]
        answer = client.generate(
            PROMPT, lora_name="poem", max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0
        )
        assert list(answer.token_ids) == expected(folder / "merged-poem")
        assert len(logs(redis_server)) == 1
        refused = cluster.command.run("model", "add", "demo", "--name", "poem")
        assert (refused.returncode, "the name of an adapter" in refused.stderr) == (1, True)
        cluster.command.json("model", "remove", "tiny")
        assert logs(redis_server) == []
        with pytest.raises(NotFoundError):
            client.generate(PROMPT, model="poem", max_tokens=1)
        cluster.command.json("model", "add", tiny)
        assert {worker.max_loras for worker in client.list_workers()} == {1}
        assert lora(cluster) == []
        with pytest.raises(NotFoundError):
            client.generate(PROMPT, model="poem", max_tokens=1)
        assert lora(cluster, "add", "poem", "poem") == ["poem"]


def test_a_setting_with_which_a_model_cannot_be_served_is_refused_and_nothing_is_added(
    cluster: Cluster, folder: Path
) -> None:
    result = cluster.command.run("model", "add", str(folder / "merged-poem"), "--max-model-len", "1000000")
    assert result.returncode == 1
    assert "beyond the model's" in result.stderr
    assert [one["id"] for one in cluster.command.json("model", "list")] == ["demo", "tiny"]


def test_slots_are_refused_for_a_model_that_serves_no_adapters_and_nothing_is_added(
    cluster: Cluster, tmp_path: Path
) -> None:
    experts = make_checkpoint(tmp_path / "experts", "Qwen3MoeForCausalLM", vocab_size=4096)
    result = cluster.command.run("model", "add", str(experts), "--max-loras", "1")
    assert result.returncode == 1
    assert "serves no adapters" in result.stderr
    assert [one["id"] for one in cluster.command.json("model", "list")] == ["demo", "tiny"]
