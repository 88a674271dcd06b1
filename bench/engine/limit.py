"""Roofline of a workload: all prompts at the matmul rate, then decode steps at their limit (bench/profile/roofline.py).

Every unfinished request runs in each decode step. A prefix that all prompts share counts once, and only the last
position of a prompt goes through the head. The roofline is no strict upper bound: prompts beside decodes, CPU caches
and numbers in 8 bits can exceed it.

Owns the arithmetic, and measuring the machine's rates in a process that ends before any system starts.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import takewhile
from multiprocessing import get_context

import torch
from blockyard.worker.model.config import ModelConfig

from bench.engine.build import DTYPES
from bench.engine.peers.protocol import Request
from bench.kernels.timing import Machine, measure_machine
from bench.profile.roofline import DecodeStep, limit_seconds, used_weights


def machine_of(device: str, dtype: str, threads: int) -> tuple[Machine, int | None]:
    """Return the machine's rates, and the bytes that are free on a GPU. None on a CPU."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_measure, device, dtype, threads).result()


def _measure(device: str, dtype: str, threads: int) -> tuple[Machine, int | None]:
    if threads:
        torch.set_num_threads(threads)
    free_bytes = None if device == "cpu" else torch.cuda.mem_get_info()[0]
    with torch.inference_mode():
        return measure_machine(torch.device(device), DTYPES[dtype]), free_bytes


def rates_of(machine: Machine) -> dict[str, float]:
    """Return the rates in the units of a report."""
    return {
        "copy_gb_per_second": round(machine.copy_bytes_per_second / 1e9, 2),
        "matmul_tflops_per_second": round(machine.matmul_flops_per_second / 1e12, 4),
    }


def roofline_tokens_per_second(
    requests: Sequence[Request], model: ModelConfig, dtype: str, machine: Machine
) -> float | None:
    """Return output tokens per second at the limit. None if the requests do not arrive all at once."""
    if any(request.arrival_seconds for request in requests):
        return None
    prompts = [request.token_ids for request in requests]
    columns = zip(*prompts, strict=False)
    num_shared = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, columns))
    num_prompt_tokens = num_shared + sum(len(prompt) - num_shared for prompt in prompts)
    head = model.vocab_size * model.hidden_size
    weights = used_weights(model)
    seconds = (
        2 * (num_prompt_tokens * (weights - head) + len(prompts) * head) / machine.matmul_flops_per_second
    )
    for step in range(1, max(request.max_tokens for request in requests)):
        lengths = [len(r.token_ids) + step - num_shared for r in requests if r.max_tokens > step]
        contexts = num_shared + sum(lengths)
        seconds += limit_seconds(
            DecodeStep(sequences=len(lengths), context_tokens=contexts / len(lengths)),
            model,
            DTYPES[dtype].itemsize,
            machine,
        )
    return sum(request.max_tokens for request in requests) / seconds
