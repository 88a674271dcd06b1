"""Request validation: turns a message into checked domain values before any other work.

Pure. Errors name the field and what is allowed. They quote nothing that was sent, except the name of a model that is
not served. Does not own limits that need the prompt as tokens (generation/generation.py), except for prompts sent as
tokens.
"""

import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict, get_args

from blockyard.proto.limits import MAX_PAUSE_SECONDS, MAX_PRIORITY, MAX_SCHEMA_DEPTH, MAX_TOOLS
from blockyard.proto.naming import headers
from blockyard.proto.naming.identifiers import NAME_RULE, is_id, is_model_name, is_variable
from blockyard.proto.naming.identifiers import is_name as is_name
from blockyard.proto.v1 import admin_pb2, cluster_pb2, inference_pb2
from blockyard.router.adapters.registry import RegisteredAdapter
from blockyard.router.admission.ledger import estimate_tokens, text_bytes
from blockyard.router.errors import (
    ContextLengthExceeded,
    FieldViolation,
    InvalidRequest,
    UnknownModel,
    Unsupported,
)
from blockyard.router.placement.config import PolicyName
from blockyard.router.request.sampling import EMBEDDING, PREFETCH, SamplingRequest, parse_sampling
from blockyard.router.request.sampling_checks import SamplingLimits, sampling_violations
from blockyard.router.request.structured_output import is_deeper_than, parse_json
from blockyard.router.tokenizing.model_facts import ModelFacts
from blockyard.router.tokenizing.service import ChatMessage, ChatPrompt, PromptInput, TextPrompt, TokenPrompt

MAX_MESSAGES = 1024
MAX_NAME_CHARS = 256
"""Most characters of the name in a chat message."""
MAX_TEMPLATE_KWARGS_BYTES = 16_384
MAX_TEMPLATE_KWARGS_DEPTH = 16
ROLES = frozenset({"system", "user", "assistant", "tool"})
MAX_TOOLS_BYTES = 262_144
MAX_NAMES_TOLD = 8
"""The most names of the served model that the error for another model lists."""
PREFETCH_PRIORITY = MAX_PRIORITY - 1
"""Default of a prefetch: behind all requests but background work, of which a busy worker takes no prompt."""
MAX_TOLD = 5
"""The most violations in the text of an error. Its details have all of them."""
_POLICIES: dict[str, PolicyName] = {name: name for name in get_args(PolicyName)}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidGeneration:
    request_id: str
    prompt: PromptInput
    estimated_tokens: int
    """Estimate for admission, before anything is tokenized."""
    sampling: SamplingRequest
    cache_salt: str
    priority: int
    """Lower values are served earlier."""
    session_id: str
    """Id of the request's conversation. Empty: none."""
    public_prefix: bool
    """Share the prompt's cached prefix with all requests that set this, of whatever tenant."""
    policy: PolicyName | None
    """Placement policy of the request. None: the router's own."""
    truncate_prompt_tokens: int | None
    """Number of last tokens of the prompt to keep. -1: as many as leave room for the output. None: all."""
    return_prompt_token_ids: bool = False
    expected_pause_seconds: float = 0.0
    """Time from its end until its session is expected to come back. 0: unknown."""
    prefetch: bool = False
    """Compute the prompt alone."""
    adapter: RegisteredAdapter | None = None
    """None: the bare model."""

    @property
    def least_room_tokens(self) -> int:
        """Return the room of the context that the prompt must leave."""
        return 0 if self.sampling.embeds else 1


def valid_generation(
    message: inference_pb2.GenerateRequest,
    facts: ModelFacts,
    *,
    max_model_len: int,
    limits: SamplingLimits,
    adapter: RegisteredAdapter | None = None,
) -> ValidGeneration:
    """Check a request and return it with its defaults. `adapter` is what it names (adapter_names.py).

    Raises InvalidRequest with all violations, ContextLengthExceeded, UnknownModel or Unsupported.
    """
    if adapter is None:
        check_model(message, facts)
    if facts.pooling is not None:
        raise Unsupported.of("model", "is an embedding model, which generates no text")
    violations = sampling_violations(message.sampling, facts, limits)
    violations += _field_violations(message) + _hint_violations(message)
    prompt = _valid_beside(violations, message, facts, max_model_len=max_model_len)
    common = _common(message)
    if message.prefetch and not message.HasField("priority"):
        common["priority"] = PREFETCH_PRIORITY
    return ValidGeneration(
        **common,
        prompt=prompt,
        estimated_tokens=prompt_estimate(prompt),
        sampling=PREFETCH if message.prefetch else parse_sampling(message.sampling, facts.sampling_defaults),
        return_prompt_token_ids=message.return_prompt_token_ids,
        expected_pause_seconds=message.expected_pause_seconds,
        prefetch=message.prefetch,
        adapter=adapter,
    )


