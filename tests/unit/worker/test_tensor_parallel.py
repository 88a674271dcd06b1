"""A model that is divided among ranks gives what the whole model gives, and a rank that fails harms one step alone.

test_engine_tokens.py runs on several ranks too: preemption, swap, forks, prefixes and host memory.
"""

import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.execution.part_runner import PartRunner
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.grammar.grammar import Grammar
from blockyard.worker.llm import LLM
from blockyard.worker.memory.host_blocks import STAGING_BYTES
from blockyard.worker.model.config import load_config
from blockyard.worker.model.division import divide
from blockyard.worker.model.weights import random_weights
from blockyard.worker.parallel.collective import RankFailed
from blockyard.worker.parallel.follower import Follower
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import SequenceState
from blockyard.worker.startup import loading

from .checkpoints import reference_greedy, shared_checkpoint
from .in_process_ranks import InProcess, in_process
from .ranks import divided_engine, ranks
from .token_engines import BLOCK_SIZE, DEMO, assert_greedy, config_of, outputs_of, prompt_of, run, submit

SIZES = (2, 4)
"""The tiny models have 2 kv heads: split between 2 ranks, and each on 2 of 4 ranks."""
LLAMA = "LlamaForCausalLM"
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    (LLAMA, {"vocab_size": 271, "intermediate_size": 37}),
    ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 37}),
    ("MixtralForCausalLM", {}),
    (LLAMA, {"attention_bias": True}),
    ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    ("MistralForCausalLM", {"sliding_window": 20}),
]


def greedy_tokens(folder: Path, size: int, **settings: Any) -> list[int]:
    with divided_engine(config_of(folder, num_ranks=size, **settings), size) as engine:
        request = submit(engine, prompt_of(37), 12)
        return run(engine)[request][0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS, ids=str)
def test_greedy_tokens_are_those_of_transformers(
    architecture: str, overrides: dict[str, Any], size: int
) -> None:
    """Also where a vocabulary, an MLP or experts do not divide."""
    checkpoint = shared_checkpoint(architecture, **overrides)
    assert_greedy(checkpoint, prompt_of(37), greedy_tokens(checkpoint, size))


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("size", SIZES)
def test_8_bit_blocks_give_the_tokens_of_one_rank(dtype: str, size: int) -> None:
    checkpoint = shared_checkpoint("Qwen3ForCausalLM")
    one, divided = (greedy_tokens(checkpoint, each, kv_cache_dtype=dtype) for each in (1, size))
    assert one == divided


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("overlap_steps", ["off", "on"])
def test_draws_and_all_logprobs_are_those_of_one_rank(size: int, overlap_steps: str) -> None:
    checkpoint = shared_checkpoint("Qwen2ForCausalLM")
    answers = []
    for num_ranks in (1, size):
        with divided_engine(config_of(checkpoint, overlap_steps=overlap_steps), num_ranks) as engine:
            submit(engine, prompt_of(300), 9, temperature=0.9, seed=3, n=3, logprobs=4, prompt_logprobs=2)
            submit(engine, prompt_of(20), 9, temperature=1.2, seed=4, top_p=0.9, repetition_penalty=1.2)
            submit(engine, prompt_of(21), 9, temperature=1.0, seed=5)
            submit(engine, prompt_of(22), 9)
            answers.append(outputs_of(engine))
    whole, divided = answers
    assert whole.keys() == divided.keys()
    for key, outputs in whole.items():
        assert len(outputs) == len(divided[key])
        for one, other in zip(outputs, divided[key], strict=True):
            assert one.token_ids == other.token_ids
            for name in ("logprobs", "prompt_logprobs"):
                pairs = list(zip(getattr(one, name), getattr(other, name), strict=True))
                assert [(a.token_id, a.rank) for a, _ in pairs] == [(b.token_id, b.rank) for _, b in pairs]
                assert [a.logprob for a, _ in pairs] == pytest.approx([b.logprob for _, b in pairs], abs=1e-4)
    assert any(output.prompt_logprobs for outputs in divided.values() for output in outputs)


