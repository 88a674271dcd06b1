"""llama.cpp as a system under test: the C functions of llama-cpp-python, driven step by step in this process.

A step computes a token of each running sequence, and the prompts of new ones, in one batch. Imports nothing from
Blockyard; see protocol.py. The settings `gguf` and `kv_type` are a file's path, and F32 or F16.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from protocol import Loaded, Settings, serve, stepped

MAX_BATCH_TOKENS = 2048
"""Tokens of a step, as many as in our engine's. llama.cpp computes them in parts of 512, its default."""


@dataclass(slots=True)
class Running:
    number: int
    slot: int
    """The sequence's id in llama.cpp."""
    position: int
    """Position of its next token."""
    token: int
    left: int


class LlamaCpp:
    def __init__(self, context: Any, vocab_size: int, max_num_seqs: int) -> None:
        import llama_cpp

        self._library = llama_cpp
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)
        self._vocab_size = vocab_size
        self._free = list(range(max_num_seqs))
        self._waiting: deque[tuple[int, list[int], int]] = deque()
        self._running: list[Running] = []

    def add(self, number: int, token_ids: list[int], max_tokens: int) -> None:
        if len(token_ids) > MAX_BATCH_TOKENS:
            raise ValueError(f"a prompt of {len(token_ids)} tokens, and a batch holds {MAX_BATCH_TOKENS}")
        self._waiting.append((number, token_ids, max_tokens))

    def step(self) -> Iterable[tuple[int, Sequence[int]]]:
        self._batch.n_tokens = 0
        rows = [self._put(one.token, one.position, one.slot, wants_logits=True) for one in self._running]
        for one in self._running:
            one.position += 1
        while (
            self._waiting
            and self._free
            and self._batch.n_tokens + len(self._waiting[0][1]) <= MAX_BATCH_TOKENS
        ):
            number, tokens, max_tokens = self._waiting.popleft()
            slot, last = self._free.pop(), len(tokens) - 1
            places = [self._put(token, at, slot, wants_logits=at == last) for at, token in enumerate(tokens)]
            rows.append(places[-1])
            self._running.append(Running(number, slot, len(tokens), 0, max_tokens))
        if failed := self._library.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode returned {failed}")
        for one, row in zip(self._running, rows, strict=True):
            one.token = self._likeliest(row)
            one.left -= 1
        came = [(one.number, [one.token]) for one in self._running]
        for one in [one for one in self._running if not one.left]:
            self._library.llama_memory_seq_rm(self._memory, one.slot, -1, -1)
            self._free.append(one.slot)
            self._running.remove(one)
        return came

    def _put(self, token: int, position: int, slot: int, *, wants_logits: bool) -> int:
        """Add a token to the batch, and return its row."""
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row], batch.pos[row] = token, position
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, slot
        batch.logits[row] = wants_logits
        batch.n_tokens = row + 1
        return int(row)

    def _likeliest(self, row: int) -> int:
        import numpy

        logits = self._library.llama_get_logits_ith(self._context, row)
        return int(numpy.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


def load(settings: Settings) -> Loaded:
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        settings["gguf"].encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise RuntimeError(f"llama.cpp does not load {settings['gguf']}")
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = settings["max_model_len"] * settings["max_num_seqs"]
    options.n_seq_max = settings["max_num_seqs"]
    options.n_batch = MAX_BATCH_TOKENS
    options.n_threads = options.n_threads_batch = settings["threads"]
    options.type_k = options.type_v = {"F32": 0, "F16": 1}[settings["kv_type"]]
    context = llama_cpp.llama_init_from_model(model, options)
    if not context:
        raise RuntimeError("llama.cpp makes no context with these settings")
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    stepper = LlamaCpp(context, vocab_size, settings["max_num_seqs"])
    units = llama_cpp.llama_print_system_info().decode().strip(" |")
    return stepped(stepper, {"llama-cpp-python": llama_cpp.__version__}, units)


if __name__ == "__main__":
    serve(load)
