"""Beam search equals that of transformers: same sequences and scores in any batch and after any preemption."""

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import SequenceOutput
from blockyard.worker.sequences.identifiers import RequestId
from blockyard.worker.sequences.sampling_params import EarlyStopping, SamplingParams

from .checkpoints import ARCHITECTURES, EXPERTS, reference_model, shared_checkpoint
from .ranks import divided_engine
from .token_engines import config_of, outputs_of, prompt_of, request_of, submit

EARLY_STOPPING: dict[EarlyStopping, Any] = {"heuristic": False, "first": True, "never": "never"}
MAX_SCORE_ERROR = 1e-4
MAX_RELATIVE_SCORE_ERROR = 1e-6
"""transformers sums float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One search, as both sides are asked for it."""

    prompt: tuple[int, ...]
    eos: frozenset[int]
    width: int = 4
    n: int = 3
    max_tokens: int = 14
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = "heuristic"

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            beam_width=self.width,
            n=self.n,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            eos_token_ids=self.eos,
        )


Beams = list[tuple[tuple[int, ...], float]]
"""Generated tokens and score, the best first."""


@functools.cache
def reference_beams(checkpoint: Path, search: Search) -> Beams:
    model: Any = reference_model(checkpoint)
    found = model.generate(
        torch.tensor([search.prompt]),
        attention_mask=torch.ones(1, len(search.prompt)),
        num_beams=search.width,
        num_return_sequences=search.n,
        max_new_tokens=search.max_tokens,
        length_penalty=search.length_penalty,
        early_stopping=EARLY_STOPPING[search.early_stopping],
        eos_token_id=sorted(search.eos) or None,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    beams = []
    for tokens, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        generated = tokens[len(search.prompt) :]
        ends = [index for index, token in enumerate(generated) if token in search.eos]
        beams.append((tuple(generated[: ends[0] + 1] if ends else generated), score))
    return beams


def start(engine: Engine, search: Search) -> RequestId:
    return engine.submit(request_of(search.prompt, params=search.sampling))


def assert_equal(checkpoint: Path, search: Search, outputs: list[SequenceOutput]) -> None:
    expected = reference_beams(checkpoint, search)
    assert [output.index for output in outputs] == list(range(search.n))
    assert [output.is_last for output in outputs] == [False] * (search.n - 1) + [True]
    assert [output.token_ids for output in outputs] == [tokens for tokens, _ in expected]
    for output, (_, score) in zip(outputs, expected, strict=True):
        assert output.beam_score == pytest.approx(score, abs=MAX_SCORE_ERROR, rel=MAX_RELATIVE_SCORE_ERROR)
        weight = len(output.token_ids) ** search.length_penalty
        assert output.cumulative_logprob == pytest.approx(output.beam_score * weight)


def ends_in_reach(checkpoint: Path, prompt: tuple[int, ...]) -> frozenset[int]:
    """Tokens in the middle of the best beams, so that some beams end early and others go on."""
    first, second, *_ = reference_beams(checkpoint, Search(prompt=prompt, eos=frozenset()))
    return frozenset({first[0][9], second[0][5]})


@pytest.fixture(params=sorted(set(ARCHITECTURES) - EXPERTS.keys()))
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return shared_checkpoint(request.param)


def searches(checkpoint: Path) -> list[Search]:
    """Every way to stop and to rank, where many tokens end a beam and the ways differ; then other sizes."""
    ways: itertools.product[tuple[EarlyStopping, float]] = itertools.product(EARLY_STOPPING, (0.5, 1.0, 1.3))
    prompt, many_ends = prompt_of(20, seed=1), frozenset(range(0, 272, 5))
    few_ends = ends_in_reach(checkpoint, prompt_of(37))
    common: dict[str, Any] = {"prompt": prompt, "eos": many_ends, "width": 2, "n": 2, "max_tokens": 32}
    return [
        *(Search(**common, early_stopping=stop, length_penalty=penalty) for stop, penalty in ways),
        Search(prompt=prompt_of(37), eos=few_ends, length_penalty=2.0),
        Search(prompt=prompt_of(37), eos=few_ends, early_stopping="first"),
        Search(prompt=prompt_of(37), eos=frozenset(), width=3, n=3),
        Search(prompt=prompt_of(16), eos=ends_in_reach(checkpoint, prompt_of(16)), width=6, n=1),
        Search(prompt=prompt_of(5), eos=few_ends, width=2, n=2, length_penalty=-1.0),
    ]


def check(engine: Engine, checkpoint: Path, started: dict[RequestId, Search]) -> dict[str, set[Any]]:
    """Check what each search finds. Return what they find by how they stop early."""
    outputs = outputs_of(engine)
    found: dict[str, set[Any]] = {}
    for request_id, search in started.items():
        best = [outputs[request_id, index][-1] for index in range(search.n)]
        assert_equal(checkpoint, search, best)
        found.setdefault(search.early_stopping, set()).update(output.token_ids for output in best)
    return found


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_beams_are_those_of_transformers_in_company(checkpoint: Path, num_ranks: int) -> None:
    """On several ranks, a few searches are enough."""
    wanted = searches(checkpoint)[:: 1 if num_ranks == 1 else 5]
    config = config_of(checkpoint, num_blocks=400, num_ranks=num_ranks, deterministic=True)
    with divided_engine(config, num_ranks) as engine:
        started = {}
        for number, search in enumerate(wanted):
            submit(engine, prompt_of(9 + 7 * number, seed=3), 12)
            started[start(engine, search)] = search
        found = check(engine, checkpoint, started)
    if num_ranks == 1:
        assert found["heuristic"] != found["never"] != found["first"] != found["heuristic"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_beams_are_those_of_transformers_after_preemptions(checkpoint: Path, preempt: str) -> None:
    settings = {"max_model_len": 80, "preempt": preempt, "swap_space_gib": 0.01, "deterministic": True}
    with divided_engine(config_of(checkpoint, num_blocks=11, **settings), 1) as engine:
        submit(engine, prompt_of(20, seed=9), 50)
        started = {}
        for seed in range(3):
            search = Search(
                prompt=prompt_of(37, seed), eos=frozenset({7 * seed}), max_tokens=24, length_penalty=2.0
            )
            started[start(engine, search)] = search
        check(engine, checkpoint, started)
        assert engine.scheduler.num_preemptions > 0
