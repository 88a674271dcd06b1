"""Embeddings equal those of transformers, for any batch, chunking, cached prefix, overlap or number of ranks."""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blockyard.proto.naming.pooling import Pooling
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest, SequenceOutput
from blockyard.worker.llm import LLM
from blockyard.worker.model.config import UnsupportedModelError, load_config
from blockyard.worker.scheduling.scheduler import CapacityError
from blockyard.worker.sequences.identifiers import RequestId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import FinishReason, SequenceState
from hypothesis import given
from hypothesis import strategies as st

from .checkpoints import ARCHITECTURES, make_embedding_checkpoint, reference_embedding, shared_checkpoint
from .ranks import divided_engine
from .token_engines import BLOCK_SIZE, DEMO, config_of, outputs_of, prompt_of, request_of

EMBEDS = SamplingParams(embeds=True, max_tokens=0)
MODES = {"steps one by one": ("off", 1), "steps overlap": ("on", 1), "two ranks": ("off", 2)}
Make = Callable[..., Engine]


@cache
def checkpoint(architecture: str = "Qwen3ForCausalLM", **options: Any) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="blockyard-embedding-"))
    return make_embedding_checkpoint(folder, architecture, **options)


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as running:

        def make(mode: str = "steps one by one", folder: Path | None = None, **settings: Any) -> Engine:
            overlap_steps, num_ranks = MODES[mode]
            options = {"overlap_steps": overlap_steps, "dtype": "float32", "num_blocks": 256} | settings
            config = config_of(folder or checkpoint(), num_ranks=num_ranks, **options)
            return running.enter_context(divided_engine(config, num_ranks))

        yield make


def embedding_of(prompt: Sequence[int]) -> EngineRequest:
    return request_of(prompt, params=EMBEDS)


def run(engine: Engine) -> dict[RequestId, SequenceOutput]:
    """Return the one output of each request."""
    found = {}
    for (request_id, _), (output,) in outputs_of(engine).items():
        assert output.is_last
        assert output.token_ids == ()
        found[request_id] = output
    return found


def assert_equals_transformers(
    output: SequenceOutput, prompt: Sequence[int], folder: Path | None = None, *, normalizes: bool = True
) -> None:
    embedding_H = torch.from_numpy(np.frombuffer(output.embedding, "<f4").copy())
    expected_H = reference_embedding(folder or checkpoint(), list(prompt), normalizes=normalizes)
    torch.testing.assert_close(embedding_H, expected_H, atol=1e-5, rtol=0)


def check(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[SequenceOutput]:
    """Check the embeddings of prompts that are computed at once."""
    ids = [engine.submit(embedding_of(prompt)) for prompt in prompts]
    outputs = run(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert_equals_transformers(outputs[request_id], prompt)
    return [outputs[request_id] for request_id in ids]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("is_bare", "normalizes"), [(True, True), (False, True), (True, False)])
def test_alone(make: Make, architecture: str, is_bare: bool, normalizes: bool) -> None:
    folder = checkpoint(architecture, is_bare=is_bare, normalizes=normalizes)
    engine = make(folder=folder)
    engine.submit(embedding_of(prompt_of(37)))
    output = run(engine)[RequestId(0)]
    assert_equals_transformers(output, prompt_of(37), folder, normalizes=normalizes)
    assert (output.state, output.finish_reason) == (SequenceState.FINISHED, FinishReason.STOP)


@pytest.mark.parametrize("mode", MODES)
def test_batched_with_others_of_uneven_length(make: Make, mode: str) -> None:
    check(make(mode), [prompt_of(length, seed=1) for length in (1, 15, 16, 17, 64, 65, 130)])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [7, 16, 36])
def test_with_the_prompt_in_chunks(make: Make, budget: int, mode: str) -> None:
    """With 36 of 37 tokens in the first chunk, the last one has the length of a decode."""
    engine = make(mode, max_num_batched_tokens=budget, max_num_seqs=4)
    check(engine, [prompt_of(37), prompt_of(65)])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [63, 64, 65])
