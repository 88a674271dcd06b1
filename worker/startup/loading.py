"""Loading: from settings to an engine that is ready to step. Sizes the KV pool, loads or simulates the model, warms
up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

import torch
from blockyard.proto.naming.fingerprint import model_fingerprint, tokenizer_fingerprint, weights_state
from blockyard.proto.naming.model_files import resolve_tokenizer
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.execution.part_runner import PartRunner
from blockyard.worker.execution.runner import Runner, TorchRunner
from blockyard.worker.execution.step_graphs import sizes_for
from blockyard.worker.lora.peft import AdapterReader, check_serves_adapters
from blockyard.worker.memory.gpu_memory import GIB, CudaMeter
from blockyard.worker.memory.kv_size import HostSize, KVSize, stored_dtype
from blockyard.worker.model.config import ModelConfig, load_config, resolve_model
from blockyard.worker.model.data_type import ChosenDataType, dtype_of
from blockyard.worker.model.division import divide
from blockyard.worker.parallel.collective import Collective
from blockyard.worker.parallel.follower import Follower, Leader
from blockyard.worker.parallel.ranks import ALONE, Ranks
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.simulated.faults import SimulatedFault
from blockyard.worker.simulated.grammars import SimulatedGrammars
from blockyard.worker.simulated.runner import SimulatedRunner
from blockyard.worker.speculation.draft_model import DraftModel
from blockyard.worker.speculation.speculation import Speculation
from blockyard.worker.startup.draft_model import DraftRunner, load_draft_model
from blockyard.worker.startup.files_read import NOTHING_READ, FilesRead
from blockyard.worker.startup.host_size import size_host_memory
from blockyard.worker.startup.pool_size import (
    check_one_full_sequence_fits,
    known_budget,
    measured_budget,
    size_pool,
)

if TYPE_CHECKING:
    from blockyard.worker.grammar.compiled import TokenizerSource
    from blockyard.worker.grammar.masks import Masks

logger = logging.getLogger(__name__)
AnyPartRunner = TypeVar("AnyPartRunner", bound=PartRunner)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """An engine, and what its server and clients need to know of it."""

    engine: Engine
    runner: TorchRunner | SimulatedRunner
    model: ModelConfig
    model_path: Path
    tokenizer_path: Path
    kv_size: KVSize
    host_size: HostSize
    max_model_len: int
    model_fingerprint: str
    tokenizer_fingerprint: str
    dtype: ChosenDataType
    kv_dtype: str
    """The data type of keys and values in its blocks. Only workers with the same one share prefixes."""
    device: str
    masks: Masks | None
    """Makes outputs follow grammars. None where that is not possible."""
    num_ranks: int = 1
    """Ranks among which the model is divided."""
    adapters: AdapterReader | None = None
    """Reads adapters. None where none is served."""
    files: FilesRead = NOTHING_READ
    read_fingerprint: Callable[[], str] = str
    """Computes the fingerprint of the model's files as they are now."""

    def changed_files(self) -> str:
        """Return which files have changed since they were read, in words. Empty: none. It may read all weights."""
        return self.files.change(self.read_fingerprint, self.model_fingerprint)

    @property
    def tokenizer_source(self) -> TokenizerSource:
        """The tokenizer for which grammars are compiled."""
        from blockyard.worker.grammar.compiled import TokenizerSource

        return TokenizerSource(
            file=self.tokenizer_path / "tokenizer.json",
            vocab_size=self.model.vocab_size,
            eos_token_ids=tuple(sorted(self.model.eos_token_ids)),
        )


