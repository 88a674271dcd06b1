"""Unlike workers: blocks whose bytes or values differ stay where they are, so tokens are those of a cold run."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import pytest
import torch
from blockyard.kernels.torch.backend import TorchBackend
from blockyard.proto.naming.block_hash import chain
from blockyard.proto.naming.block_kind import BlockKind, difference
from blockyard.proto.v1.session_pb2 import Hello, PullEnd, PullRefusal
from blockyard.worker.engine import Engine
from blockyard.worker.memory import block_kinds
from blockyard.worker.server import WorkerServer

from .pulling import BLOCKS, LENGTH, Router, a_worker, check_idle, pull_from
from .serving import ROOT, in_engine

GREEDY = {"top_k": 1}
REFUSED = PullEnd.PULL_END_REFUSED
NATIVE: dict[str, Any] = {"deterministic": False}
PYTORCH = NATIVE | {"CXX": "/no/compiler"}
DETERMINISTIC: dict[str, Any] = {}
UNLIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "C++ and PyTorch": (NATIVE, PYTORCH),
    "C++ and deterministic": (NATIVE, DETERMINISTIC),
    "PyTorch and deterministic": (PYTORCH, DETERMINISTIC),
    "linears in int8 and full ones": (NATIVE | {"cpu_linears": "int8"}, NATIVE),
    "bfloat16 and float32": (NATIVE | {"dtype": "bfloat16"}, NATIVE | {"dtype": "float32"}),
    "plain numbers and int8 ones": (NATIVE, NATIVE | {"kv_cache_dtype": "int8"}),
    "int8 numbers and fp8 ones": (NATIVE | {"kv_cache_dtype": "int8"}, NATIVE | {"kv_cache_dtype": "fp8"}),
    "quantised in C++ and in PyTorch": (
        NATIVE | {"kv_cache_dtype": "int8"},
        PYTORCH | {"kv_cache_dtype": "int8"},
    ),
    "blocks of 16 and of 32 tokens": (NATIVE, NATIVE | {"block_size": 32}),
    "C++ for other vector units": (NATIVE, NATIVE | {"CXX": "g++ -mno-avx2 -mno-avx512f"}),
    "PyTorch with other threads": (PYTORCH, PYTORCH | {"more_threads": 1}),
    "PyTorch with other settings": (PYTORCH, PYTORCH | {"MKL_CBWR": "COMPATIBLE"}),
    "two versions of the layout": (PYTORCH, PYTORCH | {"layout": "plain/2"}),
    "two versions of the code": (PYTORCH, PYTORCH | {"code": "another"}),
}
MACHINE = ("CXX", "MKL_CBWR", "more_threads", "layout", "code")


@contextmanager
def machine(changes: dict[str, Any]) -> Iterator[None]:
    """Make this process the machine on which a worker with these settings starts."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CXX", "MKL_CBWR"):
            if name in changes:
                patch.setenv(name, changes[name])
        if "layout" in changes:
            patch.setattr(TorchBackend, "kv_layout", lambda *_: changes["layout"])
        if "code" in changes:
            patch.setattr(block_kinds, "computing_code", lambda: changes["code"])
        torch.set_num_threads(threads + changes.get("more_threads", 0))
        try:
            yield
        finally:
            torch.set_num_threads(threads)


async def begin(stack: AsyncExitStack, name: str, changes: dict[str, Any]) -> WorkerServer:
    with machine(changes):
        settings = {key: value for key, value in changes.items() if key not in MACHINE}
        return await stack.enter_async_context(a_worker(name, **settings))


async def ask(router: Router, worker: WorkerServer, handle: int, **changes: Any) -> list[int]:
    names = chain(ROOT, [5] * LENGTH, worker.config.engine.block_size)
    return await router.ask(handle, sampling=GREEDY, block_names=b"".join((ROOT, *names)), **changes)


async def flush(worker: WorkerServer) -> None:
    await in_engine(worker, Engine.flush)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("pair", UNLIKE)
async def test_an_unlike_worker_takes_no_block_and_its_tokens_are_those_of_its_own_cold_run(
    pair: str, caplog: pytest.LogCaptureFixture
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    async with AsyncExitStack() as stack:
        both = [
            await begin(stack, f"w{number}", changes | {"lend_share": 0.5})
            for number, changes in enumerate(UNLIKE[pair])
        ]
        for source, destination in (both, both[::-1]):
            async with Router(destination) as here, Router(source) as there:
                cold = await ask(here, destination, 1)
                await flush(destination)
                await ask(there, source, 1)
                caplog.clear()
                for handle in (2, 3):
                    pull = await pull_from(source, num_blocks=LENGTH // destination.config.engine.block_size)
                    assert await ask(here, destination, handle, pull=pull) == cold
                    report = here.reports[handle]
                    assert (report.end, report.refusal) == (REFUSED, PullRefusal.PULL_REFUSAL_LAYOUT)
                    assert (report.num_blocks, here.cached[handle]) == (0, 0)
                    await flush(destination)
                told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
                assert len([line for line in told if "blocks of another kind, and gets none" in line]) == 1
                assert len([line for line in told if "refuses to send blocks: LAYOUT differs" in line]) == 1
                await flush(source)
            await check_idle(destination)


@pytest.mark.parametrize("changes", [NATIVE, PYTORCH, DETERMINISTIC], ids=["C++", "PyTorch", "deterministic"])
async def test_like_workers_exchange_blocks_and_say_the_same_of_them(changes: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        source = await begin(stack, "w0", changes)
        destination = await begin(stack, "w1", changes)
        assert BlockKind.of(source._hello_message).exchanges_with(BlockKind.of(destination._hello_message))
        async with Router(destination) as here, Router(source) as there:
            expected = await ask(there, source, 1)
            assert await ask(here, destination, 1, pull=await pull_from(source)) == expected
            assert here.reports[1].num_blocks == BLOCKS


def test_a_worker_of_an_older_version_exchanges_blocks_with_none() -> None:
    older, newer = Hello(), Hello(kv_layout="layers=1", kv_arithmetic="kernels=cpu")
    for one, other in ((older, newer), (newer, older), (older, older)):
        assert not BlockKind.of(one).exchanges_with(BlockKind.of(other))
    for part in (Hello(kv_layout="layers=1"), Hello(kv_arithmetic="kernels=cpu")):
        assert not BlockKind.of(part).exchanges_with(BlockKind.of(part))
    assert "older version" in difference(str(BlockKind.of(newer)), "a1b2c3 bfloat16 16 4096")


def test_a_difference_names_each_word_that_differs_and_no_other() -> None:
    assert difference("a=1 b=2 c=3", "a=1 b=4 d=5") == "b is 2, not 4, c is 3, not none, d is none, not 5"
