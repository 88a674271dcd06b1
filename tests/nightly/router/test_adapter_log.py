"""Adapters in a real Redis: all routers and later ones know them, sealed, whatever Redis loses or others write."""

from dataclasses import replace
from typing import Any

import pytest
from blockyard.proto.index.redis import connect
from blockyard.router.adapters import log as adapter_log
from blockyard.router.adapters.keeper import AdapterKeeper
from blockyard.router.adapters.log import AdapterLog
from blockyard.router.adapters.registry import RegisteredAdapter
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.config import ServedModel
from blockyard.router.errors import NotFound, StoreUnavailable, UnknownModel
from blockyard.router.sealed_records import KEEP_SECONDS

SECRET = "correct-horse-of-the-adapters"
FIRST = ServedModel(model="m", names=("m",))
OTHER = ServedModel(model="other", names=("other",), index="other")
ADDED = replace(OTHER, addition="a1")


def keeper_of(client: Any, *, secret: str = SECRET, model: ServedModel = FIRST) -> AdapterKeeper:
    fleet = Fleet(tokenizer_fingerprint="t", suspect_seconds=1.0, lost_seconds=2.0)
    return AdapterKeeper(fleet, AdapterLog([client], cluster="default", secret=secret, model=model))


def adapter(name: str, content: str = "1", tenant: str = "") -> RegisteredAdapter:
    return RegisteredAdapter(name=name, fingerprint=content, path=f"folder/{name}", rank=8, tenant=tenant)


async def give(keeper: AdapterKeeper, *adapters: RegisteredAdapter) -> None:
    """Without workers nothing can be added through `add`, which would write the same changes."""
    for one in adapters:
        await keeper._change(one.name, one)


async def read_by_a_later_router(client: Any, **settings: Any) -> list[RegisteredAdapter]:
    later = keeper_of(client, **settings)
    await later.refresh()
    return later.registry.listed()


async def test_a_log_that_is_written_anew_loses_no_change_of_another_router(operator, client, monkeypatch):
    one, other, reader = keeper_of(client), keeper_of(client), keeper_of(client)
    await give(one, adapter("sql"), adapter("law"))
    for keeper in (other, reader):
        await keeper.refresh()
    monkeypatch.setattr("blockyard.router.adapters.keeper.MAX_LOG_BYTES", 100)
    assert one._log is not None
    take = one._log.take

    async def interrupted() -> bytes:
        record = await take()
        assert record
        assert not operator.keys("*")
        await other.remove("sql")
        await give(other, adapter("code"))
        await reader.refresh()
        assert reader.registry.listed() == [adapter("code"), adapter("law")]
        return record

    monkeypatch.setattr(one._log, "take", interrupted)
    await give(one, adapter("law", "2"))
    later = keeper_of(client)
    for keeper in (one, other, reader, later):
        await keeper.refresh()
        assert keeper.registry.listed() == [adapter("code"), adapter("law", "2")]


async def test_a_router_that_ends_while_it_writes_the_log_anew_loses_nothing(operator, client, monkeypatch):
    one, other, later = keeper_of(client), keeper_of(client), keeper_of(client)
    await give(one, adapter("sql"), adapter("law"))
    await other.refresh()
    assert one._log is not None
    await one._log.take()
    await give(later, adapter("code"))
    await other.refresh()
    await later.refresh()
    wanted = [adapter("code"), adapter("law"), adapter("sql")]
    assert other.registry.listed() == later.registry.listed() == wanted


async def test_other_routers_and_later_ones_know_what_one_has_changed_and_redis_and_others_nothing(
    operator, client
):
    one, other = keeper_of(client), keeper_of(client)
    await give(one, adapter("sql"), adapter("law", tenant="acme"))
    await other.refresh()
    assert other.registry.listed() == one.registry.listed()
    await other.remove("sql")
    await give(one, adapter("law", "2"))
    assert await read_by_a_later_router(client) == [adapter("law", "2")]
    (key,) = operator.keys("*")
    assert operator.ttl(key) == -1, "it does not expire"
    with pytest.raises(NotFound):
        await one.remove("sql")
    for name in (b"law", b"folder"):
        assert name not in key + operator.get(key)
    assert await read_by_a_later_router(client, secret="another" * 4) == []
    operator.flushall()
    await one.refresh()
    assert await read_by_a_later_router(client) == one.registry.listed() == [adapter("law", "2")], (
        "written again"
    )


