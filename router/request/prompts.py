"""Checks of prompts: texts, chats and token ids, and whether they fit the context.

Pure. A text is checked by its bytes before anything is tokenized. Does not own the tokenizing
(generation/generation.py), which calls `check_context` with the number of tokens.
"""

from blockyard.proto.v1 import admin_pb2, cluster_pb2, inference_pb2
from blockyard.router.admission.ledger import estimate_tokens, text_bytes
from blockyard.router.errors import ContextLengthExceeded, FieldViolation, InvalidRequest
from blockyard.router.request.chats import valid_chat
from blockyard.router.tokenizing.model_facts import ModelFacts
from blockyard.router.tokenizing.service import ChatPrompt, PromptInput, TextPrompt, TokenPrompt

CONTEXTS_ENCODED = 2
"""A prompt longer than this many context lengths is refused before all of it is encoded."""
LEAST_TOKENS_ENCODED = 131_072
"""Prompts of at most this many tokens are encoded even if the context is short. That takes little time."""
MAX_PROMPT_REPORT_BYTES = 8 * 1024 * 1024
"""Most bytes of prompt_logprobs, which are sent in one message. A router reads messages of up to 64 MiB from a
worker."""
LOGPROB_BYTES = 24
"""Most bytes of a prompt token's own entry in that message."""
TOP_LOGPROB_BYTES = 14
"""Most bytes of each top token in that entry."""

PromptMessage = (
    inference_pb2.GenerateRequest
    | inference_pb2.EmbedRequest
    | inference_pb2.TokenizeRequest
    | cluster_pb2.LookupPrefixRequest
    | admin_pb2.PullPrefixRequest
    | cluster_pb2.ExplainPlacementRequest
)


def valid_prompt(message: PromptMessage, facts: ModelFacts, *, max_model_len: int) -> PromptInput:
    """Return the checked prompt of any message that has one. Raises InvalidRequest, ContextLengthExceeded or
    Unsupported."""
    match message.WhichOneof("input"):
        case "prompt":
            # Each access to the field builds the text again, which takes milliseconds for megabytes.
            text = message.prompt
            if not text:
                raise InvalidRequest.of("prompt", "must not be empty")
            _check_text(text, facts=facts, max_model_len=max_model_len)
            return TextPrompt(text)
        case "chat":
            assert not isinstance(message, inference_pb2.EmbedRequest), "it has no such field"
            chat = valid_chat(message.chat)
            _check_text(*chat.texts(), facts=facts, max_model_len=max_model_len)
            return chat
        case "prompt_token_ids":
            assert not isinstance(message, inference_pb2.TokenizeRequest), "it has no such field"
            embeds = isinstance(message, inference_pb2.EmbedRequest)
            is_cut = isinstance(
                message, inference_pb2.GenerateRequest | inference_pb2.EmbedRequest
            ) and message.HasField("truncate_prompt_tokens")
            most_tokens = most_encoded_tokens(max_model_len) if is_cut else max_model_len
            return _valid_token_ids(
                message.prompt_token_ids, facts, most_tokens, room_tokens=0 if embeds else 1
            )
        case _:
            raise InvalidRequest.of("input", "one of prompt, chat and prompt_token_ids is required")


def valid_prompt_beside(
    violations: list[FieldViolation], message: PromptMessage, facts: ModelFacts, *, max_model_len: int
) -> PromptInput:
    """Return the checked prompt. Raises InvalidRequest with the prompt's violations and the given ones."""
    try:
        prompt = valid_prompt(message, facts, max_model_len=max_model_len)
    except InvalidRequest as invalid:
        if not violations:
            raise
        raise InvalidRequest.of_all([*invalid.violations, *violations]) from None
    if violations:
        raise InvalidRequest.of_all(violations)
    return prompt


def prompt_estimate(prompt: PromptInput) -> int:
    """Return the prompt's number of tokens, estimated from bytes if the client sent text."""
    match prompt:
        case TextPrompt(text):
            return estimate_tokens(text_bytes(text))
        case ChatPrompt():
            return estimate_tokens(text_bytes(*prompt.texts()))
        case TokenPrompt(token_ids):
            return len(token_ids)


def most_encoded_tokens(max_model_len: int) -> int:
    """Return the most tokens of a prompt that are encoded. A longer one is refused, even if the client asked to
    truncate it."""
    return max(CONTEXTS_ENCODED * max_model_len, LEAST_TOKENS_ENCODED)


def check_context(prompt_tokens: int, max_model_len: int, room_tokens: int = 1) -> None:
    """Check that the prompt leaves room for so many tokens. Raises ContextLengthExceeded."""
    most_tokens = max_model_len - room_tokens
    if prompt_tokens > most_tokens:
        why = " that needs room for output" if room_tokens else ""
        raise ContextLengthExceeded(
            f"input: {prompt_tokens} tokens do not fit a context of {max_model_len}{why}",
            violations=(FieldViolation(field="input", description=f"at most {most_tokens} tokens"),),
        )


def check_prompt_report(prompt_tokens: int, prompt_logprobs: int | None) -> None:
    """Check that the log-probabilities of the prompt fit one message. Raises InvalidRequest."""
    if prompt_logprobs is None:
        return
    token_bytes = LOGPROB_BYTES + TOP_LOGPROB_BYTES * prompt_logprobs
    if prompt_tokens * token_bytes > MAX_PROMPT_REPORT_BYTES:
        raise InvalidRequest.of(
            "sampling.prompt_logprobs",
            f"so many are allowed only for prompts of at most {MAX_PROMPT_REPORT_BYTES // token_bytes} tokens",
        )


def _check_text(*texts: str, facts: ModelFacts, max_model_len: int) -> None:
    """Check that the texts can fit the context. Megabytes would otherwise delay the tokenizing of other prompts.

    Raises ContextLengthExceeded.
    """
    limit_bytes = facts.max_text_bytes(max_model_len)
    if text_bytes(*texts) > limit_bytes:
        raise ContextLengthExceeded(
            f"input: a context of {max_model_len} tokens cannot hold more than {limit_bytes} bytes of text",
            violations=(FieldViolation(field="input", description=f"at most {limit_bytes} bytes"),),
        )


def _valid_token_ids(
    tokens: inference_pb2.TokenIds, facts: ModelFacts, most_tokens: int, *, room_tokens: int
) -> TokenPrompt:
    if not tokens.ids:
        raise InvalidRequest.of("prompt_token_ids", "must not be empty")
    # The length first: millions of ids are not even read.
    check_context(len(tokens.ids), most_tokens, room_tokens)
    token_ids = list(tokens.ids)  # Once: iterating over a message's field takes three times as long.
    if max(token_ids) >= facts.vocab_size:
        raise InvalidRequest.of("prompt_token_ids", f"each must be below {facts.vocab_size}")
    return TokenPrompt(token_ids)
