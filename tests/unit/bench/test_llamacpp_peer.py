"""llama.cpp as a peer: its file has our checkpoint's numbers, and a step computes what is running and what is new."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

from bench.engine.peers.protocol import Course
from bench.engine.systems import PEERS, Trial, peer_system, running
from bench.quantise.peers import (
    JUDGED,
    LOADS,
    OURS,
    PAIRS,
    TYPES,
    Files,
    figures_of,
    floors_of,
    systems_of,
    text_of,
)
from tests.unit.worker.checkpoints import shared_checkpoint

VOCAB = 50


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """Both scripts as their own processes import them."""
    monkeypatch.syspath_prepend(str(PEERS))
    yield import_module("llamacpp_convert"), import_module("llamacpp_run")
    for name in ("llamacpp_convert", "llamacpp_run", "protocol"):
        sys.modules.pop(name)


def test_every_tensor_of_a_checkpoint_has_a_name_in_gguf(scripts: tuple[Any, Any]) -> None:
    convert, _ = scripts
    folder = Path(shared_checkpoint("LlamaForCausalLM"))
    names = {convert.gguf_name(name) for name, _ in convert.tensors_of(folder / "model.safetensors")}
    parts = {
        "attn_norm",
        "ffn_norm",
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
    }
    assert {"token_embd.weight", "output_norm.weight"} <= names
    assert {f"blk.1.{part}.weight" for part in parts} <= names
    with pytest.raises(KeyError):
        convert.gguf_name("model.layers.0.self_attn.q_norm.weight")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_are_read_as_they_are(scripts: tuple[Any, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    convert, _ = scripts
    tensors = {"a": torch.randn(3, 5).to(dtype), "b": torch.randn(4).to(dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    read = dict(convert.tensors_of(tmp_path / "model.safetensors"))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert numpy.array_equal(read[name], tensor.float().numpy())


def test_rows_that_are_rotated_together_become_neighbours(scripts: tuple[Any, Any]) -> None:
    convert, _ = scripts
    weight = numpy.arange(2 * 6 * 3).reshape(12, 3)  # 2 heads of 6
    order = [0, 3, 1, 4, 2, 5]
    expected = numpy.concatenate([weight[:6][order], weight[6:][order]])
    assert numpy.array_equal(convert.interleaved(weight, 2), expected)


def library(max_tokens: int) -> tuple[ModuleType, list[list[tuple[int, int, int]]]]:
    """A stand-in for llama_cpp whose next token is the last one plus one, and the rows of each of its batches."""
    module, batches = ModuleType("llama_cpp"), list[list[tuple[int, int, int]]]()
    batch = SimpleNamespace(
        n_tokens=0,
        token=[0] * max_tokens,
        pos=[0] * max_tokens,
        n_seq_id=[0] * max_tokens,
        seq_id=[[0] for _ in range(max_tokens)],
        logits=[False] * max_tokens,
    )

    def decode(_context: object, given: Any) -> int:
        rows = range(given.n_tokens)
        batches.append([(given.token[row], given.pos[row], given.seq_id[row][0]) for row in rows])
        return 0

    def logits(_context: object, row: int) -> Any:
        assert batch.logits[row]
        return numpy.eye(VOCAB, dtype=numpy.float32)[batch.token[row] + 1]

    parts = {
        "llama_get_memory": lambda _context: None,
        "llama_batch_init": lambda *_: batch,
        "llama_decode": decode,
        "llama_get_logits_ith": logits,
        "llama_memory_seq_rm": lambda *_: True,
    }
    for name, part in parts.items():
        setattr(module, name, part)
    return module, batches


def test_a_step_computes_running_sequences_and_prompts_as_slots_become_free(
    scripts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = scripts
    module, batches = library(run.MAX_BATCH_TOKENS)
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    peer = run.LlamaCpp(None, VOCAB, 2)
    for number, (prompt, max_tokens) in enumerate((([1, 2], 3), ([10], 1), ([20, 21, 22], 2))):
        peer.add(number, prompt, max_tokens)
    assert list(peer.step()) == [(0, [3]), (1, [11])]
    assert list(peer.step()) == [(0, [4]), (2, [23])]
    assert list(peer.step()) == [(0, [5]), (2, [24])]
    first, second = batches[0][0][2], batches[0][2][2]
    assert batches == [
        [(1, 0, first), (2, 1, first), (10, 0, second)],
        [(3, 2, first), (20, 0, second), (21, 1, second), (22, 2, second)],
        [(4, 3, first), (23, 3, second)],
    ]
    with pytest.raises(ValueError, match="a prompt of 2049 tokens"):
        peer.add(3, [0] * 2049, 1)


async def test_a_python_without_llama_cpp_is_absent(tmp_path: Path) -> None:
    async with running(peer_system("x", "llamacpp", Path(sys.executable), {}), tmp_path, 1 << 30) as started:
        assert started == "llama_cpp cannot be imported"


def trial(load: Any, first: float, seconds: float) -> Trial:
    course = Course(submitted=0.0, first=first, last=seconds, num_tokens=load.output_tokens)
    return Trial(courses=(course,) * load.sequences, foreign_cores=0.0, cores=1.0)


def test_a_rate_is_of_the_prompt_or_of_the_decodes_alone() -> None:
    decode, batch, prompt = LOADS
    assert decode.rate(trial(decode, 2.0, 4.0)) == pytest.approx((decode.output_tokens - 1) / 2)
    assert batch.rate(trial(batch, 1.0, 2.0)) == pytest.approx(16 * (batch.output_tokens - 1))
    assert prompt.rate(trial(prompt, 0.5, 0.5)) == pytest.approx(512 / 0.5)


def test_ours_are_compared_with_llama_cpp_round_by_round(tmp_path: Path) -> None:
    files = Files(full=tmp_path, w4a16=tmp_path, gguf=tmp_path)
    for kind in TYPES:
        (tmp_path / f"{kind}.gguf").write_bytes(b"x")
    exact, measured = systems_of(files, Path("python"), 2)
    assert all(system.env["OMP_NUM_THREADS"] == "2" for system in (*exact, *measured))
    assert {name for pair in PAIRS for name in pair} == {system.name for system in measured}
    rates = {
        load.name: {
            system.name: [
                trial(load, 1.0, 2.0 if system.name in OURS else 2.0 + delay) for delay in (1.0, 3.0, 2.0)
            ]
            for system in measured
        }
        for load in LOADS
    }
    figures = figures_of(rates)
    ratio = figures[JUDGED]["ratios"]["blockyard W4A16 / llama.cpp Q4_0"]
    assert ratio == {"median": 3.0, "lowest": 2.0, "highest": 4.0, "pairs": 3, "undisturbed": 3}
    assert [floor.value for floor in floors_of(figures, 0.75)] == [0.75, *[3.0] * len(PAIRS)]
    assert "| blockyard int8 / llama.cpp Q8_0 | **3.00** (2.00-4.00; 3) |" in text_of(figures, files, "")
