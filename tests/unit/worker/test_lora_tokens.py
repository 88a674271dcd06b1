"""Tokens with an adapter equal those of a checkpoint with the adapter merged into its weights."""

import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from blockyard.proto.naming.block_hash import root_name
from blockyard.worker.config import EngineConfig
from blockyard.worker.parallel.follower import Follower
from blockyard.worker.sequences.identifiers import RequestId
from blockyard.worker.startup.loading import LoadedEngine, load_engine
from safetensors.torch import load_file, save_file

from .adapters import make_adapter, merge
from .checkpoints import make_embedding_checkpoint, shared_checkpoint
from .ranks import ranks
from .recording import graphs_of
from .spoiling import Tensors, copy_of
from .token_engines import greedy, outputs_of, prompt_of, request_of, tokens_of

ARCHITECTURE = "Qwen3ForCausalLM"
NUM_TOKENS = 12
KINDS: tuple[dict[str, Any], ...] = (
    {"rank": 4, "alpha": 8},
    {"rank": 8, "alpha": 4, "use_rslora": True},
    {"rank": 1, "alpha": 1, "modules": ("q_proj", "v_proj")},
    {"rank": 3, "alpha": 6, "modules": ("gate_proj", "down_proj", "o_proj")},
)
"""The adapters of the tests are of these kinds in turn."""
_FOLDER = TemporaryDirectory(prefix="blockyard-adapters-")
ADAPTERS = Path(_FOLDER.name)


@cache
def adapter(number: int) -> str:
    """Return the folder of an adapter, below ADAPTERS."""
    name, kind = f"adapter-{number}", KINDS[number % len(KINDS)]
    make_adapter(ADAPTERS / name, shared_checkpoint(ARCHITECTURE), seed=number, **kind)
    return name


@cache
def merged(number: int) -> Path:
    return merge(shared_checkpoint(ARCHITECTURE), ADAPTERS / adapter(number), ADAPTERS / f"merged-{number}")


def prompt(number: int | None) -> tuple[int, ...]:
    return prompt_of(21 + (number or 0), seed=3)


def config_of(**settings: Any) -> EngineConfig:
    defaults = {"model": str(shared_checkpoint(ARCHITECTURE)), "dtype": "float32", "kv_cache_memory": 1 << 22}
    defaults |= {"max_loras": 4, "adapter_dir": str(ADAPTERS)}
    return EngineConfig(device="cpu", **(defaults | settings))  # type: ignore[arg-type]


def load(**settings: Any) -> LoadedEngine:
    return load_engine(config_of(**settings))


def submit(
    loaded: LoadedEngine, number: int | str | None, tokens: Sequence[int] | None = None, **sampling: Any
) -> RequestId:
    """Submit a request with an adapter by its number, or by its folder."""
    fingerprint = ""
    if number is not None:
        assert loaded.adapters is not None
        content = loaded.adapters.read(number if isinstance(number, str) else adapter(number))
        loaded.engine.adapters.add(content)
        fingerprint = content.fingerprint
    root = root_name(
        cluster_secret="", model_fingerprint="x", block_size=16, kv_dtype="float32", adapter=fingerprint
    )
    tokens = tokens or prompt(number if isinstance(number, int) else None)
    options = {"max_tokens": NUM_TOKENS} | sampling
    return loaded.engine.submit(request_of(tokens, root=root, adapter=fingerprint, **options))


def run(loaded: LoadedEngine) -> dict[tuple[RequestId, int], list[int]]:
    found = {key: tokens_of(outputs) for key, outputs in outputs_of(loaded.engine).items()}
    assert len(loaded.engine.load().adapters) <= loaded.engine.scheduler.config.max_loras
    return found


def expected(number: int | None, tokens: Sequence[int] | None = None) -> list[int]:
    folder = shared_checkpoint(ARCHITECTURE) if number is None else merged(number)
    return greedy(folder, tokens or prompt(number), NUM_TOKENS)


