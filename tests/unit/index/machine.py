"""The index equals a brute force over the workers' true caches, whatever happens to workers and Redis.

Many histories run against the twin, fewer against a real Redis and against several that share the prefixes. The
harness owns the time: a lease of 60 s lapses when the state machine says so. Each history has an index stride S:
workers publish every Sth block.
"""

import asyncio
from typing import Any

from blockyard.proto.index.contract import ApplyResult, Batch, Berth, RenewResult
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.properties import examples

from .harness import IndexHarness, free_of, purge_all, record
from .incarnations import WorkerIncarnation, known_to_index, rounded_down
from .truth import ALL_CHAINS, Tiers, brute_force, name_of

LEASE_SECONDS = 60.0


class IndexMachine(RuleBasedStateMachine):
    """Abstract state machine: each subclass chooses the index."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.incarnations: list[WorkerIncarnation] = []
        self.now = 0.0
        self.num_started = 0

    def make_harness(self) -> IndexHarness:
        raise NotImplementedError

    @initialize(stride_blocks=st.sampled_from([1, 1, 2, 4]))
    def open(self, stride_blocks: int) -> None:
        self.stride_blocks = stride_blocks
        self.harness = self.make_harness()
        self.index = self.harness.index

    def teardown(self) -> None:
        self.runner.close()

    def run(self, call: Any) -> Any:
        return self.runner.run(call)

    def running(self) -> list[WorkerIncarnation]:
        return [owner for owner in self.incarnations if owner.is_running]

    def pick(self, number: int) -> WorkerIncarnation:
        candidates = self.running()
        return candidates[number % len(candidates)]

    @rule(worker=st.integers(0, 3), has_host_cache=st.booleans())
    def start(self, worker: int, has_host_cache: bool) -> None:
        """Also a restart: the earlier incarnation, if any, dies without a word."""
        for owner in self.running():
            if owner.worker_id == f"w{worker}":
                owner.is_running = False
        self.num_started += 1
        owner = WorkerIncarnation(
            worker_id=f"w{worker}",
            incarnation=str(self.num_started),
            berth=Berth(number=0, epoch=0),
            tiers=Tiers(has_host_cache=has_host_cache),
            stride_blocks=self.stride_blocks,
        )
        self.incarnations.append(owner)
        self.register(owner)

    def register(self, owner: WorkerIncarnation) -> None:
        owner.berth = self.run(
            self.index.register(
                record(owner.worker_id, owner.incarnation),
                lease_seconds=LEASE_SECONDS,
                has_host_cache=owner.tiers.has_host_cache,
            )
        )
        assert (owner.berth.anywhere is not None) == owner.tiers.has_host_cache
        owner.deadline = self.now + LEASE_SECONDS
        owner.forgotten()
        owner.is_refused = False
        owner.last_batch = Batch(sequence=0)

    @precondition(lambda self: self.running())
    @rule(which=st.integers(0, 3), seed=st.integers(0, 2**16))
    def step_of_the_engine(self, which: int, seed: int) -> None:
        """Some blocks stored, some evicted, then one batch of the net difference."""
        owner = self.pick(which)
        owner.tiers.seeded_change(seed)
        self.publish(owner)

    def publish(self, owner: WorkerIncarnation) -> None:
        batch = owner.next_batch()
        result = self.run(self.index.apply(owner.berth, batch))
        if self.must_resync(owner, result is ApplyResult.UNKNOWN):
            self.resync(owner)
            return
        assert result is ApplyResult.OK
        owner.applied(batch)

    def must_resync(self, owner: WorkerIncarnation, is_unknown: bool) -> bool:
        """A live berth is never refused, a refused one never comes back; a lapsed one may go either way."""
        if owner.is_refused:
            assert is_unknown
        if self.now < owner.deadline and not owner.is_refused:
            assert not is_unknown
        return is_unknown

    def resync(self, owner: WorkerIncarnation) -> None:
        self.register(owner)
        self.publish(owner)

    @precondition(lambda self: self.running())
    @rule(which=st.integers(0, 3))
    def replay(self, which: int) -> None:
        owner = self.pick(which)
        if owner.last_batch.sequence:
            result = self.run(self.index.apply(owner.berth, owner.last_batch))
            expected = ApplyResult.DUPLICATE
            assert result in (expected, ApplyResult.UNKNOWN)
            if self.must_resync(owner, result is ApplyResult.UNKNOWN):
                self.resync(owner)

    @precondition(lambda self: self.running())
    @rule(which=st.integers(0, 3), seed=st.integers(0, 2**16))
    def lose_a_batch(self, which: int, seed: int) -> None:
        """The batch after it finds a gap: a new berth and a snapshot."""
        owner = self.pick(which)
        owner.tiers.seeded_change(seed)
        stray = (name_of((9, 9)),)
        after = Batch(sequence=owner.last_batch.sequence + 2, added=stray, anywhere_added=stray)
        result = self.run(self.index.apply(owner.berth, after))
        assert result in (ApplyResult.GAP, ApplyResult.UNKNOWN)
        self.must_resync(owner, result is ApplyResult.UNKNOWN)
        self.resync(owner)

    @rule(seconds=st.sampled_from([1.0, 25.0, 61.0, 200.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.run(self.harness.advance(seconds))

    @rule()
    def everyone_renews(self) -> None:
        for owner in self.running():
            result = self.run(
                self.index.renew(
                    owner.berth, lease_seconds=LEASE_SECONDS, applied_sequence=owner.last_batch.sequence
                )
            )
            if self.must_resync(owner, result is RenewResult.UNKNOWN):
                self.resync(owner)
            owner.deadline = self.now + LEASE_SECONDS

    @precondition(lambda self: self.running())
    @rule(which=st.integers(0, 3))
    def crash(self, which: int) -> None:
        self.pick(which).is_running = False

    @precondition(lambda self: self.running())
    @rule(which=st.integers(0, 3))
    def retire(self, which: int) -> None:
        owner = self.pick(which)
        self.run(self.index.retire(owner.berth))
        owner.is_running = False
        owner.refused()

    @precondition(lambda self: self.incarnations)
    @rule(which=st.integers(0, 20), seed=st.integers(0, 2**16))
    def zombie_writes(self, which: int, seed: int) -> None:
        """An incarnation thought dead goes on writing: it counts while its lease does, and never once purged."""
        dead = [owner for owner in self.incarnations if not owner.is_running]
        if not dead:
            return
        owner = dead[which % len(dead)]
        owner.tiers.seeded_change(seed)
        batch = owner.next_batch()
        result = self.run(self.index.apply(owner.berth, batch))
        if self.must_resync(owner, result is ApplyResult.UNKNOWN):
            owner.refused()
        else:
            owner.applied(batch)

    @rule()
    def flush_everything(self) -> None:
        self.run(self.harness.flush())
        for owner in self.incarnations:
            owner.refused()

    @rule(slice_buckets=st.sampled_from([64, 1000, 4096]))
    def purge_a_slice(self, slice_buckets: int) -> None:
        freed = self.run(self.index.purge(slice_buckets=slice_buckets)).freed
        self.check_freed(set(freed))

    def check_freed(self, freed: set[int]) -> None:
        """Only the numbers of the lapsed and the refused are freed, both of a worker at once."""
        for owner in self.incarnations:
            if owner.berth.number in freed and not owner.is_refused:
                assert self.now >= owner.deadline + 2 * LEASE_SECONDS
                assert owner.berth.anywhere is None or owner.berth.anywhere in freed
                owner.refused()
            assert owner.is_refused or owner.berth.anywhere not in freed

    def living(self) -> list[WorkerIncarnation]:
        """Return the incarnations whose blocks the index believes."""
        return [owner for owner in self.incarnations if self.now < owner.deadline and not owner.is_refused]

    @invariant()
    def lookups_equal_the_brute_force(self) -> None:
        if not hasattr(self, "index"):
            return
        living = {(owner.worker_id, owner.incarnation): owner for owner in self.living()}
        on_gpu = {identity: owner.published for identity, owner in living.items()}
        anywhere = {
            identity: owner.published | owner.published_anywhere for identity, owner in living.items()
        }
        for path in ALL_CHAINS[:: max(1, len(ALL_CHAINS) // 6)]:
            names = [name_of(path[: depth + 1]) for depth in range(len(path))]
            stride = self.stride_blocks
            found = self.run(self.index.lookup(names[stride - 1 :: stride]))
            assert len({(holder.worker_id, holder.incarnation) for holder in found}) == len(found)
            depths = {(holder.worker_id, holder.incarnation): holder for holder in found}
            on_gpu_depths = {who: h.depth * stride for who, h in depths.items() if h.depth}
            assert on_gpu_depths == rounded_down(brute_force(on_gpu, path), stride)
            anywhere_depths = {who: (h.depth + h.host_blocks) * stride for who, h in depths.items()}
            assert anywhere_depths == rounded_down(brute_force(anywhere, path), stride)

    @rule()
    def info_counts_what_is_stored_and_who_lives(self) -> None:
        info = self.run(self.index.info())
        assert info.names == self.run(self.harness.num_entries())
        assert (info.bytes > 0) == (info.names > 0)
        assert info.live_berths == sum(1 + (owner.berth.anywhere is not None) for owner in self.living())

    @rule()
    def settle(self) -> None:
        """Once the dead are purged, exactly the blocks of the living are stored: memory does not leak."""
        for _ in range(4):
            self.everyone_renews()
            self.pass_time(50.0)
        self.everyone_renews()
        for owner in self.running():
            self.publish(owner)
        for _ in range(2):
            self.check_freed(free_of(self.run(purge_all(self.index))))
        if self.running():
            living = {path for owner in self.running() for path in owner.published | owner.published_anywhere}
            info = self.run(self.index.info())
            assert info.names == len(known_to_index(living, self.stride_blocks))
            assert info.dead_berths == 0
            self.info_counts_what_is_stored_and_who_lives()


def budget(count: int) -> settings:
    return examples(
        count,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
