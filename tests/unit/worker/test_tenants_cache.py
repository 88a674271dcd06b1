"""One tenant's flood of prompts does not evict the others' prefixes from the GPU or from host memory."""

import random
from typing import Any

import pytest
from blockyard.proto.naming.block_hash import chain, root_name
from blockyard.worker.cache.host_memory import HostCache
from blockyard.worker.cache.prefix_cache import CacheChanges
from blockyard.worker.cache.tier_names import AnywhereNames
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.scheduling.scheduler import Scheduler, SchedulerConfig
from blockyard.worker.sequences.identifiers import BlockName, RequestId, TenantId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.simulated.runner import SimulatedRunner
from hypothesis import given
from hypothesis import strategies as st

from .scheduling import make_scheduler, make_sequence, run_to_end, step

A, B = TenantId(1), TenantId(2)
SYSTEM_TOKENS = 320
NUM_VISITS = 25


def request(tenant: TenantId, tokens: list[int], *, salt: str, max_tokens: int) -> EngineRequest:
    root = root_name(
        cluster_secret="", model_fingerprint="test", block_size=16, kv_dtype="float32", salt=salt
    )
    return EngineRequest(
        token_ids=tokens,
        prompt_length=len(tokens),
        names=[BlockName(name) for name in (root, *chain(root, tokens, 16))],
        sampling=SamplingParams(max_tokens=max_tokens),
        tenant=tenant,
    )


class Flood:
    """An engine on which more of A's distinct prompts wait than it can run, and B sends one now and then."""

    def __init__(self, *, num_blocks: int, has_tenants: bool, **settings: Any) -> None:
        self._now = 0.0
        self._has_tenants = has_tenants
        self._chance = random.Random(5)
        runner = SimulatedRunner(
            vocab_size=100, prefill_tokens_per_second=20_000.0, step_seconds=0.01, sleep=self._sleep
        )
        config = SchedulerConfig(max_model_len=1024, **settings)
        self.engine = Engine(config, runner, num_blocks=num_blocks, clock=lambda: self._now)
        self.num_flooding = 0

    def _sleep(self, seconds: float) -> None:
        self._now += seconds

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(100) for _ in range(count)]

    def _submit(self, tenant: TenantId, tokens: list[int], max_tokens: int) -> RequestId:
        said = tenant if self._has_tenants else TenantId(0)
        return self.engine.submit(request(said, tokens, salt=f"tenant-{tenant}", max_tokens=max_tokens))

    def hit_rate(self) -> float:
        """Share of B's visits, after the first, that find all of its system prompt."""
        system, hits, waits_for = self._tokens(SYSTEM_TOKENS), [], 0
        visit: RequestId | None = None
        while len(hits) < NUM_VISITS or visit is not None:
            if visit is None and waits_for <= 0:
                visit, waits_for = self._submit(B, [*system, *self._tokens(20)], 8), 60
            while len(self.engine.scheduler.waiting) < 8:
                self._submit(A, self._tokens(128), 24)
                self.num_flooding += 1
            for output in self.engine.step().outputs:
                if output.request_id == visit:
                    hits += [output.cached_tokens >= SYSTEM_TOKENS] if output.token_offset == 0 else []
                    visit = None if output.is_last else visit
            waits_for -= visit is None
        return sum(hits[1:]) / len(hits[1:])


LITTLE_RUNS = {"num_blocks": 256, "max_num_seqs": 8}
MEMORY_IS_FULL = {"num_blocks": 256, "max_num_seqs": 64}


@pytest.mark.parametrize("settings", [LITTLE_RUNS, MEMORY_IS_FULL], ids=["little runs", "memory is full"])
def test_a_flood_of_prompts_leaves_another_tenants_prefix_cached(settings: dict[str, Any]) -> None:
    protected = SYSTEM_TOKENS // 16 + 2
    with_tenants = Flood(has_tenants=True, protected_blocks=protected, **settings)
    assert with_tenants.hit_rate() >= 0.95
    assert with_tenants.num_flooding >= 10 * NUM_VISITS


@pytest.mark.ci
def test_without_tenants_what_is_found_again_holds_only_where_running_leaves_room_for_it() -> None:
    """The odds of reuse keep the prefix beside a flood of prompts that come once."""
    protected = SYSTEM_TOKENS // 16 + 2
    assert Flood(has_tenants=False, protected_blocks=protected, **LITTLE_RUNS).hit_rate() >= 0.8
    assert Flood(has_tenants=False, protected_blocks=protected, **MEMORY_IS_FULL).hit_rate() <= 0.05


