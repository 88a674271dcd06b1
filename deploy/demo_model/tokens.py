"""Tokenizer of the demo model, and the batches of tokens for training.

Owns the byte-level BPE vocabulary, the chat template, the encoding of chats, and the rows of a batch. Does not know the
model.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .chats import Chat, ChatMaker
from .corpus import Corpus

VOCABULARY_TOKENS = 4096
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTEXT_TOKENS = 2048
# Label that cross entropy ignores, for tokens that the model reads but need not learn to generate.
IGNORED_LABEL = -100

CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\nTools: ' ~ (tools | tojson) -}}
{{- '\\nA call is <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('Unknown role ' ~ message['role'] ~ ': use system, user, assistant or tool.') -}}
{%- endif -%}
{{- '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] -}}
{%- for call in message['tool_calls'] or [] -%}
{{- '<tool_call>\\n{"name": "' ~ call['function']['name'] ~ '", "arguments": ' -}}
{{- call['function']['arguments'] | tojson ~ '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}"""
"""ChatML. Tools and calls are in the form of Hermes. The model was trained on chats without them."""

_TOKENIZER_CHATS = 4000


def train_tokenizer(corpus: Corpus, seed: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on the corpus and a sample of chats. The three control tokens have ids 0, 1 and 2."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    maker = ChatMaker(corpus, Random(seed))
    chats = (message.content for _ in range(_TOKENIZER_CHATS) for message in maker.next_chat())
    bpe.train_from_iterator([*corpus.documents, *chats], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode_chat(tokenizer: PreTrainedTokenizerFast, chat: Chat) -> tuple[list[int], list[int]]:
    """Return (ids, labels) of a chat as the template renders it.

    A label is the token itself in an assistant's message, from its role to its end token. Others are IGNORED_LABEL.
    """
    start, end = _control_id(tokenizer, IM_START), _control_id(tokenizer, IM_END)
    newline = _encode(tokenizer, "\n")
    ids: list[int] = []
    labels: list[int] = []
    for message in chat:
        said = [*_encode(tokenizer, f"{message.role}\n{message.content}"), end]
        ids += [start, *said, *newline]
        learnt = said if message.role == "assistant" else [IGNORED_LABEL] * len(said)
        labels += [IGNORED_LABEL, *learnt, *([IGNORED_LABEL] * len(newline))]
    return ids, labels


class WindowMaker:
    """An endless source of training batches. The same seed gives the same batches in the same order."""

    def __init__(self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.rng = Random(seed)
        self._tokenizer = tokenizer
        self._chats = ChatMaker(corpus, self.rng)
        self._stream = encode_documents(tokenizer, corpus.documents)

    @property
    def num_stream_tokens(self) -> int:
        return len(self._stream)

    def batch(self, *, rows: int, chat_rows: int, row_tokens: int) -> tuple[Tensor, Tensor]:
        """Return (ids, labels), int64 [rows, row_tokens]. The first `chat_rows` rows are chats, the rest documents."""
        pairs = [self._chat_row(row_tokens) for _ in range(chat_rows)]
        for _ in range(rows - chat_rows):
            start = self.rng.randrange(len(self._stream) - row_tokens)
            window = self._stream[start : start + row_tokens]
            pairs.append((window, window))
        ids, labels = zip(*pairs, strict=True)
        return torch.stack(ids), torch.stack(labels)

    def _chat_row(self, row_tokens: int) -> tuple[Tensor, Tensor]:
        pairs = list(islice(self._chat_tokens(), row_tokens))
        ids, labels = torch.tensor(pairs, dtype=torch.int64).unbind(dim=1)
        return ids, labels

    def _chat_tokens(self) -> Iterator[tuple[int, int]]:
        end_of_text = _control_id(self._tokenizer, END_OF_TEXT)
        while True:
            yield from zip(*encode_chat(self._tokenizer, self._chats.next_chat()), strict=True)
            yield end_of_text, IGNORED_LABEL


def encode_documents(tokenizer: PreTrainedTokenizerFast, documents: tuple[str, ...]) -> Tensor:
    """Return all documents as one row of int64 ids, with an end-of-text token after each."""
    end_of_text = _control_id(tokenizer, END_OF_TEXT)
    ids = [[*_encode(tokenizer, document), end_of_text] for document in documents]
    return torch.tensor([token for document in ids for token in document], dtype=torch.int64)


def _control_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    token_id = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(token_id, int)
    return token_id


def _encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    # Called on the backend, because the wrapper warns about documents longer than the context.
    ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids
