"""Worker server: engine thread, session service, index publisher and pool map, started and stopped together.

Needs no Ray. It runs in a process (`python -m blockyard.worker`) or in a Ray actor (worker/actor.py).
"""

import asyncio
import logging
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc.aio
from blockyard.proto.index.contract import Incarnation, WorkerId, WorkerRecord
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.index.shards import index_title, split_urls
from blockyard.proto.limits import MAX_MESSAGE_BYTES
from blockyard.proto.metrics.readings import Readings
from blockyard.proto.naming.code_version import code_version
from blockyard.proto.runtime.tasks import BackgroundTasks
from blockyard.proto.security.cluster_identity import record_proof
from blockyard.proto.security.loopback import is_loopback
from blockyard.proto.security.peer_sockets import peer_contexts
from blockyard.proto.security.tls import listen, session_server_credentials
from blockyard.proto.v1.cluster_pb2 import WorkerIndex
from blockyard.proto.v1.session_pb2 import Hello
from blockyard.worker.cache.prefix_cache import CacheChanges
from blockyard.worker.config import WorkerConfig
from blockyard.worker.engine_thread import EngineThread
from blockyard.worker.engine_types import EngineLoad, StepResult
from blockyard.worker.grammar.compiler import GrammarCompiler
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.indexing.report import sharded_message
from blockyard.worker.indexing.sharded_publisher import ShardedPublisher
from blockyard.worker.indexing.state import PublisherConfig
from blockyard.worker.inspection.pool_map import map_text
from blockyard.worker.inspection.pool_view import load_message
from blockyard.worker.lora.catalogue import AdapterCatalogue
from blockyard.worker.metrics import worker_readings
from blockyard.worker.parallel.collective import RanksLost
from blockyard.worker.parallel.ranks import ALONE
from blockyard.worker.ranks import RankLeader
from blockyard.worker.session.administration import Administration
from blockyard.worker.session.compiling import CompileGrammar
from blockyard.worker.session.session import SessionService
from blockyard.worker.startup.loading import LoadedEngine, load_engine
from blockyard.worker.startup.warm_up import try_out
from blockyard.worker.transfer.exchange import Exchange
from blockyard.worker.transfer.neighbours import Neighbours

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
"""Each router has one. Further connections are closed at once."""
MAX_STREAMS = 256
"""Streams of one connection: a router's session, and its calls that inspect and administer meanwhile."""
REDIS_TIMEOUT_SECONDS = 1.0
POOL_MAP_SECONDS = 1.0
LOG_LINE_SECONDS = 10.0
STALL_CHECK_SECONDS = 0.5
FAILED_STOP_SECONDS = 1.0
"""Time for a failed engine to end by itself."""
LINGER_SECONDS = 0.1
"""Time to answer what routers sent before they heard of the drain."""
LAST_WORDS_SECONDS = 1.0
"""Time for routers to take what still waits for them."""
HAND_OVER_SECONDS = 10.0
"""Time for the current step to end when the grace is over. An engine that hangs must not keep its worker alive."""
FETCH_SECONDS = 3.0
"""Longest wait until other workers have fetched the blocks of the requests that were handed over."""
QUIET_SECONDS = 0.25
"""Time without such a fetch after which no more are expected."""
NO_CHANGES = CacheChanges(stored=(), removed=())
SERVER_OPTIONS = (
    # A router that stands still for up to five seconds keeps its requests.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The other option sets TCP's own time-out, which a frozen peer's kernel never trips. Without this one it is 60 s.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A connection takes some kilobytes before its handshake, and a peer without the secret never ends the handshake.
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    # Take the port alone: a second worker on it would take half of its sessions.
    ("grpc.so_reuseport", 0),
)


