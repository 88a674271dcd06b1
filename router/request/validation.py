"""Request validation: turns a message into checked domain values before any other work.

Pure. Errors name the field and what is allowed. They quote nothing that was sent, except the name of a model that is
not served. Does not own prompts (prompts.py), chats (chats.py) or sampling (sampling_checks.py).
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict, get_args

from blockyard.proto.limits import MAX_PAUSE_SECONDS, MAX_PRIORITY
from blockyard.proto.naming import headers
from blockyard.proto.naming.identifiers import NAME_RULE, is_id, is_model_name, is_name
from blockyard.proto.v1 import admin_pb2, cluster_pb2, inference_pb2
from blockyard.router.adapters.registry import RegisteredAdapter
from blockyard.router.errors import FieldViolation, InvalidRequest, UnknownModel, Unsupported
from blockyard.router.placement.config import PolicyName
from blockyard.router.request.prompts import prompt_estimate, valid_prompt_beside
from blockyard.router.request.sampling import EMBEDDING, PREFETCH, SamplingRequest, parse_sampling
from blockyard.router.request.sampling_checks import SamplingLimits, sampling_violations
from blockyard.router.tokenizing.model_facts import ModelFacts
from blockyard.router.tokenizing.service import PromptInput

MAX_NAMES_TOLD = 8
"""The most names of the served model that the error for another model lists."""
PREFETCH_PRIORITY = MAX_PRIORITY - 1
"""Default of a prefetch: behind all requests but background work, of which a busy worker takes no prompt."""
_POLICIES: dict[str, PolicyName] = {name: name for name in get_args(PolicyName)}


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
    prompt = valid_prompt_beside(violations, message, facts, max_model_len=max_model_len)
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
    prompt = valid_prompt_beside(violations, message, facts, max_model_len=max_model_len)
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
    return valid_prompt_beside(violations, message, facts, max_model_len=max_model_len)


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


def check_detokenize(
    message: inference_pb2.DetokenizeRequest, facts: ModelFacts, *, max_model_len: int
) -> None:
    """Check a detokenize request, but for its model. Raises InvalidRequest."""
    if len(message.token_ids) > max_model_len:
        raise InvalidRequest.of("token_ids", f"at most {max_model_len} are allowed")
    if message.token_ids and max(message.token_ids) >= facts.vocab_size:
        raise InvalidRequest.of("token_ids", f"each must be below {facts.vocab_size}")


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
