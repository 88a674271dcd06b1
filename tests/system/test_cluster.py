"""The whole path on Ray: what a user of a running cluster relies on."""

import asyncio
import json
import math
import os
import platform
import signal
import threading
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from blockyard.deploy.demo.prompts import DEMO_GROUPS, DemoGroup
from blockyard.deploy.settings.options import model_path
from blockyard.deploy.views.pool_map import cells_of_map
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import BlockyardError, Client, Completion, InvalidRequestError
from blockyard.router.client.results import completion
from blockyard.worker.inspection.pool_map import block_cells
from transformers import AutoModelForCausalLM, AutoTokenizer

from .asking import QUESTIONS, WAIT_SECONDS, ask, load
from .harness import Cluster, eventually, readme_commands

BLOCK_TOKENS = 16
READY = cluster_pb2.WORKER_STATE_READY
HEAL_SECONDS = 30.0
GAUGES_SECONDS = 20.0


def chat(system_prompt: str, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system_prompt}, {"role": "user", "content": question}]


def test_greedy_tokens_equal_those_of_transformers_and_a_stream_is_their_text(cluster: Cluster) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path("demo"))
    model = AutoModelForCausalLM.from_pretrained(model_path("demo"), dtype=torch.float32)
    prompt = "def read_lines(path):\n"
    token_ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        expected = model.generate(
            token_ids, max_new_tokens=32, do_sample=False, output_scores=True, return_dict_in_generate=True
        )
    gaps = [float(-torch.diff(scores[0].topk(2).values)) for scores in expected.scores]
    assert min(gaps) > 1e-3, "the two likeliest tokens are too close for this comparison to mean anything"
    tokens = expected.sequences[0, token_ids.shape[1] :].tolist()
    with cluster.client() as client:
        deltas = list(client.stream(prompt, temperature=0.0, max_tokens=32, seed=7))
        assert [token_id for delta in deltas for token_id in delta.token_ids] == tokens
        assert "".join(delta.text for delta in deltas) == client.detokenize(tokens)
    finish = deltas[-1].finish
    assert finish is not None
    assert (finish.reason, finish.completion_tokens, finish.seed) == ("length", 32, 7)
    assert finish.worker_id in ("worker-0", "worker-1")


def test_an_answer_follows_its_schema_and_beams_come_best_first(cluster: Cluster) -> None:
    schema = {"type": "object", "properties": {"name": {"enum": ["os", "sys"]}}, "required": ["name"]}
    with cluster.client() as client:
        described = client.generate("import ", json_schema=schema, max_tokens=200, seed=3, n=2)
        assert all(json.loads(output.text)["name"] in ("os", "sys") for output in described.outputs)
        beams = client.generate("def add(a, b):", n=3, beam_width=4, max_tokens=12)
        scores = [output.finish.beam_score or 0.0 for output in beams.outputs]
        assert (len(scores), scores) == (3, sorted(scores, reverse=True))
        answer = client.generate("def add(a, b):", logprobs=2, temperature=0.0, max_tokens=12)
        (output,) = answer.outputs
        total = sum(entry.logprob for entry in output.logprobs)
        assert output.finish.cumulative_logprob == pytest.approx(total, abs=1e-3)
        assert (beams.outputs[0].finish.cumulative_logprob or -math.inf) >= total - 1e-3
        with pytest.raises(InvalidRequestError, match="structured_output"):
            client.generate("id: ", regex="(unclosed")


@pytest.mark.parametrize("group", DEMO_GROUPS, ids=lambda group: str(group.name))
def test_a_group_lands_together_and_reuses_its_system_prompt(cluster: Cluster, group: DemoGroup) -> None:
    with cluster.client() as client:
        answers = [
            client.generate(messages=chat(group.system_prompt, question), max_tokens=4)
            for question in group.questions
        ]
        shared_tokens = len(client.tokenize(messages=chat(group.system_prompt, "")))
    reused = [answer.finish.cached_tokens for answer in answers]
    print(f"{group.name}: cached tokens {reused} of a shared prompt of about {shared_tokens}")
    assert reused[0] == 0
    assert all(cached >= shared_tokens - 2 * BLOCK_TOKENS for cached in reused[1:])
    assert len({answer.finish.worker_id for answer in answers}) == 1


def test_pools_conserve_blocks_and_every_view_of_them_agrees(cluster: Cluster) -> None:
    assert cluster.state.logs_directory is not None
    for worker_id in ("worker-0", "worker-1"):
        log = Path(cluster.state.logs_directory) / f"blockyard-{worker_id}.log"
        with cluster.client() as client:
            pool = client.block_pool(worker_id)
            listed = client.list_blocks(worker_id)
        cells = block_cells(pool)
        assert pool.free_blocks + pool.cached_blocks + pool.used_blocks == pool.total_blocks == len(cells)
        assert Counter(cells) == Counter({".": pool.free_blocks, "c": pool.cached_blocks})
        assert [block.block_id for block in listed] == list(range(pool.total_blocks))
        assert sum(1 for block in listed if block.name) == pool.cached_blocks
        assert eventually(lambda: cells_of_map(log.read_text(encoding="utf-8")) == cells, seconds=5)  # noqa: B023
        assert cluster.command.json("blocks", worker_id)[0]["cells"] == cells


