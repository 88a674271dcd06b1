"""vLLM as a system under test: its engine, driven step by step in this process.

Imports nothing from Blockyard; see protocol.py.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from protocol import Loaded, Settings, serve, stepped

GPU_SHARE = 0.4
"""Share of a GPU's memory, which the other systems of the run use too."""


class Vllm:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def add(self, number: int, token_ids: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(str(number), {"prompt_token_ids": token_ids}, sampling)

    def step(self) -> Iterable[tuple[int, Sequence[int]]]:
        # vLLM adds a random suffix to ids internally, and returns ids without it.
        return [(int(output.request_id), list(output.outputs[0].token_ids)) for output in self._engine.step()]


def load(settings: Settings) -> Loaded:
    # Run the engine in this process, so that we can drive its steps and measure all its CPU time.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    if settings["device"] == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, settings["kv_bytes"] >> 30))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{settings['threads'] - 1}"
    import vllm
    from vllm import EngineArgs, LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"],
            enable_prefix_caching=True,
            disable_log_stats=True,
            gpu_memory_utilization=GPU_SHARE,
        )
    )
    return stepped(Vllm(engine), {"vllm": vllm.__version__})


if __name__ == "__main__":
    serve(load)
