"""An engine gives the tokens of transformers, however its requests are batched, cut, cached, preempted and divided."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import Continuation
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.sequences.identifiers import RequestId
from blockyard.worker.sequences.sequence import FinishReason, SequenceState

from .checkpoints import ARCHITECTURES, shared_checkpoint
from .ranks import divided_engine
from .token_engines import (
    BLOCK_SIZE,
    assert_greedy,
    config_of,
    names_of,
    outputs_of,
    prompt_of,
    request_of,
    run,
    submit,
    tokens_of,
)

MODES = {
    "one step at a time": ("off", 1),
    "steps overlap": ("on", 1),
    "kv heads split between 2 ranks": ("off", 2),
    "kv heads on 2 of 4 ranks each": ("off", 4),
    "steps overlap on 2 ranks": ("on", 2),
}
Make = Callable[..., Engine]


@pytest.fixture(params=sorted(ARCHITECTURES))
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return shared_checkpoint(request.param)


@pytest.fixture(params=MODES.values(), ids=MODES)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """How every engine of this module is made. Its ranks end with the test."""
    overlap_steps, num_ranks = request.param
    with ExitStack() as running:

        def make(folder: Path, **settings: Any) -> Engine:
            settings = {"deterministic": True, "overlap_steps": overlap_steps} | settings
            config = config_of(folder, num_ranks=num_ranks, **settings)
            return running.enter_context(divided_engine(config, num_ranks))

        yield make


step_by_step = pytest.mark.parametrize("make", [("off", 1), ("off", 2)], indirect=True)
"""Mark for tests that check the result of a single step."""


@pytest.mark.parametrize("deterministic", [True, False])
def test_alone(make: Make, checkpoint: Path, deterministic: bool) -> None:
    engine = make(checkpoint, deterministic=deterministic)
    submit(engine, prompt_of(37), 20)
    assert_greedy(checkpoint, prompt_of(37), run(engine)[RequestId(0)][0])


@pytest.mark.quick_cases(2)
def test_batched_with_sixteen_others_of_uneven_length(make: Make, checkpoint: Path) -> None:
    engine = make(checkpoint, num_blocks=256)
    submit(engine, prompt_of(37), 20)
    for number in range(16):
        submit(engine, prompt_of(1 + 11 * number, seed=1), 3 + 2 * number)
    assert_greedy(checkpoint, prompt_of(37), run(engine)[RequestId(0)][0])


@pytest.mark.parametrize("budget", [7, 16, 33])
def test_with_the_prompt_in_chunks(make: Make, checkpoint: Path, budget: int) -> None:
    engine = make(checkpoint, max_num_batched_tokens=budget, max_num_seqs=4)
    prompts = [prompt_of(65), prompt_of(37)]
    requests = [submit(engine, prompt, 12) for prompt in prompts]
    tokens = run(engine)
    for request, prompt in zip(requests, prompts, strict=True):
        assert_greedy(checkpoint, prompt, tokens[request][0])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_after_preemptions(make: Make, checkpoint: Path, preempt: str) -> None:
    engine = make(
        checkpoint, num_blocks=9, max_model_len=9 * BLOCK_SIZE, preempt=preempt, swap_space_gib=0.001
    )
    prompts = [prompt_of(40, seed=number) for number in range(4)]
    requests = [submit(engine, prompt, 30) for prompt in prompts]
    tokens = run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert (engine.scheduler.num_swaps > 0) == (preempt == "swap")
    for request, prompt in zip(requests, prompts, strict=True):
        assert_greedy(checkpoint, prompt, tokens[request][0])


def test_with_a_prefix_that_has_been_evicted_to_host_memory(make: Make, checkpoint: Path) -> None:
    engine = make(checkpoint, num_blocks=8, max_model_len=8 * BLOCK_SIZE, host_cache_gib=0.001)
    for prompt, num_tokens in ((prompt_of(65), 1), (prompt_of(110, seed=5), 12)):
        submit(engine, prompt, num_tokens)
        run(engine)
    assert not engine.cache.match(names_of(prompt_of(65))[1:])
    again = submit(engine, prompt_of(65), 12)
    tokens, cached = run(engine)[again]
    assert cached == 64, "the prefix was lost"
    assert_greedy(checkpoint, prompt_of(65), tokens)


def test_with_a_cached_prefix_and_one_that_the_same_step_computes(make: Make, checkpoint: Path) -> None:
    engine = make(checkpoint)
    submit(engine, prompt_of(48), 1)
    run(engine)
    together = [(*prompt_of(40), 5 + number) for number in range(3)]
    prompts = [prompt_of(48), prompt_of(48) + prompt_of(9, seed=4), *together]
    requests = [submit(engine, prompt, 12) for prompt in prompts]
    results = run(engine)
    assert [results[request][1] for request in requests] == [32, 48, 0, 32, 32]
    for request, prompt in zip(requests, prompts, strict=True):
        assert_greedy(checkpoint, prompt, results[request][0])


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


def test_a_replay_of_prompt_and_tokens_continues_the_same_output(make: Make, qwen2: Path) -> None:
    prompt, whole = prompt_of(30), list[int]()
    for already in (0, 9):
        engine = make(qwen2)
        request = replace(request_of(prompt, max_tokens=24, **SAMPLED), token_ids=[*prompt, *whole[:already]])
        request_id = engine.submit(request)
        tokens = whole[:already] + tokens_of(outputs_of(engine)[request_id, 0], already)
        assert tokens == (whole or tokens)
        whole = tokens


@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_output_of_three_is_what_a_replay_of_it_alone_gives(make: Make, qwen2: Path, index: int) -> None:
    together, alone = make(qwen2), make(qwen2)
    request = submit(together, prompt_of(37), 20, n=3, **SAMPLED)
    outputs = outputs_of(together)
    everything = [tokens_of(outputs[request, number]) for number in range(3)]
    assert len({tuple(tokens) for tokens in everything}) == 3
    already = everything[index][:1]
    continued = (Continuation(index=index, token_ids=tuple(already)),)
    key = submit(alone, prompt_of(37), 20, n=3, continuations=continued, **SAMPLED), index
    replayed = outputs_of(alone)[key]
    assert already + tokens_of(replayed, 1) == everything[index]
    assert alone.load().prompt_tokens == 0, "counted where its first token came from"
    assert [output.logprobs for output in replayed] == [o.logprobs for o in outputs[request, index]][1:]


def test_the_first_output_of_several_is_what_one_output_gives(make: Make, qwen2: Path) -> None:
    tokens = []
    for n in (1, 4):
        engine = make(qwen2)
        request = submit(engine, prompt_of(37), 20, n=n, **PENALISED)
        tokens.append(tokens_of(outputs_of(engine)[request, 0]))
    assert tokens[0] == tokens[1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
@pytest.mark.parametrize("n", [1, 3])
def test_forks_penalties_and_logprobs_do_not_show_a_preemption(
    make: Make, qwen2: Path, preempt: str, n: int
) -> None:
    answers = []
    for num_blocks in (100, 11):
        engine = make(qwen2, num_blocks=num_blocks, max_model_len=96, preempt=preempt, swap_space_gib=0.001)
        for number in range(4):
            submit(engine, prompt_of(30, seed=number), 30, n=n, prompt_logprobs=1, **PENALISED)
        answers.append(
            {
                key: [(o.token_ids, o.logprobs, o.prompt_logprobs, o.finish_reason) for o in steps]
                for key, steps in outputs_of(engine).items()
            }
        )
    assert engine.scheduler.num_preemptions > 0
    assert answers[0] == answers[1]


@step_by_step
def test_a_chunk_that_is_not_finite_ends_its_request_and_poisons_nobody(make: Make, qwen2: Path) -> None:
    engine = make(qwen2, max_num_batched_tokens=32, max_num_seqs=8)
    submit(engine, prompt_of(150), 4)
    engine.step()
    runner = engine.runner
    assert isinstance(runner, TorchRunner)
    (victim,) = engine.scheduler.running
    for pool in runner.kv_pools:
        pool[victim.block_table[1]] = float("nan")
    assert [output.state for output in engine.step().outputs] == [SequenceState.FAILED]
    for pool in runner.kv_pools:
        pool[pool.isnan()] = 0.0
    published = engine.cache.match(victim.names[1:])
    assert len(published) <= 2, "what was computed on top of it is not to be found"


def test_a_request_that_leaves_itself_no_token_is_told_so_and_harms_nobody(make: Make, qwen2: Path) -> None:
    engine = make(qwen2)
    none_left = {"allowed_token_ids": frozenset({5}), "bad_token_ids": frozenset({5})}
    stuck = submit(engine, [7] * 9, 3, **none_left)
    other = submit(engine, prompt_of(37), 5)
    outputs = outputs_of(engine)
    [told] = outputs[stuck, 0]
    assert told.has_no_choice
    assert not told.token_ids
    assert outputs[other, 0][-1].finish_reason is FinishReason.LENGTH


def test_a_changed_host_block_is_computed_again_and_fails_nobody(make: Make) -> None:
    checkpoint = shared_checkpoint("LlamaForCausalLM")
    settings = {"verify_host_memory": True, "host_cache_gib": 0.01, "max_model_len": 12 * BLOCK_SIZE}
    engine = make(checkpoint, num_blocks=16, deterministic=False, **settings)
    for seed in range(4):
        submit(engine, prompt_of(100, seed=seed), 1)
        run(engine)
    runner, host_cache = engine.runner, engine.scheduler.host_cache
    assert isinstance(runner, TorchRunner)
    assert runner.host_blocks is not None
    assert host_cache is not None
    names = names_of(prompt_of(100))[1:]
    names = names[: len(host_cache.match(names))]
    assert len(names) >= 3, "host memory has what was asked for first"
    runner.host_blocks._place(host_cache._slots[names[1]])[..., 0] += 1.0
    prompts = [prompt_of(40, seed=1), prompt_of(100)]
    requests = [submit(engine, prompt, 12 - 4 * number) for number, prompt in enumerate(prompts)]
    outputs = run(engine)
    for request, prompt in zip(requests, prompts, strict=True):
        assert_greedy(checkpoint, prompt, outputs[request][0])
    assert outputs[requests[1]][1] == BLOCK_SIZE, "what lies before the changed block is still there"
