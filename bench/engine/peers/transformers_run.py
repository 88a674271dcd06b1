"""Hugging Face transformers as a system under test: `static` batches by `generate`, or its continuous batching.

A static batch takes all requests that have arrived, and returns all tokens after its longest output is done.
Imports nothing from Blockyard; see protocol.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from protocol import Loaded, Settings, serve, stepped

RESULT_SECONDS = 0.2
PAGE_TOKENS = 256
MAX_BATCH_TOKENS = 2048
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class StaticBatches:
    def __init__(self, model: Any, device: str) -> None:
        self._model = model
        self._device = device
        self._waiting: list[tuple[int, list[int], int]] = []

    def add(self, number: int, token_ids: list[int], max_tokens: int) -> None:
        self._waiting.append((number, token_ids, max_tokens))

    def step(self) -> Iterable[tuple[int, Sequence[int]]]:
        import torch

        batch, self._waiting = self._waiting, []
        width = max(len(ids) for _, ids, _ in batch)
        ids = torch.tensor([[0] * (width - len(ids)) + ids for _, ids, _ in batch], device=self._device)
        mask = torch.tensor(
            [[0] * (width - len(ids)) + [1] * len(ids) for _, ids, _ in batch], device=self._device
        )
        longest = max(max_tokens for *_, max_tokens in batch)
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=longest,
                max_new_tokens=longest,
                pad_token_id=0,
            )
        made = output[:, width:].tolist()
        return [
            (number, tokens[:max_tokens]) for (number, _, max_tokens), tokens in zip(batch, made, strict=True)
        ]


class ContinuousBatches:
    """Continuous batching, which transformers runs in a thread of its own. A step waits for that thread's results.

    A failure ends the thread too, because the process could not exit otherwise.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._seen: dict[int, int] = {}

    def add(self, number: int, token_ids: list[int], max_tokens: int) -> None:
        self._seen[number] = 0
        taken = self._manager.add_request(
            token_ids, request_id=str(number), max_new_tokens=max_tokens, streaming=True, eos_token_id=-1
        )
        if taken is None:
            raise self._failure("it takes no requests any more")

    def step(self) -> Iterable[tuple[int, Sequence[int]]]:
        result = self._manager.get_result(timeout=RESULT_SECONDS)
        if result is None and not self._manager.is_running():
            raise self._failure("its thread has ended")
        while result is not None:
            if result.error:
                raise self._failure(result.error)
            number = int(result.request_id)
            tokens = list(result.generated_tokens)
            yield number, tokens[self._seen[number] :]
            self._seen[number] = len(tokens)
            result = self._manager.get_result(timeout=0.0)

    def _failure(self, text: str) -> RuntimeError:
        cause = self._manager.background_thread_status.fatal_error
        self._manager.stop(block=False, hard_stop=True)
        return RuntimeError(text if cause is None else f"{text}: {cause}")


def batching_config(kind: Any, num_pages: int) -> Any:
    """Return a configuration of continuous batching. `kind` is transformers' ContinuousBatchingConfig.

    Its `page_size` was called `block_size` up to 5.17.
    """
    names = {field.name for field in fields(kind)}
    page_size = "page_size" if "page_size" in names else "block_size"
    return kind(**{page_size: PAGE_TOKENS}, num_blocks=num_pages, max_batch_tokens=MAX_BATCH_TOKENS)


def _pages(config: Any, settings: Settings) -> int:
    """Return the number of pages that fit `kv_bytes`, the size of each system's KV cache."""
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return settings["kv_bytes"] // (values * ITEM_BYTES[settings["dtype"]] * PAGE_TOKENS)


def load(settings: Settings) -> Loaded:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(settings["threads"])
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=getattr(torch, settings["dtype"]), local_files_only=True
    ).to(settings["device"])
    model.generation_config.eos_token_id = None
    if settings["batching"] == "static":
        return stepped(StaticBatches(model, settings["device"]), versions, "returns all tokens at the end")
    # By default, the KV cache takes most of the machine's memory, which other systems use.
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=16
        ),
        continuous_batching_config=batching_config(ContinuousBatchingConfig, _pages(model.config, settings)),
    )
    manager.start()
    return stepped(ContinuousBatches(manager), versions)


if __name__ == "__main__":
    serve(load)
