"""Generation of one request, from its message to its last delta: check, admit, tokenize, relay, turn into text.

Runs the other parts in that order and owns none of them. Does not own gRPC (services/inference.py), text (assembly.py)
or the client's reading speed (client_buffer.py).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from blockyard.proto.naming.block_hash import TOKEN_BYTES, pack_tokens, unpack_tokens
from blockyard.proto.v1 import inference_pb2
from blockyard.router.adapters.keeper import AdapterKeeper
from blockyard.router.adapters.registry import RegisteredAdapter
from blockyard.router.admission.ledger import AdmissionLedger, Charge
from blockyard.router.cluster.fleet import Fleet, ModelIdentity
from blockyard.router.dispatch.placer import Placer
from blockyard.router.errors import (
    ContextLengthExceeded,
    DeadlinePassed,
    FieldViolation,
    InternalError,
    InvalidRequest,
)
from blockyard.router.generation.answer_store import AnswerStore
from blockyard.router.generation.assembly import Assembly
from blockyard.router.generation.client_buffer import Delta, Emit
from blockyard.router.generation.grammar_quota import GrammarQuota
from blockyard.router.generation.joined_outputs import TokenChunk, without_tokens
from blockyard.router.generation.metrics import FINISHES, RequestMeter, RouterMetrics
from blockyard.router.generation.registry import RequestRecord, RequestRegistry
from blockyard.router.generation.relay import Generation, Relay
from blockyard.router.parsing.formats import NO_END, NO_FORMAT, AnswerFormat, PromptEnd
from blockyard.router.request.adapter_names import named_adapter, refuse_adapter
from blockyard.router.request.prompts import check_context, check_prompt_report, most_encoded_tokens
from blockyard.router.request.sampling_checks import SamplingLimits, ban_words
from blockyard.router.request.validation import (
    ValidGeneration,
    kept_tokens,
    valid_embedding,
    valid_generation,
)
from blockyard.router.sealed_records import SealedRecords, TextSeal
from blockyard.router.tokenizing.model_facts import ModelFacts
from blockyard.router.tokenizing.service import (
    ChatPrompt,
    Prepared,
    PromptError,
    PromptInput,
    PromptTooLong,
    TemplateKwargsError,
    TokenizerService,
    TokenizingError,
    TokenizingTimeout,
    TokenPrompt,
)
from blockyard.router.tokenizing.splices import pack_answer
from blockyard.router.tokenizing.token_texts import TokenTexts

PROMPT_END_TOKENS = 32
"""Tokens of the prompt's end that show whether it ends within the reasoning. Templates end with fewer of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterParts:
    """Parts of one router for one of its models. Registry, records and answer store are the same for all models."""

    facts: ModelFacts
    cluster_secret: str
    tokenizing: TokenizerService
    texts: TokenTexts
    fleet: Fleet
    placer: Placer
    relay: Relay
    ledger: AdmissionLedger
    registry: RequestRegistry
    limits: SamplingLimits
    grammar_quota: GrammarQuota
    adapters: AdapterKeeper
    clock: Callable[[], float] = time.monotonic
    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    answers: AnswerFormat = NO_FORMAT
    """Format of the model's answers in chats."""
    records: SealedRecords | None = None
    """Keeps what clients may name in later calls. None: nothing is kept."""
    reasoning_seal: Callable[[str], TextSeal] | None = None
    """Returns the seal of the reasoning that a tenant's clients keep. None without a cluster secret."""
    answer_store: AnswerStore | None = None
    """Keeps the tokens of sessions' answers. None: they are not kept."""

    @property
    def max_model_len(self) -> int:
        """Return the workers' context length, or the model's own before any worker has come."""
        identity = self.fleet.identity
        return identity.max_model_len if identity else self.facts.max_position_embeddings

    def root(
        self,
        identity: ModelIdentity,
        salt: str,
        *,
        realm: str,
        is_public: bool,
        adapter: RegisteredAdapter | None = None,
    ) -> bytes:
        """Return the root of a prompt's chain of block names. Callers of one realm (calls/bounds.py) share cached
        prefixes, and all callers share public ones. What one adapter has computed serves no other, nor the model."""
        return identity.root(
            cluster_secret=self.cluster_secret,
            salt=salt,
            tenant="" if is_public else realm,
            adapter="" if adapter is None else adapter.fingerprint,
        )


def scoped_session(session_id: str, realm: str) -> str:
    """Return a session id that is unique across realms (calls/bounds.py). Neither part can contain a slash."""
    return f"{realm}/{session_id}" if realm and session_id else session_id