def load_engine(config: EngineConfig, ranks: Ranks = ALONE) -> LoadedEngine:
    """Load an engine. Raises ValueError for a model or a size that is not possible; the message says what to change.

    With several ranks, this is rank 0, and the others take part in its steps from here on (`load_follower`).
    """
    path = resolve_model(config.model)
    tokenizer_path = resolve_tokenizer(config.tokenizer, path)
    model = load_config(path)
    device = _resolve_device(config)
    draft_folders = () if config.draft_model is None else (resolve_model(config.draft_model),)
    files = FilesRead.of((path, tokenizer_path, *draft_folders))
    dtype = dtype_of(config, model, on_cpu=device.type == "cpu")
    logger.info("computes in %s", dtype)
    if config.max_loras and config.adapter_dir is not None:
        check_serves_adapters(model, Path(config.adapter_dir))
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len {max_model_len} is beyond the model's {model.max_position_embeddings}"
        )
    _check_stride_within_context(config, max_model_len)
    weights_before = weights_state(path)
    arithmetic = _arithmetic(config, dtype.name, ranks.collective.size)
    read_fingerprint = partial(
        model_fingerprint, path, load_format=config.load_format, seed=config.seed, dtype=arithmetic
    )
    fingerprint = _in_background(read_fingerprint)
    draft = load_draft_model(config, model, tokenizer_path, device)
    runner, kv_size, host_size = _load_runner(
        config, model, path, device, dtype.name, max_model_len, ranks, draft
    )
    if weights_state(path) != weights_before:
        raise ValueError(f"the weights in {path} changed while they were loaded: start the worker again")
    scheduling = _scheduling(config, max_model_len, kv_size, host_size)
    draft_model = draft.allocate(kv_size.num_blocks, max_model_len) if draft is not None else None
    engine = _make_engine(
        config, scheduling, runner, kv_size, embeds=model.pooling is not None, draft_model=draft_model
    )
    masks = _give_masks(runner, model.vocab_size)
    if masks is not None:
        engine.scheduler.must_wait_for_mask, masks.on_made = masks.holds, engine.wake
        if engine.scheduler.speculation is not None:
            engine.scheduler.speculation.takes_grammar = masks.takes_drafts
    return LoadedEngine(
        engine=engine,
        runner=runner,
        model=model,
        model_path=path,
        tokenizer_path=tokenizer_path,
        kv_size=kv_size,
        host_size=host_size,
        max_model_len=max_model_len,
        model_fingerprint=fingerprint.result(),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer_path),
        dtype=dtype,
        kv_dtype=stored_dtype(config.kv_cache_dtype, dtype.name),
        device=str(device),
        masks=masks,
        num_ranks=ranks.collective.size,
        adapters=_adapter_reader(config, model, runner),
        files=files,
        read_fingerprint=read_fingerprint,
    )


def _adapter_reader(
    config: EngineConfig, model: ModelConfig, runner: TorchRunner | SimulatedRunner
) -> AdapterReader | None:
    if not config.max_loras or config.adapter_dir is None:
        return None
    # A simulated engine does not compute with them.
    dtype, on_gpu = torch.float32, False
    if isinstance(runner, TorchRunner):
        dtype, on_gpu = runner.dtype, runner.device.type == "cuda"
    return AdapterReader(
        folder=Path(config.adapter_dir),
        model=model,
        max_rank=config.max_lora_rank,
        dtype=dtype,
        pins=on_gpu,
    )


def load_follower(config: EngineConfig, collective: Collective, leader: Leader) -> Follower:
    """Load the part of a rank other than 0, with its pools. Raises ValueError as `load_engine` does."""
    path, device = resolve_model(config.model), _resolve_device(config)
    if known_budget(config, device) is not None:
        sizes = leader.pool_sizes()
        return Follower(_create(PartRunner, config, path, device, collective, *sizes), collective)
    part = _create(PartRunner, config, path, device, collective)
    follower = Follower(part, collective)
    leader.has_loaded()
    meter = CudaMeter(device)
    leader.has_measured(measured_budget(part, config, meter, lambda: follower.run(leader.next_step())))
    part.allocate_pools(*leader.pool_sizes())
    return follower


