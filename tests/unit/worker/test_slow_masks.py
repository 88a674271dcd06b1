"""A grammar whose masks are slow delays its own outputs, and no other request's tokens."""

import queue
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from blockyard.worker import engine as engine_module
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.engine_thread import EngineThread
from blockyard.worker.engine_types import EngineLoad, EngineRequest, StepResult
from blockyard.worker.grammar import compiled as library
from blockyard.worker.grammar import masks as masks_module
from blockyard.worker.grammar.compiled import MAX_TIMES_SLOW, CompiledGrammar, Matcher
from blockyard.worker.grammar.masks import Masks
from blockyard.worker.grammar.rotation import ClientQueue
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.sequences.identifiers import BlockName, RequestId, SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.simulated.grammars import SimulatedGrammars
from blockyard.worker.simulated.runner import SimulatedRunner
from blockyard.worker.startup.loading import load_engine
from hypothesis import given
from hypothesis import strategies as st

from .grammars import DEMO, DEMO_TOKENS, demo_source, regex, row_of

STEPS = 400
PATIENCE_SECONDS = 60.0


class Gate:
    """Before each mask of the slow thread."""

    def __init__(self) -> None:
        self.is_reached, self.go_on = threading.Event(), threading.Event()
        self.num_fills = 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, fill = Gate(), Matcher.fill

    def slow_fill(matcher: Matcher, mask_W: library.Mask) -> bool:
        if threading.current_thread().name.startswith("slow"):
            gate.is_reached.set()
            assert gate.go_on.wait(PATIENCE_SECONDS)
            gate.num_fills += 1
        return fill(matcher, mask_W)

    monkeypatch.setattr(Matcher, "fill", slow_fill)
    yield gate
    gate.go_on.set()


@pytest.fixture
def masks() -> Iterator[Masks]:
    masks = Masks(DEMO_TOKENS)
    yield masks
    masks.close()


def compiled_of(text: str, *, is_slow: bool = False) -> CompiledGrammar:
    compiled = CompiledGrammar(regex(text), demo_source().load())
    if is_slow:
        compiled.hold_for_slow(MAX_TIMES_SLOW)
    return compiled


def engine_of(masks: Masks, *, overlap: bool = False, **config: int) -> Engine:
    runner = SimulatedRunner(vocab_size=DEMO_TOKENS, prefill_tokens_per_second=1e9, step_seconds=0.0)
    runner.grammars = SimulatedGrammars(masks, DEMO_TOKENS)
    settings = SchedulerConfig(max_model_len=256, **config)
    engine = Engine(settings, runner, num_blocks=64, overlap_steps=overlap)
    engine.scheduler.must_wait_for_mask, masks.on_made = masks.holds, engine.wake
    return engine


