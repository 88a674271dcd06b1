"""Warm-up: a small request through a new engine before its worker takes any, so that all first-time work is done here.

Kernels are compiled and rates are measured. So a worker that joins under load is placed by its own numbers from its
first request on. Leaves nothing behind: no block, no name for the index, no count.
"""

from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.sequences.sampling_params import SamplingParams

TRIAL_PROMPT_TOKENS = 256
"""Length of the trial prompt: enough that its prefill counts as a measurement."""
TRIAL_NEW_TOKENS = 2
"""A prefill and a decode."""
_ROOT = BlockName(b"a trial, no root")


def try_out(engine: Engine) -> None:
    """Run a trial request twice: the first run compiles, the second measures. Then forget both.

    Raises ValueError for an engine that fails.
    """
    for is_measured in (False, True):
        _run_one(engine)
        engine.flush()
        engine.forget_history(keeps_rates=is_measured)
    engine.cache.take_changes()


def _run_one(engine: Engine) -> None:
    room = engine.scheduler.config.max_model_len - TRIAL_NEW_TOKENS
    prompt_length = max(1, min(TRIAL_PROMPT_TOKENS, room))
    sampling = SamplingParams(temperature=0.0, max_tokens=min(TRIAL_NEW_TOKENS, max(1, room)))
    engine.submit(
        EngineRequest(
            token_ids=[0] * prompt_length,
            prompt_length=prompt_length,
            names=[_ROOT],
            sampling=SamplingParams(max_tokens=0, embeds=True) if engine.embeds else sampling,
        )
    )
    has_result = False
    while engine.has_work:
        has_result |= any(output.token_ids or output.embedding for output in engine.step().outputs)
    if not has_result:
        raise ValueError("the engine failed on its first request; its log says why")
