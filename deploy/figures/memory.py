"""Figures of memory: the gain of paging over an engine that gives each sequence contiguous memory.

Owns a small simulation of an engine that reserves contiguous memory, first fit, since this repository has no such
engine. All paged figures come from the real scheduler and pool. Both engines take the same requests in order of
arrival, and generate one token per running request and step.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from blockyard.deploy.figures.loads import BLOCK_SIZE, Drive, Request, Sample, mean, mixed, share
from blockyard.worker.sequences.identifiers import BlockId

MAX_LENGTH = 2048


class ContiguousMemory:
    """Token slots 0 .. size - 1. Each reservation gets the first free piece that is long enough."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]
        """Free pieces (start, length), sorted. No two are adjacent."""

    @property
    def total_free(self) -> int:
        return sum(length for _, length in self._free)

    @property
    def largest_free(self) -> int:
        return max((length for _, length in self._free), default=0)

    def reserve(self, count: int) -> int | None:
        """Reserve a piece and return its start. Return None if no free piece is long enough."""
        for index, (start, length) in enumerate(self._free):
            if length >= count:
                self._free[index : index + 1] = [(start + count, length - count)] if length > count else []
                return start
        return None

    def release(self, start: int, count: int) -> None:
        merged: list[tuple[int, int]] = []
        for piece in sorted([*self._free, (start, count)]):
            if merged and sum(merged[-1]) == piece[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + piece[1])
            else:
                merged.append(piece)
        self._free = merged


@dataclass(slots=True, kw_only=True)
class _Admitted:
    request: Request
    start: int
    reserved: int
    num_tokens: int


class ContiguousEngine:
    """Continuous batching over contiguous memory. `reserve` returns how many slots to reserve for a request."""

    def __init__(self, requests: Iterable[Request], memory: int, reserve: Callable[[Request], int]) -> None:
        self.memory = ContiguousMemory(memory)
        self.running: list[_Admitted] = []
        self._coming = list(requests)
        self._reserve = reserve
        self._step = 0

    @property
    def has_work(self) -> bool:
        return bool(self._coming or self.running)

    @property
    def waiting(self) -> list[Request]:
        return [request for request in self._coming if request.arrival <= self._step]

    @property
    def is_blocked_by_pieces(self) -> bool:
        """Whether the first waiting request would fit if the free memory were one piece."""
        waiting = self.waiting
        return bool(waiting) and self._reserve(waiting[0]) <= self.memory.total_free

    def begin_step(self) -> Sample:
        """Admit requests in order of arrival, and return what the step holds while it runs."""
        while self._coming and self._coming[0].arrival <= self._step:
            reserved = self._reserve(self._coming[0])
            start = self.memory.reserve(reserved)
            if start is None:
                break
            request = self._coming.pop(0)
            admitted = _Admitted(
                request=request, start=start, reserved=reserved, num_tokens=len(request.prompt)
            )
            self.running.append(admitted)
        return Sample(
            step=self._step,
            running=len(self.running),
            waiting=len(self.waiting),
            tokens=sum(admitted.num_tokens for admitted in self.running),
            taken=sum(admitted.reserved for admitted in self.running),
            memory=self.memory.size,
        )

    def end_step(self) -> None:
        """Add a token to each running request, and release those that are complete."""
        self._step += 1
        for admitted in tuple(self.running):
            admitted.num_tokens += 1
            if admitted.num_tokens >= admitted.request.num_tokens:
                self.running.remove(admitted)
                self.memory.release(admitted.start, admitted.reserved)

    def cells(self, size: int) -> list[tuple[int, float]]:
        """Return the memory in cells of `size` slots.

        Each cell has the number of the request with most of its slots (-1: free), and the share of slots with a token.
        """
        numbers, full = [-1] * self.memory.size, [0] * self.memory.size
        for admitted in self.running:
            for slot in range(admitted.reserved):
                numbers[admitted.start + slot] = admitted.request.number
                full[admitted.start + slot] = slot < admitted.num_tokens
        starts = range(0, self.memory.size, size)
        return [(_most_common(numbers[s : s + size]), mean(full[s : s + size])) for s in starts]


