"""Tokens with an adapter equal those of a checkpoint with the adapter merged into its weights."""

import shutil
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from blockyard.proto.naming.block_hash import chain, root_name
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.parallel.follower import Follower
from blockyard.worker.sequences.identifiers import BlockName, RequestId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.startup.loading import LoadedEngine, load_engine
from safetensors.torch import load_file, save_file

from .adapters import make_adapter, merge
from .checkpoints import make_checkpoint, make_embedding_checkpoint, reference_greedy, shared_checkpoint
from .ranks import ranks
from .test_engine_tokens import prompt_of

ARCHITECTURE = "Qwen3ForCausalLM"
MIN_GAP = 1e-3
NUM_TOKENS = 12
KINDS: tuple[dict[str, Any], ...] = (
    {"rank": 4, "alpha": 8},
    {"rank": 8, "alpha": 4, "use_rslora": True},
    {"rank": 1, "alpha": 1, "modules": ("q_proj", "v_proj")},
    {"rank": 3, "alpha": 6, "modules": ("gate_proj", "down_proj", "o_proj")},
)
"""The adapters of the tests are of these kinds in turn."""


@cache
def files() -> tuple[TemporaryDirectory[str], Path]:
    folder = TemporaryDirectory(prefix="blockyard-adapters-")
    return folder, Path(folder.name)


@cache
def adapter(number: int) -> str:
    """Return the folder of an adapter, below `files()[1]`."""
    name = f"adapter-{number}"
    kind = KINDS[number % len(KINDS)]
    make_adapter(files()[1] / name, shared_checkpoint(ARCHITECTURE), seed=number, **kind)
    return name


@cache
def merged(number: int) -> Path:
    folder = files()[1] / f"merged-{number}"
    return merge(shared_checkpoint(ARCHITECTURE), files()[1] / adapter(number), folder)


def config_of(**settings: Any) -> EngineConfig:
    defaults = {"model": str(shared_checkpoint(ARCHITECTURE)), "dtype": "float32", "kv_cache_memory": 1 << 22}
    defaults |= {"max_loras": 4, "adapter_dir": str(files()[1])}
    return EngineConfig(device="cpu", **(defaults | settings))  # type: ignore[arg-type]


def load(**settings: Any) -> LoadedEngine:
    return load_engine(config_of(**settings))


def submit(
    loaded: LoadedEngine, number: int | str | None, prompt: Sequence[int], **sampling: Any
) -> RequestId:
    """Submit a request with an adapter by its number, or by its folder."""
    fingerprint = ""
    if number is not None:
        assert loaded.adapters is not None
        content = loaded.adapters.read(number if isinstance(number, str) else adapter(number))
        loaded.engine.adapters.add(content)
        fingerprint = content.fingerprint
    return submit_with(loaded, fingerprint, prompt, **sampling)


def submit_with(loaded: LoadedEngine, fingerprint: str, prompt: Sequence[int], **sampling: Any) -> RequestId:
    root = root_name(
        cluster_secret="", model_fingerprint="x", block_size=16, kv_dtype="float32", adapter=fingerprint
    )
    names = [BlockName(name) for name in (root, *chain(root, prompt, 16))]
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": NUM_TOKENS} | sampling))
    return loaded.engine.submit(
        EngineRequest(
            token_ids=list(prompt),
            prompt_length=len(prompt),
            names=names,
            sampling=params,
            adapter=fingerprint,
        )
    )


