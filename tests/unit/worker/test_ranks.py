"""Ranks that are processes: they come together by a secret, compute the tokens of one process, and end together."""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as arrays_of
import numpy as np
import pytest
import torch.distributed as dist
from blockyard.kernels.cpu.extension import load_extension
from blockyard.proto.naming.code_version import code_version
from blockyard.proto.security.peer_sockets import peer_contexts
from blockyard.worker import ranks
from blockyard.worker.config import EngineConfig
from blockyard.worker.llm import LLM
from blockyard.worker.parallel.collective import RanksLost
from blockyard.worker.parallel.exchange import Exchange
from blockyard.worker.parallel.link import DEAD_SECONDS, Kind, Link, LinkClosed, connected
from blockyard.worker.parallel.messages import pack, unpack
from blockyard.worker.parallel.step_arrays import StepArrays
from blockyard.worker.parallel.torch_collective import GlooCollective
from blockyard.worker.ranks import RankLeader, run_rank
from blockyard.worker.sequences.sampling_params import SamplingParams
from hypothesis import given
from hypothesis import strategies as st

from .adapters import make_adapter

DEMO = Path(__file__).parents[3] / "deploy/demo_model/checkpoint"
SECRET = "the ranks' secret"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = ["def add(a, b):\n", "import os\n", "class Queue:\n    " * 20]
END_SECONDS = 60.0


def settings(**changes: Any) -> dict[str, Any]:
    return {"device": "cpu", "dtype": "float32", "kv_cache_memory": 2**24, "max_model_len": 256} | changes


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    return tokens(tensor_parallel_size=1)


