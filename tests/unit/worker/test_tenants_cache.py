"""One tenant's flood of prompts does not evict the others' prefixes from the GPU or from host memory."""

import random

import pytest
from blockyard.proto.naming.block_hash import chain, root_name
from blockyard.worker.cache.host_memory import HostCache
from blockyard.worker.cache.tier_names import AnywhereNames
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.scheduling.scheduler import Scheduler, SchedulerConfig
from blockyard.worker.sequences.identifiers import BlockName, RequestId, TenantId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.simulated.runner import SimulatedRunner
from hypothesis import given
from hypothesis import strategies as st

from .scheduling import make_scheduler, run_to_end, step, submit

A, B = TenantId(1), TenantId(2)
SYSTEM_TOKENS = 320
NUM_VISITS = 12


class Flood:
    """An engine on which more of A's distinct prompts wait than it can run, and B sends one now and then."""

    def __init__(self, *, has_tenants: bool, protected_blocks: int, max_num_seqs: int) -> None:
        self._now = 0.0
        self._has_tenants = has_tenants
        self._chance = random.Random(5)
        runner = SimulatedRunner(
            vocab_size=100, prefill_tokens_per_second=20_000.0, step_seconds=0.01, sleep=self._sleep
        )
        config = SchedulerConfig(
            max_model_len=1024, protected_blocks=protected_blocks, max_num_seqs=max_num_seqs
        )
        self.engine = Engine(config, runner, num_blocks=256, clock=lambda: self._now)
        self.num_flooding = 0

    def _sleep(self, seconds: float) -> None:
        self._now += seconds

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(100) for _ in range(count)]

    def _submit(self, tenant: TenantId, tokens: list[int], max_tokens: int) -> RequestId:
        model = {"cluster_secret": "", "model_fingerprint": "test", "block_size": 16, "kv_dtype": "float32"}
        root = root_name(**model, salt=f"tenant-{tenant}")  # type: ignore[arg-type]
        request = EngineRequest(
            token_ids=tokens,
            prompt_length=len(tokens),
            names=[BlockName(name) for name in (root, *chain(root, tokens, 16))],
            sampling=SamplingParams(max_tokens=max_tokens),
            tenant=tenant if self._has_tenants else TenantId(0),
        )
        return self.engine.submit(request)

    def hit_rate(self) -> float:
        """Return the share of B's visits, after the first, that find all of its system prompt."""
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
        assert self.num_flooding >= 10 * NUM_VISITS
        return sum(hits[1:]) / len(hits[1:])


PROTECTED = SYSTEM_TOKENS // 16 + 2


@pytest.mark.parametrize(
    ("has_tenants", "max_num_seqs", "protected", "least", "most"),
    [
        (True, 8, PROTECTED, 0.95, 1.0),
        (True, 64, PROTECTED, 0.95, 1.0),
        (True, 64, 0, 0.0, 0.1),
        (False, 8, PROTECTED, 0.7, 1.0),
        (False, 64, PROTECTED, 0.0, 0.1),
    ],
    ids=[
        "little runs",
        "memory is full",
        "full and unprotected",
        "no tenants, little runs",
        "no tenants, full",
    ],
)
def test_a_flood_of_prompts_leaves_another_tenants_prefix_cached(
    has_tenants: bool, max_num_seqs: int, protected: int, least: float, most: float
) -> None:
    """Where running fills the memory, only `protected_blocks` protects, and only among tenants.

    Elsewhere the odds of reuse keep the prefix beside a flood of prompts that come once.
    """
    flood = Flood(has_tenants=has_tenants, protected_blocks=protected, max_num_seqs=max_num_seqs)
    assert least <= flood.hit_rate() <= most


def test_nothing_is_spared_where_nothing_else_runs() -> None:
    scheduler = make_scheduler(10, protected_blocks=9)
    submit(scheduler, 0, 64, max_tokens=2, tenant=B)
    run_to_end(scheduler)
    submit(scheduler, 1, list(range(100, 244)), max_tokens=8, tenant=A)
    run_to_end(scheduler)
    assert scheduler.pool.num_evictions > 0


@pytest.mark.parametrize(("tenant", "runs_at_once"), [(A, 1), (B, 2)])
def test_only_work_of_others_is_kept_from_what_is_spared(tenant: TenantId, runs_at_once: int) -> None:
    """B's blocks are no room for A beside what runs, and all of them are for B."""
    scheduler = make_scheduler(10, protected_blocks=4)
    submit(scheduler, 0, 64, max_tokens=2, tenant=B)
    run_to_end(scheduler)
    for number in (1, 2):
        tokens = [100 * number + index for index in range(48)]
        submit(scheduler, number, tokens, max_tokens=8, tenant=tenant)
    step(scheduler)
    assert len(scheduler.running) == runs_at_once
    run_to_end(scheduler)


