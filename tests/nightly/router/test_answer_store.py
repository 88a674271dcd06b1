"""Answers of sessions in a real Redis: sealed, apart by tenant, bounded, and no hindrance while Redis is away."""

import os
import signal

import pytest
import redis
from blockyard.proto.index.redis_parser import MAX_REPLY_BYTES
from blockyard.router.dispatch.prefix_lookup import PrefixLookupConfig
from blockyard.router.generation.answer_store import MAX_RECORD_BYTES, AnswerStore

from tests.unit.router.rig import until

SECRET = "correct-horse-of-the-answers"
TALK = b"tenant\0talk"
PATIENT = PrefixLookupConfig(timeout_seconds=5.0)


def store_of(
    client: redis.asyncio.Redis, *, secret: str = SECRET, config: PrefixLookupConfig = PATIENT
) -> AnswerStore:
    return AnswerStore([client], cluster="default", secret=secret, keep_seconds=100.0, config=config)


async def test_another_router_reads_what_one_has_added_until_it_expires_and_redis_and_others_nothing(
    operator: "redis.Redis", client: redis.asyncio.Redis
) -> None:
    one, other = store_of(client), store_of(client)
    assert await one.read(TALK) == b""
    await one.add(TALK, b"first canary")
    await other.add(TALK, b"second")
    (key,) = operator.keys("*")
    assert 90 < operator.ttl(key) <= 100
    operator.expire(key, 10)
    assert await other.read(TALK) == b"first canarysecond"
    assert 90 < operator.ttl(key) <= 100, "each turn renews it"
    assert not one.errors + other.errors
    for name in (b"other\0talk", b"tenant\0talk2", b"tenant", b""):
        assert await one.read(name) == b""
    for text in (b"canary", b"tenant", b"talk"):
        assert text not in key + operator.get(key)


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_record_has_an_expiry_whether_or_not_it_was_believed_to_be_new(operator, client, is_first):
    store = store_of(client)
    for text, whole in ((b"first", b"first"), (b"second", b"firstsecond")):
        await store.add(TALK, text, is_first=is_first)
        (key,) = operator.keys("*")
        assert 90 < operator.ttl(key) <= 100
        assert await store.read(TALK) == whole


async def test_what_was_not_sealed_by_this_cluster_for_this_session_is_ignored(operator, client):
    store = store_of(client)
    await store.add(TALK, b"answer")
    (key,) = operator.keys("*")
    sealed = operator.get(key)
    await store_of(client, secret="another" * 4).add(TALK, b"answer")
    (others,) = {*operator.keys("*")} - {key}
    await store.add(b"another talk", b"answer")
    (moved,) = {*operator.keys("*")} - {key, others}
    for forged in (
        b"",
        b"\xff" * 40,
        operator.get(others),
        operator.get(moved),
        sealed[:-1],
        b"\0" * 4 + sealed,
    ):
        operator.set(key, forged)
        assert await store.read(TALK) == b""
        operator.set(key, sealed + forged)
        assert await store.read(TALK) == b"answer"
    operator.delete(key)
    operator.hset(key, "of", "another type")
    assert await store.read(TALK) == b""
    await store.add(TALK, b"answer")


async def test_a_full_record_grows_no_more_whether_the_router_has_read_it_or_not(operator, client):
    writes_alone, reads = store_of(client), store_of(client)
    answer = b"x" * (MAX_RECORD_BYTES // 4)
    for _ in range(8):
        await writes_alone.add(TALK, answer)
    (key,) = operator.keys("*")
    full = operator.strlen(key)
    assert MAX_RECORD_BYTES <= full < 1.3 * MAX_RECORD_BYTES
    assert 4 * MAX_RECORD_BYTES <= MAX_REPLY_BYTES, "clients of Redis read more than a session"
    assert len(await reads.read(TALK)) == 4 * len(answer)
    await reads.add(TALK, answer)
    assert operator.strlen(key) == full
    operator.delete(key)
    assert await writes_alone.read(TALK) == b""
    await writes_alone.add(TALK, b"again")
    assert await reads.read(TALK) == b"again"


async def test_a_stopped_redis_costs_a_few_timeouts_and_then_nothing(server, operator, client):
    now = 0.0
    store = AnswerStore([client], cluster="default", secret=SECRET, keep_seconds=100.0, clock=lambda: now)
    await store_of(client).add(TALK, b"answer")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        for _ in range(5):
            assert await store.read(TALK) == b""
            await store.add(TALK, b"answer")
        assert store.errors.total() == PrefixLookupConfig().failures_to_open
        assert store.num_skipped == 10 - store.errors.total()
    finally:
        os.kill(server.pid, signal.SIGCONT)
    now = 10.0
    patient = store_of(client)
    await until(lambda: _reads(patient, b"answer"), seconds=10.0)


async def _reads(store: AnswerStore, answer: bytes) -> bool:
    return await store.read(TALK) == answer
