"""Grammars are compiled in order, once, and within limits; a hostile one fails alone."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from blockyard.proto.v1.inference_pb2 import StructuredOutput
from blockyard.worker.grammar import compiler as compiler_module
from blockyard.worker.grammar.compiled import TokenizerSource
from blockyard.worker.grammar.compiler import CompilerConfig, GrammarCompiler, GrammarsBusy
from blockyard.worker.grammar.grammar import Grammar, GrammarError
from blockyard.worker.grammar.masks import Masks
from blockyard.worker.grammar.sandbox_process import TrialsUnavailable

from tests.unit.worker.grammars import PERSON, allowed, demo_source, regex, row_of, schema

PATIENT_SECONDS = 30.0
"""Time limit for a grammar on a busy machine, in tests that do not test the limit."""
HUNGRY = schema({"type": "integer", "multipleOf": 99_999_989})
"""The library makes a state for every remainder."""
MANY = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(25)}
HOSTILE = [
    HUNGRY,
    regex("((((a{100}){100}){100}){100})"),
    regex("a?" * 4000),
    schema({"$ref": "#"}),
    schema(
        {
            "$defs": {
                "n": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/n"}} for _ in range(200)]}
            },
            "$ref": "#/$defs/n",
        }
    ),
]
HARMLESS = [
    schema({"type": "string", "pattern": "(a*)*b"}),
    schema({"type": "string", "maxLength": 10**9}),
    schema({"$ref": "#/$defs/d0", "$defs": MANY | {"d25": {"type": "string"}}}),
    schema({"enum": [f"value {i}" for i in range(3000)]}),
    regex("(" * 200 + "a" + ")" * 200),
]


def running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def thread_states(pid: int) -> set[str]:
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return {stat.read_text().rpartition(")")[2].split()[0] for stat in stats}


async def freeze(pid: int) -> None:
    """Returns once every thread has stopped: the signal reaches one of them, which stops the others."""
    os.kill(pid, signal.SIGSTOP)
    for _ in range(3000):
        if thread_states(pid) <= {"T"}:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"process {pid} does not stop")


@asynccontextmanager
async def open_compiler(
    source: TokenizerSource | None = None, **settings: float
) -> AsyncIterator[GrammarCompiler]:
    config = CompilerConfig(**({"timeout_seconds": PATIENT_SECONDS} | settings))  # type: ignore[arg-type]
    async with GrammarCompiler(source or demo_source(), config) as compiler:
        yield compiler


def pid_of(compiler: GrammarCompiler) -> int:
    process = compiler._slots[0].process
    assert process is not None
    return process.pid


async def test_what_is_compiled_makes_masks() -> None:
    async with open_compiler() as compiler:
        compiled = await compiler.compile_message(StructuredOutput(regex="[0-9]"))
    masks = Masks(4096)
    digits = set(demo_source().load().tokenize_str("0")) | set(demo_source().load().tokenize_str("7"))
    assert digits <= allowed(masks, [row_of(compiled)])[0]
    masks.close()


async def test_hostile_grammars_are_refused_and_a_normal_one_behind_them_is_served() -> None:
    async with open_compiler(memory_bytes=2**28) as compiler:
        results = await asyncio.gather(
            *(compiler.compile(grammar) for grammar in [*HOSTILE, schema(PERSON)]), return_exceptions=True
        )
        assert [type(result).__name__ for result in results] == [
            *["GrammarError"] * len(HOSTILE),
            "CompiledGrammar",
        ]
        assert str(results[0]) == "the grammar takes too much memory to compile"
        for result in results[:-1]:
            assert "a{" not in str(result)


async def test_grammars_that_only_look_hostile_are_served() -> None:
    async with open_compiler() as compiler:
        for grammar in HARMLESS:
            assert (await compiler.compile(grammar)).grammar == grammar


async def test_a_timeout_ends_the_process_and_fails_only_the_one_that_took_it() -> None:
    async with open_compiler(timeout_seconds=1.0) as compiler:
        await compiler.start()
        pid = pid_of(compiler)
        await freeze(pid)
        slow, waiting = await asyncio.gather(
            compiler.compile(regex("a+")), compiler.compile(regex("b+")), return_exceptions=True
        )
        assert isinstance(slow, GrammarError)
        assert str(slow) == "the grammar takes too long to compile"
        assert not isinstance(waiting, BaseException)
        assert pid_of(compiler) != pid
        assert not running(pid)


async def test_a_process_that_died_is_replaced_for_the_next_grammar() -> None:
    async with open_compiler() as compiler:
        await compiler.start()
        await freeze(pid_of(compiler))
        unlucky = asyncio.create_task(compiler.compile(regex("a+")))
        for _ in range(500):
            if compiler.num_trials:
                break
            await asyncio.sleep(0.01)
        os.kill(pid_of(compiler), signal.SIGKILL)
        with pytest.raises(GrammarError, match=r"^the grammar cannot be compiled$"):
            await unlucky
        await compiler.compile(regex("b+"))


async def test_one_clients_slow_grammars_delay_no_other_client() -> None:
    async with open_compiler(timeout_seconds=200.0) as compiler:
        await compiler.start()
        await freeze(pid_of(compiler))
        slow = [asyncio.create_task(compiler.compile(regex(f"a{{{number}}}"), 1)) for number in range(1, 5)]
        await asyncio.sleep(0)  # the first of them has the process that is frozen
        async with asyncio.timeout(150):
            compiled = await compiler.compile(regex("b+"), 2)
            # One that stands far behind in the other's queue is compiled as soon as this one wants it.
            shared = await compiler.compile(slow_last := regex("a{4}"), 2)
        assert compiled.grammar == regex("b+")
        assert shared.grammar == slow_last
        assert not any(task.done() for task in slow[:3]), "they wait for their own client's first"
        os.kill(pid_of(compiler), signal.SIGCONT)
        await asyncio.gather(*slow)


async def test_whose_grammar_was_slow_has_others_known_for_slow_from_the_start() -> None:
    async with open_compiler() as compiler:
        first = await compiler.compile(regex("a+"), 1)
        assert not (await compiler.compile(regex("b+"), 1)).is_slow
        first.hold_for_slow(3)
        assert (await compiler.compile(regex("c+"), 1)).times_slow == 3
        assert not (await compiler.compile(regex("d+"), 2)).is_slow
        # Also after it has proved fast again.
        first.is_slow = False
        assert (await compiler.compile(regex("e+"), 1)).is_slow


async def test_clients_take_turns_and_one_may_fill_half_of_the_queue() -> None:
    async with open_compiler(num_processes=1, max_waiting=8) as compiler:
        await compiler.start()
        await freeze(pid_of(compiler))
        finished: list[str] = []

        async def compile(text: str, client: int) -> None:
            await compiler.compile(regex(text), client)
            finished.append(text)

        async with asyncio.TaskGroup() as tasks:
            for number in range(1, 6):
                tasks.create_task(compile(f"a{{{number}}}", 1))
            await asyncio.sleep(0)
            with pytest.raises(GrammarsBusy, match="4 grammars of this client"):
                await compiler.compile(regex("a{9}"), 1)
            tasks.create_task(compile("b", 2))
            tasks.create_task(compile("c", 2))
            await asyncio.sleep(0)
            os.kill(pid_of(compiler), signal.SIGCONT)
        assert finished == ["a{1}", "b", "a{2}", "c", "a{3}", "a{4}", "a{5}"]


async def test_equal_grammars_are_compiled_once_together_and_later() -> None:
    async with open_compiler() as compiler:
        first, second = await asyncio.gather(compiler.compile(regex("a+")), compiler.compile(regex("a+")))
        assert first is second is await compiler.compile(regex("a+"))
        for _ in range(2):
            with pytest.raises(GrammarError):
                await compiler.compile(regex("(a"))
        assert compiler.num_trials == 2


async def test_a_refusal_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "REFUSAL_SECONDS", 0.0)
    async with open_compiler() as compiler:
        for _ in range(2):
            with pytest.raises(GrammarError):
                await compiler.compile(regex("(a"))
        assert compiler.num_trials == 2


async def test_the_cache_drops_what_was_not_used_for_longest() -> None:
    async with open_compiler(cached_grammars=2) as compiler:
        for text in ("a", "b", "a", "c", "a", "b"):
            await compiler.compile(regex(text))
        assert compiler.num_trials == 4
    async with open_compiler(cached_source_bytes=100) as compiler:
        for text in ("a" * 60, "b" * 60, "a" * 60):
            await compiler.compile(regex(text))
        assert compiler.num_trials == 3


async def test_who_gives_up_breaks_nothing() -> None:
    async with open_compiler() as compiler:
        await compiler.start()
        tasks = [asyncio.create_task(compiler.compile(regex(text))) for text in ("a+", "a+", "b+")]
        await asyncio.sleep(0)
        for task in (tasks[0], tasks[2]):
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes] == [True, False, True]
        assert (await compiler.compile(regex("b+"))).grammar == regex("b+")
        assert compiler.num_trials == 2


async def test_more_than_may_wait_are_turned_away_at_once() -> None:
    async with open_compiler(max_waiting=2) as compiler:
        tasks = [asyncio.create_task(compiler.compile(regex(text))) for text in "ab"]
        await asyncio.sleep(0)
        with pytest.raises(GrammarsBusy):
            await compiler.compile(regex("c"))
        await asyncio.gather(*tasks)
        await compiler.compile(regex("c"))


async def test_closing_leaves_no_process_and_nobody_waiting() -> None:
    async with open_compiler() as compiler:
        await compiler.start()
        pid = pid_of(compiler)
        await freeze(pid)
        waiting = [asyncio.create_task(compiler.compile(regex(text))) for text in "ab"]
        await asyncio.sleep(0.05)
        await compiler.aclose()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [TrialsUnavailable] * 2
    assert not running(pid)
    with pytest.raises(TrialsUnavailable):
        await compiler.compile(regex("c"))


async def test_a_process_that_cannot_start_is_no_fault_of_the_grammar() -> None:
    async with open_compiler(start_timeout_seconds=0.0) as compiler:
        for _ in range(2):
            with pytest.raises(TrialsUnavailable):
                await compiler.compile(Grammar(kind="json_object"))
