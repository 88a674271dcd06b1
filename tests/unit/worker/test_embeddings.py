"""Embeddings equal those of transformers, for any batch, chunking, cached prefix, overlap or number of ranks."""

import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blockyard.proto.naming.block_hash import chain, root_name
from blockyard.proto.naming.pooling import Pooling
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest, SequenceOutput
from blockyard.worker.llm import LLM
from blockyard.worker.model.config import UnsupportedModelError, load_config
from blockyard.worker.scheduling.scheduler import CapacityError
from blockyard.worker.sequences.identifiers import BlockName, RequestId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import FinishReason, SequenceState
from hypothesis import given
from hypothesis import strategies as st

from .checkpoints import ARCHITECTURES, make_checkpoint, make_embedding_checkpoint, reference_embedding
from .ranks import divided_engine
from .test_division import DEMO

BLOCK_SIZE = 16
BYTES_PER_BLOCK = 2 * 3 * 2 * 16 * BLOCK_SIZE * 4
ROOT = root_name(cluster_secret="", model_fingerprint="test", block_size=BLOCK_SIZE, kv_dtype="float32")
EMBEDS = SamplingParams(embeds=True, max_tokens=0)
MODES = {"steps one by one": ("off", 1), "steps overlap": ("on", 1), "two ranks": ("off", 2)}


@cache
def checkpoint(architecture: str = "Qwen3ForCausalLM", **options: Any) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="blockyard-embedding-"))
    return make_embedding_checkpoint(folder, architecture, **options)


@pytest.fixture
def running() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make_engine(
    running: ExitStack,
    folder: Path,
    mode: str = "steps one by one",
    *,
    num_blocks: int = 256,
    **settings: Any,
) -> Engine:
    overlap_steps, num_ranks = MODES[mode]
    settings = {"overlap_steps": overlap_steps, "dtype": "float32"} | settings
    memory = num_blocks * BYTES_PER_BLOCK // num_ranks
    config = EngineConfig(model=str(folder), device="cpu", kv_cache_memory=memory, **settings)
    return running.enter_context(divided_engine(config, num_ranks))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed * 1000 + length)
    return [chance.randrange(3, 270) for _ in range(length)]


def request_of(prompt: list[int], sampling: SamplingParams = EMBEDS) -> EngineRequest:
    names = [BlockName(name) for name in (ROOT, *chain(ROOT, prompt, BLOCK_SIZE))]
    return EngineRequest(token_ids=prompt, prompt_length=len(prompt), names=names, sampling=sampling)


def run(engine: Engine) -> dict[RequestId, SequenceOutput]:
    """Return the one output of each request."""
    found: dict[RequestId, SequenceOutput] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.request_id not in found
            assert output.is_last
            assert output.token_ids == ()
            found[output.request_id] = output
        engine.scheduler.check_invariants()
    return found


def assert_equals_transformers(
    output: SequenceOutput, folder: Path, prompt: list[int], *, normalizes: bool = True
) -> None:
    embedding_H = torch.from_numpy(np.frombuffer(output.embedding, "<f4").copy())
    expected_H = reference_embedding(folder, prompt, normalizes=normalizes)
    torch.testing.assert_close(embedding_H, expected_H, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("is_bare", [True, False])
def test_alone(running: ExitStack, architecture: str, is_bare: bool) -> None:
    folder = checkpoint(architecture, is_bare=is_bare)
    engine = make_engine(running, folder)
    engine.submit(request_of(prompt_of(37)))
    output = run(engine)[RequestId(0)]
    assert_equals_transformers(output, folder, prompt_of(37))
    assert output.state is SequenceState.FINISHED
    assert output.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("mode", MODES)
def test_batched_with_others_of_uneven_length(running: ExitStack, mode: str) -> None:
    engine = make_engine(running, checkpoint(), mode)
    prompts = [prompt_of(length, seed=1) for length in (1, 15, 16, 17, 64, 65, 130)]
    for prompt in prompts:
        engine.submit(request_of(prompt))
    for number, output in run(engine).items():
        assert_equals_transformers(output, checkpoint(), prompts[number])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [7, 16, 36])
def test_with_the_prompt_in_chunks(running: ExitStack, budget: int, mode: str) -> None:
    """With 36 of 37 tokens in the first chunk, the last one has the length of a decode."""
    engine = make_engine(running, checkpoint(), mode, max_num_batched_tokens=budget, max_num_seqs=4)
    for length in (37, 65):
        engine.submit(request_of(prompt_of(length)))
    outputs = run(engine)
    for number, length in enumerate((37, 65)):
        assert_equals_transformers(outputs[RequestId(number)], checkpoint(), prompt_of(length))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [63, 64, 65])
def test_with_all_of_the_prompt_cached_but_its_end(running: ExitStack, length: int, mode: str) -> None:
    engine = make_engine(running, checkpoint(), mode)
    for _ in range(2):
        engine.submit(request_of(prompt_of(length)))
        (output,) = run(engine).values()
    assert output.cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert_equals_transformers(output, checkpoint(), prompt_of(length))


def test_after_a_preemption(running: ExitStack) -> None:
    engine = make_engine(
        running,
        checkpoint(),
        num_blocks=8,
        max_model_len=8 * BLOCK_SIZE,
        max_num_batched_tokens=40,
        max_num_seqs=4,
    )
    for seed in range(4):
        engine.submit(request_of(prompt_of(100, seed)))
    outputs = run(engine)
    for seed in range(4):
        assert_equals_transformers(outputs[RequestId(seed)], checkpoint(), prompt_of(100, seed))


