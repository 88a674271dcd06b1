"""An attacker who administers Redis: a router connects only to the cluster's own workers, and goes on serving.

A state machine of what such a person may write, with real servers. They are Redis, a router that discovers its workers
there, two scripted workers, and a trap to which the attacker wants the router to connect.
"""

import asyncio
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess, start_private_redis
from blockyard.proto.index.contract import WorkerRecord
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.index.schema import key_prefix, pack_berths
from blockyard.router import model_group as server_module
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.pauses import free_loop
from tests.unit.router.fake_worker import FakeWorker, expected_tokens, signed
from tests.unit.router.rig import Router, is_ready, request, running_router, until, worker_of_model
from tests.unit.security.attacked_index import MOST_LINES, record

LOOK_SECONDS = 0.1
"""Interval between two reads of the directory, and the time of one, which a crowded machine needs."""
PREFIX = key_prefix("default")
FOREVER_MS = 9e15
FIRST_FORGED, LAST_FORGED = 20_000, 60_000


def record_of(worker_id: str, address: str) -> WorkerRecord:
    return record(worker_id, address, f"{worker_id}-life-1")


class HostileRedis(RuleBasedStateMachine):
    """One router and one Redis for a whole course of attacks."""

    redis: RedisProcess

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.random = random.Random(3)
        self.runner.run(self._start())

    async def _start(self) -> None:
        self.client = connect(self.redis.url, timeout_seconds=5.0)
        await self.client.flushall()
        self.workers = [worker_of_model(f"worker-{number}") for number in range(2)]
        for worker in self.workers:
            await worker.__aenter__()
        self.genuine = [signed(record_of(f"worker-{n}", w.address)) for n, w in enumerate(self.workers)]
        await self._register()
        self.touched = 0
        self.trap = await asyncio.start_server(self._touch, "127.0.0.1", 0)
        host, port = self.trap.sockets[0].getsockname()
        self.trap_address = f"{host}:{port}"
        self.running = running_router(redis_url=self.redis.url, suspect_seconds=20.0, lost_seconds=40.0)
        self.router: Router = await self.running.__aenter__()
        await until(self._serves)

    def teardown(self) -> None:
        self.runner.run(self._stop())
        self.runner.close()

    async def _stop(self) -> None:
        await self.running.__aexit__(None, None, None)
        for worker in self.workers:
            await worker.kill()
        self.trap.close()
        await self.client.aclose()

    async def _touch(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.touched += 1
        writer.close()

    async def _register(self) -> None:
        index = RedisPrefixIndex(self.client, "default")
        for known in self.genuine:
            await index.register(known, lease_seconds=600.0)

    async def _serves(self) -> bool:
        return {worker.address for worker in self.workers} <= (await self.router.states()).keys()

    async def _write(self, number: int, fields: dict[str, Any], identity: str = "x\0y") -> None:
        async with self.client.pipeline(transaction=False) as pipe:
            pipe.hset(f"{PREFIX}berth:{number}", mapping=fields)
            pipe.hset(f"{PREFIX}names", str(number), identity)
            pipe.zadd(f"{PREFIX}leases", {str(number): FOREVER_MS})
            await pipe.execute(raise_on_error=False)

    def _forge(self, record: WorkerRecord) -> None:
        fields = {name: getattr(record, name) for name in record.__slots__}
        identity = f"{record.worker_id}\0{record.incarnation}"
        self.runner.run(self._write(self.random.randint(FIRST_FORGED, LAST_FORGED), fields, identity))

    @rule(proof=st.sampled_from(["", "00" * 32, "\ufffd", "x" * 5000]))
    def introduce_a_rogue(self, proof: str) -> None:
        self._forge(replace(record_of("worker-9", self.trap_address), proof=proof))

    @rule()
    def move_a_real_worker(self) -> None:
        self._forge(replace(self.genuine[0], address=self.trap_address))

    @rule()
    def sign_for_another_cluster_or_with_another_secret(self) -> None:
        rogue = record_of("worker-9", self.trap_address)
        self._forge(signed(rogue, secret="guess"))
        self._forge(signed(rogue, cluster="another"))

    @rule(number=st.sampled_from([100, 5000]))
    def introduce_rogues_by_the_thousand(self, number: int) -> None:
        async def write() -> None:
            async with self.client.pipeline(transaction=False) as pipe:
                for berth in range(FIRST_FORGED, FIRST_FORGED + number):
                    record = replace(record_of(f"worker-{berth}", self.trap_address), proof="00" * 32)
                    fields = {name: getattr(record, name) for name in record.__slots__}
                    pipe.hset(f"{PREFIX}berth:{berth}", mapping=fields)
                    pipe.zadd(f"{PREFIX}leases", {str(berth): FOREVER_MS})
                await pipe.execute(raise_on_error=False)

        self.runner.run(write())

    @rule(field=st.sampled_from(["worker_id", "address", "proof", "fingerprint"]))
    def write_a_field_of_megabytes(self, field: str) -> None:
        fields = {"epoch": 1, field: b"x" * 4_000_000}
        self.runner.run(self._write(LAST_FORGED, fields, identity="y" * 1_000_000))

    @rule()
    def forget_everybody(self) -> None:
        self.runner.run(self.client.flushall())

    @rule()
    def change_every_key(self) -> None:
        async def change() -> None:
            for key in [key async for key in self.client.scan_iter(match=f"{PREFIX}*")]:
                await self.client.delete(key)
                await self.client.set(key, b"not of our making" * 1000)

        self.runner.run(change())

    @rule()
    def forge_holders_of_everything(self) -> None:
        value = pack_berths(range(FIRST_FORGED, FIRST_FORGED + 30_000))

        async def forge() -> None:
            async with self.client.pipeline(transaction=False) as pipe:
                for bucket in range(0, 4096, 64):
                    pipe.hset(f"{PREFIX}b:{bucket:03x}", "1234567", value)
                await pipe.execute(raise_on_error=False)

        self.runner.run(forge())

    @rule()
    def load_scripts_and_forget_ours(self) -> None:
        async def load() -> None:
            await self.client.script_flush()
            await self.client.script_load("while true do end")

        self.runner.run(load())

    @rule()
    def register_the_real_ones_again(self) -> None:
        async def register() -> None:
            await self.client.flushall()
            await self._register()

        self.runner.run(register())

    @rule(seed=st.integers(0, 1000))
    def ask(self, seed: int) -> None:
        async def generate() -> None:
            # Long enough for the router to have read what was written before.
            await asyncio.sleep(3 * LOOK_SECONDS)
            asked = request(f"def f{seed}(x):", sampling={"seed": seed, "max_tokens": 8})
            answer = await self.router.inference.Generate(asked, timeout=30)
            assert list(answer.token_ids) == expected_tokens(seed, 8)

        self.runner.run(generate())

    @invariant()
    def none_but_real_workers_are_known(self) -> None:
        known = self.runner.run(self.router.states())
        assert set(known) <= {worker.address for worker in self.workers}
        assert self.touched == 0, "the router connected to an address of the attacker's"


@pytest.fixture
def redis_server(tmp_path: Path) -> Any:
    server = start_private_redis(tmp_path / "redis")
    yield server
    server.stop()


def test_an_attacker_in_redis_gets_no_connection_and_stops_nobody(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "DIRECTORY_SECONDS", LOOK_SECONDS)
    monkeypatch.setattr(HostileRedis, "redis", redis_server, raising=False)
    # Without shrinking: each try takes seconds.
    phases = (Phase.reuse, Phase.generate)
    course = settings(max_examples=6, stateful_step_count=12, deadline=None, phases=phases)
    run_state_machine_as_test(HostileRedis, settings=course)


async def test_old_records_are_bounded_in_number(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attacker cannot make new records, but a reader of Redis may keep all old ones and write them back."""
    most = 20
    monkeypatch.setattr(server_module, "DIRECTORY_SECONDS", LOOK_SECONDS)
    monkeypatch.setattr(server_module, "MAX_DISCOVERED_WORKERS", most)
    client = connect(redis_server.url, timeout_seconds=5.0)
    index = RedisPrefixIndex(client, "default")
    for number in range(most + 10):
        await index.register(signed(record_of(f"w{number}", f"127.0.0.1:{number + 1}")), lease_seconds=600.0)
    async with running_router(redis_url=redis_server.url) as router:
        await until(lambda: _knows(router, most), seconds=30)
        await asyncio.sleep(5 * LOOK_SECONDS)
        assert await _knows(router, most)
    await client.aclose()


async def test_forged_records_neither_crowd_workers_out_nor_hold_up_the_loop(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All forged records have lower berths, and the largest size that is read."""
    monkeypatch.setattr(server_module, "DIRECTORY_SECONDS", LOOK_SECONDS)
    forged = {"worker_id": "x" * 256, "incarnation": "x" * 256, "fingerprint": "x" * 256}
    forged |= {"address": "x" * 200 + ":1", "block_size": "16", "proof": "00" * 32}
    number = 5000
    client = connect(redis_server.url, timeout_seconds=5.0)
    async with client.pipeline(transaction=False) as pipe:
        for berth in range(1, number + 1):
            pipe.hset(f"{PREFIX}berth:{berth}", mapping=forged)
        pipe.zadd(f"{PREFIX}leases", {str(berth): FOREVER_MS for berth in range(1, number + 1)})
        pipe.hset(f"{PREFIX}state", "next", str(number))
        await pipe.execute()
    async with worker_of_model("worker-0") as worker, running_router(redis_url=redis_server.url) as router:
        await asyncio.sleep(10 * LOOK_SECONDS)
        async with free_loop(MOST_LINES):
            record = signed(record_of("worker-0", worker.address))
            berth = await RedisPrefixIndex(client, "default").register(record, lease_seconds=600.0)
            assert berth.number > number
            await until(lambda: is_ready(router), seconds=30)
    await client.aclose()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("key", ["leases", "berth:1"])
async def test_a_worker_that_answers_is_kept_when_redis_tells_of_it_no_more(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """The same holds when its connection breaks then: the router tries again before it gives the worker up."""
    monkeypatch.setattr(server_module, "DIRECTORY_SECONDS", LOOK_SECONDS)
    client = connect(redis_server.url, timeout_seconds=5.0)
    async with worker_of_model("worker-0") as worker, running_router(redis_url=redis_server.url) as router:
        record = signed(record_of("worker-0", worker.address))
        await RedisPrefixIndex(client, "default").register(record, lease_seconds=600.0)
        await until(lambda: is_ready(router), seconds=30)
        await client.delete(PREFIX + key)
        await asyncio.sleep(5 * LOOK_SECONDS)
        for _ in range(3):
            ended = set(worker._streams)
            worker.end_streams()
            # A new stream is the event. The state between both may be too short to be seen on a busy machine.
            await until(partial(_has_other_streams, worker, ended), seconds=30)
            await until(lambda: is_ready(router), seconds=30)
        await worker.kill()
        await until(lambda: _knows(router, 0), seconds=15)
    await client.aclose()


def _has_other_streams(worker: FakeWorker, ended: set[Any]) -> bool:
    return bool(worker._streams) and not worker._streams & ended


async def _knows(router: Router, number: int) -> bool:
    return len(await router.states()) == number


async def test_a_router_with_a_supervisor_discovers_nobody(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "DIRECTORY_SECONDS", LOOK_SECONDS)
    client = connect(redis_server.url, timeout_seconds=5.0)
    async with worker_of_model("worker-0") as worker:
        record = signed(record_of("worker-0", worker.address))
        await RedisPrefixIndex(client, "default").register(record, lease_seconds=600.0)
        async with running_router(redis_url=redis_server.url, discovers_workers=False) as router:
            await asyncio.sleep(10 * LOOK_SECONDS)
            assert await _knows(router, 0)
            async with router.workers(worker):
                assert await _knows(router, 1)
    await client.aclose()