def submit(
    engine: Engine,
    grammar: object | None,
    *,
    prompt_length: int = 20,
    deadline_seconds: float | None = None,
    **sampling: Any,
) -> RequestId:
    return engine.submit(
        EngineRequest(
            token_ids=list(range(3, 3 + prompt_length)),
            prompt_length=prompt_length,
            names=[BlockName(b"root")],
            sampling=SamplingParams(**({"max_tokens": 12, "seed": 5} | sampling)),
            deadline_seconds=deadline_seconds,
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
def test_others_go_on_while_a_slow_mask_is_made(masks: Masks, gate: Gate, comes_first: bool) -> None:
    """Whether the slow one runs already, or waits to be let in."""
    slow = compiled_of("[a-z]{40}", is_slow=not comes_first)
    engine = engine_of(masks)
    if comes_first:
        held = submit(engine, slow)
        engine.step()
        slow.hold_for_slow(MAX_TIMES_SLOW)
    plain, followed = submit(engine, None), submit(engine, compiled_of("[0-9]{40}"))
    if not comes_first:
        engine.step()
        held = submit(engine, slow)
    brought = run(engine, plain, followed)
    assert len(brought[plain]) >= 11
    assert len(brought.get(held, [])) <= 1
    gate.go_on.set()
    again = submit(engine, None, prompt_length=30)
    rest = run(engine, held, again)
    assert len(brought.get(held, [])) + len(rest[held]) >= 12 - comes_first
    engine.scheduler.check_invariants()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sampling", [{}, {"n": 3}])
def test_a_slow_grammars_outputs_are_those_of_a_fast_one(
    masks: Masks, sampling: dict[str, Any], overlap: bool
) -> None:
    """Also where chunks of its prompt are in flight, and others' decodes."""
    outputs = []
    for is_slow in (False, True):
        engine = engine_of(masks, overlap=overlap, max_num_batched_tokens=16, max_num_seqs=8)
        others = [submit(engine, None, prompt_length=25 + number) for number in range(2)]
        request = submit(engine, compiled_of("[a-z]+[0-9]{2,4}", is_slow=is_slow), **sampling)
        outputs.append(sorted(run(engine, request, *others)[request]))
        masks.forget(sequence for sequence in range(100))  # type: ignore[misc]
    assert outputs[0] == outputs[1]
    assert outputs[0]


def test_a_step_waits_for_a_mask_where_nothing_else_is_there(
    masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "HELD_SECONDS", PATIENCE_SECONDS)
    engine = engine_of(masks)
    submit(engine, compiled_of("[a-z]{40}", is_slow=True))
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    assert num_steps <= 12 * 4, "it turned while it should have waited"


def test_a_loaded_engine_holds_sequences_and_is_woken_by_masks() -> None:
    loaded = load_engine(EngineConfig(model=str(DEMO.parent), engine="simulated"))
    assert loaded.masks is not None
    assert loaded.engine.scheduler.must_wait_for_mask == loaded.masks.holds
    assert loaded.masks.on_made == loaded.engine.wake
    loaded.masks.close()


def test_a_newcomer_does_not_wait_for_those_who_are_held(
    masks: Masks, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although nothing else runs, and the engine waits for a mask when it comes."""
    monkeypatch.setattr(engine_module, "HELD_SECONDS", PATIENCE_SECONDS)
    engine = engine_of(masks)
    over: queue.SimpleQueue[RequestId] = queue.SimpleQueue()

    def on_step(result: StepResult, load: EngineLoad) -> None:
        for output in result.outputs:
            if output.is_last:
                over.put(output.request_id)

    thread = EngineThread(engine, on_step)
    thread.start()
    try:
        slow = [compiled_of("[a-z]{40}", is_slow=True) for _ in range(12)]
        held = [thread.call(partial(submit, grammar=grammar)).result(PATIENCE_SECONDS) for grammar in slow]
        assert gate.is_reached.wait(PATIENCE_SECONDS)
        for length in (20, 30):
            newcomer = thread.call(partial(submit, grammar=None, prompt_length=length))
            assert over.get(timeout=PATIENCE_SECONDS) == newcomer.result(PATIENCE_SECONDS)
        gate.go_on.set()
        assert {over.get(timeout=PATIENCE_SECONDS) for _ in held} == set(held)
    finally:
        gate.go_on.set()
        thread.stop()


def test_the_deadline_of_one_who_is_held_passes(masks: Masks, gate: Gate) -> None:
    engine = engine_of(masks)
    held = submit(engine, compiled_of("[a-z]{40}", is_slow=True), deadline_seconds=0.01)
    outputs = [output for _ in range(STEPS) if engine.has_work for output in engine.step().outputs]
    assert [(output.request_id, output.expired) for output in outputs] == [(held, True)]


def test_one_found_slow_amid_a_step_does_not_wait_for_masks_of_others(
    masks: Masks, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        assert masks.holds(row_of(compiled_of("[0-9]+", is_slow=True), sequence_id=50 + number).sequence)
    both = compiled_of("ab")
    rows = [row_of(both, sequence_id=number) for number in range(2)]
    assert not any(masks.holds(row.sequence) for row in rows)
    monkeypatch.setattr(library, "SLOW_MASK_SECONDS", -1.0)
    masks.start(rows)
    assert masks._filling is not None
    first_W, second_W = masks._filling.result(PATIENCE_SECONDS)
    assert both.is_slow
    assert np.array_equal(first_W, second_W)
    assert second_W.any()
    assert all(masks.holds(row.sequence) for row in rows), "from the next step on"


def test_a_mask_waits_for_one_of_each_other_client(
    masks: Masks, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    fill_one = masks_module._fill_one

    def note(follower: Any, sequence_id: SequenceId, *rest: Any) -> None:
        made.append(sequence_id)
        fill_one(follower, sequence_id, *rest)

    monkeypatch.setattr(masks_module, "_fill_one", note)
    grammar = compiled_of("[a-z]{40}", is_slow=True)
    for number in range(20):
        assert masks.holds(row_of(grammar, sequence_id=number, client=1).sequence)
    assert gate.is_reached.wait(PATIENCE_SECONDS)
    assert masks.holds(row_of(grammar, sequence_id=30, client=2).sequence)
    all_made = threading.Event()
    masks.on_made = lambda: all_made.set() if len(made) == 21 else None
    gate.go_on.set()
    assert all_made.wait(PATIENCE_SECONDS)
    assert made == [0, 1, 30, *range(2, 20)]


@given(operations=st.lists(st.none() | st.integers(1, 5), max_size=60))
def test_clients_take_turns_and_each_has_its_oldest_first(operations: list[int | None]) -> None:
    """None takes, a client puts."""
    turns: ClientQueue[tuple[int, int]] = ClientQueue()
    waiting: list[tuple[int, int]] = []
    passed: dict[int, set[int]] = {}
    """Clients served since each waiting client last had an item taken, or since it joined."""
    for number, client in enumerate([*operations, *(None for client in operations if client)]):
        if client is not None:
            turns.put(client, (client, number))
            waiting.append((client, number))
            passed.setdefault(client, set())
        elif waiting:
            taken = turns.take()
            assert taken == min(item for item in waiting if item[0] == taken[0])
            waiting.remove(taken)
            passed = {waits: passed[waits] for waits, _ in waiting if waits != taken[0]}
            for others in passed.values():
                assert taken[0] not in others, "it had two turns while another client waited"
                others.add(taken[0])
            if any(item[0] == taken[0] for item in waiting):
                passed[taken[0]] = set()
        assert len(turns) == len(waiting)
    assert not waiting


def test_a_grammar_is_known_for_slow_by_its_first_slow_mask(
    masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = compiled_of("[a-z]{40}")
    row = row_of(grammar)
    assert not masks.holds(row.sequence)
    monkeypatch.setattr(library, "SLOW_MASK_SECONDS", -1.0)
    masks.start([row])
    masks._drop_leftovers()
    assert grammar.is_slow
    assert masks.holds(row.sequence)
    masks.forget([row.sequence.sequence_id])
    assert not masks._followers


def test_fast_masks_in_a_row_prove_a_grammar_fast_each_time_twice_as_many() -> None:
    grammar, fast, slow = compiled_of("a"), library.SLOW_MASK_SECONDS / 2, library.SLOW_MASK_SECONDS * 2
    for times_slow in (1, 2, 3):
        grammar.note_mask(slow)
        proof = library.PROOF_MASKS << (times_slow - 1)
        for count in (proof - 1, proof):
            for _ in range(count):
                assert grammar.is_slow
                grammar.note_mask(fast)
            if count < proof:
                grammar.note_mask(slow)
        assert not grammar.is_slow
        assert grammar.times_slow == times_slow


def test_one_slow_mask_does_not_hold_a_sequence_for_good(
    masks: Masks, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask for which the sequence waited is still used. After that, the slow thread gets no more work."""
    monkeypatch.setattr(library, "SLOW_MASK_SECONDS", PATIENCE_SECONDS)
    gate.go_on.set()
    engine, grammar = engine_of(masks), compiled_of("[a-z]{200}")
    grammar.hold_for_slow(1)
    request = submit(engine, grammar, max_tokens=library.PROOF_MASKS + 20)
    assert len(run(engine, request)[request]) == library.PROOF_MASKS + 20
    assert not grammar.is_slow
    assert gate.num_fills == library.PROOF_MASKS
