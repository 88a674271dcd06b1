"""A model whose next token depends only on the tokens before it and its seed; and the outputs expected of it.

Each token slot of its KV memory holds a digest of the whole prefix. So a row that reads a block of another row, or one
that was never filled, is found at once. Implements `Runner`; a step moves the clock that its engine reads. Implements
`TransferableMemory` too: the digests are the bytes that travel between workers.
"""

import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable

from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.sequences.beams import num_candidates
from blockyard.worker.sequences.identifiers import BlockId, BlockName, HostSlot
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.step_plan import NO_TOKEN, RowExtras, ScheduledRow, StepPlan, StepTokens

from simulation.engine_thread import StepClock
from simulation.virtual_time import VirtualLoop
from tests.unit.worker.storm_device import GARBAGE, candidates_after, digests, follow

VOCABULARY = 64
ROOT = BlockName(bytes(16))
"""Block name for a search that runs alone."""
DIGEST_BYTES = 8


def next_token(digest: int, seed: int, index: int) -> int:
    return (digest + 31 * seed + 13 * index) % (VOCABULARY - 2) + 1


class DigestRunner:
    """`slowness` makes a straggler: it stretches every step."""

    def __init__(
        self, clock: StepClock, *, block_size: int, step_seconds: float, prefill_tokens_per_second: float
    ) -> None:
        self.slowness = 1.0
        self._clock = clock
        self._step_seconds = step_seconds
        self._prefill_rate = prefill_tokens_per_second
        self._kv: defaultdict[int, array[int]] = defaultdict(lambda: array("q", [GARBAGE] * block_size))
        self._host: defaultdict[int, array[int]] = defaultdict(lambda: array("q", [GARBAGE] * block_size))
        self._checksums: dict[int, int] = {}
        self._block_size = block_size
        self.block_bytes = block_size * DIGEST_BYTES
        self.is_in_place = True
        self.defects: list[str] = []
        """Reads of blocks that do not belong to the reader."""

    def warm_up(self) -> None:
        """Nothing to warm."""

    def execute(self, plan: StepPlan) -> StepTokens:
        prefill_tokens = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        self._clock.spend(self.slowness * (self._step_seconds + prefill_tokens / self._prefill_rate))
        for block, slot in plan.to_host:
            self._host[slot][:] = self._kv[block]
            self._checksums[slot] = zlib.crc32(self._host[slot])
        for slot, block in plan.from_host:
            self._kv[block][:] = self._host[slot]
        for source, destination in plan.copies:
            self._kv[destination][:] = self._kv[source]
        known = [digests(row.sequence.tokens[: row.end]) for row in plan.rows]
        for row, expected in zip(plan.rows, known, strict=True):
            self._write(row, expected)
        for row, expected in zip(plan.rows, known, strict=True):
            self._check_read(row, expected)
        tokens, extras = [], {}
        for number, (row, expected) in enumerate(zip(plan.rows, known, strict=True)):
            tokens.append(NO_TOKEN)
            if row.samples:
                seed, index = row.sequence.sampling.seed, row.sequence.index
                if row.sequence.sampling.beam_width:
                    seed = index = 0
                tokens[-1] = next_token(expected[-1], seed, index)
                extras[number] = self._extras(row, expected[-1])
        return StepTokens(
            tokens=tokens, extras={n: extra for n, extra in extras.items() if extra != RowExtras()}
        )

    def regions(self) -> list[tuple[int, int]]:
        return []

    def fence(self) -> Callable[[], object]:
        return lambda: None

    def block(self, block: BlockId) -> list[memoryview]:
        return [memoryview(self._kv[block]).cast("B")]

    def slot(self, slot: HostSlot) -> memoryview:
        return memoryview(self._host[slot]).cast("B")

    def checksum(self, slot: HostSlot) -> int | None:
        return self._checksums[slot]

    def received(self, slot: HostSlot, checksum: int) -> None:
        self._checksums[slot] = checksum

    def _write(self, row: ScheduledRow, expected: list[int]) -> None:
        for position in range(row.start, row.end):
            block = row.sequence.block_table[position // self._block_size]
            self._kv[block][position % self._block_size] = expected[position]

    def _check_read(self, row: ScheduledRow, expected: list[int]) -> None:
        for start in range(0, row.end, self._block_size):
            end = min(start + self._block_size, row.end)
            found = self._kv[row.sequence.block_table[start // self._block_size]][: end - start]
            if list(found) != expected[start:end]:
                self.defects.append(
                    f"sequence {row.sequence.sequence_id} reads at {start} what is not its own"
                )

    def _extras(self, row: ScheduledRow, digest: int) -> RowExtras:
        if row.sequence.group is not None:
            return RowExtras(candidates=candidates_after(digest, num_candidates(row.sequence.sampling)))
        seed = row.sequence.sampling.seed
        return RowExtras(tokens=tuple(next_token(digest, seed, n) for n in range(1, row.num_outputs)))


def expected_outputs(prompt: list[int], sampling: SamplingParams, config: SchedulerConfig) -> list[list[int]]:
    """Return the outputs of an undisturbed cluster."""
    if sampling.beam_width:
        return _beams_alone(prompt, sampling, config)
    return [_output(prompt, sampling, index, config.max_model_len) for index in range(sampling.n)]


def _output(prompt: list[int], sampling: SamplingParams, index: int, max_model_len: int) -> list[int]:
    tokens: list[int] = []
    digest = digests(prompt)[-1]
    while len(tokens) < sampling.max_tokens and len(prompt) + len(tokens) < max_model_len:
        tokens.append(next_token(digest, sampling.seed, index))
        digest = follow(digest, tokens[-1])
        if tokens[-1] in sampling.stop_token_ids and len(tokens) >= sampling.min_tokens:
            break
    return tokens


def _beams_alone(prompt: list[int], sampling: SamplingParams, config: SchedulerConfig) -> list[list[int]]:
    """Run the search on an engine of its own."""
    clock = StepClock(VirtualLoop())
    runner = DigestRunner(
        clock, block_size=config.block_size, step_seconds=0.001, prefill_tokens_per_second=1e6
    )
    engine = Engine(config, runner, num_blocks=200, clock=clock)
    engine.submit(EngineRequest(token_ids=prompt, prompt_length=len(prompt), names=[ROOT], sampling=sampling))
    outputs: list[list[int]] = []
    while engine.has_work:
        outputs += [list(output.token_ids) for output in engine.step().outputs]
    return outputs
