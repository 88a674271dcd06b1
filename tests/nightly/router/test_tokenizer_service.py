"""The tokenizer service: processes that die, hang or are busy cost a deadline at most, and clients take turns."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.machine.processes import identify
from blockyard.proto.naming.block_hash import chain, unpack_tokens
from blockyard.router.tokenizing.encoder import PromptEncoder
from blockyard.router.tokenizing.service import (
    LONG_TEXT_CHARACTERS,
    SLOW_NICENESS,
    ChatMessage,
    ChatPrompt,
    Prepared,
    PromptError,
    PromptInput,
    TextPrompt,
    TokenizerService,
    TokenizingError,
    TokenizingTimeout,
    TokenPrompt,
)
from transformers import PreTrainedTokenizerBase

from tests.pauses import free_loop
from tests.unit.router.tokenizers_rig import (
    BLOCK_SIZE,
    DEMO_CHECKPOINT,
    ROOT,
    START_SECONDS,
    chat,
    tokenizer_with,
)

ABC = TextPrompt("abc")


@pytest.fixture(scope="module")
def encoder(tokenizer: PreTrainedTokenizerBase) -> PromptEncoder:
    return PromptEncoder(tokenizer)


def serving(path: Path = DEMO_CHECKPOINT, **options: Any) -> TokenizerService:
    return TokenizerService(path, start_timeout_seconds=START_SECONDS, **options)


async def prepared(service: TokenizerService, prompt: PromptInput = ABC) -> Prepared:
    return await service.prepare(prompt, root=None, block_size=BLOCK_SIZE)


def user(content: str) -> ChatPrompt:
    return ChatPrompt([ChatMessage("user", content)])


@pytest.fixture(scope="module")
def bomb_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its template loops for as many iterations as the content says, and then writes the content."""
    path = tmp_path_factory.mktemp("bomb")
    loop = "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2
    tokenizer_with(
        "<bos>{% if messages[0].content == 'bomb' %}" + loop + "{% endif %}{{ messages[0].content }}"
    ).save_pretrained(path)
    return path


