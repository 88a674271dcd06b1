"""Ranks that are processes compute the tokens of one process, and end together."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from blockyard.worker import ranks
from blockyard.worker.llm import LLM
from blockyard.worker.parallel.exchange import Exchange
from blockyard.worker.parallel.link import DEAD_SECONDS

from tests.unit.worker.adapters import make_adapter
from tests.unit.worker.rank_links import DEMO, END_SECONDS, GREEDY, PROMPTS, settings


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    return tokens(tensor_parallel_size=1)


def tokens(adapters: Sequence[str | None] = (), **changes: Any) -> list[tuple[int, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        # On a crowded machine a rank's process may stand still for seconds.
        patch.setattr(ranks, "FROZEN_SECONDS", 30.0)
        llm = LLM(str(DEMO), **settings(**changes))
        return [tuple(answer.token_ids) for answer in llm.generate(PROMPTS, GREEDY, adapters=adapters)]


def share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    make_memory = Exchange.make_memory

    def elsewhere(own: Exchange) -> list[str | None]:
        return [name and f"blockyard-{'0' * 32}" for name in make_memory(own)]

    monkeypatch.setattr(Exchange, "make_memory", elsewhere)


@pytest.mark.parametrize("share_memory", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_any_number_give_the_tokens_of_one_process(
    expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, share_memory: bool, size: int
) -> None:
    """Where they share no memory, steps and sums take the network, as between machines."""
    if not share_memory:
        share_no_memory(monkeypatch)
    assert tokens(tensor_parallel_size=size) == expected
    assert tokens(tensor_parallel_size=size, overlap_steps="on") == expected


@pytest.mark.parametrize("share_memory", [True, False])
def test_ranks_give_the_tokens_of_one_process_with_adapters(
    expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, share_memory: bool, tmp_path: Path
) -> None:
    for seed, name in enumerate(("sql", "law")):
        make_adapter(tmp_path / name, DEMO, seed=seed)
    slots: dict[str, Any] = {"adapters": ["sql", "law", None], "max_loras": 1, "adapter_dir": str(tmp_path)}
    alone = tokens(tensor_parallel_size=1, **slots)
    if not share_memory:
        share_no_memory(monkeypatch)
    assert tokens(tensor_parallel_size=2, **slots) == alone
    assert alone[2] == expected[2]
    assert alone[:2] != expected[:2]


def test_a_rank_at_the_far_end_of_a_link_computes_the_same_and_the_cut_of_the_link_ends_both(
    expected: list[tuple[int, ...]],
) -> None:
    """The far end has a network and a /dev/shm of its own (far_rank.py)."""
    isolated = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    needed = "ip link add a0 type veth peer name b0 && mount -t tmpfs none /dev/shm"
    if any(shutil.which(program) is None for program in ("unshare", "ip", "mount")):
        pytest.skip("unshare, ip and mount are needed")
    tried = subprocess.run([*isolated, "sh", "-c", needed], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no virtual link can be made: {tried.stderr.strip()[:100]}")
    command = [*isolated, sys.executable, "-m", "tests.nightly.worker.far_rank"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    told = json.loads(ended.stdout.splitlines()[-1])
    assert [tuple(answer) for answer in told["tokens"]] == expected
    assert told["reason"].startswith("rank 1 is lost: it is silent for 2")

    assert told["noticed"] < END_SECONDS
    assert told["far_ended"] < END_SECONDS + DEAD_SECONDS


def test_a_model_that_one_process_has_no_memory_for_is_served_by_two() -> None:
    small = {"kv_cache_memory": 3 * 2**20, "max_model_len": 2048}
    with pytest.raises(ValueError, match="holds 1024 tokens, fewer than max_model_len 2048"):
        LLM(str(DEMO), **settings(**small))
    assert all(tokens(tensor_parallel_size=2, **small))


def test_ranks_give_the_same_tokens_with_keys_and_values_in_8_bits() -> None:
    assert tokens(tensor_parallel_size=2, kv_cache_dtype="int8") == tokens(kv_cache_dtype="int8")


def test_a_rank_that_cannot_load_fails_the_load_in_words() -> None:
    with pytest.raises(ValueError, match="heads do not divide among 3 ranks"):
        LLM(str(DEMO), **settings(tensor_parallel_size=3))


GLOO_RANK = """
import sys
import torch
import torch.distributed as dist
from blockyard.worker.parallel.collective import RanksLost
from blockyard.worker.parallel.torch_collective import TorchCollective, gloo_group

rank, size, failures = int(sys.argv[1]), int(sys.argv[2]), []
group = gloo_group(dist.FileStore(sys.argv[3], size), rank, size, "127.0.0.1")
ranks = TorchCollective(group, rank=rank, size=size, on_failure=failures.append)
with ranks.step(1):
    x = torch.full((5,), float(rank + 1))
    ranks.all_reduce(x)
    assert x.tolist() == [sum(range(1, size + 1))] * 5
    gathered = ranks.gather(torch.full((2, 3), float(rank)))
    assert (gathered is None) == (rank != 0)
    assert gathered is None or gathered[0].tolist() == [float(other) for other in range(size) for _ in range(3)]
    number = torch.tensor([rank + 7])
    ranks.broadcast(number)
    assert number.tolist() == [7]
try:
    with ranks.step(2):
        raise ValueError("a defect")
except RanksLost as error:
    assert failures == [str(error)] == [f"step 2 has failed on rank {rank}: a defect"]
    print("as expected")
"""


def test_ranks_of_torch_exchange_the_same_and_a_failed_step_is_told(tmp_path: Path) -> None:
    """gloo stands in for NCCL, which needs GPUs."""
    command = [sys.executable, "-c", GLOO_RANK]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "3", str(tmp_path / "meeting")], stdout=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    for process in processes:
        assert process.communicate(timeout=300)[0] == "as expected\n"
