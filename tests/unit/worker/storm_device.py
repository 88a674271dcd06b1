"""A stand-in for a model, its memory and its draft model, for storms (storm.py).

Each token slot holds a digest of the whole prefix up to it. So a read of a wrong or unfilled block is found at once.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from itertools import accumulate
from typing import Any

from blockyard.worker.execution.step_moves import StepMoves
from blockyard.worker.memory.host_blocks import HostBlockCorrupted
from blockyard.worker.scheduling.scheduler import Scheduler
from blockyard.worker.sequences.beams import num_candidates
from blockyard.worker.sequences.identifiers import BlockId, HostSlot, SequenceId
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.sequences.step_plan import (
    FAILED_TOKEN,
    NO_TOKEN,
    RowExtras,
    ScheduledRow,
    StepPlan,
    StepTokens,
)
from blockyard.worker.speculation.draft_model import DraftModel

from .drafting import CheckedKeys

GARBAGE = -1
"""In a slot that no step has filled, or one that failed."""
STOP_TOKENS = frozenset({7, 21})


def follow(digest: int, token: int) -> int:
    return (digest * 1_000_003 + token + 7) % (2**61 - 1)


def digests(tokens: Iterable[int]) -> list[int]:
    """Return for each position the digest of all tokens up to it."""
    return list(accumulate(tokens, follow, initial=0))[1:]


def token_after(digest: int, index: int) -> int:
    return (digest + 13 * index) % 50 + 1


def candidates_after(digest: int, width: int) -> tuple[tuple[int, float], ...]:
    return tuple(((digest + 7 * n) % 50 + 1, -0.3 - 0.1 * n - digest % 97 / 500) for n in range(width))


def embedding_of(digest: int) -> bytes:
    return digest.to_bytes(8, "little")


class TransientFailure(RuntimeError):
    """It raises once."""


class Device:
    """KV memory, host memory, and a model that is a function of the prefix. Runs a step when it is planned, as a
    device that is one step ahead does: its newest tokens are known here before the scheduler hears of them."""

    def __init__(self, scheduler: Scheduler) -> None:
        size, config = scheduler.config.block_size, scheduler.config
        self._size = size
        self._kv = [[GARBAGE] * size for _ in scheduler.pool.blocks()]
        self._host = [[GARBAGE] * size for _ in range(config.swap_blocks + config.host_cache_blocks)]
        self._unheard: dict[SequenceId, int] = {}
        self.moved = Counter[str]()
        self._moves = StepMoves(
            save=self._moving("out", self._save),
            load=self._moving("in", self._load),
            copy=self._moving("copies", self._copy),
        )
        self.breaks_in: str | None = None
        """The next move of this kind raises half-way, or the step once its moves are made ("after")."""
        self.num_broken = 0
        self.corrupted: set[HostSlot] = set()
        self.found_corrupted: set[HostSlot] = set()
        """Slots of `corrupted` that a load has found."""
        self.num_found_corrupted = 0

    def warm_up(self) -> None:
        """Do nothing: there is nothing to warm."""

    def execute(self, plan: StepPlan) -> StepTokens:
        """Implement `Runner.execute`."""
        return self.run(plan)

    def run(self, plan: StepPlan, *, failing_rows: frozenset[int] = frozenset()) -> StepTokens:
        self._check_copies(plan)
        self._moves.make(plan)
        self._break("after")
        known = [digests(self._tokens(row)) for row in plan.rows]
        for row, own in zip(plan.rows, known, strict=True):
            for position in range(row.start, row.end):
                block, offset = self._place(row, position)
                self._kv[block][offset] = own[position]
        for row, own in zip(plan.rows, known, strict=True):
            self._check_read(row, own)
        self._unheard = {}
        tokens, extras = [], {}
        for index, row in enumerate(plan.rows):
            digest = known[index][row.end - 1]
            first = token_after(digest, row.sequence.index) if row.samples else NO_TOKEN
            tokens.append(FAILED_TOKEN if row.samples and index in failing_rows else first)
            if row.samples:
                if not row.drafts:
                    self._unheard[row.sequence.sequence_id] = tokens[-1]
                extras[index] = self._extras(row, digest)
            if row.embeds:
                extras[index] = RowExtras(embedding=embedding_of(digest))
        return StepTokens(tokens=tokens, extras=extras)

    def spoil(self, plan: StepPlan) -> None:
        """Fill everything that the step writes with garbage, as a step that raised may leave it."""
        self._unheard = {}
        for _, slot in plan.to_host:
            self._host[slot] = [GARBAGE] * self._size
        for block in (*(b for _, b in plan.from_host), *(b for _, b in plan.copies)):
            self._kv[block] = [GARBAGE] * self._size
        for row in plan.rows:
            for position in range(row.start, row.end):
                block, offset = self._place(row, position)
                self._kv[block][offset] = GARBAGE

    def block(self, block: BlockId) -> list[int]:
        return self._kv[block]

    def host_slot(self, slot: HostSlot) -> list[int]:
        return self._host[slot]

    def receive(self, slot: HostSlot, content: list[int]) -> None:
        """Write to the slot from outside, as the receiver of a pull does."""
        self._host[slot] = content
        self.corrupted.discard(slot)
        self.found_corrupted.discard(slot)

    def corrupt(self, slot: HostSlot) -> None:
        """Change the slot's content without notice."""
        self._host[slot] = [GARBAGE] * self._size
        self.corrupted.add(slot)

    def _break(self, kind: str) -> None:
        if self.breaks_in == kind:
            self.breaks_in = None
            self.num_broken += 1
            raise TransientFailure(kind)

    def _moving(self, kind: str, move: Callable[[Items[Any]], None]) -> Callable[[Items[Any]], None]:
        def make(pairs: Items[Any]) -> None:
            if self.breaks_in == kind:
                move(pairs[: (len(pairs) + 1) // 2])
            self._break(kind)
            move(pairs)
            self.moved[kind] += len(pairs)

        return make

    def _save(self, pairs: Items[tuple[BlockId, HostSlot]]) -> None:
        for block, slot in pairs:
            self._host[slot] = list(self._kv[block])
            self.corrupted.discard(slot)
            self.found_corrupted.discard(slot)

    def _load(self, pairs: Items[tuple[HostSlot, BlockId]]) -> None:
        if corrupted := self.corrupted.intersection(slot for slot, _ in pairs):
            assert not corrupted & self.found_corrupted, "what was found corrupted is read again"
            self.found_corrupted |= corrupted
            self.num_found_corrupted += 1
            raise HostBlockCorrupted(corrupted)
        for slot, block in pairs:
            self._kv[block] = list(self._host[slot])

    def _copy(self, pairs: Items[tuple[BlockId, BlockId]]) -> None:
        for source, destination in pairs:
            self._kv[destination] = list(self._kv[source])

    @staticmethod
    def _check_copies(plan: StepPlan) -> None:
        destinations = [destination for _, destination in plan.copies]
        assert len(set(destinations)) == len(destinations)
        assert not {source for source, _ in plan.copies} & set(destinations)

    def _tokens(self, row: ScheduledRow) -> list[int]:
        if row.drafts:
            return [*row.sequence.tokens[: row.end - len(row.drafts)], *row.drafts]
        known = list(row.sequence.tokens[: row.end])
        return known if len(known) == row.end else [*known, self._unheard[row.sequence.sequence_id]]

    def _place(self, row: ScheduledRow, position: int) -> tuple[BlockId, int]:
        return row.sequence.block_table[position // self._size], position % self._size

    def _check_read(self, row: ScheduledRow, expected: list[int]) -> None:
        for start in range(0, row.end, self._size):
            end = min(start + self._size, row.end)
            found = self._kv[row.sequence.block_table[start // self._size]][: end - start]
            assert found == expected[start:end], f"{row} reads at {start} what is not its own"

    @staticmethod
    def _extras(row: ScheduledRow, digest: int) -> RowExtras:
        if row.sequence.group is not None:
            return RowExtras(candidates=candidates_after(digest, num_candidates(row.sequence.sampling)))
        return RowExtras(tokens=tuple(token_after(digest, other) for other in range(1, row.num_outputs)))


class Guesses:
    """Drafts what the device will draw, or another token now and then."""

    def __init__(self) -> None:
        self._chance = random.Random(0)

    def draft(self, sequence: Sequence, most: int) -> tuple[list[int], int]:
        digest, draft = digests(sequence.tokens)[-1], list[int]()
        while len(draft) < most:
            token = token_after(digest, sequence.index)
            draft.append(token if self._chance.random() < 0.8 else token + 1)
            digest = follow(digest, draft[-1])
        return draft, 8

    def forget(self, ended: Iterable[SequenceId]) -> None:
        pass

    def execute(self, plan: StepPlan) -> StepTokens:
        """Draft as the runner of a draft model."""
        return StepTokens(tokens=[self.draft(row.sequence, 1)[0][0] for row in plan.rows])

    def model(self, scheduler: Scheduler) -> DraftModel:
        """Return a draft model whose keys are checked."""
        config = scheduler.config
        return DraftModel(
            CheckedKeys(config.block_size, self.execute).execute,
            num_blocks=scheduler.pool.num_blocks,
            block_size=config.block_size,
            max_tokens=config.max_model_len,
            max_step_tokens=config.max_num_batched_tokens,
        )
