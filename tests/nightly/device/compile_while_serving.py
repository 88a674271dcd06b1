"""Warm a runner up, serve every kind of step, and print what Triton compiles before and after the warm-up.

With CUDA the kernels are compiled and launched. Without it nothing is launched: Triton says what it would compile for
an H100, and every kernel's output is arbitrary but finite. The kernels of the modules that are named last are compiled
all the same. Run in a process of its own, without TRITON_INTERPRET.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from blockyard.kernels.interface import greedy_tokens
from blockyard.kernels.triton.backend import TritonBackend
from blockyard.kernels.triton.choosing import TritonDraws
from blockyard.proto.naming.block_hash import chain
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.execution.step_graphs import (
    CudaSteps,
    GraphSizes,
    RepeatedStep,
    ladder,
    shared_sizes,
)
from blockyard.worker.memory.kv_size import KVCacheDtype
from blockyard.worker.model.config import load_config
from blockyard.worker.model.weights import load_weights
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.sequences.sampling_params import SamplingParams
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
ROOT = BlockName(b"root")
BLOCK_SIZE = 16
NUM_BLOCKS = 400
SCHEDULING = SchedulerConfig(max_model_len=1024, max_num_seqs=12, max_num_batched_tokens=640)
SHARED = [7] * 530
"""A prefix that is long enough to be read once for several decodes."""


class NoGPU:
    """Stands for Triton's driver of an H100. Nothing is launched on it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class FirstTokens(TritonDraws):
    """Launches draws that write nothing, and draws the first token."""

    def from_logits(self, *inputs: torch.Tensor) -> torch.Tensor:
        return super().from_logits(*inputs).zero_()

    def from_weights(self, *inputs: torch.Tensor) -> torch.Tensor:
        return super().from_weights(*inputs).zero_()


class FiniteOutputs(TritonBackend):
    """A backend whose launches write nothing. Its outputs are finite numbers all the same."""

    draws = FirstTokens()

    def attention(self, *args: Any, out_TND: torch.Tensor, **kwargs: Any) -> None:
        super().attention(*args, out_TND=out_TND, **kwargs)
        out_TND.zero_()

    def rms_norm(self, x_TH: torch.Tensor, *args: Any, out_TH: torch.Tensor) -> None:
        super().rms_norm(x_TH, *args, out_TH=out_TH)
        out_TH.copy_(x_TH)

    def silu_mul(self, gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
        super().silu_mul(gate_up_T2I, out_TI=out_TI)
        out_TI.zero_()

    def linear(self, x_TI: torch.Tensor, *args: Any) -> torch.Tensor:
        return super().linear(x_TI, *args).zero_()

    def experts(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().experts(*args, **kwargs).zero_()

    def greedy_tokens(self, logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        super().greedy_tokens(logits_SV)
        return greedy_tokens(logits_SV)


class Compiled:
    """Keys by kernel of what Triton has compiled, or would compile."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.keys: dict[str, set[str]] = {}
        self._modules = modules
        triton.knobs.runtime.jit_cache_hook = self._note

    def _note(self, *, key: str, fn: Any, **how: Any) -> bool:
        """Return whether nothing is to be launched."""
        keys = self.keys.setdefault(fn.name, set())
        if not HAS_GPU and fn.module in self._modules and str(key) not in keys:
            wanted = how["compile"]
            source = ASTSource(
                fn.jit_function, wanted["signature"], wanted["constants"], wanted["configs"][0]
            )
            options = {name: wanted[name] for name in ("num_warps", "num_stages")}
            triton.compile(source, target=NoGPU().get_current_target(), options=options)
        keys.add(str(key))
        return not HAS_GPU

    def take(self) -> dict[str, set[str]]:
        keys, self.keys = self.keys, {}
        return keys


def make_runner(checkpoint: Path, kv_cache_dtype: KVCacheDtype) -> TorchRunner:
    config = load_config(checkpoint)
    return TorchRunner(
        config=config,
        weights=load_weights(checkpoint, config, dtype=torch.bfloat16, device=DEVICE),
        backend=TritonBackend() if HAS_GPU else FiniteOutputs(),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        kv_cache_dtype=kv_cache_dtype,
    )


def capture(runner: TorchRunner) -> None:
    rows = ladder(SCHEDULING.max_num_seqs)
    sizes = GraphSizes(
        make_graph=CudaSteps() if HAS_GPU else RepeatedStep,
        rows=rows,
        at_start=rows,
        shared_at_start=shared_sizes(rows),
    )
    runner.capture_decodes(sizes, max_context_tokens=SCHEDULING.max_model_len)


def request(prompt: list[int], **sampling: Any) -> EngineRequest:
    return EngineRequest(
        token_ids=prompt,
        prompt_length=len(prompt),
        names=[BlockName(name) for name in (ROOT, *chain(ROOT, prompt, BLOCK_SIZE))],
        sampling=SamplingParams(**{"max_tokens": 3, "temperature": 0.0, **sampling}),
    )


def serve(runner: TorchRunner) -> None:
    """Run steps of all kinds: prompts of any length, alone and beside decodes, shared prefixes, forks, beams, and
    every way to sample."""
    engine = Engine(SCHEDULING, runner, num_blocks=NUM_BLOCKS, overlap_steps=HAS_GPU)
    for length in (1, 2, 15, 16, 17, 33, 255, 256, 257, 700, 1000):  # one at a time
        run(engine, [request([length % 200] * length)])
    run(engine, [request([length] * length, max_tokens=8) for length in (1, 3, 16, 40, 200)])
    run(engine, [request(SHARED)])
    sharers = [request([*SHARED, number], max_tokens=6) for number in range(10)]
    run(engine, sharers, [request([9] * 20)])
    run(engine, [request([5] * 20, n=3, temperature=0.7)], [request([6] * 20, beam_width=2)])
    options: list[dict[str, Any]] = [
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 5, "min_p": 0.1},
        {"temperature": 0.7, "min_tokens": 2, "eos_token_ids": frozenset({2})},
        {"repetition_penalty": 1.1, "logit_bias": ((3, 1.0),), "bad_token_ids": frozenset({5})},
        {"allowed_token_ids": frozenset({5, 6}), "logprobs": 2},
    ]
    for option in options:
        run(engine, [request([8] * 18, **option)])


def run(engine: Engine, first: list[EngineRequest], later: list[EngineRequest] | None = None) -> None:
    """Serve the first requests, and the later ones from the second step on."""
    wanted = {engine.submit(each) for each in first}
    answered = set()
    while engine.has_work:
        answered |= {output.request_id for output in engine.step().outputs if output.token_ids}
        wanted |= {engine.submit(each) for each in later or ()}
        later = None
    assert answered == wanted, f"no tokens of requests {wanted - answered}"


def main(checkpoint: str, kv_cache_dtype: KVCacheDtype, steps: str, *modules: str) -> None:
    if not HAS_GPU:
        triton.runtime.driver.set_active(NoGPU())
    compiled = Compiled(modules)
    runner = make_runner(Path(checkpoint), kv_cache_dtype)
    runner.warm_up()
    if steps == "graphs":
        capture(runner)
    before = compiled.take()
    serve(runner)
    late = {name: keys - before.get(name, set()) for name, keys in compiled.take().items()}
    print(json.dumps({"at_start": _counts(before), "while_serving": _counts(late)}))


def _counts(keys: dict[str, set[str]]) -> dict[str, int]:
    return {name: len(each) for name, each in sorted(keys.items()) if each}


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
