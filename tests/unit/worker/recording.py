"""Runners on a CPU whose decode steps are recorded: all kernels of a step then run as one call."""

from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.worker.engine import Engine
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.execution.step_graphs import sizes_for
from blockyard.worker.scheduling.scheduler import SchedulerConfig

from .checkpoints import shared_checkpoint
from .steps import NEAR_GAP
from .token_engines import greedy, run, submit

CPU = torch.device("cpu")
PROMPTS = ((5, 9, 30), (7,) * 17, tuple(range(40, 60)), (3,))
NUM_TOKENS = 6


def graphs_of(runner: TorchRunner) -> Any:
    return runner._graphs


def recorded_sizes(runner: TorchRunner) -> list[int]:
    """Return the sizes of batches whose step is recorded."""
    return sorted(size for (size, _), graph in graphs_of(runner)._graphs.items() if graph is not None)


def make_runner(folder: Path | None = None, *, records: bool = True, **settings: Any) -> TorchRunner:
    folder = folder or shared_checkpoint("Qwen3ForCausalLM")
    try:
        runner = TorchRunner.create(
            folder, device=CPU, num_blocks=24, block_size=16, **({"dtype": "float32"} | settings)
        )
    except ValueError as error:
        pytest.skip(str(error))
    if runner.backend.name != settings.get("backend", "cpu"):
        pytest.skip("no C++ kernels here")
    runner.warm_up()
    if records:
        sizes = sizes_for(runner.backend, CPU, 8)
        assert sizes is not None
        runner.capture_decodes(sizes, max_context_tokens=128)
        if graphs_of(runner) is None and not runner.backend._library.has_linear(is_bf16=False):
            pytest.skip("this CPU has neither AVX-512 nor AVX2: its linears are PyTorch's")
    return runner


def engine_on(runner: TorchRunner, **settings: Any) -> Engine:
    """Return an engine of up to 8 requests, which computes long prompts in chunks."""
    config = SchedulerConfig(max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32)
    return Engine(config, runner, num_blocks=24, **settings)


def generate(runner: TorchRunner, **settings: Any) -> list[list[int]]:
    """Return the tokens of batches of four requests down to one."""
    engine = engine_on(runner, **settings)
    ids = [submit(engine, prompt, NUM_TOKENS + index) for index, prompt in enumerate(PROMPTS)]
    answers = run(engine)
    return [answers[request_id][0] for request_id in ids]


def assert_records_and_generates(folder: Path, **settings: Any) -> None:
    """Assert that recorded steps give the tokens of transformers, in batches of each size."""
    runner = make_runner(folder)
    expected = [greedy(folder, prompt, NUM_TOKENS + index, NEAR_GAP) for index, prompt in enumerate(PROMPTS)]
    assert generate(runner, **settings) == expected
    assert recorded_sizes(runner) == [1, 2, 3, 4]
