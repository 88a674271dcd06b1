"""Runs the model: a planned step in, one token for each row out.

Owns weights, KV pools and kernel backend of one worker, and the flattening of a step into tensors. Does not
decide what runs, where blocks lie or when a sequence ends: the scheduler does, and writes it into the plan.

Shapes: T tokens in the step, S rows that sample, B blocks in the pool, K kv heads, P tokens a block, D head
size.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol, Self

import torch
from blockyard.kernels.attention_plan import AttentionPlan, plan_attention
from blockyard.kernels.backend import Backend, choose_backend
from blockyard.worker import sequence as sequences
from blockyard.worker.model.config import DataTypeName, ModelConfig, load_config
from blockyard.worker.model.decoder import Decoder
from blockyard.worker.model.weights import Weights, load_weights, random_weights
from blockyard.worker.sampler import Draw, sample
from blockyard.worker.scheduler import FAILED_TOKEN, NO_TOKEN
from blockyard.worker.sequence import BlockId, SamplingParams, ScheduledRow, SequenceId, StepPlan

WARM_UP_PREFILL_TOKENS = 64

LoadFormat = Literal["auto", "random"]
RequestedDataType = Literal["auto", "float32", "bfloat16", "float16"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Runner(Protocol):
    """What an engine needs of a model, real or simulated."""

    def warm_up(self) -> None:
        """Everything slow about a first step. To be called before the pool holds anything."""
        ...

    def execute(self, plan: StepPlan) -> list[int]:
        """The new token of each row of the plan, NO_TOKEN where it does not sample, FAILED_TOKEN where the
        logits were not finite.

        A row's input may be the token that the step before sampled, although it is not committed yet.
        """
        ...


class TorchRunner:
    """The model on one device. Not thread-safe: one step at a time.

    `execute` reads tokens and block tables of the sequences when it starts, and not after that.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        weights: Weights,
        backend: Backend,
        num_blocks: int,
        block_size: int,
    ) -> None:
        self.config = config
        self.backend = backend
        self.block_size = block_size
        self.device = weights.embedding_VH.device
        self.dtype = weights.embedding_VH.dtype
        shape_B2KPD = (num_blocks, 2, config.num_kv_heads, block_size, config.head_dim)
        self.kv_pools = [
            torch.zeros(shape_B2KPD, dtype=self.dtype, device=self.device) for _ in range(config.num_layers)
        ]
        self._decoder = Decoder(config, weights, backend)
        self._sampled: dict[tuple[SequenceId, int], int] = {}
        """What the last step sampled, by sequence and position: it may be the next step's input."""

    @classmethod
    def create(
        cls,
        model_path: Path,
        *,
        device: str | torch.device,
        dtype: RequestedDataType = "auto",
        load_format: LoadFormat = "auto",
        num_blocks: int,
        block_size: int,
        deterministic: bool = False,
        seed: int = 0,
    ) -> Self:
        """Load a model (`seed` draws random weights) and allocate its pools.

        Raises ValueError for a model or a combination that cannot be had.
        """
        place = torch.device(device)
        config = load_config(model_path)
        name = resolve_dtype(dtype, config, place, deterministic=deterministic)
        backend = choose_backend(place, deterministic=deterministic)
        match load_format:
            case "auto":
                weights = load_weights(model_path, config, dtype=_DTYPES[name], device=place)
            case "random":
                weights = random_weights(config, _DTYPES[name], place, seed)
        return cls(
            config=config, weights=weights, backend=backend, num_blocks=num_blocks, block_size=block_size
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[int]:
        if not plan.rows:
            return []
        sampling = [row for row in plan.rows if row.samples]
        tokens = sample(self._logits(plan.rows), [_draw_of(row) for row in sampling])
        self._sampled = {
            (row.sequence.sequence_id, row.end): token for row, token in zip(sampling, tokens, strict=True)
        }
        remaining = iter(tokens)
        return [next(remaining) if row.samples else NO_TOKEN for row in plan.rows]

    def warm_up(self) -> None:
        """Run a decode and a prefill over blocks from 0 on, so that kernels are compiled and weights packed.

        Raises ValueError if the model yields NaN: it would do so for every request.
        """
        fitting = min(len(self.kv_pools[0]) * self.block_size, self.config.max_position_embeddings)
        num_tokens = min(WARM_UP_PREFILL_TOKENS, fitting)
        rows = (_warm_up_row(1, self.block_size), _warm_up_row(num_tokens, self.block_size))
        tokens = self.execute(StepPlan(step=0, rows=rows))
        self._sampled = {}
        if FAILED_TOKEN in tokens:
            raise ValueError(f"the model's logits are not finite in {self.dtype}; try another dtype")

    def _logits(self, rows: Sequence[ScheduledRow]) -> torch.Tensor:
        """Of the last position of each row that samples."""
        tokens: list[int] = []
        last_indices: list[int] = []
        for row in rows:
            tokens += self._input_tokens(row)
            if row.samples:
                last_indices.append(len(tokens) - 1)
        tokens_T = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        rows_S = torch.tensor(last_indices, dtype=torch.int64, device=self.device)
        return self._decoder.forward(tokens_T, self.kv_pools, self._plan_attention(rows), rows_S)

    def _plan_attention(self, rows: Sequence[ScheduledRow]) -> AttentionPlan:
        return plan_attention(
            query_lens=[row.num_tokens for row in rows],
            context_lens=[row.end for row in rows],
            block_tables=[row.sequence.block_table for row in rows],
            block_size=self.block_size,
            device=self.device,
            num_kv_heads=self.config.num_kv_heads,
        )

    def _input_tokens(self, row: ScheduledRow) -> list[int]:
        tokens = row.sequence.tokens[row.start : row.end]
        if len(tokens) < row.num_tokens:
            assert len(tokens) == row.num_tokens - 1, "only the last step's token may be uncommitted"
            sampled = self._sampled[row.sequence.sequence_id, row.end - 1]
            # After NaN the sequence fails at its commit: until then any token will do as its input.
            tokens.append(max(sampled, 0))
        return tokens


def resolve_dtype(
    requested: RequestedDataType,
    config: ModelConfig,
    device: torch.device,
    *,
    deterministic: bool,
) -> DataTypeName:
    """The data type a model runs in. "auto" is the checkpoint's own, but float32 on a CPU.

    There exactness comes first: every bfloat16 or float16 weight is a float32, and rounding each layer to 8
    bits flips tokens that differ little. bfloat16 is up to twice as fast there, for who asks for it.
    Deterministic mode is float32 only, and raises ValueError for anything else.
    """
    if deterministic:
        if requested not in ("auto", "float32"):
            raise ValueError(f"deterministic mode computes in float32 only, not {requested}")
        return "float32"
    if requested != "auto":
        return requested
    return "float32" if device.type == "cpu" else config.dtype


def _draw_of(row: ScheduledRow) -> Draw:
    # Counted from the plan, as the sequence's own tokens may lag one step behind it.
    num_generated = row.end - row.sequence.prompt_length
    return Draw(params=row.sequence.sampling, position=row.end, num_generated=num_generated)


def _warm_up_row(num_tokens: int, block_size: int) -> ScheduledRow:
    sequence = sequences.Sequence(
        sequence_id=SequenceId(-1),
        tokens=[0] * num_tokens,
        prompt_length=num_tokens,
        sampling=SamplingParams(top_k=2, top_p=0.5),
        names=[],
        block_table=[BlockId(block) for block in range(-(-num_tokens // block_size))],
    )
    return ScheduledRow(sequence=sequence, start=0, num_tokens=num_tokens, samples=True)
