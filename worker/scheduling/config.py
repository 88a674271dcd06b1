"""Configuration of a scheduler: the budgets of one engine, and the error of what can never fit it."""

from dataclasses import dataclass

from blockyard.worker.scheduling.preemption import PreemptionMode


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Budgets of one engine. Sizes are in tokens unless the name says otherwise."""

    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    preemption: PreemptionMode = "auto"
    max_preemptions: int = 4
    """Maximum preemptions of one sequence. After that it is never preempted again."""
    swap_blocks: int = 0
    """Blocks of host memory for preempted sequences."""
    host_cache_blocks: int = 0
    """Blocks of host memory for named blocks that the pool has evicted."""
    index_stride_blocks: int = 1
    """Only every Nth block of a prefix is published to the prefix index."""
    protected_blocks: int = 0
    """Cached blocks of other tenants that no tenant's work evicts, except where nothing else would run."""
    max_loras: int = 0
    """Adapters that the device holds at once. 0: none is served."""
    most_lent_blocks: int = 0
    """Most blocks of the pool that are kept at once for other workers to fetch."""

    def check(self, num_blocks: int) -> None:
        """Raise ValueError for budgets that a pool of so many blocks cannot serve."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs "
                f"{self.max_num_seqs}: some sequences would never decode"
            )
        if num_blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"the KV cache holds {num_blocks * self.block_size} tokens, fewer than max_model_len "
                f"{self.max_model_len}: give it more memory or lower max_model_len"
            )


class CapacityError(ValueError):
    """The request can never fit this engine."""
