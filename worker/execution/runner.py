"""Runner: runs the model on a planned step, and returns one token for each row and what else the rows ask for.

Owns weights, KV pools and kernel backend of one worker. Does not decide what runs, where blocks lie or when a sequence
ends: the scheduler does, and writes it into the plan. The plan becomes tensors in step_inputs.py.

Shapes: S rows that sample, Q positions that get logits, V vocabulary, B blocks in the pool, N blocks of all layers.
K kv heads, P tokens a block, D head size, C block copies.

"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, Protocol, Self, runtime_checkable

import numpy as np
import torch
from blockyard.kernels.attention.static_plan import Bounds, StaticDecodes
from blockyard.kernels.cpu.recording import NotRecordable
from blockyard.kernels.interface import Backend, BackendName, LinearsName
from blockyard.kernels.kv_pool import QUANTISED_DTYPES, movable, pool_shape
from blockyard.kernels.selection import choose_backend
from blockyard.kernels.torch.huge_pages import advise_empty
from blockyard.kernels.torch.nucleus import NucleusSearch
from blockyard.worker.execution.newest_tokens import NewestTokens
from blockyard.worker.execution.started_step import Chunks, StartedStep
from blockyard.worker.execution.step_graphs import DecodeGraphs, GraphSizes
from blockyard.worker.execution.step_inputs import InputRows, StepInputs
from blockyard.worker.execution.step_moves import StepMoves
from blockyard.worker.execution.warm_up_rows import (
    chunk_behind,
    edited_rows,
    largest_rows,
    sharing_rows,
    warm_up_row,
)
from blockyard.worker.memory.host_blocks import HostBlocks
from blockyard.worker.memory.kv_size import KVCacheDtype
from blockyard.worker.memory.transferable import TorchMemory, TransferableMemory
from blockyard.worker.memory.transfers import upload
from blockyard.worker.model.config import ModelConfig, load_config
from blockyard.worker.model.data_type import RequestedDataType, choose_dtype, cpu_has_bfloat16
from blockyard.worker.model.decoder import Decoder
from blockyard.worker.model.weights import Weights, load_weights, random_weights
from blockyard.worker.sampling.grammar_masks import GrammarMasks
from blockyard.worker.sampling.logprobs import score
from blockyard.worker.sampling.sampler import Sampler
from blockyard.worker.sequences.identifiers import BlockId, HostSlot, SequenceId
from blockyard.worker.sequences.prompt_scoring import SCORED_AT_ONCE
from blockyard.worker.sequences.sequence import TokenLogprob
from blockyard.worker.sequences.step_plan import FAILED_TOKEN, ScheduledRow, StepPlan, StepTokens

logger = logging.getLogger(__name__)
WARM_UP_PREFILL_TOKENS = 64

LoadFormat = Literal["auto", "random"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PendingStep(Protocol):
    """A step that has begun."""

    def result(self) -> StepTokens:
        """Wait until the step has ended. May raise what it raised."""
        ...


class Runner(Protocol):
    """The interface that an engine needs of a model, real or simulated."""

    def warm_up(self) -> None:
        """Do all first-time work, so that the first step is not slow. Call it before the pool holds anything."""
        ...

    def execute(self, plan: StepPlan) -> StepTokens:
        """Move the plan's blocks, compute its rows, and return the new token of each row.

        It is NO_TOKEN where the row does not sample, FAILED_TOKEN where its results were not finite, and NO_CHOICE
        where the request allows no token.

        A row's input may be the token that the step before sampled, although it is not committed yet. A step that
        raised may be executed again, whole or in parts; its blocks move once. Raises HostBlockCorrupted where a block
        in host memory is not what was saved, before it has moved anything from there.
        """
        ...


@runtime_checkable
class StartingRunner(Runner, Protocol):
    """A runner with steps that may overlap."""

    def start(self, plan: StepPlan) -> PendingStep:
        """Begin a step. Its result is that of `execute`.

        Another step may be started before the result is asked for, where neither waits for the host
        (scheduling/overlap.py).
        """
        ...


class TorchRunner:
    """The model on one device. Not thread-safe: one step at a time.

    `start` reads tokens and block tables of the sequences, and nothing reads them after that.
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
        """`verify_host_blocks` compares what comes back from host memory with what went there, by content."""
        self.config = config
        self.backend = backend
        self.split_bounds = Bounds(
            num_kv_heads=config.num_kv_heads, group=config.num_heads // config.num_kv_heads
        )
        self.block_size = block_size
        self.device = weights.embedding_VH.device
        self.dtype = weights.embedding_VH.dtype
        self._stored_dtype = self.dtype if kv_cache_dtype == "auto" else QUANTISED_DTYPES[kv_cache_dtype]
        self._verify_host_blocks = verify_host_blocks
        self._blocks_N2KPD = torch.empty(0)
        """Blocks of all layers, layer after layer. `kv_pools` are views of it, one for each layer."""
        self.kv_pools: list[torch.Tensor] = []
        self.host_blocks: HostBlocks | None = None
        self.transferable: TransferableMemory
        """The bytes of blocks and host slots, for transfers between workers."""
        self._graphs: DecodeGraphs | None = None
        self.allocate_pools(num_blocks, num_host_slots)
        self.grammar_masks: GrammarMasks | None = None
        self._decoder = Decoder(config, weights, backend)
        nuclei = NucleusSearch.of(backend)
        self._sampler = Sampler(config.vocab_size, self.device, backend.greedy_tokens, nuclei, backend.draws)
        self._inputs = InputRows(
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            group=self.split_bounds.group,
            device=self.device,
            with_items=backend.reads_items,
        )
        self.replays_graphs = True
        """Whether steps run as graphs where graphs were captured. May change between steps."""
        self._newest = NewestTokens.none()
        self._moves = StepMoves(save=self._save_blocks, load=self._load_blocks, copy=self._copy_blocks)

    def allocate_pools(self, num_blocks: int, num_host_slots: int) -> None:
        """Replace the pools. The blocks in them are lost. Call it before any graph is captured."""
        assert self._graphs is None, "a graph writes where the old pools are"
        self.kv_pools.clear()
        self.host_blocks, self._blocks_N2KPD = None, torch.empty(0)
        config, stored = self.config, self._stored_dtype
        shape = pool_shape(
            config.num_layers * num_blocks, config.num_kv_heads, self.block_size, config.head_dim, stored
        )
        self._blocks_N2KPD = torch.empty(shape, dtype=stored, device=self.device)
        advise_empty(self._blocks_N2KPD)
        self._blocks_N2KPD.zero_()
        self.kv_pools = list(self._blocks_N2KPD.split(num_blocks))
        if num_host_slots:
            self.host_blocks = HostBlocks(
                movable(self._blocks_N2KPD),
                config.num_layers,
                num_host_slots,
                verify=self._verify_host_blocks,
            )
        self.transferable = TorchMemory(movable(self._blocks_N2KPD), config.num_layers, self.host_blocks)

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

        Raises ValueError for a model or a combination that is not supported.
        """
        place = torch.device(device)
        config = load_config(model_path)
        on_cpu = place.type == "cpu"
        name = choose_dtype(
            dtype, config.dtype, on_cpu=on_cpu, has_bfloat16=cpu_has_bfloat16(), deterministic=deterministic
        ).name
        if linears == "int8" and name == "float16":
            raise ValueError("linears in int8 take float32 or bfloat16 around them, not float16")
        kernels = choose_backend(place, requested=backend, deterministic=deterministic, linears=linears)
        if name == "bfloat16" and on_cpu and not (kernels.widens_bfloat16 or cpu_has_bfloat16()):
            logger.warning("bfloat16 is slow here: this CPU has no instructions for it; try --dtype float32")
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

    def execute(self, plan: StepPlan) -> StepTokens:
        return self.start(plan).result()

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> PendingStep:
        self._forget(plan.ended)
        self._moves.make(plan)
        sampling = [row for row in plan.rows if row.samples]
        masks = self._masks_for(sampling)
        if masks is not None:
            masks.start(sampling)
        logits_SV, prompt_logprobs, chunks = self._logits(plan.rows)
        drawing = None
        if sampling:
            apply_masks = None if masks is None else masks.apply
            drawing = self._sampler.start(
                logits_SV, sampling, in_flight=self._newest, apply_masks=apply_masks
            )
        self._newest = NewestTokens.none() if drawing is None else NewestTokens(sampling, drawing.tokens_SN)
        return StartedStep(rows=plan.rows, drawing=drawing, chunks=chunks, prompt_logprobs=prompt_logprobs)

    def warm_up(self) -> None:
        """Run a decode and a prefill over blocks from 0 on, so that kernels are compiled and weights packed.

        Where Triton compiles, also run what only some steps need: a compilation while requests run would hold them all
        up. Raises ValueError if the logits are not finite: no request could then be served.
        """
        fitting = min(len(self.kv_pools[0]) * self.block_size, self.config.max_position_embeddings)
        num_tokens = min(WARM_UP_PREFILL_TOKENS, fitting)
        tokens = self._try(warm_up_row(-1, 1, self.block_size), warm_up_row(-2, num_tokens, self.block_size))
        if FAILED_TOKEN in tokens:
            raise ValueError(f"the model's logits are not finite in {self.dtype}; try another dtype")
        if self.backend.name == "triton":
            longest = self.config.max_position_embeddings
            self._try(*sharing_rows(longest, self.block_size))
            self._try(*edited_rows(self.block_size))
            windows = [window for window in self.config.layer_windows if window and window < longest]
            if windows:
                self._try(chunk_behind(min(windows), self.block_size))
            self._copy_blocks([(BlockId(0), BlockId(len(self.kv_pools[0]) - 1))])

    def run_largest_step(self, num_tokens: int, num_sequences: int) -> None:
        """Run the step that takes the most memory beside the pools. A pool of one block is enough for it."""
        longest = self.config.max_position_embeddings
        self._try(
            *largest_rows(num_tokens, num_sequences, block_size=self.block_size, max_row_tokens=longest)
        )

    def _try(self, *rows: ScheduledRow) -> list[int]:
        """Run trial rows, forget their sequences, and return their tokens. What they wrote into blocks stays there."""
        tokens = self.execute(StepPlan(step=0, rows=rows)).tokens
        self._forget(row.sequence.sequence_id for row in rows)
        self._newest = NewestTokens.none()
        return tokens

    def capture_decodes(self, sizes: GraphSizes, *, max_context_tokens: int) -> None:
        """Capture decode steps of these sizes, and launch them as graphs from now on.

        Nothing is captured for a model with windows, or a step that cannot be recorded. Call it once, before the pool
        holds anything. The backend must read only a plan's tensors.
        """
        if any(window is not None for window in self.config.layer_windows):
            logger.info("decode graphs: none, the model has layers with a window")
            return
        static = StaticDecodes(
            max_rows=sizes.rows[-1],
            max_context_tokens=max_context_tokens,
            block_size=self.block_size,
            bounds=self.split_bounds,
            device=self.device,
        )
        graphs = DecodeGraphs(self._decoder, self.kv_pools, static, sizes=sizes, device=self.device)
        try:
            with torch.inference_mode():
                graphs.capture()
        except NotRecordable as error:
            logger.info("decode graphs: none, %s", error)
            return
        self._graphs = graphs

    def _forget(self, ended: Iterable[SequenceId]) -> None:
        ended = tuple(ended)
        self._sampler.forget(ended)
        self._inputs.forget(ended)
        if self.grammar_masks is not None:
            self.grammar_masks.forget(ended)

    def _save_blocks(self, pairs: Sequence[tuple[BlockId, HostSlot]]) -> None:
        self._host_pool().save(pairs)

    def _load_blocks(self, pairs: Sequence[tuple[HostSlot, BlockId]]) -> None:
        self._host_pool().load(pairs)

    def _host_pool(self) -> HostBlocks:
        assert self.host_blocks is not None, "the plan moves blocks to or from a host pool that is not there"
        return self.host_blocks

    def _copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        layers_L11 = (np.arange(len(self.kv_pools)) * len(self.kv_pools[0]))[:, None, None]
        src_dst_C2 = (layers_L11 + np.array(pairs, dtype=np.int64)).reshape(-1, 2)
        self.backend.copy_blocks(self._blocks_N2KPD, upload(src_dst_C2, self.device))

    def _masks_for(self, sampling: Sequence[ScheduledRow]) -> GrammarMasks | None:
        is_needed = any(row.sequence.grammar is not None for row in sampling)
        return self.grammar_masks if is_needed else None

    def _logits(
        self, rows: Sequence[ScheduledRow]
    ) -> tuple[torch.Tensor, dict[int, tuple[TokenLogprob, ...]], Chunks | None]:
        """Return logits [S, V] of the rows that sample, prompt logprobs by index of the row, and the check of prompt
        chunks for NaN."""
        if not rows:
            return torch.empty(0, self.config.vocab_size), {}, None
        inputs = self._inputs.prepare(rows, self._newest)
        hidden_QH = self._hidden(inputs)
        scores = {
            index: self._score(rows[index], hidden_QH[inputs.last_R[index] - num_scored :][:num_scored])
            for index, num_scored in inputs.num_scored.items()
        }
        sampling = [last for row, last in zip(rows, inputs.last_R, strict=True) if row.samples]
        last_of_chunks = {index: inputs.last_R[index] for index, row in enumerate(rows) if not row.samples}
        chunks = Chunks.look_at(last_of_chunks, hidden_QH) if last_of_chunks else None
        if len(sampling) < len(hidden_QH):
            hidden_QH = hidden_QH[upload(sampling, self.device)]
        return self._decoder.logits(hidden_QH), scores, chunks

    def _score(self, row: ScheduledRow, hidden_QH: torch.Tensor) -> tuple[TokenLogprob, ...]:
        """Return the logprobs of the prompt tokens that follow these hidden states, computed a slice at a time."""
        num_top = row.sequence.sampling.prompt_logprobs or 0
        following = row.sequence.tokens[row.start + 1 : row.start + 1 + len(hidden_QH)]
        scores: list[TokenLogprob] = []
        for first in range(0, len(following), SCORED_AT_ONCE):
            piece = slice(first, first + SCORED_AT_ONCE)
            scores += score(self._decoder.logits(hidden_QH[piece]), following[piece], num_top=num_top)
        return tuple(scores)

    def _hidden(self, inputs: StepInputs) -> torch.Tensor:
        """Return the hidden states [Q, H] of the wanted positions."""
        if self._graphs is not None and self.replays_graphs and not inputs.num_scored:
            hidden_QH = self._graphs.hidden(inputs.tokens_T, inputs.plan)
            if hidden_QH is not None:
                return hidden_QH
        return self._decoder.hidden(
            inputs.tokens_T, self.kv_pools, inputs.plan, inputs.wanted_Q, rows_plan=inputs.wanted_plan
        )
