"""An attacker with all rights in Redis: the index's clients stay sound, and recover what they can.

A state machine of the real client. Two publishers publish their blocks, a look-up reads them, and a placement uses
them. An attacker writes anything between any two of these steps. Routers with connections are in test_hostile_redis.py,
and servers that answer every command themselves in test_replaced_server.py.
"""

import asyncio
import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess, start_private_redis
from blockyard.proto.index.contract import (
    MAX_LISTED,
    Incarnation,
    PrefixIndexError,
    WorkerId,
)
from blockyard.proto.index.redis import MAX_FIELD_BYTES, MAX_RECORD_CHARACTERS, RedisPrefixIndex, connect
from blockyard.proto.index.schema import ANYWHERE_SUFFIX, bucket_of, key_prefix, pack_berths
from blockyard.proto.security.cluster_identity import is_genuine
from blockyard.proto.v1 import session_pb2
from blockyard.router.cluster.view import ClusterView
from blockyard.router.dispatch.prefix_lookup import PrefixLookup, PrefixLookupConfig
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.policies import PlacementRequest, place
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.indexing.state import PublisherConfig
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.pauses import free_loop
from tests.properties import examples
from tests.redis_servers import each_server
from tests.unit.router.fake_worker import SECRET, signed
from tests.unit.security.attacked_index import BLOCK_SIZE, CLUSTER, MOST_LINES, NAMES, record

PREFIX = key_prefix(CLUSTER)
FIXED_KEYS = ("leases", "state", "names", "identities", "free", "condemned", "berth:1", "berth:2", "berth:3")
BUCKETS = tuple(f"b:{bucket_of(name):03x}" for name in NAMES[:6])
TRAP = "203.0.113.7:1"
QUICK = PublisherConfig(
    lease_seconds=0.6,
    flush_seconds=0.002,
    purge_seconds=0.01,
    purge_slice_seconds=0.002,
    resync_jitter_seconds=0.005,
    first_backoff_seconds=0.002,
    max_backoff_seconds=0.02,
    call_timeout_seconds=2.0,
    damage_rest_seconds=0.05,
)
RECOVERY_SECONDS = 60.0
"""Bound for a crowded machine. Alone it takes about a second."""

rubbish = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"", b"-1", b"1e300", b"nan", b"9" * 40, b"x" * 200_000, pack_berths(range(1, 30_000))]),
    st.integers(-1, 70_000).map(lambda number: str(number).encode()),
)
keys = st.sampled_from([*FIXED_KEYS, *BUCKETS])
fields = st.one_of(
    st.sampled_from(
        ["epoch", "sequence", "lease", "address", "worker_id", "proof", "next", "beat", "beat_lease", "since"]
    ),
    st.sampled_from(["cursor", "1", "2", "3", "a\0life-a", "b\0life-b", f"a\0life-a{ANYWHERE_SUFFIX}"]),
    st.sampled_from([name[1:8] for name in NAMES[:6]]),
)