def _load_runner(
    config: EngineConfig,
    model: ModelConfig,
    path: Path,
    device: torch.device,
    dtype: str,
    max_model_len: int,
    ranks: Ranks,
    draft: DraftRunner | None,
) -> tuple[TorchRunner | SimulatedRunner, KVSize, HostSize]:
    """Return a warm runner with its pools, and their sizes. Where the pool's size is measured, the weights are loaded
    before it. All ranks have pools of one size, which the rank with the least memory decides."""
    budget = known_budget(config, device)
    measured: TorchRunner | None = None
    if budget is None:
        measured = _make_torch_runner(config, path, device, ranks, num_blocks=1, num_host_slots=0)
        largest = partial(measured.run_largest_step, config.max_num_batched_tokens, config.max_num_seqs)
        own = measured_budget(measured, config, CudaMeter(device), largest)
        budget = min([own, *ranks.budgets()])
    part = divide(model, size=ranks.collective.size).config
    kv_size = size_pool(config, part, dtype, budget, draft_block_bytes=draft.block_bytes if draft else 0)
    for line in kv_size.describe(max_model_len):
        logger.info(line)
    check_one_full_sequence_fits(kv_size, max_model_len)
    host_size = size_host_memory(config, device, kv_size.block_bytes)
    logger.info(host_size.describe())
    runner: TorchRunner | SimulatedRunner
    with ranks.allocating(kv_size.num_blocks, host_size.num_blocks):
        if measured is None:
            runner = _make_runner(
                config, model, path, device, kv_size.num_blocks, host_size.num_blocks, ranks
            )
        else:
            runner = measured
            runner.allocate_pools(kv_size.num_blocks, host_size.num_blocks)
    runner.warm_up()
    _capture_graphs(config, runner, max_model_len)
    return runner, kv_size, host_size


def _in_background(read_fingerprint: Callable[[], str]) -> Future[str]:
    """Start to compute the model's fingerprint while its weights are loaded, and return its future.

    The first start on a checkpoint reads all of it for that.

    The thread is a daemon, because a start that fails does not wait for it.
    """
    future = Future[str]()

    def run() -> None:
        try:
            future.set_result(read_fingerprint())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="fingerprint", daemon=True).start()
    return future


def _arithmetic(config: EngineConfig, dtype: str, num_ranks: int) -> str:
    """Return as text the settings by which workers of the same weights are different models to a router.

    Much else changes a block's values in their last bits, and is in its kind (memory/block_kinds.py).
    """
    linears = "" if config.cpu_linears == "full" else f":{config.cpu_linears}"
    return f"{config.engine}:{dtype}{linears}" + ("" if num_ranks == 1 else f":{num_ranks} ranks")


def _check_stride_within_context(config: EngineConfig, max_model_len: int) -> None:
    stride_tokens = config.index_stride_tokens
    if stride_tokens is not None and stride_tokens > max_model_len:
        raise ValueError(
            f"index_stride_tokens {stride_tokens} is more than max_model_len {max_model_len}: "
            "no prompt is that long, so no block would be published"
        )


def _scheduling(
    config: EngineConfig, max_model_len: int, kv_size: KVSize, host_size: HostSize
) -> SchedulerConfig:
    return SchedulerConfig(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        preemption=config.preempt,
        max_preemptions=config.max_preemptions,
        swap_blocks=host_size.swap_blocks,
        host_cache_blocks=host_size.cache_blocks,
        index_stride_blocks=config.index_stride_blocks,
        protected_blocks=int(config.protected_cache_share * kv_size.num_blocks),
        max_loras=config.max_loras,
        most_lent_blocks=int(config.lend_share * kv_size.num_blocks),
    )


def _make_engine(
    config: EngineConfig,
    scheduling: SchedulerConfig,
    runner: Runner,
    kv_size: KVSize,
    *,
    embeds: bool,
    draft_model: DraftModel | None,
) -> Engine:
    """Make the engine. In deterministic mode too, measured time decides the chunks: its tokens do not depend on
    them."""
    return Engine(
        scheduling,
        runner,
        num_blocks=kv_size.num_blocks,
        bytes_per_block=kv_size.block_bytes,
        ageing_seconds=config.priority_ageing_seconds,
        mixed_step_seconds=config.mixed_step_seconds or None,
        swap_blocks_per_second=_swap_rate(runner),
        overlap_steps=_overlaps(config, runner),
        embeds=embeds,
        speculation=Speculation(model=draft_model) if draft_model or config.speculation == "ngram" else None,
    )


