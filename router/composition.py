"""Parts of a router, built from its config: those that all models share, and those of one model.

Owns the dependencies between parts. Does not own their lifetimes or what serves them (server.py, model_groups.py).
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from blockyard.proto.index.contract import PrefixIndex
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.index.shards import split_urls
from blockyard.proto.naming.code_version import code_version
from blockyard.proto.naming.fingerprint import tokenizer_fingerprint
from blockyard.proto.naming.model_files import TOKENIZER_FILES, resolve_model, resolve_tokenizer
from blockyard.proto.security.tls import session_channels
from blockyard.router.adapters.keeper import AdapterKeeper
from blockyard.router.adapters.log import AdapterLog
from blockyard.router.admission.ledger import AdmissionLedger
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.cluster.link import CHANNEL_OPTIONS
from blockyard.router.config import RouterConfig, ServedModel
from blockyard.router.dispatch.placer import Placer
from blockyard.router.dispatch.prefix_lookup import PrefixLookup
from blockyard.router.generation.answer_store import AnswerStore
from blockyard.router.generation.generation import RouterParts
from blockyard.router.generation.grammar_quota import GrammarQuota
from blockyard.router.generation.registry import RequestRegistry
from blockyard.router.generation.relay import Relay
from blockyard.router.model_group import DIRECTORY_SECONDS, ModelGroup
from blockyard.router.parsing.choice import answer_format
from blockyard.router.request.sampling_checks import SamplingLimits
from blockyard.router.sealed_records import SealedRecords, TextSeal
from blockyard.router.tokenizing.model_facts import read_facts
from blockyard.router.tokenizing.service import TokenizerService
from blockyard.router.tokenizing.token_texts import TokenTexts
from redis.asyncio import Redis


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """Parts of a router that all its models share."""

    config: RouterConfig
    placement_clients: Sequence[Redis]
    """Connections to the servers of the index, for look-ups."""
    clients: Sequence[Redis]
    """Connections for the rest: the directories, the sealed records and the sessions' answers."""
    registry: RequestRegistry
    records: SealedRecords | None
    reasoning_seal: Callable[[str], TextSeal] | None
    answer_store: AnswerStore | None


def build_shared(config: RouterConfig, stack: AsyncExitStack) -> SharedParts:
    """Build the parts that all models share. They live as long as the stack."""
    placement_clients, clients = _clients(config, stack), _clients(config, stack)
    secret = config.cluster_secret
    keeps_answers = clients and secret and config.keep_answers_seconds
    return SharedParts(
        config=config,
        placement_clients=placement_clients,
        clients=clients,
        registry=RequestRegistry(),
        records=(
            SealedRecords(clients, cluster=config.cluster, secret=secret) if clients and secret else None
        ),
        reasoning_seal=(
            partial(TextSeal.of, kind="reasoning", cluster=config.cluster, secret=secret) if secret else None
        ),
        answer_store=(
            AnswerStore(
                clients, cluster=config.cluster, secret=secret, keep_seconds=config.keep_answers_seconds
            )
            if keeps_answers
            else None
        ),
    )


async def build_group(shared: SharedParts, model: ServedModel, stack: AsyncExitStack) -> ModelGroup:
    """Build one model's group, which lives as long as the stack.

    Raises OSError, ValueError or TokenizingError for a model folder that cannot be used.
    """
    config = shared.config
    folder = await asyncio.to_thread(resolve_model, model.model, patterns=TOKENIZER_FILES)
    tokenizer_folder = await asyncio.to_thread(resolve_tokenizer, model.tokenizer, folder)
    tokenizing = await stack.enter_async_context(
        TokenizerService(
            tokenizer_folder,
            chat_template=model.chat_template,
            num_processes=config.tokenizer_processes,
        )
    )
    # In threads: other models are served meanwhile.
    facts = await asyncio.to_thread(
        read_facts,
        folder,
        names=model.names,
        tokenizer=tokenizing.tokenizer,
        generation_config=config.generation_config,
    )
    fingerprint = await asyncio.to_thread(tokenizer_fingerprint, tokenizer_folder)
    fleet = _fleet(config, fingerprint, model)
    shards = _index(config, shared.placement_clients, model)
    placer = _placer(config, fleet, PrefixLookup(*shards) if shards else None)
    adapters = AdapterKeeper(fleet, adapter_log(shared, model))
    await adapters.refresh()
    grammar_quota = GrammarQuota(lambda: len(fleet.view.ready()))
    fleet.on_change(lambda address: grammar_quota.hand_out())
    parts = RouterParts(
        answers=answer_format(tokenizing.tokenizer, config.tool_parser, config.reasoning_parser),
        facts=facts,
        cluster_secret=config.cluster_secret,
        tokenizing=tokenizing,
        texts=TokenTexts(tokenizing.tokenizer),
        fleet=fleet,
        placer=placer,
        relay=Relay(fleet, placer, max_migrations=config.max_migrations, adapters=adapters),
        ledger=AdmissionLedger(
            max_requests=config.max_requests,
            max_tokens=config.max_tokens_admitted,
            tenant_weights=config.tenant_weights,
        ),
        registry=shared.registry,
        limits=SamplingLimits(max_outputs=config.max_outputs, max_beam_width=config.max_beam_width),
        grammar_quota=grammar_quota,
        adapters=adapters,
        records=shared.records,
        reasoning_seal=shared.reasoning_seal,
        answer_store=shared.answer_store,
    )
    return ModelGroup(model, parts, _index(config, shared.clients, model), config)


def adapter_log(shared: SharedParts, model: ServedModel) -> AdapterLog | None:
    """Return None without Redis: changes of adapters then stay in this router."""
    secret = shared.config.cluster_secret
    if not (shared.clients and secret):
        return None
    return AdapterLog(shared.clients, cluster=shared.config.cluster, secret=secret, model=model)


def _fleet(config: RouterConfig, fingerprint: str, model: ServedModel) -> Fleet:
    return Fleet(
        model=model.index,
        tokenizer_fingerprint=fingerprint,
        suspect_seconds=config.suspect_seconds,
        lost_seconds=config.lost_seconds,
        stall_seconds=config.stall_seconds,
        placement=config.placement,
        pulls=not config.no_pull,
        open_channel=session_channels(
            config.session_tls,
            secret=config.cluster_secret,
            cluster=config.cluster,
            options=CHANNEL_OPTIONS,
        ),
        code=code_version(),
    )


def _placer(config: RouterConfig, fleet: Fleet, lookup: PrefixLookup | None) -> Placer:
    return Placer(
        fleet,
        lookup,
        policy=config.policy,
        pulls=not config.no_pull,
        config=config.placement,
        no_worker_seconds=config.no_worker_seconds,
        priority_ageing_seconds=config.priority_ageing_seconds,
        max_queue_seconds=config.max_queue_seconds,
        tenant_weights=config.tenant_weights,
    )


def _clients(config: RouterConfig, stack: AsyncExitStack) -> list[Redis]:
    """Connect to each server of the index. Placement has a connection of its own; the directories share one with the
    sealed records and the sessions' answers, because its timeout is as long."""
    urls = split_urls(config.redis_url) if config.redis_url is not None else ()
    clients = [connect(url, timeout_seconds=DIRECTORY_SECONDS, has_deadlines=True) for url in urls]
    for client in clients:
        stack.push_async_callback(client.aclose)
    return clients


def _index(config: RouterConfig, clients: Sequence[Redis], model: ServedModel) -> list[PrefixIndex]:
    return [
        RedisPrefixIndex(client, config.cluster, shard=shard, model=model.index, is_reader=True)
        for shard, client in enumerate(clients)
    ]