class HostileIndex(RuleBasedStateMachine):
    """Two publishing workers, the router's view of them, and an attacker between them."""

    redis: RedisProcess

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.random = random.Random(5)
        self.records = [
            signed(record(name, f"127.0.0.1:{port}")) for name, port in (("a", 7001), ("b", 7002))
        ]
        self.held: dict[str, int] = {"a": 0, "b": 0}
        self.runner.run(self._start())

    async def _start(self) -> None:
        self.attacker = connect(self.redis.url, timeout_seconds=10.0)
        await self._hands_off()
        await self.attacker.flushall()
        self.clients = [connect(self.redis.url, timeout_seconds=5.0) for _ in range(3)]
        *workers, router = self.clients
        self.publishers = {
            known.worker_id: IndexPublisher(
                RedisPrefixIndex(client, CLUSTER), known, config=QUICK, has_host_cache=True
            )
            for known, client in zip(self.records, workers, strict=True)
        }
        self.tasks = [asyncio.create_task(publisher.run()) for publisher in self.publishers.values()]
        self.index = RedisPrefixIndex(router, CLUSTER, is_reader=True)
        self.lookup = PrefixLookup(
            self.index, config=PrefixLookupConfig(timeout_seconds=2.0, open_seconds=0.0)
        )
        self.view = ClusterView(
            suspect_seconds=1e9, lost_seconds=1e9, clock=lambda: 0.0, config=PlacementConfig()
        )
        for known in self.records:
            hello = session_pb2.Hello(
                worker_id=known.worker_id,
                incarnation=known.incarnation,
                block_size=BLOCK_SIZE,
                total_blocks=1000,
                max_model_len=1000,
            )
            self.view.accepted(known.address, hello)

    async def _hands_off(self) -> None:
        """Restore the server's own settings. Its content stays as it is."""
        await self.attacker.config_set("maxmemory", 0)
        await self.attacker.replicaof("NO", "ONE")

    def teardown(self) -> None:
        try:
            self.runner.run(self._recover())
        finally:
            self.runner.run(self._stop())
            self.runner.close()

    async def _recover(self) -> None:
        """Check that after the attack the look-up finds what is held, at the latest when operators have it republished.
        One rebuild may be too early: a forged entry may carry a berth number that is given out next, until a purge
        removes it."""
        await self._hands_off()
        async with asyncio.timeout(RECOVERY_SECONDS):
            while await self._found() != {name: held for name, held in self.held.items() if held}:
                for publisher in self.publishers.values():
                    publisher.rebuild()
                await asyncio.sleep(1.0)

    async def _found(self) -> dict[str, int] | None:
        try:
            return {holder.worker_id: holder.depth for holder in await self.index.lookup(NAMES)}
        except PrefixIndexError:
            return None

    async def _stop(self) -> None:
        for publisher in self.publishers.values():
            await publisher.close()
        await asyncio.gather(*self.tasks)
        for client in (*self.clients, self.attacker):
            await client.aclose()

    # Actions of workers and the router

    @rule(name=st.sampled_from(["a", "b"]), depth=st.integers(0, len(NAMES)))
    def hold(self, name: str, depth: int) -> None:
        before, self.held[name] = self.held[name], depth
        stored, removed = NAMES[before:depth], NAMES[depth:before][::-1]
        self.runner.run(self._tell(self.publishers[WorkerId(name)], stored, removed))

    async def _tell(self, publisher: IndexPublisher, stored: Any, removed: Any) -> None:
        publisher.record(stored, removed, stored, removed)
        await asyncio.sleep(0.02)

    @rule(length=st.integers(1, len(NAMES)))
    def place(self, length: int) -> None:
        self.runner.run(self._place(length))

    async def _place(self, length: int) -> None:
        names, prompt_tokens = NAMES[:length], length * BLOCK_SIZE + 1
        found = await self.lookup.lookup(names, self.view.incarnations())
        assert set(found.depth_by_worker) <= {known.worker_id for known in self.records}
        for depth in found.depth_by_worker.values():
            assert 0 <= depth.blocks <= length
            assert 0 <= depth.blocks + depth.host_blocks <= length
        candidates = self.view.candidates(names, prompt_tokens, found.depth_by_worker)
        assert len(candidates) == len(self.records)
        for candidate in candidates:
            assert 0 <= candidate.cached_tokens + candidate.host_cached_tokens < prompt_tokens
        wanted = PlacementRequest(prompt_tokens=prompt_tokens, index_available=found.available)
        chosen = place(wanted, candidates, "prefix", self.random).chosen
        assert chosen.address in {known.address for known in self.records}

    @rule()
    def read_the_directory(self) -> None:
        self.runner.run(self._read_directory())

    async def _read_directory(self) -> None:
        with contextlib.suppress(PrefixIndexError):
            listed = await self.index.directory()
            assert len(listed) <= MAX_LISTED
            for known in listed:
                assert len(known.proof) <= MAX_FIELD_BYTES
                texts = (known.worker_id, known.incarnation, known.address, known.fingerprint)
                assert all(len(text) <= MAX_RECORD_CHARACTERS for text in texts)
            genuine = {known.address for known in listed if is_genuine(known, secret=SECRET, cluster=CLUSTER)}
            assert genuine <= {known.address for known in self.records}
        with contextlib.suppress(PrefixIndexError):
            await self.index.info()

    # Actions of the attacker

    def _attack(self, *command: Any) -> None:
        async def send() -> None:
            with contextlib.suppress(Exception):  # the server may refuse an action
                await self.attacker.execute_command(*command)
            await asyncio.sleep(0.01)

        self.runner.run(send())

    @rule(key=keys, field=fields, value=rubbish)
    def write_a_field(self, key: str, field: Any, value: bytes) -> None:
        self._attack("HSET", PREFIX + key, field, value)

    @rule(key=keys, value=rubbish, kind=st.sampled_from(["string", "list", "set", "zset", "stream"]))
    def change_a_type(self, key: str, value: bytes, kind: str) -> None:
        self._attack("DEL", PREFIX + key)
        command = {
            "string": ("SET", PREFIX + key, value),
            "list": ("RPUSH", PREFIX + key, value),
            "set": ("SADD", PREFIX + key, value),
            "zset": ("ZADD", PREFIX + key, "1e300", value),
            "stream": ("XADD", PREFIX + key, "*", "field", value),
        }[kind]
        self._attack(*command)

    @rule(member=rubbish, score=st.sampled_from(["-inf", "0", "9e15", "inf", "1e300"]))
    def write_a_lease(self, member: bytes, score: str) -> None:
        self._attack("ZADD", f"{PREFIX}leases", score, member)

    @rule(member=rubbish, key=st.sampled_from(["free", "condemned"]))
    def write_a_member(self, member: bytes, key: str) -> None:
        self._attack("SADD", PREFIX + key, member)

    @rule(key=keys)
    def delete_a_key(self, key: str) -> None:
        self._attack("DEL", PREFIX + key)

    @rule(key=keys)
    def let_a_key_expire(self, key: str) -> None:
        self._attack("PEXPIRE", PREFIX + key, 5)

    @rule()
    def forget_all(self) -> None:
        self._attack("FLUSHALL")

    @rule()
    def replace_the_scripts(self) -> None:
        self._attack("SCRIPT", "FLUSH")
        self._attack("SCRIPT", "LOAD", "return {1, 2, 3}")

    @rule(proof=st.sampled_from(["", "00" * 32, "of-a-real-one"]))
    def introduce_a_rogue(self, proof: str) -> None:
        proof = self.records[0].proof if proof == "of-a-real-one" else proof
        facts = ("worker_id", "a", "incarnation", "life-a", "fingerprint", "model", "block_size", "16")
        self._attack("HSET", f"{PREFIX}berth:4711", "epoch", 1, *facts, "address", TRAP, "proof", proof)
        self._attack("HSET", f"{PREFIX}names", "4711", "a\0life-a")
        self._attack("ZADD", f"{PREFIX}leases", "9e15", "4711")

    @rule()
    def introduce_thousands(self) -> None:
        self._attack(
            "EVAL",
            "for n = 20000, 26000 do local k = KEYS[1] .. 'berth:' .. n "
            "redis.call('HSET', k, 'worker_id', 'w' .. n, 'incarnation', '1', 'address', ARGV[1], "
            "'fingerprint', 'f', 'block_size', '16') redis.call('ZADD', KEYS[1] .. 'leases', 9e15, n) "
            "redis.call('HSET', KEYS[1] .. 'names', n, string.rep('x', 300)) end",
            1,
            PREFIX,
            TRAP,
        )

    @rule()
    def let_everybody_hold_everything(self) -> None:
        for name in NAMES[:6]:
            self._attack("HSET", f"{PREFIX}b:{bucket_of(name):03x}", name[1:8], pack_berths(range(1, 5000)))

    @rule(bytes_=st.sampled_from([1, 0]))
    def fill_the_memory(self, bytes_: int) -> None:
        self._attack("CONFIG", "SET", "maxmemory", bytes_)

    @rule()
    def cut_everybody_off(self) -> None:
        self._attack("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    @rule()
    def make_it_a_replica_of_nobody_that_answers(self) -> None:
        self._attack("REPLICAOF", "127.0.0.1", "1")
        self._attack("REPLICAOF", "NO", "ONE")

    @invariant()
    def nobody_has_ended(self) -> None:
        assert not any(task.done() for task in self.tasks)


@pytest.fixture(scope="module", params=each_server())
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisProcess]:
    executable: Path = request.param
    process = start_private_redis(tmp_path_factory.mktemp("redis"), executable=executable)
    yield process
    process.stop()


