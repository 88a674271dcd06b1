"""Greedy output equals that of transformers token for token, for any batch, chunking, preemption or cache."""

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from blockyard.proto.naming.block_hash import chain, root_name
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import Continuation, EngineRequest, SequenceOutput
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.sequences.identifiers import BlockName, RequestId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import FinishReason, SequenceState

from .checkpoints import ARCHITECTURES, reference_greedy, shared_checkpoint
from .ranks import divided_engine

BLOCK_SIZE = 16
MIN_GAP = 1e-3
ROOT = root_name(cluster_secret="", model_fingerprint="test", block_size=BLOCK_SIZE, kv_dtype="float32")
BYTES_PER_BLOCK = 2 * 3 * 2 * 16 * BLOCK_SIZE * 4


@pytest.fixture(params=sorted(ARCHITECTURES))
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return shared_checkpoint(request.param)


@dataclass(slots=True, kw_only=True)
class Mode:
    """How every engine of this module runs its steps."""

    overlap_steps: str = "off"
    num_ranks: int = 1
    running: ExitStack = field(default_factory=ExitStack)


MODE = Mode()
MODES = {
    "one step at a time": ("off", 1),
    "steps overlap": ("on", 1),
    "kv heads split between 2 ranks": ("off", 2),
    "kv heads on 2 of 4 ranks each": ("off", 4),
    "steps overlap on 2 ranks": ("on", 2),
}


@pytest.fixture(params=MODES.values(), ids=MODES, autouse=True)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    overlap_steps, num_ranks = request.param
    with ExitStack() as running:
        chosen = Mode(overlap_steps=overlap_steps, num_ranks=num_ranks, running=running)
        monkeypatch.setattr(sys.modules[__name__], "MODE", chosen)
        yield


step_by_step = pytest.mark.parametrize("mode", [("off", 1), ("off", 2)], indirect=True)
"""Mark for tests that check the result of a single step."""


def make_engine(
    checkpoint: Path, *, num_blocks: int = 256, deterministic: bool = True, **settings: Any
) -> Engine:
    config = EngineConfig(
        model=str(checkpoint),
        device="cpu",
        deterministic=deterministic,
        # Of the two kv heads, each of several ranks has one.
        kv_cache_memory=num_blocks * BYTES_PER_BLOCK // min(MODE.num_ranks, 2),
        **({"overlap_steps": MODE.overlap_steps} | settings),
    )
    return MODE.running.enter_context(divided_engine(config, MODE.num_ranks))


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    chance = random.Random(seed * 1000 + length)
    return tuple(chance.randrange(3, 270) for _ in range(length))


def submit(
    engine: Engine, prompt: tuple[int, ...], num_tokens: int, *, temperature: float = 0.0, **sampling: Any
) -> RequestId:
    names = [BlockName(name) for name in (ROOT, *chain(ROOT, prompt, BLOCK_SIZE))]
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, **sampling)
    request = EngineRequest(token_ids=list(prompt), prompt_length=len(prompt), names=names, sampling=params)
    return engine.submit(request)


def run(engine: Engine) -> dict[RequestId, tuple[list[int], int]]:
    """Tokens and cached prompt tokens of everything submitted, with contiguous offsets seen on the way."""
    tokens: dict[RequestId, list[int]] = {}
    cached: dict[RequestId, int] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.token_ids
            assert output.token_offset == len(tokens.setdefault(output.request_id, []))
            tokens[output.request_id] += output.token_ids
            cached[output.request_id] = output.cached_tokens
        engine.scheduler.check_invariants()
    return {key: (tokens[key], cached[key]) for key in tokens}