def test_a_prompt_may_fill_the_context(running: ExitStack) -> None:
    engine = make_engine(running, checkpoint(), max_model_len=64)
    engine.submit(request_of(prompt_of(64)))
    (output,) = run(engine).values()
    assert_equals_transformers(output, checkpoint(), prompt_of(64))
    with pytest.raises(CapacityError):
        engine.submit(request_of(prompt_of(65)))


def test_recorded_steps_give_the_same(running: ExitStack) -> None:
    """A chunk of one token runs as a recorded step, where the C++ kernels record."""
    prompt = prompt_of(65)
    values = []
    for enforce_eager in (True, False):
        engine = make_engine(running, checkpoint(), enforce_eager=enforce_eager)
        for _ in range(2):
            engine.submit(request_of(prompt))
            (output,) = run(engine).values()
        assert output.cached_tokens == 64
        assert_equals_transformers(output, checkpoint(), prompt)
        values.append(np.frombuffer(output.embedding, "<f4"))
    np.testing.assert_allclose(*values, atol=1e-6, rtol=0)


def test_without_normalisation(running: ExitStack) -> None:
    folder = checkpoint(normalizes=False)
    engine = make_engine(running, folder)
    engine.submit(request_of(prompt_of(9)))
    (output,) = run(engine).values()
    assert_equals_transformers(output, folder, prompt_of(9), normalizes=False)


def test_a_step_computes_an_embedding_and_nothing_of_the_vocabulary(
    running: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(running, checkpoint())
    runner: Any = engine.runner
    monkeypatch.setattr(runner._decoder, "logits", lambda hidden_SH: pytest.fail("logits of an embedding"))
    engine.submit(request_of(prompt_of(20)))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    assert steps == 1
    assert engine.load().generated_tokens == 0
    assert engine.load().prompt_tokens == 20


def test_a_prompt_that_is_not_finite_fails(running: ExitStack) -> None:
    engine = make_engine(running, checkpoint())
    runner: Any = engine.runner
    runner._decoder._weights.embedding_VH[7] = float("nan")
    engine.submit(request_of([7] * 20))
    engine.submit(request_of([8] * 20))
    outputs = run(engine)
    assert outputs[RequestId(0)].state is SequenceState.FAILED
    assert outputs[RequestId(0)].embedding == b""
    assert_equals_transformers(outputs[RequestId(1)], checkpoint(), [8] * 20)


def test_a_cancelled_request_gives_its_blocks_back(running: ExitStack) -> None:
    engine = make_engine(running, checkpoint(), "steps overlap", max_num_batched_tokens=16, max_num_seqs=4)
    request_id = engine.submit(request_of(prompt_of(100)))
    engine.step()
    engine.cancel(request_id)
    assert run(engine) == {}
    assert engine.pool.num_used == 0


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
    config = EngineConfig(
        model=str(checkpoint()),
        engine="simulated",
        kv_cache_memory=64 * BYTES_PER_BLOCK,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        simulated_step_seconds=0.0,
        simulated_prefill_tokens_per_second=1e12,
        overlap_steps="on" if overlap else "off",
    )
    with divided_engine(config, 1) as engine:
        for seed, length in enumerate(lengths):
            engine.submit(request_of((prompt_of(40)[:shared] + prompt_of(70, seed))[:length]))
        outputs = run(engine)
        load = engine.load()
    assert sorted(outputs) == list(range(len(lengths)))
    assert all(output.embedding for output in outputs.values())
    assert load.generated_tokens == 0
    assert load.prompt_tokens == sum(lengths)
    assert load.step_prompt_tokens + load.step_decodes == sum(lengths) - load.cached_tokens
    assert load.used_blocks == 0


def test_a_model_in_this_process_embeds() -> None:
    model = LLM(
        str(checkpoint()),
        tokenizer=str(DEMO),
        device="cpu",
        dtype="float32",
        kv_cache_memory=64 * BYTES_PER_BLOCK,
    )
    found = model.embed([prompt_of(20), prompt_of(33)])
    for values, length in zip(found, (20, 33), strict=True):
        expected_H = reference_embedding(checkpoint(), prompt_of(length))
        torch.testing.assert_close(torch.tensor(values), expected_H, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="embeds"):
        model.generate([prompt_of(5)])


def test_a_model_does_what_it_is_for_and_nothing_else(running: ExitStack, tmp_path: Path) -> None:
    embedding = make_engine(running, checkpoint())
    with pytest.raises(ValueError, match="embeds"):
        embedding.submit(request_of(prompt_of(5), SamplingParams(max_tokens=3)))
    generating = make_engine(running, make_checkpoint(tmp_path, "Qwen3ForCausalLM"))
    with pytest.raises(ValueError, match="does not embed"):
        generating.submit(request_of(prompt_of(5)))


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


def test_other_modules_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_embedding_checkpoint(tmp_path, "Qwen3ForCausalLM")
    modules = json.loads((folder / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.models.Dense"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="Dense"):
        load_config(folder)


@pytest.mark.parametrize("place", ["", ".", "..", "../other", "/etc", "1_Pooling/deeper"])
def test_settings_outside_the_folder_are_not_read(tmp_path: Path, place: str) -> None:
    folder = make_embedding_checkpoint(tmp_path, "Qwen3ForCausalLM")
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = place
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="must lie in a folder"):
        load_config(folder)


def test_a_checkpoint_without_a_head_generates_only_where_it_embeds(tmp_path: Path) -> None:
    folder = make_embedding_checkpoint(tmp_path, "Qwen3ForCausalLM")
    assert load_config(folder).pooling is not None
    (folder / "modules.json").unlink()
    with pytest.raises(UnsupportedModelError, match="Qwen3Model"):
        load_config(folder)