def test_whatever_an_attacker_writes_costs_hits_alone_and_is_mended_by_telling_anew(
    server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostileIndex, "redis", server, raising=False)
    num_examples = int(os.environ.get("BLOCKYARD_HOSTILE_EXAMPLES", "4"))
    run_state_machine_as_test(
        HostileIndex,
        settings=examples(
            num_examples,
            stateful_step_count=25,
            deadline=None,
            phases=(Phase.reuse, Phase.generate),  # each try takes seconds: without shrinking
            suppress_health_check=list(HealthCheck),
        ),
    )


# A replaced server may answer anything.


FULL = "x" * MAX_RECORD_CHARACTERS
FORGE = """
for n = 20000, 24095 do
  local berth = KEYS[1] .. 'berth:' .. n
  redis.call('HSET', berth, 'worker_id', ARGV[1], 'incarnation', ARGV[1], 'address', ARGV[2], 'fingerprint', ARGV[1],
    'block_size', '16', 'proof', string.rep('0', 64))
  redis.call('ZADD', KEYS[1] .. 'leases', 9e15, n)
  redis.call('HSET', KEYS[1] .. 'names', n, string.rep('x', 500) .. n .. string.char(0) .. string.rep('x', 500))
end
"""


async def test_thousands_of_forged_holders_and_records_hold_up_no_loop(server: RedisProcess) -> None:
    async with connect(server.url, timeout_seconds=5.0) as client:
        await client.flushall()
        index = RedisPrefixIndex(client, CLUSTER)
        await index.register(signed(record("a", "127.0.0.1:7001")), lease_seconds=60.0)
        forge: Any = client.eval
        await forge(FORGE, 1, PREFIX, FULL, f"{FULL[:200]}:1")
        name = NAMES[0]
        await client.hset(f"{PREFIX}b:{bucket_of(name):03x}", name[1:8], pack_berths(range(20_000, 24_096)))
        lookup = PrefixLookup(index, config=PrefixLookupConfig(timeout_seconds=2.0))
        async with free_loop(MOST_LINES):
            assert (await lookup.lookup(NAMES[:1], {WorkerId("a"): Incarnation("life-a")})).available
            page = await index.directory_page()
            for known in page.records:
                is_genuine(known, secret=SECRET, cluster=CLUSTER)
            assert len(await index.directory()) == MAX_LISTED