def test_shares_alone_do_not_hold_where_running_fills_the_memory() -> None:
    """Only `protected_blocks` protects cached prefixes in this case."""
    assert Flood(has_tenants=True, protected_blocks=0, **MEMORY_IS_FULL).hit_rate() <= 0.05


def test_nothing_is_spared_where_nothing_else_runs() -> None:
    scheduler = make_scheduler(10, protected_blocks=9)
    scheduler.submit(make_sequence(0, list(range(64)), max_tokens=2, tenant=B))
    run_to_end(scheduler)
    scheduler.submit(make_sequence(1, list(range(100, 244)), max_tokens=8, tenant=A))
    run_to_end(scheduler)
    assert scheduler.pool.num_evictions > 0


def test_only_work_of_others_is_kept_from_what_is_spared() -> None:
    """B's blocks are no room for A beside what runs, and all of them are for B."""
    for tenant, runs_at_once in ((A, 1), (B, 2)):
        scheduler = make_scheduler(10, protected_blocks=4)
        scheduler.submit(make_sequence(0, list(range(64)), max_tokens=2, tenant=B))
        run_to_end(scheduler)
        for number in (1, 2):
            tokens = [100 * number + index for index in range(48)]
            scheduler.submit(make_sequence(number, tokens, max_tokens=8, tenant=tenant))
        step(scheduler)
        assert len(scheduler.running) == runs_at_once
        run_to_end(scheduler)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_of_the_cache_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="protected_cache_share"):
        EngineConfig(model="demo", protected_cache_share=share)


def owners(scheduler: Scheduler, sequence: Sequence) -> list[TenantId | None]:
    return [scheduler.cache.owner(name) for name in sequence.names[1:]]


def test_what_builds_on_anothers_block_is_on_its_account() -> None:
    """In a public prompt the tenant of the first block owns all that begins with it, so no child outlives it."""
    scheduler = make_scheduler(32)
    shared = list(range(1, 33))
    first = make_sequence(0, [*shared, *range(40, 60)], max_tokens=2, tenant=A)
    second = make_sequence(1, [*shared, *range(70, 140)], max_tokens=2, tenant=B)
    scheduler.submit(first)
    run_to_end(scheduler)
    scheduler.submit(second)
    run_to_end(scheduler)
    assert second.cached_tokens == 32
    assert owners(scheduler, second) == [A] * 6
    own = make_sequence(2, list(range(200, 240)), max_tokens=2, tenant=B)
    scheduler.submit(own)
    run_to_end(scheduler)
    assert owners(scheduler, own) == [B] * 2


def test_outputs_that_fork_before_their_first_block_are_on_their_requests_account() -> None:
    scheduler = make_scheduler(32)
    scheduler.submit(make_sequence(0, [1, 2, 3], max_tokens=40, tenant=A, n=3))
    run_to_end(scheduler)
    assert scheduler.pool.num_cached >= 6
    assert scheduler.pool.num_cached_by_others(A) == 0


def test_a_copy_of_a_name_is_on_the_account_of_the_first() -> None:
    """A prompt that must be computed whole gets blocks of its own for names that are cached."""
    scheduler = make_scheduler(32)
    tokens = list(range(1, 50))
    scheduler.submit(make_sequence(0, tokens, max_tokens=1, tenant=A))
    run_to_end(scheduler)
    whole = make_sequence(1, tokens, max_tokens=20, tenant=B, prompt_logprobs=0)
    scheduler.submit(whole)
    step(scheduler)
    assert {scheduler.pool.owner(block) for block in whole.block_table[:3]} == {A}


def test_what_lies_in_host_memory_comes_back_to_its_owner() -> None:
    scheduler = make_scheduler(8, host_cache_blocks=16)
    tokens = list(range(1, 60))
    scheduler.submit(make_sequence(0, tokens, max_tokens=1, tenant=A))
    run_to_end(scheduler)
    scheduler.submit(make_sequence(1, list(range(100, 220)), max_tokens=1, tenant=B))
    run_to_end(scheduler)
    assert scheduler.host_cache is not None
    again = make_sequence(2, [*tokens, *range(300, 320)], max_tokens=1, tenant=B)
    assert scheduler.cache.owner(again.names[1]) is None
    assert scheduler.host_cache.owner(again.names[1]) == A
    scheduler.submit(again)
    run_to_end(scheduler)
    assert again.cached_tokens == 48
    assert set(owners(scheduler, again)) <= {A, None}
    scheduler.check_invariants()


def names(letter: str, count: int) -> list[BlockName]:
    return [BlockName(f"{letter}{index}".encode().ljust(16)) for index in range(count)]