def prompt_logprobs(checkpoint: Path, size: int, settings: dict[str, Any]) -> torch.Tensor:
    with divided_engine(config_of(checkpoint, **settings), size) as engine:
        submit(engine, prompt_of(200), 1, prompt_logprobs=0)
        (outputs,) = outputs_of(engine).values()
        return torch.tensor([score.logprob for output in outputs for score in output.prompt_logprobs])


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "cpu_linears": "int8"},
        {"dtype": "float32", "cpu_linears": "int8"},
        {"dtype": "float16", "kv_cache_dtype": "int8"},
    ],
    ids=str,
)
def test_rounded_numbers_are_as_exact_on_any_number_of_ranks(settings: dict[str, Any]) -> None:
    """Rounding differs, so errors are compared: each rank rounds other sums, and has scales of its own."""
    checkpoint = shared_checkpoint(LLAMA, intermediate_size=37)
    exact = prompt_logprobs(checkpoint, 1, {"deterministic": True})
    errors = [
        float((prompt_logprobs(checkpoint, size, settings) - exact).abs().mean()) for size in (1, *SIZES)
    ]
    assert max(errors[1:]) < 1.3 * errors[0]


class Counting(InProcess):
    """Counts what it gathers."""

    num_gathered = 0

    def gather(self, x_SV: torch.Tensor) -> torch.Tensor | None:
        self.num_gathered += x_SV.numel()
        return super().gather(x_SV)


@pytest.mark.parametrize("size", SIZES)
def test_the_largest_logits_give_the_tokens_of_all_gathered_ones(size: int) -> None:
    checkpoint = shared_checkpoint("Qwen2ForCausalLM", vocab_size=271)
    answers, gathered = [], []
    for gathers_all in (True, False):
        with divided_engine(config_of(checkpoint, deterministic=True), size) as engine:
            runner = engine.runner
            assert isinstance(runner, TorchRunner)
            assert isinstance(runner.collective, InProcess)
            runner.gathers_all_logits = gathers_all
            runner.collective.__class__ = Counting
            for number in range(5):
                submit(engine, prompt_of(30, seed=number), 12)
            submit(engine, prompt_of(31), 12, temperature=0.8, seed=3)
            submit(engine, prompt_of(32), 12, logprobs=1)
            submit(engine, prompt_of(33), 12, n=2, prompt_logprobs=0)
            answers.append(run_outputs(engine))
            assert isinstance(runner.collective, Counting)
            gathered.append(runner.collective.num_gathered)
    assert answers[0] == answers[1]
    assert gathered[1] < 0.6 * gathered[0]


def run_outputs(engine: Engine) -> dict[Any, Any]:
    return {
        key: [(output.token_ids, output.logprobs, output.prompt_logprobs) for output in outputs]
        for key, outputs in outputs_of(engine).items()
    }


def test_a_rank_without_finite_logits_fails_the_rows_that_take_the_largest() -> None:
    checkpoint = shared_checkpoint(LLAMA)
    followers: list[Follower] = []
    with divided_engine(config_of(checkpoint), 2, followers) as engine:
        part = followers[0]._part
        assert isinstance(part, PartRunner)
        linear = part.backend.linear

        def spoilt(x_TI: torch.Tensor, weight_OI: torch.Tensor, *bias: torch.Tensor | None) -> torch.Tensor:
            y_TO = linear(x_TI, weight_OI, *bias)
            if weight_OI is part._decoder._weights.lm_head_VH:
                y_TO[0, 7] = float("nan")
            return y_TO

        part.backend.linear = spoilt  # type: ignore[method-assign]
        # In each step, the first row is spoilt.
        first, second = submit(engine, prompt_of(37), 4), submit(engine, prompt_of(38), 4)
        outputs = outputs_of(engine)
        assert [output.state for output in outputs[first, 0]] == [SequenceState.FAILED]
        assert [len(output.token_ids) for output in outputs[second, 0]] == [1, 0]
        assert outputs[second, 0][-1].state is SequenceState.FAILED