def run(engine: Engine) -> dict[tuple[RequestId, int], tuple[int, ...]]:
    """Return the tokens of each output. No step may use more adapters than there are slots."""
    tokens: dict[tuple[RequestId, int], tuple[int, ...]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.token_ids
            key = output.request_id, output.index
            tokens[key] = tokens.get(key, ()) + output.token_ids
        engine.scheduler.check_invariants()
        resident = engine.load().adapters
        assert len(resident) <= engine.scheduler.config.max_loras
    return tokens


def expected(number: int | None, prompt: tuple[int, ...]) -> tuple[int, ...]:
    folder = shared_checkpoint(ARCHITECTURE) if number is None else merged(number)
    greedy = reference_greedy(folder, prompt, NUM_TOKENS)
    assert greedy.min_gap > MIN_GAP
    return greedy.tokens


MODES: dict[str, dict[str, Any]] = {
    "C++, recorded steps": {},
    "C++, kernel by kernel": {"enforce_eager": True},
    "steps overlap": {"overlap_steps": "on"},
    "deterministic": {"deterministic": True},
    "small chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_tokens_equal_those_of_merged_weights_in_one_mixed_batch(mode: dict[str, Any]) -> None:
    loaded = load(max_loras=8, **mode)
    wanted = {}
    for number in (None, *range(8)):
        prompt = prompt_of(21 + (number or 0), seed=3)
        wanted[submit(loaded, number, prompt)] = expected(number, prompt)
    assert {key: tokens for (key, _), tokens in run(loaded.engine).items()} == wanted


def test_decodes_with_adapters_are_recorded() -> None:
    loaded = load()
    if loaded.engine.runner.backend.name != "cpu":  # type: ignore[attr-defined]
        pytest.skip("no C++ kernels")
    for number in (0, None, 1):
        submit(loaded, number, prompt_of(21, seed=3))
    run(loaded.engine)
    graphs = loaded.engine.runner._graphs  # type: ignore[attr-defined]
    assert (3, False) in graphs._lora_graphs
    assert (3, False) not in graphs._graphs


def test_adapters_change_what_is_generated() -> None:
    prompt = prompt_of(21, seed=3)
    assert len({expected(number, prompt) for number in (None, 0, 1, 2, 3)}) == 5


def test_more_adapters_than_slots_take_turns() -> None:
    loaded, begun = load(max_loras=2), time.monotonic()
    wanted = {}
    for number in range(6):
        prompt = prompt_of(21 + number, seed=3)
        wanted[submit(loaded, number, prompt)] = expected(number, prompt)
    assert {key: tokens for (key, _), tokens in run(loaded.engine).items()} == wanted
    load_report = loaded.engine.load()
    assert load_report.adapter_loads == 6
    assert 0 < load_report.adapter_load_seconds < time.monotonic() - begun


SIZES = (2, 4)
"""The tiny model has 2 kv heads: split between 2 ranks, and each on 2 of 4 ranks."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("max_loras", [8, 2])
@pytest.mark.parametrize("mode", ["C++, recorded steps", "steps overlap", "small chunks"])
def test_tokens_on_several_ranks_equal_those_of_merged_weights(mode: str, max_loras: int, size: int) -> None:
    config = config_of(max_loras=max_loras, **MODES[mode])
    with ranks(config, size) as group:
        loaded, wanted = load_engine(config, group), {}
        for number in (None, *range(6), 0):
            prompt = prompt_of(21 + (number or 0), seed=3)
            wanted[submit(loaded, number, prompt)] = expected(number, prompt)
        assert {key: tokens for (key, _), tokens in run(loaded.engine).items()} == wanted
        # Slots are loaded again where there are fewer than adapters.
        assert loaded.engine.load().adapter_loads >= 6


@pytest.mark.parametrize("size", SIZES)
def test_an_adapter_of_an_mlp_that_does_not_divide_is_padded(size: int, tmp_path: Path) -> None:
    checkpoint = shared_checkpoint("LlamaForCausalLM", intermediate_size=37)
    make_adapter(tmp_path / "adapters/a", checkpoint, seed=1)
    greedy = reference_greedy(
        merge(checkpoint, tmp_path / "adapters/a", tmp_path / "merged"), prompt_of(21), 12
    )
    assert greedy.min_gap > MIN_GAP
    config = config_of(model=str(checkpoint), adapter_dir=str(tmp_path / "adapters"))
    with ranks(config, size) as group:
        loaded = load_engine(config, group)
        key = submit(loaded, "a", prompt_of(21))
        assert run(loaded.engine) == {(key, 0): greedy.tokens}


@pytest.mark.parametrize("size", SIZES)
def test_an_adapter_of_fused_layers_changes_each_of_their_parts(size: int, tmp_path: Path) -> None:
    """Phi's modules are qkv_proj and gate_up_proj: one A, and the outputs of all parts in B."""
    checkpoint = shared_checkpoint("Phi3ForCausalLM")
    modules = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    make_adapter(tmp_path / "adapters/a", checkpoint, seed=1, modules=modules)
    merged_folder = merge(checkpoint, tmp_path / "adapters/a", tmp_path / "merged")
    greedy = reference_greedy(merged_folder, prompt_of(21), NUM_TOKENS)
    assert greedy.min_gap > MIN_GAP
    config = config_of(model=str(checkpoint), adapter_dir=str(tmp_path / "adapters"))
    with ranks(config, size) as group:
        loaded = load_engine(config, group)
        key = submit(loaded, "a", prompt_of(21))
        assert run(loaded.engine) == {(key, 0): greedy.tokens}


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_in_a_load_is_loaded_again(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the last weights by then, and has not kept them. All other ranks have."""
    config, followers = config_of(max_loras=2), list[Follower]()
    with ranks(config, 4, followers) as group:
        loaded = load_engine(config, group)
        parts = [loaded.engine.runner, *(follower._part for follower in followers)]
        down = parts[failing].adapters._linears["down"]  # type: ignore[attr-defined]
        part, copies, num_layers = down._part, [0], len(down._a_LSPRI)

        def fails_once(*weights: Any, **targets: Any) -> None:
            copies[0] += 1
            if copies[0] == num_layers:
                raise RuntimeError("no memory")
            part.copy(*weights, **targets)

        monkeypatch.setattr(down, "_part", SimpleNamespace(whole=part.whole, copy=fails_once))
        prompt = prompt_of(21, seed=3)
        wanted = {submit(loaded, number, prompt): expected(number, prompt) for number in (0, 1)}
        assert {key: tokens for (key, _), tokens in run(loaded.engine).items()} == wanted
        assert copies[0] > num_layers


def test_no_adapter_finds_the_blocks_of_another_or_of_the_bare_model() -> None:
    loaded, prompt = load(), prompt_of(70, seed=4)
    for number in (None, 0, 1, 0, None):
        submit(loaded, number, prompt)
        ((_, tokens),) = run(loaded.engine).items()
        assert tokens == expected(number, prompt)
    # Of 70 tokens, 4 blocks are found again by the last two.
    assert loaded.engine.load().cached_tokens == 2 * 64


@pytest.mark.parametrize("swap_space_gib", [0.0, 0.01], ids=["recomputed", "swapped"])
def test_preempted_sequences_go_on_with_their_adapter(swap_space_gib: float) -> None:
    loaded = load(
        kv_cache_memory=8 * 2 * 3 * 2 * 16 * 16 * 4,
        max_model_len=64,
        swap_space_gib=swap_space_gib,
        preempt="auto" if not swap_space_gib else "swap",
    )
    wanted = {}
    for number in (0, 1, 2, 3, None):
        prompt = prompt_of(28, seed=number or 9)
        wanted[submit(loaded, number, prompt)] = expected(number, prompt)
    assert {key: tokens for (key, _), tokens in run(loaded.engine).items()} == wanted
    report = loaded.engine.load()
    assert report.preemptions > 0
    assert bool(report.swaps) is bool(swap_space_gib)


def test_forks_and_beams_keep_the_adapter_of_their_request() -> None:
    bare, adapted = load(), load()
    folder = merged(1)
    of_merged = load_engine(
        EngineConfig(model=str(folder), device="cpu", dtype="float32", kv_cache_memory=1 << 22)
    )
    prompt = prompt_of(20, seed=5)
    for sampling in ({"n": 3, "temperature": 0.7, "seed": 4}, {"n": 2, "beam_width": 3}):
        submit(adapted, 1, prompt, **sampling)
        submit(of_merged, None, prompt, **sampling)
        submit(bare, None, prompt, **sampling)
        found, wanted, others = (run(loaded.engine) for loaded in (adapted, of_merged, bare))
        assert found == wanted != others


def test_logprobs_and_scored_prompts_are_those_of_the_adapter() -> None:
    adapted, prompt = load(), prompt_of(20, seed=5)
    of_merged = load_engine(
        EngineConfig(model=str(merged(1)), device="cpu", dtype="float32", kv_cache_memory=1 << 22)
    )
    found = []
    for loaded, number in ((adapted, 1), (of_merged, None)):
        submit(loaded, None if number is None else 0, prompt_of(9))  # beside another
        key = submit(loaded, number, prompt, logprobs=2, prompt_logprobs=0)
        scores: list[float] = []
        while loaded.engine.has_work:
            for output in loaded.engine.step().outputs:
                if output.request_id == key:
                    scores += [one.logprob for one in (*output.prompt_logprobs, *output.logprobs)]
        found.append(scores)
    assert len(found[0]) == len(prompt) - 1 + NUM_TOKENS
    assert found[0] == pytest.approx(found[1], abs=1e-3)


@pytest.mark.parametrize(
    "settings",
    [{"cpu_linears": "int8"}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}],
    ids=["linears in int8", "bf16", "KV in int8"],
)
def test_eight_adapters_in_one_batch_equal_each_alone(settings: dict[str, Any]) -> None:
    loaded = load(max_loras=8, **settings)
    if loaded.engine.runner.backend.name != "cpu":  # type: ignore[attr-defined]
        pytest.skip("no C++ kernels")
    prompts = {number: prompt_of(21 + number, seed=3) for number in range(8)}
    alone = {}
    for number, prompt in prompts.items():
        submit(loaded, number, prompt)
        ((_, alone[number]),) = run(loaded.engine).items()
    loaded.engine.flush()
    keys = {submit(loaded, number, prompt): number for number, prompt in prompts.items()}
    assert {keys[key]: tokens for (key, _), tokens in run(loaded.engine).items()} == alone
    assert len(set(alone.values())) == 8


def test_an_embedding_model_serves_no_adapters(tmp_path: Path) -> None:
    checkpoint = make_embedding_checkpoint(tmp_path / "embeds", ARCHITECTURE)
    with pytest.raises(ValueError, match="embedding model"):
        load(model=str(checkpoint))


def test_an_adapter_of_a_model_that_also_reads_images_is_that_of_its_text_part(tmp_path: Path) -> None:
    """PEFT names its tensors as transformers names the model's: as version 4 did before 4.52, or as it does since."""
    checkpoint = make_checkpoint(
        tmp_path / "model", "Mistral3ForConditionalGeneration", model_type="mistral", intermediate_size=96
    )
    older, newer = make_adapter(tmp_path / "older", checkpoint, seed=1), tmp_path / "newer"
    shutil.copytree(older, newer)
    tensors = load_file(older / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.language_model.model.layers.") for name in tensors)
    renamed = {
        name.replace("language_model.model.", "model.language_model."): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, newer / "adapter_model.safetensors")
    loaded, prompt = load(model=str(checkpoint), adapter_dir=str(tmp_path)), prompt_of(21, seed=3)
    assert loaded.adapters is not None
    contents = [loaded.adapters.read(folder.name) for folder in (older, newer)]
    assert contents[0].fingerprint == contents[1].fingerprint
    wanted = reference_greedy(merge(checkpoint, older, tmp_path / "merged"), prompt, NUM_TOKENS)
    assert wanted.min_gap > MIN_GAP
    loaded.engine.adapters.add(contents[1])
    submit_with(loaded, contents[1].fingerprint, prompt)
    [tokens] = run(loaded.engine).values()
    assert tokens == wanted.tokens

    both = tmp_path / "both"
    shutil.copytree(older, both)
    copied = {name: tensor.clone() for name, tensor in renamed.items()}
    save_file(tensors | copied, both / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="are for the same layer"):
        loaded.adapters.read("both")
