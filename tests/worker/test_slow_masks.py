"""A grammar whose masks are slow delays its own outputs, and nobody else's tokens."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.grammar import compiled as library
from blockyard.worker.grammar.compiled import CompiledGrammar, Matcher
from blockyard.worker.grammar.masks import Masks
from blockyard.worker.scheduler import SchedulerConfig
from blockyard.worker.sequence import BlockName, RequestId, SamplingParams
from blockyard.worker.simulated import SimulatedRunner
from blockyard.worker.simulated_grammars import SimulatedGrammars

from .grammars import DEMO_TOKENS, demo_source, regex, row_of

STEPS = 400


@pytest.fixture
def masks() -> Iterator[Masks]:
    masks = Masks(DEMO_TOKENS)
    yield masks
    masks.close()


def compiled_of(text: str, *, is_slow: bool = False) -> CompiledGrammar:
    compiled = CompiledGrammar(regex(text), demo_source().load())
    compiled.is_slow = is_slow
    return compiled


def engine_of(masks: Masks) -> Engine:
    runner = SimulatedRunner(vocab_size=DEMO_TOKENS, prefill_tokens_per_second=1e9, step_seconds=0.0)
    runner.grammars = SimulatedGrammars(masks, DEMO_TOKENS)
    engine = Engine(SchedulerConfig(max_model_len=256), runner, num_blocks=64)
    engine.scheduler.holds = masks.holds
    return engine


def submit(engine: Engine, grammar: object | None, *, prompt_length: int = 20, **sampling: Any) -> RequestId:
    return engine.submit(
        EngineRequest(
            token_ids=list(range(3, 3 + prompt_length)),
            prompt_length=prompt_length,
            names=[BlockName(b"root")],
            sampling=SamplingParams(max_tokens=12, seed=5, **sampling),
            grammar=grammar,
        )
    )


def run(engine: Engine, *requests: RequestId) -> dict[RequestId, list[tuple[int, int]]]:
    """Steps until these requests are over: what all have brought by then, as (index, token)."""
    brought: dict[RequestId, list[tuple[int, int]]] = {}
    over: set[RequestId] = set()
    for _ in range(STEPS):
        if set(requests) <= over:
            return brought
        for output in engine.step().outputs:
            brought.setdefault(output.request_id, []).extend(
                (output.index, token) for token in output.token_ids
            )
            over |= {output.request_id} if output.is_last else set()
    raise AssertionError(f"{set(requests) - over} are not over after {STEPS} steps")


@pytest.mark.parametrize("comes_first", [False, True])
def test_others_go_on_while_a_slow_mask_is_made(
    masks: Masks, monkeypatch: pytest.MonkeyPatch, comes_first: bool
) -> None:
    """Whether the slow one runs already, or waits to be let in."""
    go_on, fill = threading.Event(), Matcher.fill
    slow = compiled_of("[a-z]{40}", is_slow=True)

    def slow_fill(matcher: Matcher, mask_W: library.Mask) -> bool:
        if threading.current_thread().name.startswith("slow"):
            assert go_on.wait(120)
        return fill(matcher, mask_W)

    engine = engine_of(masks)
    if comes_first:
        held = submit(engine, slow)
        engine.step()
    monkeypatch.setattr(Matcher, "fill", slow_fill)
    plain, followed = submit(engine, None), submit(engine, compiled_of("[0-9]{40}"))
    if not comes_first:
        engine.step()
        held = submit(engine, slow)
    brought = run(engine, plain, followed)
    assert len(brought[plain]) >= 11
    assert len(brought.get(held, [])) <= 1
    go_on.set()
    again = submit(engine, None, prompt_length=30)
    rest = run(engine, held, again)
    assert len(brought.get(held, [])) + len(rest[held]) >= 12 - comes_first
    engine.scheduler.check_invariants()


@pytest.mark.parametrize("sampling", [{}, {"n": 3}])
def test_a_slow_grammars_outputs_are_those_of_a_fast_one(masks: Masks, sampling: dict[str, Any]) -> None:
    outputs = []
    for is_slow in (False, True):
        engine = engine_of(masks)
        others = [submit(engine, None, prompt_length=25 + number) for number in range(2)]
        request = submit(engine, compiled_of("[a-z]+[0-9]{2,4}", is_slow=is_slow), **sampling)
        outputs.append(sorted(run(engine, request, *others)[request]))
        masks.forget(sequence for sequence in range(100))  # type: ignore[misc]
    assert outputs[0] == outputs[1]
    assert outputs[0]


def test_a_slow_one_alone_runs_at_once_since_nobody_waits_for_it(masks: Masks) -> None:
    engine = engine_of(masks)
    request = submit(engine, compiled_of("[a-z]{40}", is_slow=True))
    for _ in range(13):
        engine.step()
    assert not engine.has_work, f"{request} took a step more than its tokens"


def test_a_grammar_is_known_for_slow_by_its_first_slow_mask(
    masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = compiled_of("[a-z]{40}")
    row = row_of(grammar)
    assert not masks.holds(row.sequence)
    monkeypatch.setattr(library, "SLOW_MASK_SECONDS", -1.0)
    masks.start([row])
    masks._settle()
    assert grammar.is_slow
    assert masks.holds(row.sequence) or masks._ahead[row.sequence.sequence_id].mask.done()
    masks.forget([row.sequence.sequence_id])
    assert not masks._ahead
    assert not masks._followers
