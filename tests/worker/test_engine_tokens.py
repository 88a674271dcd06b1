"""Greedy output equals transformers' token for token, whatever company, chunking, preemption or cache."""

import random
from pathlib import Path

import pytest
from blockyard.proto.block_hash import chain, root_name
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine, EngineRequest
from blockyard.worker.loading import load_engine
from blockyard.worker.sequence import BlockName, SamplingParams, SequenceId

from .checkpoints import ARCHITECTURES, reference_greedy, shared_checkpoint

BLOCK_SIZE = 16
MIN_GAP = 1e-3
ROOT = root_name(cluster_secret="", model_fingerprint="test", block_size=BLOCK_SIZE, kv_dtype="float32")
BYTES_PER_BLOCK = 2 * 3 * 2 * 16 * BLOCK_SIZE * 4


@pytest.fixture(params=sorted(ARCHITECTURES))
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return shared_checkpoint(request.param)


def make_engine(
    checkpoint: Path, *, num_blocks: int = 256, deterministic: bool = True, **settings: int
) -> Engine:
    config = EngineConfig(
        model=str(checkpoint),
        device="cpu",
        deterministic=deterministic,
        kv_cache_memory=num_blocks * BYTES_PER_BLOCK,
        **settings,  # type: ignore[arg-type]
    )
    return load_engine(config).engine


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    chance = random.Random(seed * 1000 + length)
    return tuple(chance.randrange(3, 270) for _ in range(length))


def submit(engine: Engine, prompt: tuple[int, ...], num_tokens: int) -> SequenceId:
    names = [BlockName(name) for name in (ROOT, *chain(ROOT, prompt, BLOCK_SIZE))]
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    request = EngineRequest(token_ids=list(prompt), prompt_length=len(prompt), names=names, sampling=sampling)
    return engine.submit(request)


def run(engine: Engine) -> dict[SequenceId, tuple[list[int], int]]:
    """Tokens and cached prompt tokens of everything submitted, with contiguous offsets seen on the way."""
    tokens: dict[SequenceId, list[int]] = {}
    cached: dict[SequenceId, int] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.token is not None
            assert output.token_offset == len(tokens.setdefault(output.sequence_id, []))
            tokens[output.sequence_id].append(output.token)
            cached[output.sequence_id] = output.cached_tokens
        engine.scheduler.check_invariants()
    return {key: (tokens[key], cached[key]) for key in tokens}


def assert_greedy(checkpoint: Path, prompt: tuple[int, ...], tokens: list[int]) -> None:
    expected = reference_greedy(checkpoint, prompt, len(tokens))
    assert expected.min_gap > MIN_GAP, "the reference itself is undecided: choose another prompt"
    assert tokens == list(expected.tokens)


@pytest.mark.parametrize("deterministic", [True, False])
def test_alone(checkpoint: Path, deterministic: bool) -> None:
    engine = make_engine(checkpoint, deterministic=deterministic)
    submit(engine, prompt_of(37), 20)
    assert_greedy(checkpoint, prompt_of(37), run(engine)[SequenceId(0)][0])


def test_batched_with_sixteen_others_of_uneven_length(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    submit(engine, prompt_of(37), 20)
    for number in range(16):
        submit(engine, prompt_of(1 + 11 * number, seed=1), 3 + 2 * number)
    assert_greedy(checkpoint, prompt_of(37), run(engine)[SequenceId(0)][0])


@pytest.mark.parametrize("budget", [7, 16, 33])
def test_with_the_prompt_in_chunks(checkpoint: Path, budget: int) -> None:
    engine = make_engine(checkpoint, max_num_batched_tokens=budget, max_num_seqs=4)
    submit(engine, prompt_of(65), 12)
    submit(engine, prompt_of(37), 12)
    tokens = run(engine)
    assert_greedy(checkpoint, prompt_of(65), tokens[SequenceId(0)][0])
    assert_greedy(checkpoint, prompt_of(37), tokens[SequenceId(1)][0])


def test_after_preemptions(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, num_blocks=9, max_model_len=9 * BLOCK_SIZE)
    for number in range(4):
        submit(engine, prompt_of(40, seed=number), 30)
    tokens = run(engine)
    assert engine.scheduler.num_preemptions > 0
    for number in range(4):
        assert_greedy(checkpoint, prompt_of(40, seed=number), tokens[SequenceId(number)][0])


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
    assert [results[SequenceId(number)][1] for number in range(3)] == [0, 32, 32]
    for number, prompt in enumerate(prompts):
        assert_greedy(checkpoint, prompt, results[SequenceId(number)][0])


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
                assert output.token is not None
                offsets.append(output.token_offset)
                sampled.append(output.token)
        assert offsets == list(range(already, 24))
        outputs.append(tokens[30:] + sampled)
    assert outputs[0] == outputs[1]