def outputs_of(engine: Engine) -> dict[tuple[RequestId, int], list[SequenceOutput]]:
    """Return what each output of each request got, step by step."""
    outputs: dict[tuple[RequestId, int], list[SequenceOutput]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            outputs.setdefault((output.request_id, output.index), []).append(output)
        engine.scheduler.check_invariants()
    return outputs


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    assert [output.token_offset for output in outputs] == list(range(len(outputs)))
    return [token for output in outputs for token in output.token_ids]


def assert_greedy(checkpoint: Path, prompt: tuple[int, ...], tokens: list[int]) -> None:
    expected = reference_greedy(checkpoint, prompt, len(tokens))
    assert expected.min_gap > MIN_GAP, "the reference itself is undecided: choose another prompt"
    assert tokens == list(expected.tokens)


@pytest.mark.parametrize("deterministic", [True, False])
def test_alone(checkpoint: Path, deterministic: bool) -> None:
    engine = make_engine(checkpoint, deterministic=deterministic)
    submit(engine, prompt_of(37), 20)
    assert_greedy(checkpoint, prompt_of(37), run(engine)[RequestId(0)][0])


@pytest.mark.quick_cases(2)
def test_batched_with_sixteen_others_of_uneven_length(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    submit(engine, prompt_of(37), 20)
    for number in range(16):
        submit(engine, prompt_of(1 + 11 * number, seed=1), 3 + 2 * number)
    assert_greedy(checkpoint, prompt_of(37), run(engine)[RequestId(0)][0])


@pytest.mark.parametrize("budget", [7, 16, 33])
def test_with_the_prompt_in_chunks(checkpoint: Path, budget: int) -> None:
    engine = make_engine(checkpoint, max_num_batched_tokens=budget, max_num_seqs=4)
    submit(engine, prompt_of(65), 12)
    submit(engine, prompt_of(37), 12)
    tokens = run(engine)
    assert_greedy(checkpoint, prompt_of(65), tokens[RequestId(0)][0])
    assert_greedy(checkpoint, prompt_of(37), tokens[RequestId(1)][0])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_after_preemptions(checkpoint: Path, preempt: str) -> None:
    engine = make_engine(
        checkpoint, num_blocks=9, max_model_len=9 * BLOCK_SIZE, preempt=preempt, swap_space_gib=0.001
    )
    for number in range(4):
        submit(engine, prompt_of(40, seed=number), 30)
    tokens = run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert (engine.scheduler.num_swaps > 0) == (preempt == "swap")
    for number in range(4):
        assert_greedy(checkpoint, prompt_of(40, seed=number), tokens[RequestId(number)][0])


def test_with_a_prefix_that_has_been_evicted_to_host_memory(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, num_blocks=8, max_model_len=8 * BLOCK_SIZE, host_cache_gib=0.001)
    submit(engine, prompt_of(65), 1)
    run(engine)
    submit(engine, prompt_of(110, seed=5), 12)
    run(engine)
    assert not engine.cache.match(list(map(BlockName, chain(ROOT, prompt_of(65), BLOCK_SIZE))))
    again = submit(engine, prompt_of(65), 12)
    tokens, cached = run(engine)[again]
    assert cached == 64, "the prefix was lost"
    assert_greedy(checkpoint, prompt_of(65), tokens)


def test_with_a_cached_prefix(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    submit(engine, prompt_of(48), 1)
    run(engine)
    longer = prompt_of(48) + prompt_of(9, seed=4)
    aligned = submit(engine, prompt_of(48), 12)
    extended = submit(engine, longer, 12)
    results = run(engine)
    assert (results[aligned][1], results[extended][1]) == (32, 48)
    assert_greedy(checkpoint, prompt_of(48), results[aligned][0])
    assert_greedy(checkpoint, longer, results[extended][0])


def test_sharing_within_the_step_that_computes_the_prefix(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    prompts = [(*prompt_of(40), 5 + number) for number in range(3)]
    for prompt in prompts:
        submit(engine, prompt, 8)
    results = run(engine)
    assert [results[RequestId(number)][1] for number in range(3)] == [0, 32, 32]
    for number, prompt in enumerate(prompts):
        assert_greedy(checkpoint, prompt, results[RequestId(number)][0])


def test_a_replay_of_prompt_and_tokens_continues_the_same_output(checkpoint: Path) -> None:
    sampling = SamplingParams(temperature=0.9, top_k=50, seed=7, max_tokens=24)
    outputs = []
    for already in (0, 9):
        engine = make_engine(checkpoint)
        tokens = list(prompt_of(30)) + (outputs[0][:already] if outputs else [])
        names = [BlockName(ROOT), *map(BlockName, chain(ROOT, prompt_of(30), BLOCK_SIZE))]
        engine.submit(EngineRequest(token_ids=tokens, prompt_length=30, names=names, sampling=sampling))
        offsets, sampled = [], []
        while engine.has_work:
            for output in engine.step().outputs:
                offsets.append(output.token_offset)
                sampled += output.token_ids
        assert offsets == list(range(already, 24))
        outputs.append(tokens[30:] + sampled)
    assert outputs[0] == outputs[1]


SAMPLED: dict[str, Any] = {"temperature": 1.1, "top_k": 60, "seed": 5, "logprobs": 2}
PENALISED: dict[str, Any] = SAMPLED | {
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.3,
    "logit_bias": ((17, 3.0),),
    "min_tokens": 20,
    "eos_token_ids": frozenset(range(100, 130)),
}


@pytest.fixture
def qwen2() -> Path:
    """One is enough where an architecture does not matter."""
    return shared_checkpoint("Qwen2ForCausalLM")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_output_of_three_is_what_a_replay_of_it_alone_gives(qwen2: Path, index: int) -> None:
    together = make_engine(qwen2)
    request_id = submit(together, prompt_of(37), 20, n=3, **SAMPLED)
    outputs = outputs_of(together)
    everything = [tokens_of(outputs[request_id, number]) for number in range(3)]
    assert len({tuple(tokens) for tokens in everything}) == 3
    alone = make_engine(qwen2)
    already = everything[index][:1]
    names = [BlockName(name) for name in (ROOT, *chain(ROOT, prompt_of(37), BLOCK_SIZE))]
    request = EngineRequest(
        token_ids=list(prompt_of(37)),
        prompt_length=37,
        names=names,
        sampling=SamplingParams(max_tokens=20, n=3, **SAMPLED),
        continuations=(Continuation(index=index, token_ids=tuple(already)),),
    )
    key = alone.submit(request), index
    replayed = outputs_of(alone)[key]
    assert already + [token for output in replayed for token in output.token_ids] == everything[index]
    assert alone.load().prompt_tokens == 0, "counted where its first token came from"
    assert [output.logprobs for output in replayed] == [o.logprobs for o in outputs[request_id, index]][1:]


def test_the_first_output_of_several_is_what_one_output_gives(qwen2: Path) -> None:
    tokens = []
    for n in (1, 4):
        engine = make_engine(qwen2)
        request_id = submit(engine, prompt_of(37), 20, n=n, **PENALISED)
        tokens.append(tokens_of(outputs_of(engine)[request_id, 0]))
    assert tokens[0] == tokens[1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
@pytest.mark.parametrize("n", [1, 3])
def test_forks_penalties_and_logprobs_do_not_show_a_preemption(qwen2: Path, preempt: str, n: int) -> None:
    answers = []
    for num_blocks in (100, 11):
        engine = make_engine(
            qwen2, num_blocks=num_blocks, max_model_len=96, preempt=preempt, swap_space_gib=0.001
        )
        for number in range(4):
            submit(engine, prompt_of(30, seed=number), 30, n=n, prompt_logprobs=1, **PENALISED)
        outputs = outputs_of(engine)
        answers.append(
            {
                key: [(o.token_ids, o.logprobs, o.prompt_logprobs, o.finish_reason) for o in steps]
                for key, steps in outputs.items()
            }
        )
    assert engine.scheduler.num_preemptions > 0
    assert answers[0].keys() == answers[1].keys()
    assert answers[0] == answers[1]


@step_by_step
def test_a_chunk_that_is_not_finite_ends_its_request_and_poisons_nobody() -> None:
    checkpoint = shared_checkpoint("LlamaForCausalLM")
    engine = make_engine(checkpoint, max_num_batched_tokens=32, max_num_seqs=8)
    prompt = prompt_of(150)
    submit(engine, prompt, 4)
    engine.step()
    runner = engine.runner
    assert isinstance(runner, TorchRunner)
    (victim,) = engine.scheduler.running
    for pool in runner.kv_pools:
        pool[victim.block_table[1]] = float("nan")
    outputs = engine.step().outputs
    assert [output.state for output in outputs] == [SequenceState.FAILED]
    for pool in runner.kv_pools:
        pool[pool.isnan()] = 0.0
    published = engine.cache.match(victim.names[1:])
    assert len(published) <= 2, "what was computed on top of it is not to be found"


def test_a_request_that_leaves_itself_no_token_is_told_so_and_harms_nobody() -> None:
    checkpoint = shared_checkpoint("LlamaForCausalLM")
    engine = make_engine(checkpoint)
    names = [BlockName(ROOT)]
    none_left = SamplingParams(allowed_token_ids=frozenset({5}), bad_token_ids=frozenset({5}), max_tokens=3)
    request = EngineRequest(token_ids=[7] * 9, prompt_length=9, names=names, sampling=none_left)
    stuck = engine.submit(request)
    other = submit(engine, prompt_of(37), 5)
    ended = {}
    while engine.has_work:
        for output in engine.step().outputs:
            ended[output.request_id] = output
    assert ended[stuck].has_no_choice
    assert not ended[stuck].token_ids
    assert ended[other].finish_reason is FinishReason.LENGTH


def test_a_changed_host_block_is_computed_again_and_fails_nobody() -> None:
    checkpoint = shared_checkpoint("LlamaForCausalLM")
    engine = make_engine(
        checkpoint,
        num_blocks=16,
        deterministic=False,
        verify_host_memory=True,
        host_cache_gib=0.01,
        max_model_len=12 * BLOCK_SIZE,
    )
    for seed in range(4):
        submit(engine, prompt_of(100, seed=seed), 1)
        run(engine)
    runner, host_cache = engine.runner, engine.scheduler.host_cache
    assert isinstance(runner, TorchRunner)
    assert runner.host_blocks is not None
    assert host_cache is not None
    names = [BlockName(name) for name in chain(ROOT, prompt_of(100), BLOCK_SIZE)]
    names = names[: len(host_cache.match(names))]
    assert len(names) >= 3, "host memory has what was asked for first"
    runner.host_blocks._place(host_cache._slots[names[1]])[..., 0] += 1.0
    beside, hit = submit(engine, prompt_of(40, seed=1), 12), submit(engine, prompt_of(100), 8)
    outputs = run(engine)
    assert_greedy(checkpoint, prompt_of(40, seed=1), outputs[beside][0])
    assert_greedy(checkpoint, prompt_of(100), outputs[hit][0])
    assert outputs[hit][1] == BLOCK_SIZE, "what lies before the changed block is still there"