def served(
    scheduler: Scheduler, number: int, tokens: list[int], tenant: TenantId, **settings: int
) -> Sequence:
    sequence = submit(scheduler, number, tokens, tenant=tenant, **({"max_tokens": 2} | settings))
    run_to_end(scheduler)
    return sequence


def owners(scheduler: Scheduler, sequence: Sequence) -> list[TenantId | None]:
    return [scheduler.cache.owner(name) for name in sequence.names[1:]]


def test_what_builds_on_anothers_block_is_on_its_account() -> None:
    """In a public prompt the tenant of the first block owns all that begins with it, so no child outlives it."""
    scheduler, shared = make_scheduler(32), list(range(1, 33))
    served(scheduler, 0, [*shared, *range(40, 60)], A)
    second = served(scheduler, 1, [*shared, *range(70, 140)], B)
    assert second.cached_tokens == 32
    assert owners(scheduler, second) == [A] * 6
    assert owners(scheduler, served(scheduler, 2, list(range(200, 240)), B)) == [B] * 2


def test_outputs_that_fork_before_their_first_block_are_on_their_requests_account() -> None:
    scheduler = make_scheduler(32)
    served(scheduler, 0, [1, 2, 3], A, max_tokens=40, n=3)
    assert scheduler.pool.num_cached >= 6
    assert scheduler.pool.num_cached_by_others(A) == 0


def test_a_copy_of_a_name_is_on_the_account_of_the_first() -> None:
    """A prompt that must be computed whole gets blocks of its own for names that are cached."""
    scheduler, tokens = make_scheduler(32), list(range(1, 50))
    served(scheduler, 0, tokens, A)
    whole = submit(scheduler, 1, tokens, max_tokens=20, tenant=B, prompt_logprobs=0)
    step(scheduler)
    assert {scheduler.pool.owner(block) for block in whole.block_table[:3]} == {A}


def test_what_lies_in_host_memory_comes_back_to_its_owner() -> None:
    scheduler, tokens = make_scheduler(8, host_cache_blocks=16), list(range(1, 60))
    first = served(scheduler, 0, tokens, A).names[1]
    served(scheduler, 1, list(range(100, 220)), B)
    assert scheduler.host_cache is not None
    assert (scheduler.cache.owner(first), scheduler.host_cache.owner(first)) == (None, A)
    again = served(scheduler, 2, [*tokens, *range(300, 320)], B)
    assert again.cached_tokens == 48
    assert set(owners(scheduler, again)) <= {A, None}


def names(letter: str, count: int) -> list[BlockName]:
    return [BlockName(f"{letter}{index}".encode().ljust(16)) for index in range(count)]


def host_cache(num_blocks: int) -> HostCache:
    return HostCache(num_blocks, first_slot=0, anywhere=AnywhereNames())


def test_host_memory_is_shared_by_tenants_too() -> None:
    cache, of_b = host_cache(8), names("b", 3)
    for name in reversed(of_b):
        cache.store(name, B)
    for name in names("a", 100):
        cache.store(name, A)
        cache.check_invariants()
    assert cache.match(of_b) == of_b
    assert len(cache) == 8


def test_what_a_step_reads_from_host_memory_is_not_evicted_and_then_the_newest() -> None:
    cache, old = host_cache(4), names("b", 2)
    for name in (*reversed(old), *names("a", 2)):
        cache.store(name, A)
    cache.read(old)
    for name in names("f", 5):
        cache.store(name, A)
        cache.check_invariants()
    assert cache.match(old) == old
    cache.done(old)
    for name in (*names("g", 1), *names("h", 1)):
        cache.store(name, A)
    assert cache.match(old) == old
    cache.store(names("i", 1)[0], A)
    assert cache.match(old) == old[:1], "a child goes before its parent"
    cache.check_invariants()


@given(st.integers(1, 6), st.integers(0, 6), st.booleans())
def test_a_pulled_prefix_goes_first_while_the_gpu_has_it_too(
    num_pulled: int, num_more: int, is_evicted_by_gpu: bool
) -> None:
    cache = host_cache(2 * num_pulled + num_more)
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
    cache, held = host_cache(2), names("b", 2)
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