def test_with_all_of_the_prompt_cached_but_its_end(make: Make, length: int, mode: str) -> None:
    engine = make(mode)
    for _ in range(2):
        [output] = check(engine, [prompt_of(length)])
    assert output.cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_after_a_preemption(make: Make) -> None:
    budgets = {"max_num_batched_tokens": 40, "max_num_seqs": 4, "max_model_len": 8 * BLOCK_SIZE}
    check(make(num_blocks=8, **budgets), [prompt_of(100, seed) for seed in range(4)])


def test_a_prompt_may_fill_the_context(make: Make) -> None:
    engine = make(max_model_len=64)
    check(engine, [prompt_of(64)])
    with pytest.raises(CapacityError):
        engine.submit(embedding_of(prompt_of(65)))


def test_recorded_steps_give_the_same(make: Make) -> None:
    """A chunk of one token runs as a recorded step, where the C++ kernels record."""
    values = []
    for enforce_eager in (True, False):
        engine = make(enforce_eager=enforce_eager)
        for _ in range(2):
            [output] = check(engine, [prompt_of(65)])
        assert output.cached_tokens == 64
        values.append(np.frombuffer(output.embedding, "<f4"))
    np.testing.assert_allclose(*values, atol=1e-6, rtol=0)


def test_a_step_computes_an_embedding_and_nothing_of_the_vocabulary(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    runner: Any = engine.runner
    monkeypatch.setattr(runner._decoder, "logits", lambda hidden_SH: pytest.fail("logits of an embedding"))
    engine.submit(embedding_of(prompt_of(20)))
    engine.step()
    assert not engine.has_work
    assert (engine.load().generated_tokens, engine.load().prompt_tokens) == (0, 20)


def test_a_prompt_that_is_not_finite_fails(make: Make) -> None:
    engine = make()
    runner: Any = engine.runner
    runner._decoder._weights.embedding_VH[7] = float("nan")
    ids = [engine.submit(embedding_of([token] * 20)) for token in (7, 8)]
    outputs = run(engine)
    assert (outputs[ids[0]].state, outputs[ids[0]].embedding) == (SequenceState.FAILED, b"")
    assert_equals_transformers(outputs[ids[1]], [8] * 20)


def test_a_cancelled_request_gives_its_blocks_back(make: Make) -> None:
    engine = make("steps overlap", max_num_batched_tokens=16, max_num_seqs=4)
    request_id = engine.submit(embedding_of(prompt_of(100)))
    engine.step()
    engine.cancel(request_id)
    assert run(engine) == {}


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    shared=st.integers(0, 40),
    budget=st.integers(4, 80),
    overlap=st.booleans(),
)
def test_any_batch_takes_each_uncached_token_once_and_ends_with_its_last_chunk(
    lengths: list[int], shared: int, budget: int, overlap: bool
) -> None:
    """The model is a clock here. The rows of its steps are real."""
    config = config_of(
        checkpoint(),
        engine="simulated",
        num_blocks=64,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        simulated_step_seconds=0.0,
        simulated_prefill_tokens_per_second=1e12,
        overlap_steps="on" if overlap else "off",
    )
    with divided_engine(config, 1) as engine:
        for seed, length in enumerate(lengths):
            engine.submit(embedding_of((prompt_of(40)[:shared] + prompt_of(70, seed))[:length]))
        outputs = run(engine)
        load = engine.load()
    assert sorted(outputs) == list(range(len(lengths)))
    assert all(output.embedding for output in outputs.values())
    assert load.generated_tokens == 0
    assert load.prompt_tokens == sum(lengths)
    assert load.step_prompt_tokens + load.step_decodes == sum(lengths) - load.cached_tokens