def _most_common(values: list[int]) -> int:
    return max(set(values), key=values.count)


class PagedEngine:
    """Real scheduler, which gets the same stream of requests as ContiguousEngine."""

    def __init__(self, requests: Iterable[Request], memory: int) -> None:
        self.drive = Drive(memory // BLOCK_SIZE, max_num_seqs=512)
        self._coming = list(requests)
        self._step = 0

    @property
    def has_work(self) -> bool:
        return bool(self._coming or self.drive.scheduler.has_work)

    def step(self, look: Callable[[Sample], None]) -> None:
        """Run one step. Calls `look` while the step runs."""
        while self._coming and self._coming[0].arrival <= self._step:
            request = self._coming.pop(0)
            self.drive.submit(request.prompt, request.num_output_tokens)
        plan = self.drive.plan()
        look(self.drive.sample(self._step))
        self.drive.finish(plan)
        self._step += 1

    def num_in_pieces(self) -> int:
        """Return the number of running sequences whose blocks are not contiguous."""
        tables = [list(sequence.block_table) for sequence in self.drive.scheduler.running]
        return sum(table != list(range(table[0], table[0] + len(table))) for table in tables if table)

    def cells(self) -> list[tuple[int, float]]:
        """Return, for each block, the number of the sequence that holds it (-1: none) and its share of used slots."""
        owners: dict[BlockId, int] = {
            block: sequence.sequence_id
            for sequence in self.drive.scheduler.running
            for block in sequence.block_table
        }
        fill = self.drive.block_fill()
        blocks = self.drive.scheduler.pool.blocks()
        return [(owners.get(block, -1), fill.get(block, 0) / BLOCK_SIZE) for block in blocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """Figures of sequences with a mean length of 258 tokens, where 2048 is the maximum."""

    num_sequences: int
    mean_tokens: float
    contiguous_utilisation: float
    paged_utilisation: float
    times_the_sequences: float
    """Sequences that fit in the memory of one contiguous sequence, by the blocks that they need."""
    times_the_sequences_run: float
    """The same, by the sequences that the scheduler runs at once. It keeps a block free for the next token of each."""


def memory_figures(num_sequences: int = 50) -> MemoryFigures:
    chance = random.Random(0)
    half = [258 + deviation for deviation in chance.sample(range(250), num_sequences // 2)]
    lengths = [*half, *(2 * 258 - length for length in half)]
    memory = num_sequences * MAX_LENGTH
    drive = _running_prompts(lengths, memory)
    tokens = sum(sequence.num_scheduled for sequence in drive.sequences)
    taken = drive.scheduler.pool.num_used * BLOCK_SIZE
    full = _running_prompts(lengths * (2 * memory // taken), memory)
    return MemoryFigures(
        num_sequences=num_sequences,
        mean_tokens=tokens / num_sequences,
        contiguous_utilisation=tokens / memory,
        paged_utilisation=tokens / taken,
        times_the_sequences=memory / taken,
        times_the_sequences_run=len(full.scheduler.running) / num_sequences,
    )


def _running_prompts(lengths: list[int], memory: int) -> Drive:
    """Return a Drive after it has planned one step, with as many prompts of these lengths as fit."""
    drive = Drive(
        memory // BLOCK_SIZE,
        max_model_len=MAX_LENGTH,
        max_num_seqs=len(lengths),
        max_num_batched_tokens=sum(lengths),
    )
    for number, length in enumerate(lengths):
        drive.submit((number * 7 + index for index in range(length)), 8)
    drive.plan()
    return drive


Cells = list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentationFigures:
    """Figures of one stream of requests. Contiguous memory reserves what each will need, as if lengths were known.

    `worst_...` are of the step with the most free tokens among those that refused a request for lack of one piece.
    """

    memory: int
    num_requests: int
    refused_for_pieces: int
    """Steps in which the first waiting request would have fit if the free memory were one piece."""
    steps: int
    paged_steps: int
    worst_step: int
    worst_free: int
    worst_largest_piece: int
    worst_wanted: int
    paged_free: int
    """Free tokens in the pool at `worst_step`. Every free block is usable."""
    paged_in_pieces: float
    """Share of sequences running at `worst_step` whose blocks are not contiguous, which costs nothing."""
    contiguous_cells: Cells
    paged_cells: Cells


def fragmentation_figures(memory: int = 4096, num_requests: int = 200) -> FragmentationFigures:
    requests = mixed(num_requests, mean_steps_between=6.0, seed=3)
    refused = steps = 0
    worst: tuple[int, int, int, int, Cells] = (0, -1, 0, 0, [])
    engine = ContiguousEngine(requests, memory, reserve=lambda request: request.num_tokens)
    while engine.has_work:
        engine.begin_step()
        if engine.is_blocked_by_pieces:
            refused += 1
            free = engine.memory.total_free
            if free > worst[0]:
                wanted = engine.waiting[0].num_tokens
                worst = free, steps, engine.memory.largest_free, wanted, engine.cells(BLOCK_SIZE)
        engine.end_step()
        steps += 1
    free, worst_step, largest, wanted, contiguous_cells = worst
    paged, paged_steps, seen = PagedEngine(requests, memory), 0, _Seen()
    while paged.has_work:
        paged.step(lambda sample: seen.look(paged, sample, worst_step))
        paged_steps += 1
    return FragmentationFigures(
        memory=memory,
        num_requests=num_requests,
        refused_for_pieces=refused,
        steps=steps,
        paged_steps=paged_steps,
        worst_step=worst_step,
        worst_free=free,
        worst_largest_piece=largest,
        worst_wanted=wanted,
        paged_free=seen.free,
        paged_in_pieces=seen.in_pieces,
        contiguous_cells=contiguous_cells,
        paged_cells=seen.cells,
    )


class _Seen:
    """State of the paged engine during the step `wanted_step`."""

    def __init__(self) -> None:
        self.free = 0
        self.in_pieces = 0.0
        self.cells: Cells = []

    def look(self, engine: PagedEngine, sample: Sample, wanted_step: int) -> None:
        if sample.step == wanted_step:
            self.free = sample.memory - sample.taken
            self.in_pieces = engine.num_in_pieces() / sample.running
            self.cells = engine.cells()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalFigures:
    """Figures of one stream of arrivals on the same memory. Contiguous memory reserves 2048 tokens for each request."""

    memory: int
    num_requests: int
    contiguous: list[Sample]
    paged: list[Sample]

    @property
    def mean_running(self) -> tuple[float, float]:
        """Mean number of running sequences while there was work: contiguous, paged."""
        return mean(s.running for s in self.contiguous), mean(s.running for s in self.paged)

    @property
    def peak_running(self) -> tuple[int, int]:
        return max(s.running for s in self.contiguous), max(s.running for s in self.paged)

    @property
    def utilisation(self) -> tuple[float, float]:
        """Tokens per taken slot over all steps: contiguous, paged."""
        return _utilisation(self.contiguous), _utilisation(self.paged)

    @property
    def mean_wait_steps(self) -> tuple[float, float]:
        """Mean steps from a request's arrival to its admission: contiguous, paged."""
        return (
            sum(s.waiting for s in self.contiguous) / self.num_requests,
            sum(s.waiting for s in self.paged) / self.num_requests,
        )


def _utilisation(samples: list[Sample]) -> float:
    return share((s.tokens for s in samples), (s.taken for s in samples))


def arrival_figures(memory: int = 8 * MAX_LENGTH, num_requests: int = 300) -> ArrivalFigures:
    requests = mixed(num_requests, mean_steps_between=2.0, seed=5)
    contiguous: list[Sample] = []
    engine = ContiguousEngine(requests, memory, reserve=lambda request: MAX_LENGTH)
    while engine.has_work:
        contiguous.append(engine.begin_step())
        engine.end_step()
    paged: list[Sample] = []
    pool = PagedEngine(requests, memory)
    while pool.has_work:
        pool.step(paged.append)
    return ArrivalFigures(memory=memory, num_requests=num_requests, contiguous=contiguous, paged=paged)