@pytest.mark.parametrize("is_behind", [True, False])
async def test_what_is_not_sealed_hides_no_adapter(operator, client, is_behind):
    one, other = keeper_of(client), keeper_of(client)
    await give(one, adapter("sql"))
    (key,) = operator.keys("*")
    forged = b"\x30\0\0\0" + b"x" * 48
    operator.set(key, operator.get(key) + forged if is_behind else forged)
    await give(one, adapter("law"))
    await other.refresh()
    assert other.registry.listed() == [adapter("law"), adapter("sql")]


async def test_a_long_log_is_written_anew(operator, client, monkeypatch):
    monkeypatch.setattr("blockyard.router.adapters.keeper.MAX_LOG_BYTES", 2000)
    assert adapter_log.MAX_LOG_BYTES > 2000
    one, longest = keeper_of(client), 0
    for number in range(40):
        await give(one, adapter("sql", str(number)))
        (key,) = operator.keys("*")
        longest = max(longest, operator.strlen(key))
    assert longest < 2600
    assert await read_by_a_later_router(client) == [adapter("sql", "39")]


async def test_without_redis_nothing_changes_and_what_is_known_stays(operator, client):
    one = keeper_of(client)
    await give(one, adapter("sql"))
    nobody = connect("redis://127.0.0.1:1", timeout_seconds=0.2, has_deadlines=True)
    one._log = AdapterLog([nobody], cluster="default", secret=SECRET, model=FIRST)
    await one.refresh()
    with pytest.raises(StoreUnavailable):
        await one.remove("sql")
    assert one.registry.listed() == [adapter("sql")]
    await nobody.aclose()


async def test_each_model_has_a_log_of_its_own_and_cannot_read_that_of_another(operator, client):
    one, other = keeper_of(client), keeper_of(client, model=OTHER)
    await give(one, adapter("sql"))
    (of_one,) = operator.keys("*")
    await give(other, adapter("law"))
    (of_other,) = set(operator.keys("*")) - {of_one}
    for model, wanted in ((FIRST, "sql"), (OTHER, "law")):
        assert await read_by_a_later_router(client, model=model) == [adapter(wanted)]
    operator.copy(of_one, of_other, replace=True)
    assert await read_by_a_later_router(client, model=OTHER) == [], "a log that was moved is not the model's"


async def test_an_erased_log_is_gone_and_its_keeper_writes_no_other(operator, client):
    removed, kept = keeper_of(client, model=OTHER), keeper_of(client)
    await give(removed, adapter("sql"))
    await give(kept, adapter("law"))
    await removed.erase()
    assert len(operator.keys("*")) == 1
    await removed.refresh()
    with pytest.raises(UnknownModel):
        await give(removed, adapter("sql", "2"))
    assert len(operator.keys("*")) == 1
    again = keeper_of(client, model=OTHER)
    await again.refresh()
    assert again.registry.listed() == []
    await kept.refresh()
    assert kept.registry.listed() == [adapter("law")]


async def test_a_router_that_still_serves_a_removed_model_writes_nothing_for_the_one_that_was_added_again(
    operator, client
) -> None:
    late, again = keeper_of(client, model=ADDED), keeper_of(client, model=replace(OTHER, addition="a2"))
    await give(late, adapter("sql"))
    await again.refresh()
    assert again.registry.listed() == []
    await give(again, adapter("law"))
    await late.refresh()
    await give(late, adapter("code"))
    await late.erase()
    await again.refresh()
    assert again.registry.listed() == [adapter("law")]


async def test_the_log_of_an_added_model_expires_once_no_router_reads_it(operator, client):
    keepers = {model: keeper_of(client, model=model) for model in (FIRST, OTHER, ADDED)}
    lives = {}
    for model, keeper in keepers.items():
        before = set(operator.keys("*"))
        await give(keeper, adapter("sql"))
        await keeper.refresh()
        (key,) = set(operator.keys("*")) - before
        lives[model] = operator.ttl(key)
    assert (lives[FIRST], lives[OTHER]) == (-1, -1), "they outlive their cluster"
    assert KEEP_SECONDS - 60 <= lives[ADDED] <= KEEP_SECONDS


async def test_erasing_without_redis_stops_the_keeper_all_the_same(caplog: pytest.LogCaptureFixture):
    nobody = connect("redis://127.0.0.1:1", timeout_seconds=0.2, has_deadlines=True)
    keeper = keeper_of(nobody, model=OTHER)
    await keeper.erase()
    assert "the log of adapters of model other stays in Redis" in caplog.text
    with pytest.raises(UnknownModel):
        await give(keeper, adapter("sql"))
    await nobody.aclose()