def test_a_model_in_this_process_embeds() -> None:
    model = LLM(
        str(checkpoint()), tokenizer=str(DEMO), device="cpu", dtype="float32", kv_cache_memory=1 << 22
    )
    prompts = [list(prompt_of(20)), list(prompt_of(33))]
    for values, prompt in zip(model.embed(prompts), prompts, strict=True):
        expected_H = reference_embedding(checkpoint(), prompt)
        torch.testing.assert_close(torch.tensor(values), expected_H, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="embeds"):
        model.generate(prompts)


def test_a_model_does_what_it_is_for_and_nothing_else(make: Make) -> None:
    with pytest.raises(ValueError, match="embeds"):
        make().submit(request_of(prompt_of(5), max_tokens=3))
    with pytest.raises(ValueError, match="does not embed"):
        make(folder=shared_checkpoint("Qwen3ForCausalLM")).submit(embedding_of(prompt_of(5)))


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 1}, {"n": 2}, {"logprobs": 0}, {"prompt_logprobs": 0}, {"beam_width": 2}]
)
def test_an_embedding_takes_nothing_that_needs_tokens(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="embedding"):
        replace(EMBEDS, **wrong)


@pytest.mark.parametrize(
    ("file", "change", "error"),
    [
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True}, "mean_tokens"),
        ("1_Pooling/config.json", {"pooling_mode_lasttoken": False}, "lasttoken"),
        ("1_Pooling/config.json", {"pooling_mode": "cls"}, "cls"),
        ("1_Pooling/config.json", {"pooling_mode": ["lasttoken", "mean"]}, "mean"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "lower case"),
        ("config.json", {"is_causal": False}, "is_causal"),
        ("config.json", {"architectures": ["BertModel"]}, "BertModel"),
    ],
)
def test_what_pools_in_another_way_is_refused_by_name(
    tmp_path: Path, file: str, change: dict[str, Any], error: str
) -> None:
    folder = make_embedding_checkpoint(tmp_path, "Qwen3ForCausalLM")
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | change))
    with pytest.raises(ValueError, match=error):
        load_config(folder)


@pytest.mark.parametrize("mode", ["lasttoken", ["lasttoken"]])
def test_newer_files_name_the_mode(tmp_path: Path, mode: Any) -> None:
    folder = make_embedding_checkpoint(tmp_path, "Qwen3ForCausalLM", normalizes=False)
    file = folder / "1_Pooling" / "config.json"
    file.write_text(json.dumps({"embedding_dimension": 64, "pooling_mode": mode}))
    assert load_config(folder).pooling == Pooling(normalizes=False)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "null", '[{"type": 5}]', "[" * 10000])
def test_broken_files_are_a_value_error(tmp_path: Path, text: str) -> None:
    folder = make_embedding_checkpoint(tmp_path, "Qwen3ForCausalLM")
    for name in ("modules.json", "1_Pooling/config.json"):
        before = (folder / name).read_text()
        (folder / name).write_text(text)
        with pytest.raises(ValueError, match=name.rpartition("/")[2]):
            load_config(folder)
        (folder / name).write_text(before)


@pytest.mark.parametrize(
    ("index", "change", "why"),
    [(2, {"type": "sentence_transformers.models.Dense"}, "Dense")]
    + [
        (1, {"path": place}, "must lie in a folder")
        for place in ("", ".", "..", "../other", "/etc", "1_Pooling/deeper")
    ],
)
def test_other_modules_and_settings_outside_the_folder_are_refused(
    tmp_path: Path, index: int, change: dict[str, str], why: str
) -> None:
    folder = make_embedding_checkpoint(tmp_path, "Qwen3ForCausalLM")
    modules = json.loads((folder / "modules.json").read_text())
    modules[index] |= change
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=why):
        load_config(folder)


def test_a_checkpoint_without_a_head_generates_only_where_it_embeds(tmp_path: Path) -> None:
    folder = make_embedding_checkpoint(tmp_path, "Qwen3ForCausalLM")
    assert load_config(folder).pooling is not None
    (folder / "modules.json").unlink()
    with pytest.raises(UnsupportedModelError, match="Qwen3Model"):
        load_config(folder)
