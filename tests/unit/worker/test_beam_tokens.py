"""Beam search equals that of transformers: same sequences and scores in any batch and after any preemption."""

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest, SequenceOutput
from blockyard.worker.sequences.identifiers import BlockName, RequestId
from blockyard.worker.sequences.sampling_params import EarlyStopping, SamplingParams

from .checkpoints import ARCHITECTURES, EXPERTS, reference_model, shared_checkpoint
from .test_engine_tokens import BLOCK_SIZE, ROOT, chain, make_engine, prompt_of, submit

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
    names = [BlockName(name) for name in (ROOT, *chain(ROOT, search.prompt, BLOCK_SIZE))]
    return engine.submit(
        EngineRequest(
            token_ids=list(search.prompt),
            prompt_length=len(search.prompt),
            names=names,
            sampling=search.sampling,
        )
    )


def outputs_of(engine: Engine) -> dict[RequestId, list[SequenceOutput]]:
    outputs: dict[RequestId, list[SequenceOutput]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
        engine.scheduler.check_invariants()
    return outputs


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


@pytest.fixture(params=sorted(ARCHITECTURES.keys() - EXPERTS.keys()))
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return shared_checkpoint(request.param)


def searches(checkpoint: Path) -> list[Search]:
    """Every way to stop and to rank, where many tokens end a beam and the ways differ; then other sizes."""
    ways: itertools.product[tuple[EarlyStopping, float]] = itertools.product(EARLY_STOPPING, (0.5, 1.0, 1.3))
    prompt, many_ends = prompt_of(20, seed=1), frozenset(range(0, 272, 5))
    few_ends = ends_in_reach(checkpoint, prompt_of(37))
    return [
        *(
            Search(
                prompt=prompt,
                eos=many_ends,
                width=2,
                n=2,
                max_tokens=32,
                early_stopping=stopping,
                length_penalty=penalty,
            )
            for stopping, penalty in ways
        ),
        Search(prompt=prompt_of(37), eos=few_ends, length_penalty=2.0),
        Search(prompt=prompt_of(37), eos=few_ends, early_stopping="first"),
        Search(prompt=prompt_of(37), eos=frozenset(), width=3, n=3),
        Search(prompt=prompt_of(16), eos=ends_in_reach(checkpoint, prompt_of(16)), width=6, n=1),
        Search(prompt=prompt_of(5), eos=few_ends, width=2, n=2, length_penalty=-1.0),
    ]


@pytest.mark.ci
def test_alone(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    found: dict[EarlyStopping, list[tuple[int, ...]]] = {}
    for search in searches(checkpoint):
        request_id = start(engine, search)
        outputs = outputs_of(engine)[request_id]
        assert_equal(checkpoint, search, outputs)
        if search.max_tokens == 32:
            found.setdefault(search.early_stopping, []).extend(output.token_ids for output in outputs)
    assert found["heuristic"] != found["never"] != found["first"] != found["heuristic"]


@pytest.mark.quick_cases(1)
def test_in_company(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, num_blocks=400)
    started = {}
    for number, search in enumerate(searches(checkpoint)):
        submit(engine, prompt_of(9 + 7 * number, seed=3), 12)
        started[start(engine, search)] = search
    outputs = outputs_of(engine)
    for request_id, search in started.items():
        assert_equal(checkpoint, search, outputs[request_id])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_after_preemptions(checkpoint: Path, preempt: str) -> None:
    engine = make_engine(checkpoint, num_blocks=11, max_model_len=80, preempt=preempt, swap_space_gib=0.01)
    prompts = [prompt_of(37, seed=seed) for seed in range(3)]
    wanted = [
        Search(prompt=prompt, eos=frozenset({7 * seed}), max_tokens=24, length_penalty=2.0)
        for seed, prompt in enumerate(prompts)
    ]
    submit(engine, prompt_of(20, seed=9), 50)
    started = {start(engine, search): search for search in wanted}
    outputs = outputs_of(engine)
    assert engine.scheduler.num_preemptions > 0
    for request_id, search in started.items():
        assert_equal(checkpoint, search, outputs[request_id])