def test_gauges_of_every_worker_appear_at_rays_metrics_port(cluster: Cluster) -> None:
    url = f"http://127.0.0.1:{cluster.state.metrics_port}/metrics"

    def gauges() -> dict[tuple[str, str], float]:
        lines = urllib.request.urlopen(url, timeout=5).read().decode("utf-8").splitlines()
        ours = [line for line in lines if line.startswith("ray_blockyard_")]
        return {
            (line.partition("{")[0].removeprefix("ray_blockyard_"), worker): float(line.rpartition(" ")[2])
            for line in ours
            for worker in ("worker-0", "worker-1")
            if f'worker="{worker}"' in line
        }

    with cluster.client() as client:
        loads = {worker.worker_id: worker.load for worker in client.list_workers()}

    def agree() -> bool:
        shown = gauges()
        return all(
            shown.get((gauge, worker), 0 if gauge.endswith("_total") else None) == value
            for worker, load in loads.items()
            for gauge, value in {
                "blocks_free": load.free_blocks,
                "blocks_cached": load.cached_blocks,
                "blocks_used": load.used_blocks,
                "running": 0,
                "waiting": 0,
                "prompt_tokens_total": load.prompt_tokens,
                "generated_tokens_total": load.generated_tokens,
                "cached_tokens_total": load.cached_tokens,
            }.items()
        )

    assert eventually(agree, seconds=GAUGES_SECONDS), gauges()


def test_each_command_answers_shows_no_secret_and_leaves_no_job_in_rays_list(cluster: Cluster) -> None:
    """Run what the README types between `up` and `down`, and every look at the cluster."""
    sampling = ("--temperature", "0", "--max-tokens", "12")
    with cluster.client() as client:
        expected = client.generate("import os\n", temperature=0.0, max_tokens=12)
    before = _jobs(cluster)
    looks = [
        *readme_commands()[1:-1],
        ("status",),
        ("workers",),
        ("blocks",),
        ("index",),
        ("logs", "-n", "1"),
    ]
    looks += [("explain", "def main():"), ("top", "--once", "--interval", "0.1"), ("open", "--no-browser")]
    said = {arguments: cluster.command.run(*arguments) for arguments in looks}
    for result in said.values():
        assert (result.returncode, bool(result.stdout.strip())) == (0, True), result.stderr
        for secret in (cluster.state.secret, str(cluster.state.redis_url)):
            assert secret not in result.stdout + result.stderr
    assert "demo on 2 of 2 workers" in said["status",].stdout
    assert "router-0  serving" in said["status",].stdout
    assert said["workers",].stdout.count("READY") == 2
    assert "worker-1  384 blocks of 16 tokens" in said["blocks",].stdout
    assert cluster.command.run("generate", "-", *sampling, stdin="import os\n").stdout == expected.text + "\n"
    assert cluster.command.run("chat", *sampling, stdin="Say x.\n").stdout.strip()
    assert len(before) >= 1, "`up` is a driver"
    assert _jobs(cluster) == before