async def tokenise(
    parts: RouterParts,
    prompt: PromptInput,
    charge: Charge,
    *,
    root: bytes | None,
    block_size: int,
    client: str,
    keep_last: int | None = None,
    answers: bytes | None = None,
    room_tokens: int = 1,
) -> Prepared:
    """Tokenize a prompt, name its blocks, and set the charge to its number of tokens. Raises RouterErrors.

    Waiting clients take turns by the name `client`. Only the last `keep_last` tokens of a longer prompt are kept. It
    must leave `room_tokens` of the context. `answers` are earlier ones of the prompt's session, packed.
    """
    max_tokens = most_encoded_tokens(parts.max_model_len)
    try:
        prepared = await parts.tokenizing.prepare(
            prompt,
            root=root,
            block_size=block_size,
            client=client,
            max_tokens=max_tokens,
            keep_last=keep_last,
            answers=answers,
        )
    except PromptTooLong:
        most = parts.max_model_len - room_tokens
        raise ContextLengthExceeded(
            f"input: more than {max_tokens} tokens do not fit a context of {parts.max_model_len}",
            violations=(FieldViolation(field="input", description=f"at most {most} tokens"),),
        ) from None
    except TemplateKwargsError as error:
        raise InvalidRequest.of("chat.template_kwargs", str(error)) from None
    except PromptError as error:
        raise InvalidRequest.of("input", str(error)) from None
    except TokenizingTimeout:
        raise DeadlinePassed("tokenising the prompt takes too long") from None
    except TokenizingError:
        raise InternalError("the tokeniser failed") from None
    charge.correct(prepared.num_tokens)
    return prepared


def admit(
    parts: RouterParts, message: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest, tenant: str
) -> ValidGeneration:
    """Add the tokens of `bad_words` to the message, and return the checked request. It may name adapters of the tenant.

    Raises InvalidRequest, ContextLengthExceeded, UnknownModel or Unsupported.
    """
    if isinstance(message, inference_pb2.EmbedRequest):
        refuse_adapter(message, parts.adapters.registry, parts.facts, tenant)
        return valid_embedding(message, parts.facts, max_model_len=parts.max_model_len)
    adapter = named_adapter(message, parts.adapters.registry, parts.facts, tenant)
    tokenizer = parts.tokenizing.tokenizer
    ban_words(message.sampling, lambda word: tokenizer.encode(word, add_special_tokens=False))
    return valid_generation(
        message, parts.facts, max_model_len=parts.max_model_len, limits=parts.limits, adapter=adapter
    )


async def generate(
    parts: RouterParts,
    valid: ValidGeneration,
    record: RequestRecord,
    charge: Charge,
    emit: Emit,
    *,
    deadline: float,
    parsed: AnswerFormat | None = None,
) -> None:
    """Tokenize a checked request, run it, and emit its outputs in deltas. Raises any RouterError.

    Cancelling the call also cancels the request on its worker. `deadline` is on the clock of `parts`. `parsed` is the
    format in which the caller parses the outputs.
    """
    identity = await parts.placer.identity()
    root = parts.root(
        identity,
        valid.cache_salt,
        realm=record.realm,
        is_public=valid.public_prefix,
        adapter=valid.adapter,
    )
    session = _KeptSession.of(parts, valid, record, root)
    prepared = await _prepared(parts, valid, record, charge, identity, root, session)
    prompt_end = NO_END if parsed is None else _prompt_end(parts, prepared)
    structure = valid.sampling.structured_output
    if parsed is not None and structure is not None and structure.HasField("tool_calls"):
        structure.tool_calls.is_thinking = parsed.is_thinking(prompt_end)
    generation = _generation(
        parts, valid, record, prepared, deadline=deadline, max_model_len=identity.max_model_len
    )
    assembly = Assembly(
        parts.tokenizing.tokenizer,
        valid.sampling,
        record,
        clock=parts.clock,
        prompt_token_ids=unpack_tokens(prepared.token_ids) if valid.return_prompt_token_ids else (),
        prompt_end=prompt_end,
        shown_tokens=frozenset() if parsed is None else parsed.shown_tokens,
    )
    has_grammar = generation.sampling.HasField("structured_output")
    trace = record.progress.trace
    with RequestMeter(parts.metrics, record, is_prefetch=valid.prefetch) as meter:
        async with parts.grammar_quota.permit(record.client if has_grammar else None) as leave:

            def take(chunk: TokenChunk) -> bool:
                leave()
                delta = assembly.delta(without_tokens(chunk) if valid.prefetch else chunk)
                if session is not None:
                    session.take(delta)
                meter.piece(chunk.index, len(delta.token_ids))
                finish = delta.finish
                if finish is not None:
                    meter.end(finish.reason)
                    if trace is not None:
                        trace.finish_reasons.append(FINISHES[finish.reason])
                emit(delta)
                return finish is not None

            await parts.relay.run(generation, record.progress, take)
            if session is not None:
                await session.keep(prepared)


