"""A scheduler under every action that can happen to it, and the invariants that hold after each action.

A `Device` stands in for a model and its memory (storm_device.py). `Storm` owns the actions and the checks. weather.py
chooses among them.
"""

from collections import Counter
from collections.abc import Sequence as Items
from itertools import count
from typing import Any

from blockyard.worker.cache.block_tables import Loan
from blockyard.worker.execution.bisect import NothingSucceeds, in_halves
from blockyard.worker.memory.host_blocks import HostBlockCorrupted
from blockyard.worker.scheduling.commit import BeamsUpdate, SequenceUpdate, Update
from blockyard.worker.scheduling.preemption import Elsewhere
from blockyard.worker.scheduling.pulls import Pull, PullOrder
from blockyard.worker.scheduling.scheduler import CapacityError
from blockyard.worker.sequences.identifiers import BlockName, RequestId, SequenceId
from blockyard.worker.sequences.sequence import Sequence, SequenceState
from blockyard.worker.sequences.step_plan import StepPlan, StepTokens

from .drafting import AlwaysDrafts
from .scheduling import make_scheduler, make_sequence, measured
from .storm_device import (
    GARBAGE,
    Device,
    Guesses,
    TransientFailure,
    digests,
    embedding_of,
    follow,
    token_after,
)