def tokens(adapters: Sequence[str | None] = (), **changes: Any) -> list[tuple[int, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        # On a crowded machine a rank's process may stand still for seconds.
        patch.setattr(ranks, "FROZEN_SECONDS", 30.0)
        llm = LLM(str(DEMO), **settings(**changes))
        return [tuple(answer.token_ids) for answer in llm.generate(PROMPTS, GREEDY, adapters=adapters)]


int32s = st.integers(-(2**31), 2**31 - 1)


@st.composite
def steps(draw: st.DrawFn) -> StepArrays:
    shapes = {
        field.name: draw(st.tuples(*[st.integers(0, 5)] * getattr(StepArrays(), field.name).ndim))
        for field in fields(StepArrays)
    }
    dtypes = st.sampled_from([np.int32, np.int64])
    return StepArrays(
        **{
            name: draw(arrays_of.arrays(draw(dtypes), shape, elements=int32s))
            for name, shape in shapes.items()
        }
    )


@given(steps())
def test_a_step_is_the_same_after_its_message(step: StepArrays) -> None:
    received = unpack(pack(step).tobytes())
    for field in fields(StepArrays):
        sent, got = getattr(step, field.name), getattr(received, field.name)
        assert got.shape == sent.shape, field.name
        assert (got == sent).all(), field.name


@given(steps(), st.data())
def test_a_message_that_is_cut_or_changed_in_its_sizes_is_refused(
    step: StepArrays, data: st.DataObject
) -> None:
    message = pack(step)
    with pytest.raises(ValueError, match="message of a step"):
        unpack(message.tobytes()[: data.draw(st.integers(0, 4 * len(message) - 1))])
    with pytest.raises(ValueError, match="message of a step"):
        unpack(message.tobytes() + b"\0\0\0\0")
    message[0] += 1
    with pytest.raises(ValueError, match="message of a step"):
        unpack(message.tobytes())


@pytest.mark.ci
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_any_number_give_the_tokens_of_one_process(
    expected: list[tuple[int, ...]], size: int
) -> None:
    assert tokens(tensor_parallel_size=size) == expected
    assert tokens(tensor_parallel_size=size, overlap_steps="on") == expected


def share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    make_memory = Exchange.make_memory

    def elsewhere(own: Exchange) -> list[str | None]:
        return [name and f"blockyard-{'0' * 32}" for name in make_memory(own)]

    monkeypatch.setattr(Exchange, "make_memory", elsewhere)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_no_memory_give_the_same_tokens(
    expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Steps and sums take the network, as between machines."""
    share_no_memory(monkeypatch)
    assert tokens(tensor_parallel_size=size) == expected
    assert tokens(tensor_parallel_size=size, overlap_steps="on") == expected


@pytest.mark.ci
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


@pytest.mark.parametrize("has_kernels", [True, False])
def test_ranks_of_which_one_lacks_the_kernels_share_no_memory(has_kernels: bool) -> None:
    """On GPUs they are not needed. Then steps take the connections."""
    config = EngineConfig(model=str(DEMO), **settings(tensor_parallel_size=2))
    library = load_extension() if has_kernels else None
    exchange = Exchange(config, library, rank=1, size=2, tell=lambda key, value: None)
    name = f"blockyard-{'0' * 32}"
    assert not exchange.map_memory([None, None] if has_kernels else [name, None])
    assert exchange.ring is None


@pytest.mark.ci
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
    command = [*isolated, sys.executable, "-m", f"{__package__}.far_rank"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    told = json.loads(ended.stdout.splitlines()[-1])
    assert [tuple(answer) for answer in told["tokens"]] == expected
    assert told["reason"].startswith("rank 1 is lost: it is silent for 2")

    assert told["noticed"] < END_SECONDS
    assert told["far_ended"] < END_SECONDS + DEAD_SECONDS


@pytest.mark.ci
def test_a_model_that_one_process_has_no_memory_for_is_served_by_two() -> None:
    small = {"kv_cache_memory": 3 * 2**20, "max_model_len": 2048}
    with pytest.raises(ValueError, match="holds 1024 tokens, fewer than max_model_len 2048"):
        LLM(str(DEMO), **settings(**small))
    assert all(tokens(tensor_parallel_size=2, **small))


@pytest.mark.ci
def test_ranks_give_the_same_tokens_with_keys_and_values_in_8_bits() -> None:
    assert tokens(tensor_parallel_size=2, kv_cache_dtype="int8") == tokens(kv_cache_dtype="int8")


@pytest.mark.ci
def test_a_rank_that_cannot_load_fails_the_load_in_words() -> None:
    with pytest.raises(ValueError, match="heads do not divide among 3 ranks"):
        LLM(str(DEMO), **settings(tensor_parallel_size=3))


def leader(size: int = 2) -> RankLeader:
    config = EngineConfig(model=str(DEMO), engine="simulated", **settings(tensor_parallel_size=size))
    return RankLeader(config, secret=SECRET, cluster="c")


def test_a_rank_without_the_secret_is_refused_and_one_with_it_joins_after_it() -> None:
    own = leader()
    errors: list[Exception] = []

    def intrude() -> None:
        try:
            run_rank(1, own.address, "another secret", "c")
        except Exception as error:
            errors.append(error)
        with socket.create_connection(("127.0.0.1", int(own.address.rpartition(":")[2]))) as plain:
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
        run_rank(1, own.address, SECRET, "c")

    thread = threading.Thread(target=intrude)
    thread.start()
    own.connect(END_SECONDS)
    own.close()
    thread.join(END_SECONDS)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [LinkClosed]


def joined(own: RankLeader, rank: int) -> Link:
    """Return the other end of a link to rank 0, which has been told that this is `rank`."""
    contexts = peer_contexts(None, secret=SECRET, cluster="c ranks")
    assert contexts is not None
    link = connected("127.0.0.1", int(own.address.rpartition(":")[2]), contexts, END_SECONDS)
    link.send_json(Kind.HELLO, rank=rank, code=code_version())
    return link


def connect_with(own: RankLeader, *ranks: int) -> list[Link]:
    """Connect rank 0 with links for these ranks, which come in this order."""
    found: list[Link] = []

    def come() -> None:
        for rank in ranks:
            found.append(joined(own, rank))
            found[-1].expect(Kind.START, END_SECONDS)
            found[-1].send_json(Kind.MAPPED, is_mapped=True)

    thread = threading.Thread(target=come)
    thread.start()
    own.connect(END_SECONDS)
    thread.join(END_SECONDS)
    for link in found:
        link.expect(Kind.GO, END_SECONDS)
    return found


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_ranks_keep_their_numbers_in_whatever_order_they_come(lost: int) -> None:
    own, order = leader(4), [3, 1, 2]
    links = connect_with(own, *order)
    links[order.index(lost)].close()
    until(lambda: own.lost)
    assert own.lost is not None
    assert own.lost.startswith(f"rank {lost} is lost")
    own.close()


@pytest.mark.parametrize("number", [1, 0, 3, "1", None])
def test_a_rank_whose_number_is_not_due_is_refused_and_the_others_come(number: Any) -> None:
    own = leader(3)
    refused: list[bool] = []

    def come() -> None:
        first = joined(own, 1)
        first.expect(Kind.START, END_SECONDS)
        try:
            joined(own, number).expect(Kind.START, END_SECONDS)
        except LinkClosed:
            refused.append(True)
        for link in (first, joined(own, 2)):
            if link is not first:
                link.expect(Kind.START, END_SECONDS)
            link.send_json(Kind.MAPPED, is_mapped=True)

    thread = threading.Thread(target=come)
    thread.start()
    own.connect(END_SECONDS)
    thread.join(END_SECONDS)
    assert refused == [True]
    own.close()


@pytest.mark.ci
def test_rank_0_waits_until_all_ranks_have_their_pools() -> None:
    own = leader(3)
    links = connect_with(own, 1, 2)
    had_pools: list[int] = []

    def allocate(link: Link) -> None:
        had_pools.append(link.expect(Kind.POOLS, END_SECONDS).json("num_blocks"))
        time.sleep(0.2)
        had_pools.append(0)
        link.send(Kind.READY)

    threads = [threading.Thread(target=allocate, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    with own.allocating(10, 2):
        pass
    assert sorted(had_pools) == [0, 0, 10, 10]
    own.close()


def test_a_rank_without_memory_for_its_pool_fails_the_load_in_words() -> None:
    own = leader(2)
    (link,) = connect_with(own, 1)
    with pytest.raises(RanksLost, match="rank 1: it has no memory"), own.allocating(10, 2):
        link.send_json(Kind.FAILED, reason="it has no memory")
    own.close()


def test_without_a_secret_ranks_meet_on_loopback_alone() -> None:
    config = EngineConfig(model=str(DEMO), **settings(tensor_parallel_size=2))
    with pytest.raises(ValueError, match="need a cluster secret"):
        RankLeader(config, secret="", cluster="c", host="10.0.0.1")


def test_ranks_that_do_not_come_are_told_of() -> None:
    with pytest.raises(ValueError, match="1 of 2 ranks have come"):
        leader().connect(0.3)


def test_a_rank_notices_the_end_of_rank_0_without_its_goodbye() -> None:
    own = leader()
    errors: list[Exception] = []

    def join() -> None:
        try:
            run_rank(1, own.address, SECRET, "c")
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    own.connect(END_SECONDS)
    for one in own._links.values():
        one.close()
    thread.join(END_SECONDS)
    assert [type(error) for error in errors] == [RanksLost]
    own.close()


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


@pytest.mark.ci
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


class LateWork(dist.Work):
    """An operation that ends right after a wait for it has timed out."""

    def __init__(self, failure: str | None) -> None:
        super().__init__()
        self._failure = failure
        self._has_ended = False

    def is_completed(self) -> bool:
        return self._has_ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._has_ended:
            self._has_ended = True
            raise RuntimeError("Operation timed out!")
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return True


def test_an_operation_that_ends_as_a_wait_for_it_times_out_counts_as_it_ended() -> None:
    ranks = GlooCollective(None, rank=0, size=2)
    ranks._wait(LateWork(None))
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        ranks._wait(LateWork("connection closed by peer"))