async def test_a_router_loads_no_tokenizer_that_its_process_cannot_load(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{")
    load = "blockyard.router.tokenizing.service.load_tokenizer"
    monkeypatch.setattr(load, lambda *_: pytest.fail("it is loaded in the router"))
    with pytest.raises((OSError, ValueError)):
        await TokenizerService(tmp_path, start_timeout_seconds=START_SECONDS).__aenter__()


@pytest.fixture
async def service() -> AsyncIterator[TokenizerService]:
    async with serving() as service:
        yield service


def child_pid(service: TokenizerService) -> int:
    (pid,) = service.pids()
    return pid


async def test_one_call_encodes_names_and_packs(service: TokenizerService, encoder: PromptEncoder) -> None:
    prompt = chat("You write Python.", "words " * 100)
    expected = encoder.encode(prompt)
    answer = await service.prepare(prompt, root=ROOT, block_size=BLOCK_SIZE)
    assert unpack_tokens(answer.token_ids) == expected
    assert answer.num_tokens == len(expected)
    names = chain(ROOT, expected, BLOCK_SIZE)
    assert len(names) == len(expected) // BLOCK_SIZE > 0
    assert answer.block_names == ROOT + b"".join(names)
    packed = bytes([5, 0, 0, 0, 6, 0, 0, 0, 7, 0, 0, 0])
    only_ids = Prepared(token_ids=packed, num_tokens=3, block_names=b"")
    assert await prepared(service, TokenPrompt([5, 6, 7])) == only_ids
    with pytest.raises(PromptError, match=r"^the prompt is empty$"):
        await prepared(service, TextPrompt(""))
    assert service.detokenize([*encoder.encode(TextPrompt("héllo")), 1]) == "héllo"
    assert service.num_guarded == 0
    for forged in (chat("s", "a<|im_end|>"), TextPrompt("<|im_start|>")):
        await prepared(service, forged)
    assert service.num_guarded == 2
    long = chat("s", "word " * (LONG_TEXT_CHARACTERS // 4))
    assert unpack_tokens((await prepared(service, long)).token_ids) == encoder.encode(long)
    lengths = [600_000, 1, 300_000]
    answers = await asyncio.gather(*(prepared(service, TokenPrompt([5] * length)) for length in lengths))
    assert [(answer.num_tokens, len(answer.token_ids)) for answer in answers] == [(n, 4 * n) for n in lengths]


async def test_the_process_is_replaced_when_it_dies(service, caplog):
    first = child_pid(service)
    os.kill(first, signal.SIGKILL)
    answer = await prepared(service)
    assert answer.num_tokens > 0
    assert child_pid(service) != first
    assert f"the tokeniser process {first} died, and another takes its place" in caplog.messages


async def test_a_template_bomb_costs_its_deadline_and_no_more(bomb_checkpoint: Path) -> None:
    async with serving(bomb_checkpoint, timeout_seconds=2.0) as service:
        first = child_pid(service)
        calls = (prepared(service, user("bomb")), prepared(service, user("good")))
        refused, served = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(refused, TokenizingTimeout)
        assert isinstance(served, Prepared)
        assert not process_lives(first)
        last = child_pid(service)
    assert not process_lives(last)
    with pytest.raises(TokenizingError, match="closed"):
        await prepared(service, user("good"))


async def test_a_cancelled_bomb_does_not_fail_the_next_call(bomb_checkpoint: Path) -> None:
    async with serving(bomb_checkpoint, timeout_seconds=2.0) as service:
        bomb = asyncio.create_task(prepared(service, user("bomb")))
        await asyncio.sleep(0.2)
        bomb.cancel()
        assert (await prepared(service)).num_tokens == 4
        assert bomb.cancelled()


@pytest.mark.parametrize("num_processes", [1, 2])
async def test_neither_a_long_text_nor_with_two_processes_a_bomb_holds_a_short_one_up(
    bomb_checkpoint, num_processes
):
    length = LONG_TEXT_CHARACTERS if num_processes == 1 else 0
    async with serving(bomb_checkpoint, num_processes=num_processes, timeout_seconds=30.0) as service:
        assert len(set(service.pids())) == num_processes
        assert service.slow_pid is None
        bomb = asyncio.create_task(prepared(service, user("bomb" + "x" * length)))
        async with asyncio.timeout(10):
            for _ in range(3):
                assert (await prepared(service)).num_tokens == 4
        assert not bomb.done()
        if num_processes == 1:
            assert service.slow_pid is not None
            assert os.getpriority(os.PRIO_PROCESS, service.slow_pid) == SLOW_NICENESS
            assert os.getpriority(os.PRIO_PROCESS, child_pid(service)) == os.getpriority(os.PRIO_PROCESS, 0)
        bomb.cancel()


async def test_a_loaded_process_follows_one_that_dies() -> None:
    async with serving(spare_delay_seconds=0.0) as service:
        await asyncio.sleep(0.1)
        first, spare = child_pid(service), service.spare_pid
        assert spare not in (None, first)
        os.kill(first, signal.SIGKILL)
        await prepared(service)
        assert child_pid(service) == spare
        assert service.spare_pid not in (None, spare)


async def test_a_frozen_process_costs_one_deadline_and_is_killed() -> None:
    async with serving(timeout_seconds=1.0) as service:
        (frozen,) = service.pids()
        os.kill(frozen, signal.SIGSTOP)
        with pytest.raises(TokenizingTimeout):
            await prepared(service, TextPrompt("def f(x):"))
        async with asyncio.timeout(START_SECONDS):
            while True:
                with suppress(TokenizingTimeout):  # The next one may take as long on a busy machine.
                    assert (await prepared(service, TextPrompt("x"))).token_ids
                    break
        assert service.pids() != [frozen]
    assert identify(frozen) is None


async def test_a_process_that_dies_while_it_loads_fails_no_call(service: TokenizerService) -> None:
    killed = child_pid(service)
    os.kill(killed, signal.SIGKILL)
    call = asyncio.create_task(prepared(service))
    for _ in range(2):
        killed = await _next_pid(service, killed)
        os.kill(killed, signal.SIGKILL)
    assert (await call).num_tokens > 0


async def _next_pid(service: TokenizerService, last: int) -> int:
    for _ in range(1000):
        if child_pid(service) != last:
            return child_pid(service)
        await asyncio.sleep(0.01)
    raise AssertionError("the process was not replaced")


ORPHANING_PROGRAM = """
import asyncio, os, signal, sys
print("begun", flush=True)
from blockyard.router.tokenizing.service import TokenizerService

async def main():
    async with TokenizerService(sys.argv[1]) as service:
        print(*service.pids(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_killed_router_leaves_no_process_behind_and_none_of_them_ran_its_program(tmp_path: Path) -> None:
    program = tmp_path / "router.py"
    program.write_text(ORPHANING_PROGRAM)
    shown = subprocess.run([sys.executable, program, DEMO_CHECKPOINT], stdout=subprocess.PIPE, text=True)
    assert shown.returncode == -signal.SIGKILL
    begun, pid = shown.stdout.splitlines()
    assert begun == "begun"
    deadline = time.monotonic() + 10
    while process_lives(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process_lives(int(pid))


def process_lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_the_event_loop_stays_free_while_long_prompts_tokenise(service: TokenizerService) -> None:
    long_text = "def f(x):\n    return x + 1\n" * 2000
    async with free_loop(5_000, least_turns=1_000), asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(service.prepare(chat("s", long_text), root=ROOT, block_size=BLOCK_SIZE))
