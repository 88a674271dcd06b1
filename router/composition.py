"""Parts of a router, built from its config.

Owns the dependencies between parts. Does not own their lifetimes or what serves them (server.py).
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from blockyard.proto.index.contract import PrefixIndex
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.index.shards import split_urls
from blockyard.proto.naming.code_version import code_version
from blockyard.proto.naming.fingerprint import tokenizer_fingerprint
from blockyard.proto.naming.model_files import TOKENIZER_FILES, model_names, resolve_model, resolve_tokenizer
from blockyard.proto.security.tls import session_channels
from blockyard.router.adapters.keeper import AdapterKeeper
from blockyard.router.adapters.log import AdapterLog
from blockyard.router.admission.ledger import AdmissionLedger
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.cluster.link import CHANNEL_OPTIONS
from blockyard.router.config import RouterConfig
from blockyard.router.dispatch.placer import Placer
from blockyard.router.dispatch.prefix_lookup import PrefixLookup
from blockyard.router.generation.answer_store import AnswerStore
from blockyard.router.generation.generation import RouterParts
from blockyard.router.generation.grammar_quota import GrammarQuota
from blockyard.router.generation.registry import RequestRegistry
from blockyard.router.generation.relay import Relay
from blockyard.router.parsing.choice import answer_format
from blockyard.router.request.sampling_checks import SamplingLimits
from blockyard.router.sealed_records import SealedRecords
from blockyard.router.tokenizing.model_facts import read_facts
from blockyard.router.tokenizing.service import TokenizerService
from redis.asyncio import Redis

DIRECTORY_SECONDS = 1.0
"""Interval and timeout of reading the index's directory of workers."""


async def build_parts(config: RouterConfig, stack: AsyncExitStack) -> tuple[RouterParts, list[PrefixIndex]]:
    """Build the parts, which live as long as the stack. Return them, and the index on each of its servers.

    Raises OSError, ValueError or TokenizingError for a model folder that cannot be used.
    """
    folder = await asyncio.to_thread(resolve_model, config.model, patterns=TOKENIZER_FILES)
    tokenizer_folder = await asyncio.to_thread(resolve_tokenizer, config.tokenizer, folder)
    tokenizing = await stack.enter_async_context(
        TokenizerService(
            tokenizer_folder,
            chat_template=config.chat_template,
            num_processes=config.tokenizer_processes,
        )
    )
    facts = read_facts(
        folder,
        names=model_names(config.model, config.model_names),
        tokenizer=tokenizing.tokenizer,
        generation_config=config.generation_config,
    )
    fleet = Fleet(
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer_folder),
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
    shards = _index(config, _clients(config, stack))
    lookup = PrefixLookup(*shards) if shards else None
    clients = _clients(config, stack)
    placer = Placer(
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
    adapters = AdapterKeeper(
        fleet,
        AdapterLog(clients, cluster=config.cluster, secret=config.cluster_secret)
        if clients and config.cluster_secret
        else None,
    )
    grammar_quota = GrammarQuota(lambda: len(fleet.view.ready()))
    fleet.on_change(lambda address: grammar_quota.hand_out())
    parts = RouterParts(
        answers=answer_format(tokenizing.tokenizer, config.tool_parser, config.reasoning_parser),
        facts=facts,
        cluster_secret=config.cluster_secret,
        tokenizing=tokenizing,
        fleet=fleet,
        placer=placer,
        relay=Relay(fleet, placer, max_migrations=config.max_migrations, adapters=adapters),
        ledger=AdmissionLedger(
            max_requests=config.max_requests,
            max_tokens=config.max_tokens_admitted,
            tenant_weights=config.tenant_weights,
        ),
        registry=RequestRegistry(),
        limits=SamplingLimits(max_outputs=config.max_outputs, max_beam_width=config.max_beam_width),
        grammar_quota=grammar_quota,
        adapters=adapters,
        records=(
            SealedRecords(clients, cluster=config.cluster, secret=config.cluster_secret)
            if clients and config.cluster_secret
            else None
        ),
        answer_store=(
            AnswerStore(
                clients,
                cluster=config.cluster,
                secret=config.cluster_secret,
                keep_seconds=config.keep_answers_seconds,
            )
            if clients and config.cluster_secret and config.keep_answers_seconds
            else None
        ),
    )
    return parts, _index(config, clients)


def _clients(config: RouterConfig, stack: AsyncExitStack) -> list[Redis]:
    """Connect to each server of the index. Placement has a connection of its own; the directory shares one with the
    sealed records and the sessions' answers, because its timeout is as long."""
    urls = split_urls(config.redis_url) if config.redis_url is not None else ()
    clients = [connect(url, timeout_seconds=DIRECTORY_SECONDS, has_deadlines=True) for url in urls]
    for client in clients:
        stack.push_async_callback(client.aclose)
    return clients


def _index(config: RouterConfig, clients: Sequence[Redis]) -> list[PrefixIndex]:
    return [
        RedisPrefixIndex(client, config.cluster, shard=shard, is_reader=True)
        for shard, client in enumerate(clients)
    ]