class WorkerServer:
    """Serves one engine from `start` to `stop`."""

    def __init__(self, config: WorkerConfig, leader: RankLeader | None = None) -> None:
        """Where the model is divided among ranks, `leader` waits for the others. None: they are processes of this
        one."""
        self.config = config
        self._leader = leader
        self.incarnation = secrets.token_hex(8)
        self.address = ""
        self.failed = asyncio.Event()
        """Set when the engine has ended by a defect. The caller must then end this worker."""
        self._loaded: LoadedEngine
        self._service: SessionService
        self._engine: EngineThread
        self._hello_message: Hello
        self._exchange: Exchange
        self._administration: Administration
        self._server: grpc.aio.Server
        self._grammars: GrammarCompiler | None = None
        self._publisher: ShardedPublisher | None = None
        self._tasks = BackgroundTasks(self._fail)

    async def start(self) -> str:
        """Load the model and serve. Return the address "host:port" at which routers reach it.

        Raises ValueError for a model, size or interface that is not possible, or an interface without protection.
        """
        config = self.config
        _refuse_openness(config)
        credentials = session_server_credentials(
            config.session_tls, secret=config.cluster_secret, cluster=config.cluster
        )
        if config.engine.tensor_parallel_size > 1:
            self._lead_ranks()
        try:
            self._loaded = await self._load_aside()
        except BaseException:
            self._end_ranks()
            raise
        self._hello_message = self._hello()
        self._service = SessionService(
            hello=self._hello_message,
            vocab_size=self._loaded.model.vocab_size,
            max_waiting=self.config.max_waiting,
            compile_grammar=self._compile_grammar(),
        )
        loop = asyncio.get_running_loop()
        self._engine = EngineThread(
            self._loaded.engine, self._service.on_step, lambda: loop.call_soon_threadsafe(self.failed.set)
        )
        self._service.attach(self._engine, self._loaded.engine.load())
        self._administration = Administration(service=self._service, engine=self._engine)
        self._exchange = self._make_exchange()
        self._service.measure_link = self._exchange.measure
        self._administration.exchange = self._exchange
        self._engine.start()
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        methods = self._administration.methods(self._catalogue())
        self._server.add_generic_rpc_handlers((self._service.handler(methods),))
        try:
            port = listen(self._server, f"{self.config.host}:{self.config.port}", credentials)
        except RuntimeError as error:
            self._engine.stop()
            raise ValueError(f"cannot listen on {self.config.host}:{self.config.port}") from error
        self._hello_message.transfer_port = self._listen_for_transfers()
        await self._server.start()
        self.address = f"{self.config.advertise_host or self.config.host}:{port}"
        self._start_tasks()
        logger.info("worker %s serves at %s", self.config.worker_id, self.address)
        return self.address

    def _lead_ranks(self) -> None:
        """Start the other ranks, unless a leader waits for them already. The loss of one fails the worker."""
        loop = asyncio.get_running_loop()
        if self._leader is None:
            config = self.config
            self._leader = RankLeader(config.engine, secret=config.cluster_secret, cluster=config.cluster)
            self._leader.spawn()
        self._leader.on_lost = lambda reason: loop.call_soon_threadsafe(self.failed.set)

    def _end_ranks(self) -> None:
        if self._leader is not None:
            self._leader.close()

    def _make_exchange(self) -> Exchange:
        config, loaded = self.config, self._loaded
        return Exchange(
            loaded.engine,
            self._engine,
            loaded.runner.transferable,
            incarnation=self.incarnation,
            model_fingerprint=loaded.model_fingerprint,
            context=peer_contexts(config.session_tls, secret=config.cluster_secret, cluster=config.cluster),
            neighbours=None if config.session_tls else Neighbours(config.cluster_secret, config.cluster),
            on_pull_end=self._service.pull_ended,
            nixl=config.engine.nixl,
        )

    def _listen_for_transfers(self) -> int:
        """Return the port at which other workers fetch blocks. Raises ValueError where it cannot be bound.

        It is 0 where rank 0 has only a part of each block: then this worker lends none.
        """
        if self._loaded.num_ranks > 1:
            return 0
        port = self.config.transfer_port
        try:
            return self._exchange.start(self.config.host, port)
        except OSError as error:
            self._engine.stop()
            raise ValueError(f"cannot listen for transfers on {self.config.host}:{port}") from error

    async def _load_aside(self) -> LoadedEngine:
        """Load in a thread that ends.

        OpenMP keeps a team for every thread that has computed. Where all teams together exceed the cores, none of them
        spins while it waits (startup/openmp.py).
        """
        executor = ThreadPoolExecutor(1, thread_name_prefix="loading")
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, self._load)
        finally:
            executor.shutdown(wait=False)

    def _load(self) -> LoadedEngine:
        try:
            loaded = load_engine(
                self.config.engine, ALONE if self._leader is None else self._leader.connect()
            )
            try_out(loaded.engine)
        except RanksLost as error:
            raise ValueError(str(error)) from error
        return loaded

    @property
    def dtype(self) -> str:
        """The data type of the model's computation, and why it was chosen."""
        return str(self._loaded.dtype)

    def changed_files(self) -> str:
        """Return which of the model's files have changed since they were read, in words. It may read all weights."""
        return self._loaded.changed_files()

    @property
    def is_draining(self) -> bool:
        return self._administration.draining.is_on

    def _compile_grammar(self) -> CompileGrammar | None:
        """Make the grammar compiler and return its function, or None where no output can follow a grammar.

        The compiler's process starts with the first grammar: most workers never need it.
        """
        if self._loaded.masks is None:
            return None
        self._grammars = GrammarCompiler(self._loaded.tokenizer_source)
        return self._grammars.compile_message

    def _hello(self) -> Hello:
        loaded = self._loaded
        return Hello(
            worker_id=self.config.worker_id,
            incarnation=self.incarnation,
            model_fingerprint=loaded.model_fingerprint,
            tokenizer_fingerprint=loaded.tokenizer_fingerprint,
            block_size=loaded.kv_size.block_size,
            block_bytes=loaded.kv_size.block_bytes,
            kv_dtype=loaded.kv_dtype,
            total_blocks=loaded.kv_size.num_blocks,
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.model.vocab_size,
            device=loaded.device,
            num_ranks=self.config.engine.tensor_parallel_size,
            engine=self.config.engine.engine,
            version=code_version(),
            load=load_message(loaded.engine.load()),
            max_waiting=self.config.max_waiting,
            role=self.config.role,
            model=self.config.index_model,
            index_stride_blocks=self.config.engine.index_stride_blocks,
            max_loras=self.config.engine.max_loras,
            kv_layout=loaded.runner.transferable.kind.layout,
            kv_arithmetic=loaded.runner.transferable.kind.arithmetic,
        )

    def _catalogue(self) -> AdapterCatalogue | None:
        reader = self._loaded.adapters
        return None if reader is None else AdapterCatalogue(reader)

    def _start_tasks(self) -> None:
        if self.config.redis_url is not None:
            self._publisher = self._make_publisher(self.config.redis_url)
            self._service.on_changes = self._publish
            self._service.index_part = self._index_part
            self._administration.index = self._publisher
            self._tasks.start(self._publisher.run(), name="index publisher")
        if self.config.pool_map_path is not None:
            self._tasks.start(self._write_pool_map(Path(self.config.pool_map_path)), name="pool map")
        self._tasks.start(self._log_load(), name="load log")
        self._tasks.start(self._watch_engine(), name="engine watch")

    def _fail(self, task_name: str, error: BaseException) -> None:
        """Fail the whole worker where one of its tasks fails, rather than leave it half alive."""
        logger.critical("the worker fails: a defect ended its %s", task_name, exc_info=error)
        self.failed.set()

    def _publish(self, result: StepResult) -> None:
        changes = result.changes
        if self._publisher is not None and changes != NO_CHANGES:
            self._publisher.record(changes)

    def _index_part(self) -> WorkerIndex | None:
        return sharded_message(self._publisher.states()) if self._publisher is not None else None

    def _make_publisher(self, redis_url: str) -> ShardedPublisher:
        record = WorkerRecord(
            worker_id=WorkerId(self.config.worker_id),
            incarnation=Incarnation(self.incarnation),
            address=self.address,
            fingerprint=self._loaded.model_fingerprint,
            block_size=self._loaded.kv_size.block_size,
        )
        proof = record_proof(record, secret=self.config.cluster_secret, cluster=self.config.cluster)
        has_host_cache = self._loaded.host_size.cache_blocks > 0
        urls = split_urls(redis_url)
        publishers = [
            IndexPublisher(
                RedisPrefixIndex(
                    connect(url, timeout_seconds=REDIS_TIMEOUT_SECONDS),
                    self.config.cluster,
                    shard=shard,
                    model=self.config.index_model,
                ),
                replace(record, proof=proof),
                config=PublisherConfig(lease_seconds=self.config.lease_seconds),
                has_host_cache=has_host_cache,
                title=index_title(shard, len(urls)),
            )
            for shard, url in enumerate(urls)
        ]
        return ShardedPublisher(publishers, has_host_cache=has_host_cache)

    async def stop(self, grace_seconds: float | None = None) -> None:
        """Drain, leave the index, end the sessions, then the engine. A failed worker does not drain.

        The grace is the config's unless another is given.
        """
        if not self.failed.is_set():
            await self._drain(self.config.grace_seconds if grace_seconds is None else grace_seconds)
        await self._administration.draining.aclose()
        if self._publisher is not None:
            await self._publisher.close()
        await self._tasks.aclose()
        self._service.end_streams()
        await self._server.stop(LAST_WORDS_SECONDS)
        if self._grammars is not None:
            await self._grammars.aclose()
        await asyncio.to_thread(self._exchange.stop)
        # An engine that hangs ends with the process.
        await asyncio.to_thread(self._engine.stop, FAILED_STOP_SECONDS if self.failed.is_set() else None)
        if self._loaded.masks is not None:
            self._loaded.masks.close()
        await asyncio.to_thread(self._end_ranks)

    async def _drain(self, grace_seconds: float) -> None:
        draining = self._administration.draining
        async with BackgroundTasks() as waits:
            drained = waits.start(draining.drain_for_good(grace_seconds), name="wait for the drain")
            failed = waits.start(self.failed.wait(), name="wait for a failure")
            await asyncio.wait(
                (drained, failed),
                timeout=grace_seconds + HAND_OVER_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not drained.done():
                logger.error(
                    "the engine did not hand over its requests in time: routers will count them as lost"
                )
            has_moved = drained.done() and not drained.exception() and drained.result() > 0
        if self._service.has_routers:
            await asyncio.sleep(LINGER_SECONDS)
            if has_moved:
                await self._until_fetched()

    async def _until_fetched(self) -> None:
        """Wait, for a limited time, until no other worker fetches blocks from this one."""
        loop = asyncio.get_running_loop()
        begun_at = loop.time()
        while (waited := loop.time() - begun_at) < FETCH_SECONDS:
            left = QUIET_SECONDS - min(waited, self._exchange.lends_nothing_for_seconds)
            if left <= 0:
                return
            await asyncio.sleep(left)

    def stats(self) -> Readings:
        """Return the value of every metric by its name. The load is that of the last step. Any thread may call this."""
        return worker_readings(
            self._service.load,
            self._index_part(),
            num_evictions=self._loaded.engine.pool.num_evictions,
            stalled_seconds=self._engine.stalled_seconds,
            is_draining=self.is_draining,
        )

    async def _write_pool_map(self, path: Path) -> None:
        """Rewrite the file, whole or not at all, each second in which the load changed. Ignore a missing folder."""
        scratch = path.with_name(f".{path.name}.new")
        complained, written = False, None
        while True:
            load = self._service.load
            if load != written:
                text = map_text(await self._service.inspection.block_pool())
                try:
                    scratch.write_text(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}")
                    scratch.replace(path)
                    complained, written = False, load
                except OSError as error:
                    if not complained:
                        logger.warning("cannot write the pool map: %s", error)
                    complained = True
            await asyncio.sleep(POOL_MAP_SECONDS)

    async def _watch_engine(self) -> None:
        while self._engine.stalled_seconds <= self.config.stall_seconds:  # noqa: ASYNC110 - time, not an event
            await asyncio.sleep(STALL_CHECK_SECONDS)
        logger.critical("the engine has finished no step for %.0f s", self._engine.stalled_seconds)
        self.failed.set()

    async def _log_load(self) -> None:
        """Log one line for each ten seconds in which something ran or waited."""
        before = self._service.load
        while True:
            await asyncio.sleep(LOG_LINE_SECONDS)
            now = self._service.load
            if now.generated_tokens != before.generated_tokens or now.running or now.waiting:
                logger.info(load_line(before, now, LOG_LINE_SECONDS))
            before = now


def load_line(before: EngineLoad, now: EngineLoad, seconds: float) -> str:
    """Return the log line on what ran between two loads."""
    total = now.free_blocks + now.cached_blocks + now.used_blocks
    prompt = now.prompt_tokens - before.prompt_tokens
    cached = now.cached_tokens - before.cached_tokens
    hits = f"{cached / prompt:.1%}" if prompt else "-"
    return (
        f"running {now.running}, waiting {now.waiting}, KV usage {now.used_blocks / total:.1%}, "
        f"prompt {prompt / seconds:.1f} tokens/s, "
        f"generated {(now.generated_tokens - before.generated_tokens) / seconds:.1f} tokens/s, "
        f"prefix cache hit rate {hits}"
    )


def _refuse_openness(config: WorkerConfig) -> None:
    """Raise ValueError for a worker without protection that others can reach. Warn where only this machine can.

    A peer at the session port could read and change every request.
    """
    if config.session_tls is not None or config.cluster_secret:
        return
    if not is_loopback(config.host):
        raise ValueError(
            f"a worker without a cluster secret would serve every client that reaches {config.host}: set "
            "BLOCKYARD_CLUSTER_SECRET or the session's TLS files, or bind loopback"
        )
    logger.warning("no cluster secret: every account on this machine may call this worker, in plaintext")
