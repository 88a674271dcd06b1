"""The whole path with real processes: what a user of a running cluster relies on.

The tests run in order: each leaves a cluster that serves.
"""

import json
import os
import platform
import re
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
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import BlockyardError, Client, Completion, InvalidRequestError, NotFoundError
from blockyard.router.client.results import completion
from blockyard.worker.inspection.pool_map import block_cells
from transformers import AutoModelForCausalLM, AutoTokenizer

from .harness import Cluster, eventually, readme_commands

BLOCK_TOKENS = 16
READY = cluster_pb2.WORKER_STATE_READY
HEAL_SECONDS = 30.0
GAUGES_SECONDS = 20.0


def chat(system_prompt: str, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system_prompt}, {"role": "user", "content": question}]


def test_greedy_tokens_equal_those_of_transformers(cluster: Cluster) -> None:
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
    with cluster.client() as client:
        answer = client.generate(prompt, temperature=0.0, max_tokens=32)
    assert list(answer.token_ids) == expected.sequences[0, token_ids.shape[1] :].tolist()


def test_a_stream_is_its_tokens_text_and_says_how_it_ended(cluster: Cluster) -> None:
    with cluster.client() as client:
        deltas = list(client.stream("class Point:\n", max_tokens=24, seed=7, ignore_eos=True))
        text = client.detokenize([token_id for delta in deltas for token_id in delta.token_ids])
    assert "".join(delta.text for delta in deltas) == text
    assert len(deltas) > 1
    finish = deltas[-1].finish
    assert finish is not None
    assert (finish.reason, finish.completion_tokens, finish.seed) == ("length", 24, 7)
    assert finish.worker_id in ("worker-0", "worker-1")


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


def test_an_unknown_model_is_refused_with_its_code(cluster: Cluster) -> None:
    with cluster.client() as client, pytest.raises(NotFoundError):
        client.generate("def", model="gpt-17")


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


def test_commands_show_the_cluster_and_no_secret(cluster: Cluster) -> None:
    status, workers, blocks = (cluster.command.run(name) for name in ("status", "workers", "blocks"))
    assert [result.returncode for result in (status, workers, blocks)] == [0, 0, 0]
    assert "demo on 2 of 2 workers" in status.stdout
    assert "router-0  serving" in status.stdout
    assert workers.stdout.count("READY") == 2
    assert "worker-1  384 blocks of 16 tokens" in blocks.stdout
    said = "".join(result.stdout + result.stderr for result in (status, workers, blocks))
    assert cluster.state.secret not in said
    assert str(cluster.state.redis_url) not in said


def test_looking_leaves_no_job_in_rays_list(cluster: Cluster) -> None:
    looks = [
        *(
            ("status",),
            ("workers",),
            ("blocks",),
            ("index",),
            ("logs", "-n", "1"),
            ("explain", "def main():"),
        ),
        *(("top", "--once", "--interval", "0.1"), ("open", "--no-browser")),
    ]
    before = _jobs(cluster)
    for arguments in looks:
        assert cluster.command.run(*arguments).returncode == 0
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


def test_generate_and_chat_print_what_the_client_gets(cluster: Cluster) -> None:
    sampling = ("--temperature", "0", "--max-tokens", "12")
    with cluster.client() as client:
        expected = client.generate("import os\n", temperature=0.0, max_tokens=12)
        reply = client.generate(
            messages=[{"role": "user", "content": "Say x."}], temperature=0.0, max_tokens=12
        )
    assert cluster.command.run("generate", "import os\n", *sampling).stdout == expected.text + "\n"
    assert cluster.command.run("generate", "-", *sampling, stdin="import os\n").stdout == expected.text + "\n"
    assert cluster.command.run("chat", *sampling, stdin="Say x.\n").stdout == reply.text + "\n"


def test_what_the_readme_types_between_up_and_down_is_answered(cluster: Cluster) -> None:
    between = readme_commands()[1:-1]  # the fixture runs the first, the last test the last
    assert between
    for arguments in between:
        result = cluster.command.run(*arguments)
        assert (result.returncode, bool(result.stdout.strip())) == (0, True), result.stderr


def test_structured_outputs_follow_their_schema_and_expression(cluster: Cluster) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["os", "sys"]}, "lines": {"type": "integer", "maximum": 999}},
        "required": ["name", "lines"],
        "additionalProperties": False,
    }
    with cluster.client() as client:
        described = client.generate("import ", json_schema=schema, max_tokens=200, seed=3, n=2)
        for output in described.outputs:
            value = json.loads(output.text)
            assert value["name"] in ("os", "sys")
            assert isinstance(value["lines"], int)
        assert re.fullmatch(
            "[a-f]{3}-[0-9]+", client.generate("id: ", regex="[a-f]{3}-[0-9]{2,4}", seed=1).text
        )
        with pytest.raises(InvalidRequestError, match="structured_output"):
            client.generate("id: ", regex="(unclosed")
        with pytest.raises(InvalidRequestError, match="no token to choose"):
            client.generate("id: ", regex="[a]{5}", allowed_token_ids=[300])


def test_beams_come_best_first_and_log_probabilities_add_up(cluster: Cluster) -> None:
    with cluster.client() as client:
        beams = client.generate("def add(a, b):", n=3, beam_width=4, max_tokens=12)
        scores = [output.finish.beam_score for output in beams.outputs]
        assert len(scores) == 3
        assert scores == sorted(scores, key=lambda score: -(score or 0.0))
        answer = client.generate("def add(a, b):", logprobs=2, temperature=0.0, max_tokens=12)
        (output,) = answer.outputs
        assert [entry.rank for entry in output.logprobs] == [1] * len(output.token_ids)
        assert all(len(entry.top) == 2 for entry in output.logprobs)
        total = sum(entry.logprob for entry in output.logprobs)
        assert output.finish.cumulative_logprob == pytest.approx(total, abs=1e-3)
        best = beams.outputs[0].finish.cumulative_logprob
        assert best is not None
        assert best >= total - 1e-3


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