def check(loaded: LoadedEngine, numbers: Iterable[int | None]) -> None:
    """Check that requests with these adapters, all at once, get the tokens of merged weights."""
    wanted = {(submit(loaded, number), 0): expected(number) for number in numbers}
    assert run(loaded) == wanted


MODES: dict[str, dict[str, Any]] = {
    "C++, recorded steps": {},
    "C++, kernel by kernel": {"enforce_eager": True},
    "steps overlap": {"overlap_steps": "on"},
    "deterministic": {"deterministic": True},
    "small chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
}


@pytest.mark.parametrize("mode", MODES)
def test_tokens_equal_those_of_merged_weights_in_one_mixed_batch(mode: str) -> None:
    loaded = load(max_loras=8, **MODES[mode])
    check(loaded, (None, *range(8)))
    assert len({tuple(expected(number, prompt(None))) for number in (None, 0, 1, 2, 3)}) == 5
    if mode == "C++, recorded steps" and loaded.engine.runner.backend.name == "cpu":  # type: ignore[attr-defined]
        check(loaded, (0, None, 1))
        graphs = graphs_of(loaded.engine.runner)  # type: ignore[arg-type]
        assert (3, False) in graphs._lora_graphs
        assert (3, False) not in graphs._graphs


def test_more_adapters_than_slots_take_turns() -> None:
    loaded, begun = load(max_loras=2), time.monotonic()
    check(loaded, range(6))
    report = loaded.engine.load()
    assert report.adapter_loads == 6
    assert 0 < report.adapter_load_seconds < time.monotonic() - begun


SIZES = (2, 4)
"""The tiny model has 2 kv heads: split between 2 ranks, and each on 2 of 4 ranks."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("max_loras", [8, 2])
@pytest.mark.parametrize("mode", ["C++, recorded steps", "steps overlap", "small chunks"])
def test_tokens_on_several_ranks_equal_those_of_merged_weights(mode: str, max_loras: int, size: int) -> None:
    """Slots are loaded again where there are fewer than adapters."""
    config = config_of(max_loras=max_loras, **MODES[mode])
    with ranks(config, size) as group:
        loaded = load_engine(config, group)
        check(loaded, (None, *range(6), 0))
        assert loaded.engine.load().adapter_loads >= 6


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("architecture", "fields", "modules"),
    [
        ("LlamaForCausalLM", {"intermediate_size": 37}, ("q_proj", "gate_proj", "up_proj", "down_proj")),
        ("Phi3ForCausalLM", {}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    ],
)
def test_an_mlp_that_does_not_divide_is_padded_and_fused_layers_change_in_each_of_their_parts(
    architecture: str, fields: dict[str, Any], modules: tuple[str, ...], size: int, tmp_path: Path
) -> None:
    """Phi's modules have one A, and the outputs of all parts in B."""
    checkpoint = shared_checkpoint(architecture, **fields)
    folder = make_adapter(tmp_path / "adapters/a", checkpoint, seed=1, modules=modules)
    wanted = greedy(merge(checkpoint, folder, tmp_path / "merged"), prompt(None), NUM_TOKENS)
    config = config_of(model=str(checkpoint), adapter_dir=str(folder.parent))
    with ranks(config, size) as group:
        loaded = load_engine(config, group)
        key = submit(loaded, "a")
        assert run(loaded) == {(key, 0): wanted}


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
        check(loaded, (0, 1))
        assert copies[0] > num_layers


def test_no_adapter_finds_the_blocks_of_another_or_of_the_bare_model() -> None:
    loaded, long = load(), prompt_of(70, seed=4)
    for number in (None, 0, 1, 0, None):
        key = submit(loaded, number, long)
        assert run(loaded) == {(key, 0): expected(number, long)}
    # Of 70 tokens, 4 blocks are found again by the last two.
    assert loaded.engine.load().cached_tokens == 2 * 64


