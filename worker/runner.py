"""Runs the model: a planned step in, one token for each row out, and what else the rows ask for.

Owns weights, KV pools and kernel backend of one worker. Does not decide what runs, where blocks lie or when a sequence
ends: the scheduler does, and writes it into the plan; step_inputs.py makes tensors of that.

Shapes: S rows that sample, Q positions that get logits, V vocabulary, B blocks in the pool,
K kv heads, P tokens a block, D head size, C block copies.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol, Self

import torch
from blockyard.kernels.backend import Backend, BackendName, LinearsName, choose_backend
from blockyard.kernels.huge_pages import advise_empty
from blockyard.kernels.kv_pool import QUANTISED_DTYPES, movable, pool_shape
from blockyard.worker import sequence as sequences
from blockyard.worker.host_blocks import HostBlocks
from blockyard.worker.kv_size import KVCacheDtype
from blockyard.worker.logprobs import score
from blockyard.worker.model.config import DataTypeName, ModelConfig, load_config
from blockyard.worker.model.decoder import Decoder
from blockyard.worker.model.weights import Weights, load_weights, random_weights
from blockyard.worker.prompt_scoring import SCORED_AT_ONCE
from blockyard.worker.sampler import Sampler
from blockyard.worker.sequence import (
    FAILED_TOKEN,
    NO_TOKEN,
    BlockId,
    RowExtras,
    SamplingParams,
    ScheduledRow,
    SequenceId,
    StepPlan,
    StepTokens,
    TokenLogprob,
)
from blockyard.worker.step_inputs import InputRows

WARM_UP_PREFILL_TOKENS = 64

LoadFormat = Literal["auto", "random"]
RequestedDataType = Literal["auto", "float32", "bfloat16", "float16"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Runner(Protocol):
    """What an engine needs of a model, real or simulated."""

    def warm_up(self) -> None:
        """Everything slow about a first step. To be called before the pool holds anything."""
        ...

    def execute(self, plan: StepPlan) -> StepTokens:
        """The new token of each row of the plan, NO_TOKEN where it does not sample, FAILED_TOKEN where the
        logits were not finite or no token was possible.

        A row's input may be the token that the step before sampled, although it is not committed yet. A step that
        raised may be executed again, whole or in parts; its blocks move once.
        """
        ...


class GrammarMasks(Protocol):
    """What structured output adds to a step. Never raises for what a request or a model has done."""

    def start(self, rows: Sequence[ScheduledRow]) -> None:
        """Called before the forward pass with the rows that sample: may fill masks in a thread beside it."""
        ...

    def apply(self, logits_SV: torch.Tensor, rows: Sequence[ScheduledRow]) -> None:
        """Called after it with the same rows: in place, minus infinity for every token that may not come."""
        ...

    def forget(self, ended: Iterable[SequenceId]) -> None:
        """Sequences that have left, whether it knows them or not."""
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
        num_host_slots: int = 0,
        verify_host_blocks: bool = False,
        kv_cache_dtype: KVCacheDtype = "auto",
    ) -> None:
        """`verify_host_blocks` checks what comes back from host memory against what went there, by content."""
        self.config = config
        self.backend = backend
        self.block_size = block_size
        self.device = weights.embedding_VH.device
        self.dtype = weights.embedding_VH.dtype
        stored = self.dtype if kv_cache_dtype == "auto" else QUANTISED_DTYPES[kv_cache_dtype]
        shape = pool_shape(num_blocks, config.num_kv_heads, block_size, config.head_dim, stored)
        self.kv_pools = [self._empty_pool(shape, stored) for _ in range(config.num_layers)]
        moved = [movable(pool) for pool in self.kv_pools]
        self.host_blocks = (
            HostBlocks(moved, num_host_slots, verify=verify_host_blocks) if num_host_slots else None
        )
        self.grammar_masks: GrammarMasks | None = None
        self._decoder = Decoder(config, weights, backend)
        self._sampler = Sampler(config.vocab_size, self.device)
        self._inputs = InputRows(
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            device=self.device,
            with_items=backend.reads_items,
        )
        self._sampled: dict[tuple[SequenceId, int], int] = {}
        """What the last step sampled, by sequence and position: it may be the next step's input."""
        self._moved_step: int | None = None
        """The last whose blocks were all moved."""

    def _empty_pool(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        pool = torch.empty(shape, dtype=dtype, device=self.device)
        advise_empty(pool)
        return pool.zero_()

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
        num_host_slots: int = 0,
        verify_host_blocks: bool = False,
        deterministic: bool = False,
        backend: BackendName = "auto",
        linears: LinearsName = "full",
        kv_cache_dtype: KVCacheDtype = "auto",
        seed: int = 0,
    ) -> Self:
        """Load a model (`seed` draws random weights) and allocate its pools.

        Raises ValueError for a model or a combination that cannot be had.
        """
        place = torch.device(device)
        config = load_config(model_path)
        name = resolve_dtype(dtype, config, place, deterministic=deterministic)
        if linears == "int8" and name == "float16":
            raise ValueError("linears in int8 take float32 or bfloat16 around them, not float16")
        kernels = choose_backend(place, requested=backend, deterministic=deterministic, linears=linears)
        match load_format:
            case "auto":
                weights = load_weights(model_path, config, dtype=_DTYPES[name], device=place)
            case "random":
                weights = random_weights(config, _DTYPES[name], place, seed)
        return cls(
            config=config,
            weights=weights,
            backend=kernels,
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_slots=num_host_slots,
            verify_host_blocks=verify_host_blocks or deterministic,
            kv_cache_dtype=kv_cache_dtype,
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepTokens:
        self._forget(plan.ended)
        if not plan.has_work:
            return StepTokens(tokens=[])
        self._move_blocks(plan)
        sampling = [row for row in plan.rows if row.samples]
        masks = self._masks_for(sampling)
        if masks is not None:
            masks.start(sampling)
        logits_SV, prompt_logprobs, spoilt = self._logits(plan.rows)
        sampled = self._sampler.sample(
            logits_SV, sampling, in_flight=self._sampled, apply_masks=None if masks is None else masks.apply
        )
        self._sampled = {
            (row.sequence.sequence_id, row.end): token
            for row, token in zip(sampling, sampled.tokens, strict=True)
        }
        return _by_row_of_plan(plan.rows, sampled, prompt_logprobs, spoilt)

    def warm_up(self) -> None:
        """Run a decode and a prefill over blocks from 0 on, so that kernels are compiled and weights packed.

        Raises ValueError if the model yields NaN: it would do so for every request.
        """
        fitting = min(len(self.kv_pools[0]) * self.block_size, self.config.max_position_embeddings)
        num_tokens = min(WARM_UP_PREFILL_TOKENS, fitting)
        rows = (_warm_up_row(-1, 1, self.block_size), _warm_up_row(-2, num_tokens, self.block_size))
        tokens = self.execute(StepPlan(step=0, rows=rows)).tokens
        self._forget(row.sequence.sequence_id for row in rows)
        self._sampled = {}
        if FAILED_TOKEN in tokens:
            raise ValueError(f"the model's logits are not finite in {self.dtype}; try another dtype")

    def _forget(self, ended: Iterable[SequenceId]) -> None:
        ended = tuple(ended)
        self._sampler.forget(ended)
        self._inputs.forget(ended)
        if self.grammar_masks is not None:
            self.grammar_masks.forget(ended)

    def _move_blocks(self, plan: StepPlan) -> None:
        """In the plan's order: a block that goes to the host may be filled again in the same step."""
        if plan.step == self._moved_step or not (plan.to_host or plan.from_host or plan.copies):
            return
        if plan.to_host or plan.from_host:
            assert self.host_blocks is not None, (
                "the plan moves blocks to or from a host pool that is not there"
            )
            if plan.to_host:
                self.host_blocks.save(plan.to_host)
            if plan.from_host:
                self.host_blocks.load(plan.from_host)
        if plan.copies:
            src_dst_C2 = torch.tensor(plan.copies, dtype=torch.int64, device=self.device)
            for pool in self.kv_pools:
                self.backend.copy_blocks(pool, src_dst_C2)
        self._moved_step = plan.step

    def _masks_for(self, sampling: Sequence[ScheduledRow]) -> GrammarMasks | None:
        is_needed = any(row.sequence.grammar is not None for row in sampling)
        return self.grammar_masks if is_needed else None

    def _logits(
        self, rows: Sequence[ScheduledRow]
    ) -> tuple[torch.Tensor, dict[int, tuple[TokenLogprob, ...]], frozenset[int]]:
        """Logits [S, V] of the rows that sample, in order; prompt logprobs by index of the row; and the chunks of
        prompts that hold NaN: nothing computed on top of them may be found by others."""
        if not rows:
            return torch.empty(0, self.config.vocab_size), {}, frozenset()
        inputs = self._inputs.prepare(rows, self._sampled)
        hidden_QH = self._decoder.hidden(inputs.tokens_T, self.kv_pools, inputs.plan, inputs.wanted_Q)
        scores = {
            index: self._score(rows[index], hidden_QH[inputs.last_R[index] - num_scored :][:num_scored])
            for index, num_scored in inputs.num_scored.items()
        }
        sampling = [last for row, last in zip(rows, inputs.last_R, strict=True) if row.samples]
        chunks = {index: inputs.last_R[index] for index, row in enumerate(rows) if not row.samples}
        spoilt = self._spoilt(chunks, hidden_QH) if chunks else frozenset[int]()
        if len(sampling) < len(hidden_QH):
            hidden_QH = hidden_QH[sampling]
        return self._decoder.logits(hidden_QH), scores, spoilt

    def _spoilt(self, chunks: dict[int, int], hidden_QH: torch.Tensor) -> frozenset[int]:
        """The last position sees all before it: where anything was NaN, it is."""
        is_finite = torch.isfinite(hidden_QH[list(chunks.values())]).all(dim=-1).tolist()
        return frozenset(index for index, finite in zip(chunks, is_finite, strict=True) if not finite)

    def _score(self, row: ScheduledRow, hidden_QH: torch.Tensor) -> tuple[TokenLogprob, ...]:
        """How likely the prompt's next tokens were, a slice at a time."""
        num_top = row.sequence.sampling.prompt_logprobs or 0
        following = row.sequence.tokens[row.start + 1 : row.start + 1 + len(hidden_QH)]
        scores: list[TokenLogprob] = []
        for first in range(0, len(following), SCORED_AT_ONCE):
            piece = slice(first, first + SCORED_AT_ONCE)
            scores += score(self._decoder.logits(hidden_QH[piece]), following[piece], num_top=num_top)
        return tuple(scores)


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


def _by_row_of_plan(
    rows: Sequence[ScheduledRow],
    sampled: StepTokens,
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]],
    spoilt: frozenset[int],
) -> StepTokens:
    """What the rows that sample got, at their places among all rows."""
    places = [index for index, row in enumerate(rows) if row.samples]
    tokens = [FAILED_TOKEN if index in spoilt else NO_TOKEN for index in range(len(rows))]
    for place, token in zip(places, sampled.tokens, strict=True):
        tokens[place] = token
    extras = {places[index]: extra for index, extra in sampled.extras.items()}
    for index, scores in prompt_logprobs.items():
        if scores:
            extras[index] = replace(extras.get(index, RowExtras()), prompt_logprobs=scores)
    return StepTokens(tokens=tokens, extras=extras)


def _warm_up_row(number: int, num_tokens: int, block_size: int) -> ScheduledRow:
    sequence = sequences.Sequence(
        sequence_id=SequenceId(number),
        tokens=[0] * num_tokens,
        prompt_length=num_tokens,
        sampling=SamplingParams(top_k=2, top_p=0.5),
        names=[],
        block_table=[BlockId(block) for block in range(-(-num_tokens // block_size))],
    )
    return ScheduledRow(sequence=sequence, start=0, num_tokens=num_tokens, samples=True)