def _jobs(cluster: Cluster) -> list[str]:
    """Return the jobs as the Jobs tab of Ray's dashboard lists them."""
    token = Path(str(cluster.state.ray_token_path)).read_text(encoding="ascii").strip()
    asked = urllib.request.Request(
        f"{cluster.state.dashboard_url}/api/jobs/", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return sorted(job["job_id"] for job in json.load(answer))


def test_a_second_cluster_of_the_same_name_is_refused(cluster: Cluster) -> None:
    result = cluster.command.run("up", "--model", "demo", "--device", "cpu")
    assert result.returncode == 1
    assert "is up already" in result.stderr
    assert cluster.command.run("workers").stdout.count("READY") == 2


def test_a_killed_worker_loses_no_token_and_comes_back_as_a_new_incarnation(cluster: Cluster) -> None:
    victim = cluster.command.place("worker-0")
    seeds = range(8)
    with cluster.client() as client, ThreadPoolExecutor(max_workers=16) as threads:
        undisturbed = list(threads.map(lambda seed: long_answer(client, seed), seeds))
        all_begun = threading.Barrier(len(seeds) + 1, timeout=30)
        running = [threads.submit(long_answer, client, seed, all_begun) for seed in seeds]
        all_begun.wait()
        lost = [request for request in client.list_requests() if request.worker_id == victim["name"]]
        os.kill(victim["pid"], signal.SIGKILL)
        not_started = [threads.submit(long_answer, client, seed) for seed in seeds]
        print(f"{len(lost)} of {len(seeds)} streams ran on the killed worker")
        assert lost
        expected = [all_tokens(answer) for answer in undisturbed]
        assert {len(tokens) for outputs in expected for tokens in outputs} == {96}
        assert [all_tokens(future.result()) for future in running] == expected
        assert [all_tokens(future.result()) for future in not_started] == expected

        def healed() -> bool:
            known = {worker.worker_id: worker for worker in client.list_workers() if worker.state == READY}
            return "worker-0" in known and known["worker-0"].incarnation != victim["incarnation"]

        assert eventually(healed, seconds=HEAL_SECONDS)
    reborn = cluster.command.place("worker-0")
    assert reborn["num_starts"] == 2
    # Before Linux 6.15 Ray's node may reap a dead process first, and then no other process sees the status.
    told = {"its process was killed by SIGKILL"} | (set() if tells_of_deaths() else {"its process died"})
    assert reborn["error"] in told
    assert reborn["pid"] != victim["pid"]


def tells_of_deaths() -> bool:
    major, minor = platform.release().split(".")[:2]
    return (int(major), int(minor)) >= (6, 15)


def long_answer(client: Client, seed: int, begun: threading.Barrier | None = None) -> Completion:
    """Two outputs of 96 tokens; meets the others at `begun` after its first piece."""
    pieces = []
    prompt = f"# File {seed}\nimport os\n"
    for delta in client.stream(prompt, n=2, max_tokens=96, ignore_eos=True, seed=seed, frequency_penalty=0.3):
        pieces.append(delta)
        if begun is not None and len(pieces) == 1:
            begun.wait()
    return completion(pieces)


def all_tokens(answer: Completion) -> list[tuple[int, ...]]:
    return [output.token_ids for output in answer.outputs]


def test_a_killed_router_comes_back_where_clients_look_for_it(cluster: Cluster) -> None:
    router = cluster.command.place("router-0")
    os.kill(router["pid"], signal.SIGKILL)

    def serves() -> bool:
        try:
            with Client(router["address"], timeout_seconds=5.0) as client:
                return client.cluster_info().workers_ready == 2
        except BlockyardError:
            return False

    assert eventually(serves, seconds=HEAL_SECONDS)
    with cluster.client() as client:
        assert client.generate("def", max_tokens=4).finish.completion_tokens == 4


def test_a_killed_supervisor_comes_back_and_adopts_everyone(cluster: Cluster) -> None:
    before = cluster.command.json("status")
    pids = {place["name"]: place["pid"] for place in before["places"]}
    os.kill(before["supervisor_pid"], signal.SIGKILL)

    def adopted() -> bool:
        now = cluster.command.json("status")
        serving = {place["name"]: place["pid"] for place in now["places"] if place["phase"] == "serving"}
        return now["supervisor_pid"] != before["supervisor_pid"] and serving == pids

    assert eventually(adopted, seconds=HEAL_SECONDS)


def test_a_cluster_grows_and_shrinks_under_load_and_fails_nobody(cluster: Cluster) -> None:
    with cluster.client() as client:
        expected = {question: ask(client, question).token_ids for question in QUESTIONS}
    with load(cluster) as asking:
        grown = cluster.command.json("scale", "3")
        assert (grown["added"], grown["removed"]) == (["worker-2"], [])
        assert ready(asking.client) == {"worker-0", "worker-1", "worker-2"}
        before = len(asking.answers)
        # A grace so short that some requests are moved, not only finished.
        assert cluster.command.json("scale", "2", "--grace-seconds", "0.3")["removed"] == ["worker-2"]
        assert eventually(lambda: len(asking.answers) >= before + len(QUESTIONS), seconds=WAIT_SECONDS)
    assert all(answer.token_ids == expected[question] for question, answer in asking.answers)
    assert sum(answer.finish.migrations for _, answer in asking.answers) == 0, "a drain counts as no death"
    with cluster.client() as client:
        assert eventually(lambda: len(client.list_workers()) == 2, seconds=WAIT_SECONDS)
        assert ready(client) == {"worker-0", "worker-1"}
    assert asyncio.run(indexed(cluster)) == ["worker-0", "worker-1"]


def ready(client: Client) -> set[str]:
    return {worker.worker_id for worker in client.list_workers() if worker.state == READY}


async def indexed(cluster: Cluster) -> list[str]:
    """Return the workers that the index takes for alive."""
    assert cluster.state.router_redis_url is not None
    async with connect(cluster.state.router_redis_url, timeout_seconds=5.0) as redis:
        records = await RedisPrefixIndex(redis, cluster.state.cluster).directory()
    return sorted(str(record.worker_id) for record in records)