class Storm:
    """One scheduler, its device, and all that has been asked of it."""

    def __init__(
        self,
        num_blocks: int,
        *,
        pipelined: bool,
        drafts: bool = False,
        draft_model: bool = False,
        **settings: Any,
    ) -> None:
        self.scheduler = make_scheduler(num_blocks, **settings)
        if drafts:
            self.scheduler.speculation = AlwaysDrafts(Guesses())
        if draft_model:
            self.scheduler.speculation = AlwaysDrafts(model=Guesses().model(self.scheduler))
        self.device = Device(self.scheduler)
        self.pipelined = pipelined
        self.sequences: dict[SequenceId, Sequence] = {}
        self.beams: dict[SequenceId, BeamsUpdate] = {}
        """Result of each beam search that has ended, by the id of the search's first sequence."""
        self.embeddings: dict[SequenceId, bytes] = {}
        self.moved = Counter[str]()
        self._leaders: dict[int, Sequence] = {}
        self._in_flight: list[tuple[StepPlan, StepTokens]] = []
        self._content: dict[BlockName, tuple[int, ...]] = {}
        self._parents: dict[BlockName, BlockName] = {}
        self._published: set[BlockName] = set()
        self._anywhere: set[BlockName] = set()
        self._numbers = count()
        self._transfers: list[tuple[Pull, list[list[int]]]] = []
        """Pulls under way, and the content of their blocks that is still to come."""
        self._loans: list[tuple[Loan, list[BlockName]]] = []
        """Loans, and the names of the prefix that was asked for."""

    # Actions

    def submit(
        self,
        tokens: Items[int],
        *,
        generated: int = 0,
        pulled: int = 0,
        may_move: bool = False,
        waited: int = 0,
        pause: float = 0.0,
        **settings: Any,
    ) -> None:
        """`generated` of the tokens are output already: a replay. `pulled` blocks are to come from elsewhere. `waited`
        steps of priority are made up for. Its client says that it comes back after a `pause`."""
        size = self.scheduler.config.block_size
        longest = self.scheduler.config.max_model_len - len(tokens)
        if not settings.get("embeds"):
            settings["max_tokens"] = max(1, min(settings["max_tokens"], longest)) + generated
        sequence = make_sequence(next(self._numbers), tokens, block_size=size, **settings)
        sequence.rank -= waited
        sequence.prompt_length -= generated
        sequence.may_move, sequence.expected_pause_seconds = may_move, pause
        self._begin(sequence, pulled)

    def _begin(self, sequence: Sequence, pulled: int) -> None:
        try:
            self.scheduler.submit(sequence)
        except CapacityError:
            return
        self._leaders.setdefault(sequence.request_id, sequence)
        self._know(sequence)
        self._pull(sequence, PullOrder(address="", incarnation="", num_blocks=pulled, seconds=1.0))

    def offer_room(self, num_blocks: int, blocks_per_second: float) -> None:
        """Another worker has room for so many blocks. What moves there comes back at once, as a replay with a pull."""
        swap = self.scheduler.mixed_steps.rates.swap_blocks_per_second
        measured(self.scheduler, prefill=50.0, swap=swap, decode=50.0)
        room = Elsewhere(num_blocks=num_blocks, setup_seconds=0.01, blocks_per_second=blocks_per_second)
        self.scheduler.elsewhere = room if num_blocks else None

    def _move(self, sequences: Items[Sequence]) -> None:
        """Submit the sequences of a request that was given back, as the next worker gets them."""
        numbers = [next(self._numbers) for _ in sequences]
        for number, left in zip(numbers, sequences, strict=True):
            assert left.may_move
            assert left.num_generated
            assert left.group is None
            assert not left.num_in_flight
            sequence = make_sequence(number, left.tokens, block_size=self.scheduler.config.block_size)
            sequence.sampling = left.sampling
            sequence.prompt_length, sequence.index = left.prompt_length, left.index
            sequence.num_outputs, sequence.may_move = 1, True
            sequence.request_id = RequestId(numbers[0])
            sequence.priority, sequence.rank, sequence.tenant = left.priority, left.rank, left.tenant
            sequence.num_preemptions = min(left.num_preemptions + 1, self.scheduler.config.max_preemptions)
            self._begin(sequence, 9)
        self.moved["given back"] += 1
        self.moved["outputs given back together"] += len(sequences) > 1

    def _pull(self, sequence: Sequence, order: PullOrder) -> None:
        pull = self.scheduler.pulls.begin(sequence, order, now=0.0)
        if pull is not None:
            self._transfers.append((pull, [list(self._content[name]) for name in pull.names]))

    def receive(self, number: int) -> None:
        """A block of a pull arrives, the first half of it first."""
        if self._transfers:
            pull, coming = self._transfers[number % len(self._transfers)]
            if coming:
                slot, content = pull.slots[len(pull.slots) - len(coming)], coming.pop(0)
                half = len(content) // 2
                self.device.receive(slot, [*content[:half], *[GARBAGE] * (len(content) - half)])
                self.check()
                self.device.receive(slot, content)

    def end_pull(self, number: int) -> None:
        """A pull ends, whole or not."""
        if self._transfers:
            pull, coming = self._transfers.pop(number % len(self._transfers))
            self.moved["cut"] += bool(coming) and not pull.is_cancelled
            self.moved["cancelled"] += pull.is_cancelled
            before = self.scheduler.pulls.num_blocks
            following = self.scheduler.pulls.end(pull, len(pull.slots) - len(coming))
            self.moved["pulled"] += self.scheduler.pulls.num_blocks - before
            for sequence, order, _ in following:
                self._pull(sequence, order)

    def late(self) -> None:
        """No sequence waits for its pull any longer."""
        self.scheduler.pulls.release_late(now=100.0)

    def lend(self, number: int) -> None:
        """Another worker fetches a prefix."""
        if self.sequences:
            names = list(self.sequences.values())[number % len(self.sequences)].names[1:]
            loan = self.scheduler.tables.lend(names, most_blocks=self.scheduler.pool.num_blocks // 3)
            self._loans.append((loan, names))
            self.moved["lent"] += len(loan)

    def end_loan(self, number: int) -> None:
        if self._loans:
            self.scheduler.tables.end_loan(self._loans.pop(number % len(self._loans))[0])

    def cancel_request(self, number: int, index: int | None = None) -> None:
        if self._leaders:
            leader = list(self._leaders.values())[number % len(self._leaders)]
            # A beam is no output: a search is cancelled as a whole.
            self.scheduler.cancel_request(leader.request_id, None if leader.group else index)

    def plan(self, failing_rows: frozenset[int] = frozenset()) -> None:
        """Plans and runs a step; without pipelining the one before is over."""
        while len(self._in_flight) > self.pipelined:
            self.commit()
        self.scheduler.pool.now_seconds += 1.3
        live = (*self.scheduler.waiting, *self.scheduler.running)
        plan = self.scheduler.plan()
        assert all(row.num_tokens > 0 for row in plan.rows)
        assert sum(row.num_tokens for row in plan.rows) <= self.scheduler.config.max_num_batched_tokens
        for request_id in self.scheduler.take_given_back():
            self._move([sequence for sequence in live if sequence.request_id == request_id])
        if not plan.has_work:
            return
        try:
            self._in_flight.append((plan, self.device.run(plan, failing_rows=failing_rows)))
        except (TransientFailure, HostBlockCorrupted) as failure:
            self._run_again(plan, failure)

    def _run_again(self, plan: StepPlan, failure: Exception) -> None:
        """Bisect a failed step as `Steps` does: after the steps before it are committed, before another is planned."""
        while self._in_flight:
            self.commit()
        try:
            tokens = in_halves(self.device, plan, self.scheduler.cache.is_unconfirmed, failure)
        except NothingSucceeds:
            self._take(self.scheduler.fail(plan))
        else:
            self._in_flight.append((plan, tokens))
            self.commit()

    def break_next(self, kind: str) -> None:
        """The next step that moves blocks so raises once in the middle of it."""
        self.device.breaks_in = kind

    def corrupt(self, number: int) -> None:
        """One slot of host memory in use."""
        host, swapped = self.scheduler.host_cache, [s.swapped for s in self.scheduler.waiting if s.swapped]
        slots = [slot for blocks in swapped for slot in blocks.slots]
        slots += list(host._slots.values()) if host is not None else []
        if slots:
            self.device.corrupt(slots[number % len(slots)])

    def commit(self) -> None:
        if self._in_flight:
            plan, tokens = self._in_flight.pop(0)
            updates = self.scheduler.commit(plan, tokens)
            self._take(updates)
            for sequence in (*(row.sequence for row in plan.rows), *(update.sequence for update in updates)):
                self._know(sequence)

    def fail(self) -> None:
        """The oldest step raises, and with it what was planned on it."""
        for plan, _ in self._in_flight:
            self.device.spoil(plan)
        while self._in_flight:
            self._take(self.scheduler.fail(self._in_flight.pop(0)[0]))

    def take_back(self, *, moved: bool) -> None:
        """The newest step is not committed, because of one before it; what it moved may or may not have moved."""
        while len(self._in_flight) > 1:
            self.commit()
        for plan, _ in self._in_flight:
            if not moved:
                self.device.spoil(plan)
            self.scheduler.abandon(plan, moved=moved)
        self._in_flight.clear()

    def measure(self, prefill: float, swap: float, beside_decodes: int | None) -> None:
        decode = self.scheduler.mixed_steps.rates.decode_tokens_per_second
        measured(self.scheduler, prefill=prefill, swap=swap, decode=decode)
        self.scheduler.mixed_steps.limit_tokens = beside_decodes

    def finish(self) -> None:
        """Lets everything end by itself."""
        while self._transfers:
            self.end_pull(0)
        while self._loans:
            self.end_loan(0)
        for _ in range(3000):
            if not self.scheduler.has_work and not self._in_flight:
                break
            self.plan()
            self.end_pull(0)  # what moves now is pulled too
            self.check()
            self.commit()
            self.check()
        self._check_nothing_is_held()
        self._check_tokens()

    def _take(self, updates: list[Update]) -> None:
        """Apply updates as the engine does: an output that fails ends its whole request."""
        for update in updates:
            if isinstance(update, SequenceUpdate) and update.embedding:
                assert update.sequence.sequence_id not in self.embeddings
                self.embeddings[update.sequence.sequence_id] = update.embedding
            elif isinstance(update, SequenceUpdate) and update.token is None:
                self.scheduler.cancel_request(update.sequence.request_id)
            if isinstance(update, BeamsUpdate):
                self.beams[self._leaders[update.sequence.request_id].sequence_id] = update

    # Checks

    def check(self) -> None:
        """After every action."""
        self.scheduler.check_invariants()
        for sequence in (*self.scheduler.waiting, *self.scheduler.running):
            self._know(sequence)
            assert sequence.num_preemptions <= self.scheduler.config.max_preemptions
            rows = (row for plan, _ in self._in_flight for row in plan.rows)
            assert sequence.num_in_flight == sum(row.sequence is sequence for row in rows)
        self._check_names()
        for loan, names in self._loans:
            held = [self.device.block(block) for block in loan.blocks]
            held += [self.device.host_slot(slot) for slot in loan.host_slots]
            unread = [GARBAGE] * self.scheduler.config.block_size
            for name, content in zip(names, held, strict=False):
                assert content in (list(self._content[name]), unread), "a lent block has changed"

    def _know(self, sequence: Sequence) -> None:
        """Record what a block of each of the sequence's names must hold."""
        self.sequences[sequence.sequence_id] = sequence
        names, size = sequence.names[1:], self.scheduler.config.block_size
        if not names or names[-1] in self._content:
            return
        known = digests(sequence.tokens[: len(names) * size])
        for index, name in enumerate(names):
            self._content[name] = tuple(known[index * size : (index + 1) * size])
            self._parents[name] = sequence.names[index]

    def _check_names(self) -> None:
        cache, host = self.scheduler.cache, self.scheduler.host_cache
        changes = cache.take_changes()
        self._published.difference_update(changes.removed)
        assert not self._published & set(changes.stored)
        self._published.update(changes.stored)
        blocks = [block for block in self.scheduler.pool.blocks() if cache.name(block) is not None]
        names = {block: cache.name(block) for block in blocks if not cache.is_unconfirmed(block)}
        assert set(names.values()) == self._published, "news of names and the cache disagree"
        for block, name in names.items():
            assert name is not None
            assert tuple(self.device.block(block)) == self._content[name], "a name is of other content"
        in_host = dict(host._slots) if host is not None else {}
        for name, slot in in_host.items():
            is_right = tuple(self.device.host_slot(slot)) == self._content[name]
            assert is_right or slot in self.device.corrupted, "other content in host memory"
        self._anywhere.difference_update(changes.anywhere_removed)
        self._anywhere.update(changes.anywhere_stored)
        assert self._anywhere == (self._published | in_host.keys() if host is not None else set())
        for name in self._anywhere or self._published:
            parent = self._parents[name]
            assert parent not in self._parents or parent in (self._anywhere or self._published), "a gap"
            owners = {cache.owner(name), cache.owner(parent)}
            owners |= set() if host is None else {host.owner(name), host.owner(parent)}
            assert len(owners - {None}) == 1, "what builds on a block is on its owner's account"

    def _check_nothing_is_held(self) -> None:
        scheduler, host = self.scheduler, self.scheduler.host_cache
        assert not scheduler.has_work, "it still has work"
        assert not scheduler._moves
        assert scheduler.pool.num_used == 0
        assert not scheduler.tables.held_beside_sequences()
        assert scheduler.tables.swap.num_free == scheduler.config.swap_blocks
        assert all(sequence.is_over for sequence in self.sequences.values())
        assert host is None or not (host._reading or host._reserved)
        assert not len(scheduler.pulls)

    def _check_tokens(self) -> None:
        """Check that each sequence has the tokens that it gets alone, or their beginning if it was cut short."""
        for sequence in self.sequences.values():
            if sequence.group is None:
                expected = self._alone(sequence)
                assert list(sequence.tokens) == expected[: len(sequence.tokens)]
                finished = sequence.state is SequenceState.FINISHED
                assert not finished or len(expected) == len(sequence.tokens)
                embedding = embedding_of(digests(sequence.tokens)[-1]) if sequence.sampling.embeds else None
                assert self.embeddings.get(sequence.sequence_id) == (embedding if finished else None)
        for sequence_id, update in self.beams.items():
            assert update.hypotheses == self._search_alone(self.sequences[sequence_id]).hypotheses

    @staticmethod
    def _alone(sequence: Sequence) -> list[int]:
        tokens, sampling = list(sequence.tokens[: sequence.prompt_length]), sequence.sampling
        digest = digests(tokens)[-1]
        for number in range(sampling.max_tokens):
            tokens.append(token_after(digest, sequence.index))
            if number + 1 >= sampling.min_tokens and tokens[-1] in sampling.stop_token_ids:
                break
            digest = follow(digest, tokens[-1])
        return tokens

    def _search_alone(self, sequence: Sequence) -> BeamsUpdate:
        sampling = sequence.sampling
        wanted = ("n", "beam_width", "max_tokens", "stop_token_ids")
        calm = Storm(1000, pipelined=False, block_size=self.scheduler.config.block_size)
        calm.submit(
            sequence.tokens[: sequence.prompt_length], **{name: getattr(sampling, name) for name in wanted}
        )
        while calm.scheduler.has_work:
            calm.plan()
            calm.commit()
        (update,) = calm.beams.values()
        return update
