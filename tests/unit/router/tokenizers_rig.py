"""Tokenizers with chat templates of the tests' own, and short chats."""

from collections.abc import Sequence
from pathlib import Path

import blockyard.deploy
from blockyard.router.tokenizing.service import ChatMessage, ChatPrompt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

DEMO_CHECKPOINT = Path(blockyard.deploy.__file__).parent / "demo_model" / "checkpoint"
ROOT = bytes(range(16))
START_SECONDS = 300.0
"""Longest start of a process. On a busy machine its imports may take longer than a router allows."""
BLOCK_SIZE = 16


def chat(*contents: str) -> ChatPrompt:
    roles = ("system", "user", "assistant", "user", "assistant")
    return ChatPrompt([ChatMessage(role, content) for role, content in zip(roles, contents, strict=False)])


def tokenizer_with(template: str | None, *, added: Sequence[AddedToken] = ()) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer of single bytes that puts <bos> first, with another chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.add_tokens(list(added))
    bos_id = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos_id)]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    wrapped.chat_template = template
    return wrapped