def _overlaps(config: EngineConfig, runner: Runner) -> bool:
    if config.overlap_steps != "auto":
        return config.overlap_steps == "on"
    return isinstance(runner, TorchRunner) and runner.device.type == "cuda"


def _give_masks(runner: Runner, vocab_size: int) -> Masks | None:
    """Give the runner masks for grammars, and return them. Return None where the runner takes none, or
    llguidance is not installed."""
    if not isinstance(runner, TorchRunner | SimulatedRunner):
        return None
    if find_spec("llguidance") is None:
        logger.warning("llguidance is not installed: structured outputs are refused")
        return None
    from blockyard.worker.grammar.masks import Masks

    masks = Masks(vocab_size)
    if isinstance(runner, TorchRunner):
        runner.grammar_masks = masks
    else:
        runner.grammars = SimulatedGrammars(masks, vocab_size)
    return masks


def _swap_rate(runner: Runner) -> float:
    """Return the measured rate of round trips to host memory in blocks a second. 0 where no block moves there."""
    if isinstance(runner, TorchRunner) and runner.host_blocks is not None:
        return runner.host_blocks.measure()
    return 0.0


def _resolve_device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no CUDA device")
    if config.engine == "simulated" or config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda:0")


def _make_runner(
    config: EngineConfig,
    model: ModelConfig,
    path: Path,
    device: torch.device,
    num_blocks: int,
    num_host_slots: int,
    ranks: Ranks,
) -> TorchRunner | SimulatedRunner:
    match config.engine:
        case "simulated":
            return SimulatedRunner(
                vocab_size=model.vocab_size,
                embedding_size=model.hidden_size,
                prefill_tokens_per_second=config.simulated_prefill_tokens_per_second,
                step_seconds=config.simulated_step_seconds,
                fault=SimulatedFault.parse(config.simulated_fault) if config.simulated_fault else None,
            )
        case "model":
            return _make_torch_runner(
                config, path, device, ranks, num_blocks=num_blocks, num_host_slots=num_host_slots
            )


def _make_torch_runner(
    config: EngineConfig,
    path: Path,
    device: torch.device,
    ranks: Ranks,
    *,
    num_blocks: int,
    num_host_slots: int,
) -> TorchRunner:
    runner = _create(TorchRunner, config, path, device, ranks.collective, num_blocks, num_host_slots)
    runner.lead = ranks.lead
    return runner


def _create(
    kind: type[AnyPartRunner],
    config: EngineConfig,
    path: Path,
    device: torch.device,
    collective: Collective,
    num_blocks: int = 1,
    num_host_slots: int = 0,
) -> AnyPartRunner:
    return kind.create(
        path,
        device=device,
        dtype=config.dtype,
        load_format=config.load_format,
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_host_slots=num_host_slots,
        verify_host_blocks=config.verify_host_memory,
        deterministic=config.deterministic,
        linears=config.cpu_linears,
        kv_cache_dtype=config.kv_cache_dtype,
        seed=config.seed,
        collective=collective,
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        max_model_len=config.max_model_len,
    )


def _capture_graphs(config: EngineConfig, runner: Runner, max_model_len: int) -> None:
    if not isinstance(runner, TorchRunner) or config.enforce_eager:
        return
    sizes = sizes_for(runner.backend, runner.device, config.max_num_seqs)
    if sizes is None:
        logger.info("decode graphs: none, the %s backend cannot be captured", runner.backend.name)
        return
    meter = CudaMeter(runner.device) if runner.device.type == "cuda" else None
    taken_before = meter.taken()[0] if meter is not None else 0
    runner.capture_decodes(sizes, max_context_tokens=max_model_len)
    if meter is not None:
        # The pool's size left room for an estimate of it, as the line "memory: ..." says.
        logger.info("decode graphs take %.2f GiB", (meter.taken()[0] - taken_before) / GIB)
