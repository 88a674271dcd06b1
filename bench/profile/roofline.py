"""Roofline of a whole decode step. Pure.

    limit = max(weight bytes / B, 2 * weights * sequences / F) + KV bytes / B

B is the copy bandwidth and F the matmul rate of the same run. A step reads each weight once, or multiplies it once with
each sequence, whichever is slower. It also reads the keys and values of each sequence once.
"""

from dataclasses import dataclass

from blockyard.worker.model.config import ModelConfig
from blockyard.worker.model.shards import num_parameters

from bench.kernels.timing import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    sequences: int
    context_tokens: float
    """Mean context length of a sequence."""


def limit_seconds(step: DecodeStep, model: ModelConfig, item_bytes: int, machine: Machine) -> float:
    weights = used_weights(model)
    kv_values = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    kv_bytes = step.sequences * step.context_tokens * kv_values * item_bytes
    return (
        max(
            weights * item_bytes / machine.copy_bytes_per_second,
            2 * weights * step.sequences / machine.matmul_flops_per_second,
        )
        + kv_bytes / machine.copy_bytes_per_second
    )


def used_weights(model: ModelConfig) -> int:
    """Count the weights that a step multiplies. An embedding table is only looked up, unless it is also the head."""
    table = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    return num_parameters(model) - table
