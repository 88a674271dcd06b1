"""Part runner: computes steps on the part of a model that one rank has. With one rank, the part is the whole model.

Owns weights, KV pools and kernel backend of one rank. Does not sample: rank 0 does (runner.py).

Shapes: Q positions that get logits, H hidden size, U tokens that the host does not know, B blocks in the pool, N blocks
of all layers. K kv heads, P tokens a block, D head size, C block copies.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from blockyard.kernels.attention.static_plan import Bounds
from blockyard.kernels.interface import Backend, BackendName, LinearsName
from blockyard.kernels.kv_pool import QUANTISED_DTYPES, movable, pool_shape
from blockyard.kernels.selection import choose_backend
from blockyard.kernels.torch.huge_pages import advise_empty
from blockyard.worker.execution.step_inputs import Layout, StepInputs, step_inputs
from blockyard.worker.execution.step_moves import StepMoves
from blockyard.worker.lora.device_slots import DeviceSlots
from blockyard.worker.memory.block_kinds import block_kind
from blockyard.worker.memory.host_blocks import HostBlockCorrupted, HostBlocks
from blockyard.worker.memory.kv_size import KVCacheDtype
from blockyard.worker.memory.transferable import TorchMemory, TransferableMemory
from blockyard.worker.memory.transfers import upload
from blockyard.worker.model.config import ModelConfig, load_config
from blockyard.worker.model.data_type import RequestedDataType, choose_dtype, cpu_has_bfloat16
from blockyard.worker.model.decoder import Decoder
from blockyard.worker.model.division import ModelPart, divide
from blockyard.worker.model.weights import Weights, load_weights, random_weights
from blockyard.worker.parallel.collective import Alone, Collective
from blockyard.worker.parallel.step_arrays import LARGEST, LOGITS, StepArrays
from blockyard.worker.sequences.identifiers import BlockId, HostSlot
from blockyard.worker.sequences.prompt_scoring import pieces
from blockyard.worker.sequences.step_plan import StepPlan

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "random"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PartRunner:
    """One rank's part of a model on one device. Not thread-safe: one step at a time."""

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
        part: ModelPart | None = None,
        collective: Collective | None = None,
        max_loras: int = 0,
        max_lora_rank: int = 1,
    ) -> None:
        """`verify_host_blocks` compares what comes back from host memory with what went there, by content.

        `weights` are those of `part`, of the whole model without it.
        """
        self.config = config
        self.backend = backend
        self.collective = collective or Alone()
        part = part or divide(config)
        self.part = part.config
        """Sizes of the part of the model."""
        self.split_bounds = Bounds(
            num_kv_heads=self.part.num_kv_heads, group=self.part.num_heads // self.part.num_kv_heads
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
        self.allocate_pools(num_blocks, num_host_slots)
        self._decoder = Decoder(config, weights, backend, part=part, collective=self.collective)
        self._layout = Layout(
            block_size=block_size,
            num_kv_heads=self.split_bounds.num_kv_heads,
            group=self.split_bounds.group,
            device=self.device,
            with_items=backend.reads_items,
        )
        self.adapters = (
            DeviceSlots(
                part,
                self.collective,
                num_slots=max_loras,
                max_rank=max_lora_rank,
                dtype=self.dtype,
                device=self.device,
            )
            if max_loras
            else None
        )
        """The slots of adapters. None: no adapter is served."""
        self._moves = StepMoves(save=self._save_blocks, load=self._load_blocks, copy=self._copy_blocks)
        self._set_up()

    def _set_up(self) -> None:
        """Make what a subclass needs beside this. Called once, when everything else is there."""

    def allocate_pools(self, num_blocks: int, num_host_slots: int) -> None:
        """Replace the pools. The blocks in them are lost. Call it before any graph is captured."""
        self.kv_pools.clear()
        self.host_blocks, self._blocks_N2KPD = None, torch.empty(0)
        config, stored = self.part, self._stored_dtype
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
        kind = block_kind(
            self.backend,
            self.kv_pools,
            self.dtype,
            rank=self.collective.rank,
            num_ranks=self.collective.size,
        )
        self.transferable = TorchMemory(
            movable(self._blocks_N2KPD), config.num_layers, self.host_blocks, kind
        )

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
        collective: Collective | None = None,
        max_loras: int = 0,
        max_lora_rank: int = 1,
        max_model_len: int | None = None,
    ) -> Self:
        """Load a model, or this rank's part of it, and allocate its pools. `seed` draws random weights.

        Without `max_model_len`, sequences may have the length of the model's own context. Raises ValueError for a model
        or a combination that is not supported.
        """
        place = torch.device(device)
        config = load_config(model_path)
        if max_model_len is not None:
            # Tables of positions and trial steps are then no longer than what is served.
            reached = min(max_model_len, config.max_position_embeddings)
            config = replace(config, max_position_embeddings=reached)
        ranks = collective or Alone()
        part = divide(config, ranks.rank, ranks.size)
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
                weights = load_weights(model_path, config, dtype=_DTYPES[name], device=place, part=part)
            case "random":
                weights = random_weights(config, _DTYPES[name], place, seed, part)
        return cls(
            config=config,
            weights=weights,
            backend=kernels,
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_slots=num_host_slots,
            verify_host_blocks=verify_host_blocks or deterministic,
            kv_cache_dtype=kv_cache_dtype,
            part=part,
            collective=ranks,
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
        )

    def compute(self, arrays: StepArrays) -> None:
        """Compute this part of a step, together with rank 0."""
        self._moves.make(_moves_of(arrays))
        if not len(arrays.query_R):
            self._agree()
            return
        if len(arrays.loads_N3):
            self._slots().follow(arrays.loads_N3)
        inputs = self._inputs_of(arrays)
        self._fill_in(
            inputs, arrays, torch.zeros(len(arrays.unknown_U), dtype=torch.int64, device=self.device)
        )
        hidden_QH = self._hidden(inputs)
        for index, num_scored in inputs.num_scored.items():
            for piece in pieces(num_scored):
                self._decoder.logits(scored(hidden_QH, inputs, index)[piece])
        drawn, taking = sampling_positions(inputs, arrays)
        if drawn:
            self._decoder.logits(self._rows_of(hidden_QH, drawn))
        if taking:
            self._decoder.largest(self._rows_of(hidden_QH, taking))

    def _inputs_of(self, arrays: StepArrays) -> StepInputs:
        inputs = step_inputs(arrays, self._layout)
        if not len(arrays.slots_R):
            return inputs
        ends_narrow = inputs.wanted_plan is not None
        lora = self._slots().step(arrays.slots_R, arrays.query_R, ends_narrow=ends_narrow)
        return replace(inputs, lora=lora)

    def _slots(self) -> DeviceSlots:
        assert self.adapters is not None, "the plan uses adapters, and there are no slots"
        return self.adapters

    def _agree(self) -> None:
        """End a step that moves blocks alone: raises where another rank has failed."""
        self.collective.all_reduce(torch.zeros(1, device=self.device))

    def _fill_in(self, inputs: StepInputs, arrays: StepArrays, unknown_U: torch.Tensor) -> None:
        """Write the tokens that rank 0 alone knows into the inputs."""
        if len(unknown_U):
            self.collective.broadcast(unknown_U)
            indices_U = upload(arrays.unknown_U.astype(np.int64, copy=False), self.device)
            inputs.tokens_T.index_copy_(0, indices_U, unknown_U)

    def _hidden(self, inputs: StepInputs) -> torch.Tensor:
        """Return the hidden states [Q, H] of the wanted positions."""
        return self._decoder.hidden(
            inputs.tokens_T,
            self.kv_pools,
            inputs.plan,
            inputs.wanted_Q,
            rows_plan=inputs.wanted_plan,
            lora=inputs.lora,
        )

    def _rows_of(self, hidden_QH: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
        return hidden_QH if len(indices) == len(hidden_QH) else hidden_QH[upload(indices, self.device)]

    def _save_blocks(self, pairs: Sequence[tuple[BlockId, HostSlot]]) -> None:
        self._host_pool().save(pairs)

    def _load_blocks(self, pairs: Sequence[tuple[HostSlot, BlockId]]) -> None:
        host_blocks = self._host_pool()
        if self.collective.size > 1 and host_blocks.verifies:
            corrupted = frozenset(host_blocks.corrupted(slot for slot, _ in pairs))
            is_lost_M = torch.tensor([float(slot in corrupted) for slot, _ in pairs], device=self.device)
            self.collective.all_reduce(is_lost_M)
            if lost := [
                slot for (slot, _), is_lost in zip(pairs, is_lost_M.tolist(), strict=True) if is_lost
            ]:
                raise HostBlockCorrupted(lost)
        host_blocks.load(pairs)

    def _host_pool(self) -> HostBlocks:
        assert self.host_blocks is not None, "the plan moves blocks to or from a host pool that is not there"
        return self.host_blocks

    def _copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        layers_L11 = (np.arange(len(self.kv_pools)) * len(self.kv_pools[0]))[:, None, None]
        src_dst_C2 = (layers_L11 + np.array(pairs, dtype=np.int64)).reshape(-1, 2)
        self.backend.copy_blocks(self._blocks_N2KPD, upload(src_dst_C2, self.device))


def scored(hidden_QH: torch.Tensor, inputs: StepInputs, index: int) -> torch.Tensor:
    """Return the hidden states of the positions of one row that score its prompt."""
    last = inputs.last_R[index]
    return hidden_QH[last - inputs.num_scored[index] : last]


def sampling_positions(inputs: StepInputs, arrays: StepArrays) -> tuple[list[int], list[int]]:
    """Return the indices in Q of last positions that need their logits, and of those that need the largest alone."""
    wants = list(zip(inputs.last_R, arrays.samples_R.tolist(), strict=True))
    return [last for last, want in wants if want == LOGITS], [last for last, want in wants if want == LARGEST]


def _moves_of(arrays: StepArrays) -> StepPlan:
    pairs = [
        tuple((BlockId(a), BlockId(b)) for a, b in moves_M2.tolist())
        for moves_M2 in (arrays.to_host_M2, arrays.from_host_M2, arrays.copies_M2)
    ]
    to_host = tuple((block, HostSlot(slot)) for block, slot in pairs[0])
    from_host = tuple((HostSlot(slot), block) for slot, block in pairs[1])
    return StepPlan(
        step=int(arrays.numbers[1]), rows=(), to_host=to_host, from_host=from_host, copies=pairs[2]
    )