async def _prepared(
    parts: RouterParts,
    valid: ValidGeneration,
    record: RequestRecord,
    charge: Charge,
    identity: ModelIdentity,
    root: bytes,
    session: "_KeptSession | None",
) -> Prepared:
    """Tokenize a request's prompt and check its length. Record its tokens, and the time in the trace."""
    trace = record.progress.trace
    began_at = 0.0 if trace is None else parts.clock()
    prepared = await tokenise(
        parts,
        valid.prompt,
        charge,
        root=root,
        block_size=identity.block_size,
        client=record.client,
        keep_last=kept_tokens(valid, identity.max_model_len),
        room_tokens=valid.least_room_tokens,
        answers=await session.answers() if session is not None else None,
    )
    check_context(prepared.num_tokens, identity.max_model_len, valid.least_room_tokens)
    check_prompt_report(prepared.num_tokens, valid.sampling.prompt_logprobs)
    record.prompt_tokens = prepared.num_tokens
    if trace is not None:
        trace.tokenising = began_at, parts.clock()
    return prepared


def _generation(
    parts: RouterParts,
    valid: ValidGeneration,
    record: RequestRecord,
    prepared: Prepared,
    *,
    deadline: float,
    max_model_len: int,
) -> Generation:
    """Return what the relay runs."""
    room_tokens = max_model_len - prepared.num_tokens
    return Generation(
        request_id=valid.request_id,
        prompt=prepared.token_ids,
        prompt_tokens=prepared.num_tokens,
        block_names=prepared.block_names,
        sampling=valid.sampling.for_engine(room_tokens=room_tokens, facts=parts.facts),
        deadline=deadline,
        priority=valid.priority,
        client=record.client,
        cache_account="" if valid.public_prefix else record.tenant,
        session_id=scoped_session(valid.session_id, record.realm),
        policy=valid.policy,
        expected_pause_seconds=valid.expected_pause_seconds,
        adapter=valid.adapter,
    )


class _KeptSession:
    """The answers of a request's session: those before it, and its own."""

    def __init__(self, store: AnswerStore, name: bytes, prompt: PromptInput) -> None:
        self._store = store
        self._name = name
        self._prompt = prompt
        self._outputs: dict[int, list[int]] = {}
        self._is_first = True

    @classmethod
    def of(
        cls, parts: RouterParts, valid: ValidGeneration, record: RequestRecord, root: bytes
    ) -> "_KeptSession | None":
        """Return the request's session, or None if its answers are not kept."""
        has_answers = valid.session_id and not valid.sampling.embeds
        if parts.answer_store is None or not has_answers or isinstance(valid.prompt, TokenPrompt):
            return None
        # The root differs by model, adapter and salt.
        name = b"\0".join((root, record.tenant.encode(), valid.session_id.encode()))
        return cls(parts.answer_store, name, valid.prompt)

    async def answers(self) -> bytes:
        """Return the earlier answers that the prompt may repeat, packed."""
        prompt = self._prompt
        if isinstance(prompt, ChatPrompt) and all(message.role != "assistant" for message in prompt.messages):
            return b""
        answers = await self._store.read(self._name)
        self._is_first = not answers
        return answers

    def take(self, delta: Delta) -> None:
        self._outputs.setdefault(delta.index, []).extend(delta.token_ids)

    async def keep(self, prepared: Prepared) -> None:
        """Keep the outputs, before the client can send them back in its next prompt."""
        self._store.num_spliced_tokens += prepared.num_spliced
        answers = [pack_answer(prepared.place, pack_tokens(ids)) for ids in self._outputs.values() if ids]
        if prepared.place and answers:
            await self._store.add(self._name, b"".join(answers), is_first=self._is_first)


def _prompt_end(parts: RouterParts, prepared: Prepared) -> PromptEnd:
    if prepared.end:
        return prepared.end
    last = unpack_tokens(prepared.token_ids[-PROMPT_END_TOKENS * TOKEN_BYTES :])
    return PromptEnd(parts.tokenizing.detokenize(last, skip_special=False))