def test_outputs_follow_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar(kind="regex", source="(return|yield|pass) [a-z]{2,8}")
    wild = SamplingParams(seed=2, max_tokens=30, n=2, temperature=2.0)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128}
    settings["kv_cache_memory"] = 2**22
    texts = []
    for size in (1, 2):
        with ranks(EngineConfig(model=str(DEMO), **settings), size) as group, monkeypatch.context() as patch:
            load = partial(loading.load_engine, ranks=group)
            patch.setattr(loading, "load_engine", lambda config, _, load=load: load(config))
            answers = LLM(str(DEMO), **settings).generate(["def ", "x = "], wild, structured_output=grammar)
            texts.append([output.text for answer in answers for output in answer.outputs])
    assert texts[0] == texts[1]
    assert all(re.fullmatch(grammar.source, text) for text in texts[1])


@pytest.mark.parametrize("tie", [False, True])
def test_parts_of_random_weights_are_one_model(tie: bool) -> None:
    overrides = {"attention_bias": True, "vocab_size": 270, "tie_word_embeddings": tie}
    config = load_config(shared_checkpoint(LLAMA, **overrides))
    cpu = torch.device("cpu")
    whole = random_weights(config, torch.float32, cpu, seed=3)
    parts = [random_weights(config, torch.float32, cpu, 3, divide(config, rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat([part.lm_head_VH for part in parts])[:270], whole.lm_head_VH)
    for index, layer in enumerate(whole.layers):
        mine = [part.layers[index] for part in parts]
        down_HI = torch.cat([part.down_HI for part in mine], dim=1)
        assert layer.down_HI is not None
        assert torch.equal(down_HI, layer.down_HI)
        assert torch.equal(mine[0].attention_out_bias_H, layer.attention_out_bias_H)
        assert mine[1].attention_out_bias_H is None


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "reason"), [(4, 2, 3, "4 query heads"), (12, 4, 6, "4 kv heads")]
)
def test_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int, size: int, reason: str) -> None:
    overrides = {"hidden_size": 96, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = load_config(shared_checkpoint(LLAMA, **overrides))
    with pytest.raises(ValueError, match=f"{reason} do not divide among {size} ranks"):
        divide(config, 0, size)


def fails(part: object, when: Callable[[], bool]) -> list[int]:
    """Make forward passes of a rank fail within their layers. Return a list that gets an entry for each failure."""
    assert isinstance(part, PartRunner)
    attend: Callable[..., torch.Tensor] = part._decoder._attend
    failures: list[int] = []

    def failing(*arguments: Any) -> torch.Tensor:
        if when():
            failures.append(1)
            raise MemoryError("injected")
        return attend(*arguments)

    part._decoder._attend = failing  # type: ignore[method-assign]
    return failures


@pytest.mark.parametrize("failing_rank", [0, 1, 3])
@pytest.mark.parametrize("overlap_steps", ["off", "on"])
def test_a_step_that_fails_on_one_rank_is_run_again_on_all(failing_rank: int, overlap_steps: str) -> None:
    checkpoint, followers = shared_checkpoint(LLAMA), list[Follower]()
    config = config_of(checkpoint, num_ranks=4, overlap_steps=overlap_steps)
    with divided_engine(config, 4, followers) as engine:
        parts = [engine.runner, *(follower._part for follower in followers)]
        calls = iter([False] * 10 + [True])
        failures = fails(parts[failing_rank], lambda: next(calls, False))
        requests = [submit(engine, prompt_of(37, seed=number), 12) for number in range(3)]
        tokens = run(engine)
        assert failures
        for number, request in enumerate(requests):
            assert_greedy(checkpoint, prompt_of(37, seed=number), tokens[request][0])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_fail_at_random_change_no_token(seed: int) -> None:
    """One forward pass in forty fails."""
    checkpoint, followers = shared_checkpoint(LLAMA), list[Follower]()
    settings = {"max_model_len": 9 * BLOCK_SIZE, "preempt": "swap", "swap_space_gib": 0.001}
    settings["overlap_steps"] = ("off", "on")[seed % 2]
    with divided_engine(config_of(checkpoint, num_blocks=9, num_ranks=2, **settings), 2, followers) as engine:
        failures = []
        for number, part in enumerate((engine.runner, followers[0]._part)):
            chance = Random(10 * seed + number)
            failures.append(fails(part, lambda chance=chance: chance.random() < 1 / 40 / 3))
        requests = [submit(engine, prompt_of(40, seed=number), 30) for number in range(4)]
        outputs = outputs_of(engine)
        assert engine.scheduler.num_swaps > 0
        for number, request in enumerate(requests):
            tokens = tuple(token for output in outputs[request, 0] for token in output.token_ids)
            expected = reference_greedy(checkpoint, prompt_of(40, seed=number), 30).tokens
            is_failed = outputs[request, 0][-1].state is SequenceState.FAILED
            assert tokens == (expected[: len(tokens)] if is_failed else expected)
        assert all(failures)
        assert sum(len(steps) for steps in outputs.values()) > 60, "most steps were run again, and went well"


def test_a_host_block_that_another_rank_has_lost_is_computed_again() -> None:
    checkpoint = shared_checkpoint(LLAMA)
    followers: list[Follower] = []
    settings = {"max_model_len": 8 * BLOCK_SIZE, "verify_host_memory": True, "host_cache_gib": 0.001}
    config = config_of(checkpoint, num_blocks=8, num_ranks=2, **settings)
    with divided_engine(config, 2, followers) as engine:
        for prompt in (prompt_of(65), prompt_of(110, seed=5)):
            submit(engine, prompt, 1)
            run(engine)
        part, runner = followers[0]._part, engine.runner
        assert isinstance(part, PartRunner)
        assert isinstance(runner, TorchRunner)
        assert part.host_blocks is not None
        with torch.inference_mode():
            for chunk in part.host_blocks._chunks_SL2KPD:
                chunk += 1.0
        again = submit(engine, prompt_of(65), 12)
        tokens, cached = run(engine)[again]
        assert_greedy(checkpoint, prompt_of(65), tokens)
        assert cached < 64


def test_a_rank_that_does_not_come_ends_the_wait_by_an_error() -> None:
    first, _ = in_process(2, deadline_seconds=0.05)
    with pytest.raises(RankFailed, match="the deadline has passed"), first.step(1):
        first.all_reduce(torch.zeros(3))


def test_a_worker_of_several_ranks_computes_its_own_kind_of_blocks() -> None:
    config = config_of(shared_checkpoint(LLAMA))
    found = []
    for size in (1, 2):
        with ranks(config, size) as group:
            loaded = loading.load_engine(config, group)
            found.append((loaded.model_fingerprint, loaded.num_ranks, loaded.kv_size.block_bytes))
    (whole, _, whole_bytes), (divided, num_ranks, part_bytes) = found
    assert whole != divided, "sums are rounded in another order"
    assert (num_ranks, part_bytes) == (2, whole_bytes // 2)


@pytest.mark.parametrize("poorest", range(3))
def test_the_rank_with_the_least_memory_decides_the_size_of_all_pools(
    poorest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks measure it in the same two steps, as on GPUs."""

    def meter(_: torch.device) -> object:
        """Implements `Meter` for this rank's memory, of which nothing is taken."""
        name = threading.current_thread().name
        rank = int(name.removeprefix("rank ")) if name.startswith("rank ") else 0
        total = STAGING_BYTES + 2**21 + (0 if rank == poorest else 2**21)
        methods = {name: lambda: 0 for name in ("reserved", "allocated", "forget_peak", "peak")}
        return SimpleNamespace(taken=lambda: (0, total), **methods)

    monkeypatch.setattr(loading, "known_budget", lambda config, device: None)
    monkeypatch.setattr(loading, "CudaMeter", meter)
    checkpoint, followers = shared_checkpoint(LLAMA), list[Follower]()
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "enforce_eager": True, "swap_space_gib": 0.0}
    config = config_of(checkpoint, gpu_memory_utilization=1.0, **settings)
    with ranks(config, 4, followers) as group:
        loaded = loading.load_engine(config, group)
        runner = loaded.runner
        assert isinstance(runner, TorchRunner)
        partials = runner.split_bounds.partial_bytes(4, runner.config.head_dim)
        assert loaded.kv_size.num_blocks == (2**21 - partials) // loaded.kv_size.block_bytes
        pools = [runner.kv_pools, *(follower._part.kv_pools for follower in followers)]
        assert {len(pool[0]) for pool in pools} == {loaded.kv_size.num_blocks}
        request_id = submit(loaded.engine, prompt_of(37), 8)
        assert_greedy(checkpoint, prompt_of(37), run(loaded.engine)[request_id][0])
