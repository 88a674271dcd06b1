"""Draft model at startup: loads it beside the served model, refuses one that does not fit it, and sizes its pool."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from blockyard.worker.config import EngineConfig
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.execution.step_graphs import sizes_for
from blockyard.worker.memory.gpu_memory import GIB
from blockyard.worker.memory.kv_size import bytes_per_block
from blockyard.worker.model.config import ModelConfig, load_config, resolve_model
from blockyard.worker.speculation.draft_model import DraftModel
from blockyard.worker.unsupported import UnsupportedModelError

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
        return DraftModel(
            runner.execute,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_tokens=min(max_model_len, runner.config.max_position_embeddings),
            max_step_tokens=config.max_num_batched_tokens,
        )


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
    _check_fits(load_config(path), served, path, tokenizer)
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
    return DraftRunner(config, runner)


def _check_fits(draft: ModelConfig, served: ModelConfig, path: Path, tokenizer: Path) -> None:
    if served.pooling is not None:
        raise ValueError("draft_model is for models that generate: the served model embeds")
    if draft.pooling is not None:
        raise UnsupportedModelError("draft_model must be a model that generates, not one that embeds")
    if draft.vocab_size != served.vocab_size:
        raise ValueError(
            f"draft_model has a vocabulary of {draft.vocab_size} tokens, and the served model one of "
            f"{served.vocab_size}: they must have the same tokens"
        )
    own, other = _tokens_of(path), _tokens_of(tokenizer)
    if own is not None and other is not None and own != other:
        raise ValueError(
            "draft_model has another tokenizer than the served model: they must have the same tokens"
        )


def _tokens_of(folder: Path) -> tuple[Any, dict[int, str]] | None:
    """Return the vocabulary and the added tokens of a folder's tokenizer.json. None where it has no such file."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        added = {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
        return content["model"]["vocab"], added
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"{file} cannot be read") from error
