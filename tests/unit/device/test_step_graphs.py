"""Decode steps replayed from static buffers give the same tokens as steps launched kernel by kernel."""

import pytest
import torch
from blockyard.worker.execution.runner import PendingStep, TorchRunner
from blockyard.worker.execution.step_graphs import ladder
from blockyard.worker.sequences.step_plan import StepPlan

from tests.unit.worker.recording import PROMPTS, engine_on
from tests.unit.worker.steps import DEVICE
from tests.unit.worker.token_engines import run, submit

from .graphs import CHECKS, capture, check, check_tokens, checkpoint, make_runner


@pytest.mark.parametrize("max_rows", [1, 2, 5, 8, 9, 100, 256, 300, 1000])
def test_every_batch_has_a_size_that_is_little_larger(max_rows: int) -> None:
    sizes = ladder(max_rows)
    assert list(sizes) == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, max_rows)
    assert len(sizes) < 70
    for rows in range(1, max_rows + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows < max(2, 8 if rows <= 256 else 32)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.skipif(DEVICE.type != "cuda", reason="without CUDA tests/nightly/device runs it")
def test_replayed_steps_give_the_tokens_of_transformers(name: str) -> None:
    CHECKS[name]()


def test_steps_replayed_on_little_work_give_the_tokens_of_transformers() -> None:
    check_tokens(overlap=True, prompts=[(3,)], max_rows=1)


def test_a_model_with_windows_runs_kernel_by_kernel() -> None:
    folder = checkpoint("MistralForCausalLM", sliding_window=20)
    runner = make_runner(folder)
    replays = capture(runner, max_rows=2)
    check(engine_on(runner), folder, [((5,) * 3, 3)])
    assert not replays


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA, which says who waits for it")
def test_a_step_is_started_without_waiting_for_the_device() -> None:
    class NeverWaits(TorchRunner):
        def start(self, plan: StepPlan) -> PendingStep:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return super().start(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    runner = make_runner(checkpoint(), NeverWaits)
    capture(runner, max_rows=4)
    engine = engine_on(runner, overlap_steps=True)
    for prompt in PROMPTS:
        submit(engine, prompt, 8)
    assert all(len(tokens) == 8 for tokens, _ in run(engine).values())
