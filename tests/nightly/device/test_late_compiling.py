"""Triton compiles nothing once a worker serves: a compilation holds up every stream for a second or two.

The steps run in a process of their own, which has compiled nothing yet and does not interpret kernels.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.quantise.recipes import quantise_checkpoint, recipes
from tests.unit.worker.checkpoints import shared_checkpoint

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "graphs": ("LlamaForCausalLM", {}, "auto"),
    "kernel by kernel": ("LlamaForCausalLM", {}, "auto"),
    "windows": ("MistralForCausalLM", {"sliding_window": 600}, "auto"),
    "int8": ("Qwen3ForCausalLM", {}, "int8"),
    "linears in 4 bits": ("LlamaForCausalLM", {"intermediate_size": 128}, "auto"),
    "linears in 8 bits, act order": ("Qwen3ForCausalLM", {"intermediate_size": 128}, "auto"),
    "experts": ("Qwen3MoeForCausalLM", {}, "auto"),
    "experts in 4 bits": (
        "Qwen3MoeForCausalLM",
        {"intermediate_size": 128, "moe_intermediate_size": 64},
        "auto",
    ),
}
QUANTISED = {
    "linears in 4 bits": "awq",
    "linears in 8 bits, act order": "gptq-8-order-asymmetric",
    "experts in 4 bits": "awq",
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_compiled_after_the_warm_up(tmp_path: Path, case: str) -> None:
    architecture, overrides, kv_cache_dtype = CASES[case]
    overrides = {"max_position_embeddings": 1024, "vocab_size": 4096, "head_dim": 64} | overrides
    checkpoint = shared_checkpoint(architecture, **overrides)
    if case in QUANTISED:
        quantise_checkpoint(checkpoint, recipes(32)[QUANTISED[case]], tmp_path / "quantised")
        checkpoint = tmp_path / "quantised"
    steps = "graphs" if case in ("graphs", "int8", "experts") else "kernel by kernel"
    # The kernels that tests/nightly/kernels/compile_for_cuda.py leaves out, exactly as a worker launches them.
    launched = ["blockyard.kernels.triton.choice", "blockyard.kernels.triton.nucleus"]
    compiled_modules = launched if case == "graphs" else []
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("compile_while_serving.py")),
            str(checkpoint),
            kv_cache_dtype,
            steps,
            *compiled_modules,
        ],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    print(compiled)
    assert not compiled["while_serving"]
    kernels = {
        "attend_items",
        "merge_partials",
        "copy_blocks",
        "top_k_top_p",
        "largest_of_rows",
        "sums_above",
    }
    if case in QUANTISED:
        kernels |= {"quantised_linear", "dequantise"}
    if case == "experts in 4 bits":
        kernels.add("quantised_experts")
    assert set(compiled["at_start"]) >= {f"{kernel}_kernel" for kernel in kernels}