def valid_embedding(
    message: inference_pb2.EmbedRequest, facts: ModelFacts, *, max_model_len: int
) -> ValidGeneration:
    """Check a request for an embedding and return it. Raises as `valid_generation` does."""
    check_model(message, facts)
    if facts.pooling is None:
        raise Unsupported.of("model", "generates text, and is no embedding model")
    violations = _field_violations(message)
    if message.HasField("dimensions") and not 1 <= message.dimensions <= facts.embedding_size:
        description = f"must be from 1 to {facts.embedding_size}"
        violations.append(FieldViolation(field="dimensions", description=description))
    prompt = _valid_beside(violations, message, facts, max_model_len=max_model_len)
    return ValidGeneration(
        **_common(message), prompt=prompt, estimated_tokens=prompt_estimate(prompt), sampling=EMBEDDING
    )


def check_model(
    message: (
        inference_pb2.GenerateRequest
        | inference_pb2.EmbedRequest
        | inference_pb2.TokenizeRequest
        | inference_pb2.DetokenizeRequest
    ),
    facts: ModelFacts,
) -> None:
    """Raise UnknownModel if the request names a model that is not served. Without a name it means the served one."""
    if message.HasField("model"):
        check_model_name(message.model, facts.names)


def check_model_name(name: str, names: Sequence[str]) -> None:
    """Raise UnknownModel if no served model has this name. The error repeats only what has the form of a model's
    name."""
    if name in names:
        return
    asked = f"model `{name}`" if is_model_name(name) else "model asked for"
    served = ", ".join(f"`{known}`" for known in names[:MAX_NAMES_TOLD])
    violation = FieldViolation(field="model", description=f"must be one that is served: {served}")
    raise UnknownModel(f"The {asked} does not exist. Served here: {served}.", violations=(violation,))


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
            chat = _valid_chat(message.chat)
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


PrefixQuestion = (
    cluster_pb2.LookupPrefixRequest | cluster_pb2.ExplainPlacementRequest | admin_pb2.PullPrefixRequest
)


def valid_question(
    message: PrefixQuestion,
    facts: ModelFacts,
    *,
    max_model_len: int,
) -> PromptInput:
    """Return the checked prompt of a call that asks about a prefix.

    Raises InvalidRequest with all violations, ContextLengthExceeded or Unsupported.
    """
    violations = []
    if isinstance(message, cluster_pb2.ExplainPlacementRequest):
        violations += _id_violations(("session_id", message.HasField("session_id"), message.session_id))
    violations += _salt_violations(message.cache_salt)
    return _valid_beside(violations, message, facts, max_model_len=max_model_len)