@pytest.mark.parametrize("swap_space_gib", [0.0, 0.01], ids=["recomputed", "swapped"])
def test_preempted_sequences_go_on_with_their_adapter(swap_space_gib: float) -> None:
    preempt = "swap" if swap_space_gib else "auto"
    memory = 8 * 2 * 3 * 2 * 16 * 16 * 4
    loaded = load(kv_cache_memory=memory, max_model_len=64, swap_space_gib=swap_space_gib, preempt=preempt)
    wanted = {}
    for number in (0, 1, 2, 3, None):
        tokens = prompt_of(28, seed=number or 9)
        wanted[submit(loaded, number, tokens), 0] = expected(number, tokens)
    assert run(loaded) == wanted
    report = loaded.engine.load()
    assert report.preemptions > 0
    assert bool(report.swaps) is bool(swap_space_gib)


def test_forks_beams_and_scores_are_those_of_the_adapter_of_their_request() -> None:
    bare, adapted, of_merged = load(), load(), load(model=str(merged(1)), max_loras=0)
    tokens = prompt_of(20, seed=5)
    scores: list[list[float]] = []
    for sampling in ({"n": 3, "temperature": 0.7, "seed": 4}, {"n": 2, "beam_width": 3}):
        for loaded, number in ((adapted, 1), (of_merged, None), (bare, None)):
            submit(loaded, number, tokens, **sampling)
        found, wanted, others = (run(loaded) for loaded in (adapted, of_merged, bare))
        assert found == wanted != others
    for loaded, number in ((adapted, 1), (of_merged, None)):
        submit(loaded, None if number is None else 0, prompt_of(9))  # beside another
        key = submit(loaded, number, tokens, logprobs=2, prompt_logprobs=0), 0
        outputs = outputs_of(loaded.engine)[key]
        scores.append([one.logprob for o in outputs for one in (*o.prompt_logprobs, *o.logprobs)])
    assert len(scores[0]) == len(tokens) - 1 + NUM_TOKENS
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)


@pytest.mark.parametrize(
    "settings", [{"cpu_linears": "int8"}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}], ids=str
)
def test_eight_adapters_in_one_batch_equal_each_alone(settings: dict[str, Any]) -> None:
    loaded = load(max_loras=8, **settings)
    if loaded.engine.runner.backend.name != "cpu":  # type: ignore[attr-defined]
        pytest.skip("no C++ kernels")
    alone = []
    for number in range(8):
        submit(loaded, number)
        alone += run(loaded).values()
    loaded.engine.flush()
    for number in range(8):
        submit(loaded, number)
    together = run(loaded)
    assert [together[key] for key in sorted(together)] == alone
    assert len(set(map(tuple, alone))) == 8


def test_an_embedding_model_serves_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="embedding model"):
        load(model=str(make_embedding_checkpoint(tmp_path / "embeds", ARCHITECTURE)))


def test_an_adapter_of_a_model_that_also_reads_images_is_that_of_its_text_part(tmp_path: Path) -> None:
    """PEFT names its tensors as transformers names the model's: as version 4 did before 4.52, or as it does since."""
    checkpoint = shared_checkpoint(
        "Mistral3ForConditionalGeneration", model_type="mistral", intermediate_size=96
    )
    older = make_adapter(tmp_path / "older", checkpoint, seed=1)
    tensors = load_file(older / "adapter_model.safetensors")
    old, new = "base_model.model.language_model.model.", "base_model.model.model.language_model."
    assert all(name.startswith(f"{old}layers.") for name in tensors)
    renamed: Tensors = {name.replace(old, new): tensor.clone() for name, tensor in tensors.items()}
    for name, content in (("newer", renamed), ("both", tensors | renamed)):
        save_file(content, copy_of(older, tmp_path / name) / "adapter_model.safetensors")
    loaded = load(model=str(checkpoint), adapter_dir=str(tmp_path))
    assert loaded.adapters is not None
    assert loaded.adapters.read("older").fingerprint == loaded.adapters.read("newer").fingerprint
    key = submit(loaded, "newer")
    wanted = greedy(merge(checkpoint, older, tmp_path / "merged"), prompt(None), NUM_TOKENS)
    assert run(loaded) == {(key, 0): wanted}
    with pytest.raises(ValueError, match="are for the same layer"):
        loaded.adapters.read("both")
