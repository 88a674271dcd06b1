"""Draft model at startup: loads it beside the served model, refuses one that does not fit it, and sizes its pool."""

import logging
from pathlib import Path

import torch
from blockyard.worker.config import EngineConfig
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.execution.step_graphs import sizes_for
from blockyard.worker.memory.gpu_memory import GIB
from blockyard.worker.memory.kv_size import bytes_per_block
from blockyard.worker.model.config import ModelConfig, load_config, resolve_model
from blockyard.worker.speculation.draft_model import DraftModel
from blockyard.worker.startup.draft_vocabulary import check_fits

logger = logging.getLogger(__name__)


class DraftRunner:
    """A draft model that is loaded. Its pool is a single block until `allocate`."""

    def __init__(self, config: EngineConfig, runner: TorchRunner) -> None:
        self.runner = runner
        self._config = config
        model = runner.config
        self.block_bytes = bytes_per_block(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=config.block_size,
            kv_dtype=str(runner.dtype).removeprefix("torch."),
        )
        """Bytes of a block of its pool."""

    def allocate(self, num_blocks: int, max_model_len: int) -> DraftModel:
        """Allocate its pool beside one of `num_blocks` blocks, and return the model, warm. Raises ValueError where its
        logits are not finite."""
        config, runner = self._config, self.runner
        num_all_blocks = num_blocks + config.max_num_seqs
        runner.allocate_pools(num_all_blocks, 0)
        runner.warm_up()
        sizes = (
            None if config.enforce_eager else sizes_for(runner.backend, runner.device, config.max_num_seqs)
        )
        if sizes is not None:
            runner.capture_decodes(sizes, max_context_tokens=max_model_len)
        pool_gib = num_all_blocks * self.block_bytes / GIB
        logger.info("draft model: KV cache of %.2f GiB, %d bytes a block", pool_gib, self.block_bytes)
        model = DraftModel(
            runner.execute,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_tokens=min(max_model_len, runner.config.max_position_embeddings),
            max_step_tokens=config.max_num_batched_tokens,
        )
        model.measure(min(config.max_num_seqs, config.max_num_batched_tokens))
        return model


def load_draft_model(
    config: EngineConfig, served: ModelConfig, tokenizer: Path, device: torch.device
) -> DraftRunner | None:
    """Load the draft model of the settings, or return None where they name none.

    `tokenizer` is the folder of the served model's tokenizer. Raises UnsupportedModelError for a model that the engine
    cannot run, and ValueError for one that does not fit the served model.
    """
    if config.draft_model is None:
        return None
    path = resolve_model(config.draft_model)
    check_fits(load_config(path), served, path, tokenizer)
    runner = TorchRunner.create(
        path,
        device=device,
        dtype=config.dtype,
        load_format=config.load_format,
        num_blocks=1,
        block_size=config.block_size,
        deterministic=config.deterministic,
        linears=config.cpu_linears,
        seed=config.seed,
        max_model_len=config.max_model_len or served.max_position_embeddings,
    )
    if runner.config.vocab_size != served.vocab_size:
        runner.limit_tokens(served.vocab_size)
    return DraftRunner(config, runner)