def valid_tenant(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the tenant that the call's metadata names, or "". Raises InvalidRequest.

    calls/bounds.py decides whether the caller may name it.
    """
    names = [value for key, value in metadata if key == headers.TENANT]
    if not names:
        return ""
    tenant = names[0]
    if len(names) > 1 or not isinstance(tenant, str) or not is_id(tenant):
        raise InvalidRequest.of(headers.TENANT, f"must name one tenant by {NAME_RULE}, not empty")
    return tenant


def most_encoded_tokens(max_model_len: int) -> int:
    """Return the most tokens of a prompt that are encoded. A longer one is refused, even if the client asked to
    truncate it."""
    return max(CONTEXTS_ENCODED * max_model_len, LEAST_TOKENS_ENCODED)


def kept_tokens(valid: ValidGeneration, max_model_len: int) -> int | None:
    """Return how many of the prompt's last tokens to keep, or None for all. Raises InvalidRequest."""
    if valid.truncate_prompt_tokens != -1:
        return valid.truncate_prompt_tokens
    kept = max_model_len - max(valid.sampling.max_tokens or 0, valid.least_room_tokens)
    if kept < 1:
        raise InvalidRequest.of(
            "truncate_prompt_tokens", "-1 needs a max_tokens that leaves room for a prompt"
        )
    return kept


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


def check_detokenize(
    message: inference_pb2.DetokenizeRequest, facts: ModelFacts, *, max_model_len: int
) -> None:
    """Check a detokenize request, but for its model. Raises InvalidRequest."""
    if len(message.token_ids) > max_model_len:
        raise InvalidRequest.of("token_ids", f"at most {max_model_len} are allowed")
    if message.token_ids and max(message.token_ids) >= facts.vocab_size:
        raise InvalidRequest.of("token_ids", f"each must be below {facts.vocab_size}")


def prompt_estimate(prompt: PromptInput) -> int:
    """Return the prompt's number of tokens, estimated from bytes if the client sent text."""
    match prompt:
        case TextPrompt(text):
            return estimate_tokens(text_bytes(text))
        case ChatPrompt():
            return estimate_tokens(text_bytes(*prompt.texts()))
        case TokenPrompt(token_ids):
            return len(token_ids)


def _valid_beside(
    violations: list[FieldViolation], message: PromptMessage, facts: ModelFacts, *, max_model_len: int
) -> PromptInput:
    """Return the checked prompt. Raises InvalidRequest with the prompt's violations and the given ones."""
    try:
        prompt = valid_prompt(message, facts, max_model_len=max_model_len)
    except InvalidRequest as invalid:
        if not violations:
            raise
        raise _invalid([*invalid.violations, *violations]) from None
    if violations:
        raise _invalid(violations)
    return prompt


def _valid_chat(chat: inference_pb2.Chat) -> ChatPrompt:
    if not chat.messages:
        raise InvalidRequest.of("chat.messages", "must not be empty")
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidRequest.of("chat.messages", f"at most {MAX_MESSAGES} are allowed")
    if any(message.media for message in chat.messages):
        raise Unsupported.of("chat.messages.media", "is not supported yet")
    violations = []
    if any(message.role not in ROLES for message in chat.messages):
        description = "must be system, user, assistant or tool"
        violations.append(FieldViolation(field="chat.messages.role", description=description))
    if all(message.role == "assistant" for message in chat.messages):
        description = "needs a message of another role than assistant"
        violations.append(FieldViolation(field="chat.messages", description=description))
    if any(
        message.HasField("name") and not 1 <= len(message.name) <= MAX_NAME_CHARS for message in chat.messages
    ):
        description = f"must have 1 to {MAX_NAME_CHARS} characters"
        violations.append(FieldViolation(field="chat.messages.name", description=description))
    for field, problem in (
        ("chat.template_kwargs", _template_kwargs_problem(chat.template_kwargs)),
        ("chat.continue_final_message", _continuation_problem(chat)),
        ("chat.tools", _tools_problem(chat.tools, "name")),
        *(
            ("chat.messages.tool_calls", _tools_problem(message.tool_calls, "arguments"))
            for message in chat.messages
            if message.tool_calls
        ),
    ):
        if problem is not None:
            violations.append(FieldViolation(field=field, description=problem))
    if violations:
        raise _invalid(violations)
    continues = chat.continue_final_message
    return ChatPrompt(
        [
            ChatMessage(
                message.role,
                message.content,
                message.name,
                tool_calls=message.tool_calls,
                tool_call_id=message.tool_call_id,
                reasoning=message.reasoning_content,
            )
            for message in chat.messages
        ],
        tools=chat.tools,
        template_kwargs=chat.template_kwargs,
        add_generation_prompt=(
            chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues
        ),
        continue_final_message=continues,
    )


def _tools_problem(text: str, required: str) -> str | None:
    """Return what is wrong with a JSON list of tools or calls, or None. Each must have a function with the text
    `required`."""
    if not text:
        return None
    if len(text) > MAX_TOOLS_BYTES or len(text.encode()) > MAX_TOOLS_BYTES:
        return f"at most {MAX_TOOLS_BYTES} bytes of JSON are allowed"
    try:
        tools = parse_json(text)
        # JSON can spell a lone surrogate, which is not a character.
        json.dumps(tools, ensure_ascii=False).encode()
    except RecursionError:
        return f"must not be nested deeper than {MAX_SCHEMA_DEPTH} levels"
    except ValueError:
        return "must be JSON"
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        return f"must be a list of 1 to {MAX_TOOLS}"
    functions = [tool.get("function") if isinstance(tool, dict) else None for tool in tools]
    if not all(isinstance(one, dict) and isinstance(one.get(required), str) for one in functions):
        return f"each must have a function with the text `{required}`"
    if is_deeper_than(tools, MAX_SCHEMA_DEPTH):
        return f"must not be nested deeper than {MAX_SCHEMA_DEPTH} levels"
    return None


def _template_kwargs_problem(text: str) -> str | None:
    """Return what is wrong with the template's variables, or None. The tokenizer process checks their names."""
    if not text:
        return None
    if len(text) > MAX_TEMPLATE_KWARGS_BYTES or len(text.encode()) > MAX_TEMPLATE_KWARGS_BYTES:
        return f"at most {MAX_TEMPLATE_KWARGS_BYTES} bytes of JSON are allowed"
    try:
        kwargs = parse_json(text)
        # JSON can spell a lone surrogate, which is not a character.
        json.dumps(kwargs, ensure_ascii=False).encode()
    except RecursionError:
        return f"must not be nested deeper than {MAX_TEMPLATE_KWARGS_DEPTH} levels"
    except ValueError:
        return "must be JSON"
    if not isinstance(kwargs, dict) or not all(map(is_variable, kwargs)):
        return "must be an object with names of variables"
    if is_deeper_than(kwargs, MAX_TEMPLATE_KWARGS_DEPTH):
        return f"must not be nested deeper than {MAX_TEMPLATE_KWARGS_DEPTH} levels"
    return None


def _continuation_problem(chat: inference_pb2.Chat) -> str | None:
    if not chat.continue_final_message:
        return None
    if chat.add_generation_prompt:
        return "excludes add_generation_prompt"
    return None if chat.messages[-1].role == "assistant" else "needs a last message of the role assistant"


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


def _field_violations(
    message: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest,
) -> list[FieldViolation]:
    violations = [
        *_id_violations(
            ("request_id", message.HasField("request_id"), message.request_id),
            ("session_id", message.HasField("session_id"), message.session_id),
        ),
        *_salt_violations(message.cache_salt),
    ]
    if abs(message.priority) > MAX_PRIORITY:
        description = f"must be from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        violations.append(FieldViolation(field="priority", description=description))
    if message.HasField("truncate_prompt_tokens") and not (
        message.truncate_prompt_tokens == -1 or message.truncate_prompt_tokens >= 1
    ):
        violations.append(
            FieldViolation(field="truncate_prompt_tokens", description="must be -1 or at least 1")
        )
    if message.HasField("policy") and message.policy not in _POLICIES:
        description = f"must be one of {', '.join(_POLICIES)}"
        violations.append(FieldViolation(field="policy", description=description))
    return violations


def _hint_violations(message: inference_pb2.GenerateRequest) -> list[FieldViolation]:
    violations = []
    if message.HasField("expected_pause_seconds") and not (
        0 < message.expected_pause_seconds <= MAX_PAUSE_SECONDS
    ):
        description = f"must be above 0 and at most {MAX_PAUSE_SECONDS}"
        violations.append(FieldViolation(field="expected_pause_seconds", description=description))
    if message.prefetch:
        violations += [
            FieldViolation(field=f"sampling.{field}", description="excludes prefetch")
            for field in ("n", "beam_width", "logprobs", "prompt_logprobs")
            if message.sampling.HasField(field) and (field, getattr(message.sampling, field)) != ("n", 1)
        ]
    return violations


class _Common(TypedDict):
    """Fields of a checked request that any kind of request has."""

    request_id: str
    cache_salt: str
    priority: int
    session_id: str
    public_prefix: bool
    policy: PolicyName | None
    truncate_prompt_tokens: int | None


def _common(message: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest) -> _Common:
    return {
        "request_id": message.request_id
        if message.HasField("request_id")
        else f"req-{secrets.token_hex(12)}",
        "cache_salt": message.cache_salt,
        "priority": message.priority,
        "session_id": message.session_id,
        "public_prefix": message.public_prefix,
        "policy": _POLICIES.get(message.policy),
        "truncate_prompt_tokens": (
            message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None
        ),
    }


def _id_violations(*given: tuple[str, bool, str]) -> list[FieldViolation]:
    """Return the violations of fields that must hold an id, from `(field, was_sent, text)` triples."""
    return [
        FieldViolation(field=field, description=f"must be {NAME_RULE}, not empty")
        for field, was_sent, text in given
        if was_sent and not is_id(text)
    ]


def _salt_violations(salt: str) -> list[FieldViolation]:
    violation = FieldViolation(field="cache_salt", description=f"must be {NAME_RULE}")
    return [] if is_name(salt) else [violation]


def _invalid(violations: list[FieldViolation]) -> InvalidRequest:
    text = "; ".join(f"{violation.field}: {violation.description}" for violation in violations[:MAX_TOLD])
    left = len(violations) - MAX_TOLD
    return InvalidRequest(text + (f"; and {left} more" if left > 0 else ""), violations=violations)
