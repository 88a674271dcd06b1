"""Runner: runs the model on a planned step, and returns one token for each row and what else the rows ask for.

Does not decide what runs, where blocks lie or when a sequence ends: the scheduler does, and writes it into the plan.
The plan becomes tensors in step_inputs.py. The model computes in part_runner.py.

Shapes: S rows that sample, Q positions that get logits, H hidden size, V vocabulary.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from blockyard.kernels.attention.static_plan import StaticDecodes
from blockyard.kernels.cpu.recording import NotRecordable
from blockyard.kernels.lora import BARE
from blockyard.kernels.torch.nucleus import NucleusSearch
from blockyard.kernels.triton.linears.choice import DEQUANTISE_FROM_TOKENS, WARM_UP_TOKENS
from blockyard.worker.execution.newest_tokens import NewestTokens
from blockyard.worker.execution.part_runner import PartRunner, scored
from blockyard.worker.execution.started_step import Chunks, Embeddings, StartedStep
from blockyard.worker.execution.step_graphs import DecodeGraphs, GraphSizes
from blockyard.worker.execution.step_inputs import InputRows, StepInputs, UnknownToken
from blockyard.worker.execution.warm_up_rows import (
    chunk_behind,
    edited_rows,
    first_tokens,
    largest_rows,
    prompt_in_one_block,
    sharing_rows,
    warm_up_row,
)
from blockyard.worker.parallel.step_arrays import (
    LARGEST,
    LOGITS,
    NO_LOADS,
    NO_PAIRS,
    NO_SAMPLE,
    Integers,
    StepArrays,
)
from blockyard.worker.sampling.divided_drawing import DividedDrawing
from blockyard.worker.sampling.grammar_masks import GrammarMasks
from blockyard.worker.sampling.logprobs import score
from blockyard.worker.sampling.sampler import ApplyMasks, Drawing, Sampler
from blockyard.worker.sequences.adapter import Adapter
from blockyard.worker.sequences.identifiers import BlockId, SequenceId
from blockyard.worker.sequences.prompt_scoring import pieces
from blockyard.worker.sequences.sequence import TokenLogprob
from blockyard.worker.sequences.step_plan import FAILED_TOKEN, ScheduledRow, StepPlan, StepTokens

logger = logging.getLogger(__name__)
WARM_UP_PREFILL_TOKENS = 64
_TRIAL_ADAPTER = Adapter(fingerprint="", rank=1, num_bytes=0, weights={})


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


class TorchRunner(PartRunner):
    """The model on one device, or the part of it on rank 0. Not thread-safe: one step at a time.

    `start` reads tokens and block tables of the sequences, and nothing reads them after that.
    """

    lead: Callable[[StepArrays], None]
    """Sends a step to the other ranks, before rank 0 computes it. Set it before the first step, where there are any."""

    def _set_up(self) -> None:
        self._graphs: DecodeGraphs | None = None
        self.grammar_masks: GrammarMasks | None = None
        self._sampler = self._make_sampler(self.config.vocab_size)
        self._num_tokens: int | None = None
        """Number of tokens that may be drawn, where `limit_tokens` was called."""
        self._inputs = InputRows(self.block_size)
        self.replays_graphs = True
        """Whether steps run as graphs where graphs were captured. May change between steps."""
        self._newest = NewestTokens.none()
        self._num_started = 0
        self.gathers_all_logits = False
        """Whether rank 0 gathers the logits of rows that take the largest too. The tokens are the same."""

    def _make_sampler(self, vocab_size: int) -> Sampler:
        backend = self.backend
        nuclei = NucleusSearch.of(backend)
        return Sampler(vocab_size, self.device, backend.greedy_tokens, nuclei, backend.draws)

    def limit_tokens(self, num_tokens: int) -> None:
        """Draw only tokens below `num_tokens`, and read tokens that this model lacks as its last one.

        It is for a draft model with another vocabulary size. Call it before the first step, on a worker of one rank.
        """
        self._num_tokens = min(num_tokens, self.config.vocab_size)
        self._sampler = self._make_sampler(self._num_tokens)

    def execute(self, plan: StepPlan) -> StepTokens:
        return self.start(plan).result()

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> PendingStep:
        self._forget(plan.ended)
        arrays, unknown = self._inputs.arrays(plan.rows) if plan.rows else (StepArrays(), ())
        if plan.adapters:
            arrays = replace(arrays, slots_R=_slots_of(plan))
        if self._num_tokens is not None:
            # An embedding that is read beyond its end ends the process on a GPU.
            arrays = replace(arrays, tokens_T=np.minimum(arrays.tokens_T, self.config.vocab_size - 1))
        self._num_started += 1
        if self.collective.size == 1:
            return self._start(plan, arrays, unknown)
        arrays = self._send(plan, arrays)
        try:
            with self.collective.step(self._num_started):
                return self._start(plan, arrays, unknown)
        except BaseException:
            if plan.adapters:
                self._slots().forget(plan.adapters)
            raise

    def _send(self, plan: StepPlan, arrays: StepArrays) -> StepArrays:
        """Send a step to the other ranks, and return it whole."""
        sent = replace(
            arrays,
            numbers=np.array([self._num_started, plan.step]),
            to_host_M2=_pairs(plan.to_host),
            from_host_M2=_pairs(plan.from_host),
            copies_M2=_pairs(plan.copies),
            loads_N3=self._slots().due(plan.adapters) if plan.adapters else NO_LOADS,
            samples_R=np.array([self._needs(row) for row in plan.rows], dtype=np.int64),
        )
        self.lead(sent)
        return sent

    def _needs(self, row: ScheduledRow) -> int:
        if not row.samples:
            return NO_SAMPLE
        takes_largest = row.sequence.sampling.takes_largest and row.sequence.grammar is None
        return LARGEST if takes_largest and not self.gathers_all_logits else LOGITS

    def _start(self, plan: StepPlan, arrays: StepArrays, unknown: Sequence[UnknownToken]) -> StartedStep:
        self._moves.make(plan)
        rows = plan.rows
        if not rows:
            self._agree()
            self._newest = NewestTokens.none()
            return StartedStep(rows=rows, drawing=None, chunks=None, prompt_logprobs={})
        sampling = [row for row in rows if row.samples]
        masks = self._masks_for(sampling)
        if masks is not None:
            masks.start(sampling)
        if plan.adapters:
            self._slots().load(plan.adapters)
        inputs = self._inputs_of(arrays)
        if unknown:
            self._fill_in(inputs, arrays, self._newest.of(unknown))
        hidden_QH = self._hidden(inputs)
        scores = {
            index: self._score(rows[index], scored(hidden_QH, inputs, index)) for index in inputs.num_scored
        }
        last_of_chunks = {index: inputs.last_R[index] for index, row in enumerate(rows) if not row.samples}
        chunks = Chunks.look_at(last_of_chunks, hidden_QH) if last_of_chunks else None
        drawing: Drawing | DividedDrawing | None = None
        if sampling:
            last = [last for row, last in zip(rows, inputs.last_R, strict=True) if row.samples]
            apply_masks = None if masks is None else masks.apply
            drawing = self._draw(sampling, self._rows_of(hidden_QH, last), arrays, apply_masks)
        self._newest = NewestTokens.none() if drawing is None else NewestTokens(sampling, drawing.tokens_SN)
        embeddings = self._embeddings(rows, inputs, hidden_QH)
        return StartedStep(
            rows=rows,
            drawing=drawing,
            chunks=chunks,
            prompt_logprobs=scores,
            embeddings=embeddings,
            loads=() if self.adapters is None else self.adapters.take_loads(),
        )

    def _embeddings(
        self, rows: Sequence[ScheduledRow], inputs: StepInputs, hidden_QH: torch.Tensor
    ) -> Embeddings | None:
        pooling = self.config.pooling
        if pooling is None:
            return None
        last = {index: inputs.last_R[index] for index, row in enumerate(rows) if row.embeds}
        return Embeddings.pool(last, hidden_QH, pooling) if last else None

    def _draw(
        self,
        sampling: Sequence[ScheduledRow],
        hidden_SH: torch.Tensor,
        arrays: StepArrays,
        apply_masks: ApplyMasks | None,
    ) -> Drawing | DividedDrawing:
        """Begin to draw the tokens of the rows that sample, from the hidden states of their last positions."""
        start = partial(self._sampler.start, in_flight=self._newest, apply_masks=apply_masks)
        if self.collective.size == 1:
            logits_SV = self._decoder.logits(hidden_SH)
            if self._num_tokens is not None:
                logits_SV = logits_SV[:, : self._num_tokens].contiguous()
            return start(logits_SV, sampling)
        wants_S = arrays.samples_R[arrays.samples_R != NO_SAMPLE]
        drawn, taking = (np.flatnonzero(wants_S == want).tolist() for want in (LOGITS, LARGEST))
        drawing = None
        if drawn:
            logits_SV = self._decoder.logits(self._rows_of(hidden_SH, drawn))
            drawing = start(logits_SV, [sampling[index] for index in drawn])
        if not taking:
            assert drawing is not None
            return drawing
        largest = self._decoder.largest(self._rows_of(hidden_SH, taking))
        return DividedDrawing.join(drawing, drawn, largest, taking)

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
        if self.adapters is not None:
            self._try(
                warm_up_row(-1, 1, self.block_size),
                warm_up_row(-2, num_tokens, self.block_size),
                adapter=_TRIAL_ADAPTER,
            )
        if self.backend.name == "triton":
            longest = self.config.max_position_embeddings
            self._try(*sharing_rows(longest, self.block_size))
            self._try(*edited_rows(self.block_size))
            windows = [window for window in self.config.layer_windows if window and window < longest]
            if windows:
                self._try(chunk_behind(min(windows), self.block_size))
            if self.config.quantisation is not None:
                for count in WARM_UP_TOKENS:
                    self._try(*first_tokens(count, self.block_size))
                self._try(prompt_in_one_block(min(DEQUANTISE_FROM_TOKENS, longest), self.block_size))
            copies = ((BlockId(0), BlockId(len(self.kv_pools[0]) - 1)),)
            self.execute(StepPlan(step=-1, rows=(), copies=copies))

    def run_largest_step(self, num_tokens: int, num_sequences: int) -> None:
        """Run the step that takes the most memory beside the pools. A pool of one block is enough for it."""
        longest = self.config.max_position_embeddings
        self._try(
            *largest_rows(num_tokens, num_sequences, block_size=self.block_size, max_row_tokens=longest),
            adapter=None if self.adapters is None else _TRIAL_ADAPTER,
        )

    def _try(self, *rows: ScheduledRow, adapter: Adapter | None = None) -> list[int]:
        """Run trial rows, forget their sequences, and return their tokens. What they wrote into blocks stays there."""
        for row in rows:
            row.sequence.adapter = adapter
        adapters = () if adapter is None else ((0, adapter),)
        tokens = self.execute(StepPlan(step=0, rows=rows, adapters=adapters)).tokens
        self._forget(row.sequence.sequence_id for row in rows)
        self._newest = NewestTokens.none()
        return tokens

    def capture_decodes(self, sizes: GraphSizes, *, max_context_tokens: int) -> None:
        """Capture decode steps of these sizes, and launch them as graphs from now on.

        Nothing is captured for a part of a model, nor where queries are scaled, a layer has a window or a shared
        expert, or a step cannot be recorded. Call it once, before the pool holds anything. The backend must read only a
        plan's tensors.
        """
        if self.collective.size > 1:
            logger.info("decode graphs: none, the model is divided among %d ranks", self.collective.size)
            return
        if any(window is not None for window in self.config.layer_windows):
            logger.info("decode graphs: none, the model has layers with a window")
            return
        if self.config.query_scaling is not None or (
            self.config.mixture is not None and self.config.mixture.shared_rows
        ):
            logger.info("decode graphs: none, the model scales queries or has a shared expert")
            return
        static = StaticDecodes(
            max_rows=sizes.rows[-1],
            max_context_tokens=max_context_tokens,
            block_size=self.block_size,
            bounds=self.split_bounds,
            device=self.device,
        )
        graphs = DecodeGraphs(
            self._decoder,
            self.kv_pools,
            static,
            sizes=sizes,
            device=self.device,
            lora_layers=None if self.adapters is None else self.adapters.layers,
        )
        try:
            with torch.inference_mode():
                graphs.capture()
        except (NotRecordable, ValueError) as error:
            # A recording only saves time, so no failure of it may end a worker.
            is_expected = isinstance(error, NotRecordable) and error.__cause__ is None
            logger.log(logging.INFO if is_expected else logging.WARNING, "decode graphs: none, %s", error)
            return
        self._graphs = graphs

    def _forget(self, ended: Iterable[SequenceId]) -> None:
        ended = tuple(ended)
        self._sampler.forget(ended)
        self._inputs.forget(ended)
        if self.grammar_masks is not None:
            self.grammar_masks.forget(ended)

    def _masks_for(self, sampling: Sequence[ScheduledRow]) -> GrammarMasks | None:
        is_needed = any(row.sequence.grammar is not None for row in sampling)
        return self.grammar_masks if is_needed else None

    def _score(self, row: ScheduledRow, hidden_QH: torch.Tensor) -> tuple[TokenLogprob, ...]:
        """Return the logprobs of the prompt tokens that follow these hidden states, computed a slice at a time."""
        num_top = row.sequence.sampling.prompt_logprobs or 0
        following = row.sequence.tokens[row.start + 1 : row.start + 1 + len(hidden_QH)]
        scores: list[TokenLogprob] = []
        for piece in pieces(len(following)):
            scores += score(self._decoder.logits(hidden_QH[piece]), following[piece], num_top=num_top)
        return tuple(scores)

    def _hidden(self, inputs: StepInputs) -> torch.Tensor:
        if self._graphs is not None and self.replays_graphs and not inputs.num_scored:
            hidden_QH = self._graphs.hidden(inputs.tokens_T, inputs.plan, inputs.lora)
            if hidden_QH is not None:
                return hidden_QH
        return super()._hidden(inputs)


def _slots_of(plan: StepPlan) -> Integers:
    """Return the slot of each row's adapter, BARE without one."""
    slot_of = {adapter.fingerprint: slot for slot, adapter in plan.adapters}
    adapters = (row.sequence.adapter for row in plan.rows)
    slots = [BARE if adapter is None else slot_of[adapter.fingerprint] for adapter in adapters]
    return np.array(slots, dtype=np.int32)


def _pairs(moves: Sequence[tuple[int, int]]) -> Integers:
    return np.array(moves, dtype=np.int64) if moves else NO_PAIRS