def test_host_memory_is_shared_by_tenants_too() -> None:
    cache = HostCache(8, first_slot=0, anywhere=AnywhereNames())
    of_b = names("b", 3)
    for name in reversed(of_b):
        cache.store(name, B)
    for name in names("a", 100):
        cache.store(name, A)
        cache.check_invariants()
    assert cache.match(of_b) == of_b
    assert len(cache) == 8


def test_what_a_step_reads_from_host_memory_is_not_evicted_and_then_the_newest() -> None:
    cache = HostCache(4, first_slot=0, anywhere=AnywhereNames())
    old = names("b", 2)
    for name in (*reversed(old), *names("a", 2)):
        cache.store(name, A)
    cache.read(old)
    flood = names("f", 5)
    for name in flood:
        cache.store(name, A)
        cache.check_invariants()
    assert cache.match(old) == old
    cache.done(old)
    cache.store(names("g", 1)[0], A)
    cache.store(names("h", 1)[0], A)
    assert cache.match(old) == old
    cache.store(names("i", 1)[0], A)
    assert cache.match(old) == old[:1], "a child goes before its parent"
    cache.check_invariants()


@given(st.integers(1, 6), st.integers(0, 6), st.booleans())
def test_a_pulled_prefix_goes_first_while_the_gpu_has_it_too(
    num_pulled: int, num_more: int, is_evicted_by_gpu: bool
) -> None:
    cache = HostCache(2 * num_pulled + num_more, first_slot=0, anywhere=AnywhereNames())
    own, pulled = names("b", num_pulled + num_more), names("a", num_pulled)
    for name in reversed(own):
        cache.store(name, B)
    for index, slot in enumerate(cache.reserve(num_pulled)):
        parent = pulled[index - 1] if index else None
        cache.commit(pulled[index], slot, B, parent=parent, is_indexed=True)
    cache.done(pulled)
    cache.read(pulled)
    cache.done(pulled, are_loaded=True)
    cache.check_invariants()
    if is_evicted_by_gpu:
        for name in reversed(pulled):
            assert cache.store(name, B) is None, "it is here already"
    kept, lost = (pulled, own) if is_evicted_by_gpu else (own, pulled)
    for number, name in enumerate(names("f", num_pulled), start=1):
        cache.store(name, B)
        cache.check_invariants()
        assert cache.match(kept) == kept
        assert cache.match(lost) == lost[: len(lost) - number], "a child goes before its parent"


def test_host_memory_that_is_all_being_read_takes_nothing() -> None:
    cache = HostCache(2, first_slot=0, anywhere=AnywhereNames())
    held = names("b", 2)
    for name in held:
        cache.store(name, B)
    cache.read(held)
    assert cache.store(names("a", 1)[0], A) is None
    cache.clear()
    cache.check_invariants()
    assert (len(cache), cache.store(held[0], A)) == (0, None), "a slot that is read is not reused"
    cache.done(held)
    assert cache.store(held[0], A) is not None
    cache.check_invariants()
    assert (len(cache), cache.owner(held[0])) == (1, A)


def test_a_block_that_finds_no_slot_takes_along_what_builds_on_it() -> None:
    anywhere = AnywhereNames()
    cache = HostCache(2, first_slot=0, anywhere=anywhere)
    parent, child, grandchild = names("a", 3)
    cache.store(grandchild, A, parent=child)
    cache.store(child, A, parent=parent)
    cache.read([child, grandchild])
    assert cache.store(parent, A) is None, "both slots are read"
    cache.check_invariants()
    assert (len(cache), len(anywhere)) == (0, 0), "nothing could find them without their parent"
    assert anywhere.take_changes() == ((), ())
    cache.done([child, grandchild])
    assert cache.store(parent, A) is not None


def test_evictions_of_tenants_tell_children_before_parents() -> None:
    scheduler = make_scheduler(12)
    known: dict[BlockName, BlockName] = {}
    published: set[BlockName] = set()
    chance = random.Random(1)
    shared = list(range(1, 33))
    for number in range(200):
        tokens = [*shared[: chance.choice([0, 16, 32])], *(chance.randrange(50) for _ in range(40))]
        sequence = make_sequence(number, tokens, max_tokens=3, tenant=number % 3)
        scheduler.submit(sequence)
        run_to_end(scheduler)
        known.update(zip(sequence.names[2:], sequence.names[1:-1], strict=True))
        changes: CacheChanges = scheduler.cache.take_changes()
        published = (published | set(changes.stored)) - set(changes.removed)
        assert all(name not in known or known[name] in published for name in published)
