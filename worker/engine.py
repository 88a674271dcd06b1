"""Engine: scheduler, pool, prefix cache and runner in one loop body.

Synchronous, and owned by one thread (engine_thread.py). Needs no Ray, Redis or gRPC. Owns requests and their ids
(engine_requests.py: their deadlines and outputs). Does not choose what runs (the scheduler).
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Unpack

from blockyard.worker.cache.adapter_book import AdapterBook
from blockyard.worker.cache.block_tables import Loan
from blockyard.worker.engine_requests import Ending, OpenRequests, TokenCounters, is_late
from blockyard.worker.engine_types import Continuation, EngineLoad, EngineRequest, SequenceOutput, StepResult
from blockyard.worker.execution.runner import Runner
from blockyard.worker.execution.steps import EndedStep, Steps
from blockyard.worker.scheduling.commit import SequenceUpdate, Update
from blockyard.worker.scheduling.mixed_steps import MixedStepController
from blockyard.worker.scheduling.preemption import Elsewhere
from blockyard.worker.scheduling.pulls import NoHostMemory, Pull, PullOrder, PullRates
from blockyard.worker.scheduling.queued_work import uncached_work
from blockyard.worker.scheduling.scheduler import CapacityError, Scheduler, SchedulerConfig
from blockyard.worker.sequences.identifiers import BlockName, RequestId, SequenceId, TenantId
from blockyard.worker.sequences.phases import Phase, PhaseWatch
from blockyard.worker.sequences.sequence import Sequence, token_array
from blockyard.worker.speculation.speculation import Speculation

MAX_FAILURES_IN_A_ROW = 8
"""Failed requests in a row, without a step that succeeded between. Then the device is at fault: the engine ends, and
its worker is restarted."""
DEFAULT_AGEING_SECONDS = 10.0
HELD_SECONDS = 0.05
"""Longest wait of a step where all sequences wait for grammar masks. Then deadlines are checked again."""
SHED_AT_SHARE_OF_ESTIMATE = 0.5
"""A waiting request is shed once less than this share of its estimated prefill time is left. Not even a prefill twice
as fast as measured would then meet its deadline."""


class EngineFailed(RuntimeError):
    """Every step fails. This engine serves no request any more."""


class Engine:
    """One model over one pool. Not thread-safe."""

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        *,
        num_blocks: int,
        bytes_per_block: int = 0,
        ageing_seconds: float = DEFAULT_AGEING_SECONDS,
        mixed_step_seconds: float | None = None,
        swap_blocks_per_second: float = 0.0,
        overlap_steps: bool = False,
        embeds: bool = False,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ageing_seconds` of waiting make up for one step of priority.

        `mixed_step_seconds` is the time that prompts may add to a step that decodes, as estimated from earlier steps.
        With None only the token budget limits them. With `overlap_steps` each step starts during the one before it
        (execution/steps.py), and its tokens come with the next `step`. A model that `embeds` generates nothing. Without
        `speculation` no token is guessed.
        """
        self.mixed_steps = MixedStepController(
            target_seconds=mixed_step_seconds, max_batched_tokens=config.max_num_batched_tokens
        )
        self.mixed_steps.rates.swap_blocks_per_second = swap_blocks_per_second
        self.scheduler = Scheduler(config, num_blocks=num_blocks, mixed_steps=self.mixed_steps)
        self.scheduler.speculation = speculation
        self.pool = self.scheduler.pool
        self.cache = self.scheduler.cache
        self.runner = runner
        self.bytes_per_block = bytes_per_block
        self._ageing_seconds = ageing_seconds
        self.embeds = embeds
        """Whether it takes requests for embeddings, and no others."""
        self._clock = clock
        self.steps = Steps(self.scheduler, runner, overlap=overlap_steps, clock=clock)
        self._requests = OpenRequests()
        self._watches: dict[RequestId, PhaseWatch] = {}
        """The requests of which a trace is made."""
        self._next_request = 0
        self._next_sequence = 0
        self._failures_in_a_row = 0
        self._woken = threading.Event()
        self.start_pull: Callable[[Pull], object] | None = None
        """Starts a pull, which must end with `end_pull`. None: this engine fetches nothing from other workers."""
        self.lends_all = False
        """Whether all blocks may be lent at once, because others continue what has begun here."""
        self.pull_rates = PullRates()
        self.adapters = AdapterBook(self.scheduler.adapters)
        self._loans: set[Loan] = set()
        self._num_lent_blocks = 0
        """Blocks that loans which have ended brought to other workers."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.steps.is_any_in_flight

    def submit(self, request: EngineRequest) -> RequestId:
        """Queue a request, and return its id.

        Raises CapacityError where it can never fit, and UnknownAdapter for an adapter that is not served. Raises
        ValueError for an empty prompt, continuations that do not fit it, or a model that does not do what is asked.
        """
        if request.sampling.embeds != self.embeds:
            raise ValueError(
                "the model embeds, and generates nothing" if self.embeds else "the model does not embed"
            )
        if not 0 < request.prompt_length <= len(request.token_ids):
            raise ValueError(
                f"a prompt of {request.prompt_length} tokens: it must have from 1 to the {len(request.token_ids)} given"
            )
        request_id = RequestId(self._next_request)
        sequences = self._sequences(request, request_id)
        try:
            for sequence in sequences:
                self.scheduler.submit(sequence)
        except ValueError:
            self.scheduler.cancel_request(request_id)
            raise
        self._next_request += 1
        if request.pull is not None:
            for sequence in sequences:
                self._pull(sequence, request.pull)
        beams = request.sampling.beam_width > 0
        self._requests.open(
            request_id,
            num_outputs=1 if beams else sum(sequence.num_outputs for sequence in sequences),
            deadline=sequences[0].deadline,
        )
        return request_id

    def watch(self, request_id: RequestId, *, seconds_here: float) -> None:
        """Report the phases of a request that was just submitted. It reached this worker `seconds_here` ago."""
        sequence = next(one for one in self.scheduler.waiting if one.request_id == request_id)
        self._watches[request_id] = PhaseWatch(sequence, self._clock() - seconds_here)

    def _sequences(self, request: EngineRequest, request_id: RequestId) -> list[Sequence]:
        """Return the sequences of a request: one that forks later, or one for each of its `continuations`.

        Raises ValueError for continuations that do not fit the request.
        """
        now = self._clock()
        sampling = request.sampling
        adapter = self.adapters.find(request.adapter)
        self.adapters.note_request(request.adapter, now)
        if request.continuations and (
            sampling.beam_width
            or len(request.token_ids) != request.prompt_length
            or any(not part.token_ids or part.index >= sampling.n for part in request.continuations)
            or len({part.index for part in request.continuations}) < len(request.continuations)
        ):
            raise ValueError(
                "continuations need a prompt without output, no beams, distinct indices below n, and tokens each"
            )
        if len(request.continuations) > self.scheduler.config.max_num_seqs:
            raise CapacityError(f"more outputs than max_num_seqs {self.scheduler.config.max_num_seqs}")
        parts = request.continuations or (Continuation(index=0, token_ids=()),)
        forks = not request.continuations and not sampling.beam_width
        sequences = []
        for part in parts:
            sequence = Sequence(
                sequence_id=SequenceId(self._next_sequence),
                tokens=token_array((*request.token_ids, *part.token_ids)),
                prompt_length=request.prompt_length,
                sampling=sampling,
                names=list(request.names),
                arrival=self._next_sequence,
                rank=now + request.priority * self._ageing_seconds,
                priority=request.priority,
                tenant=request.tenant,
                client=request.client,
                request_id=request_id,
                index=part.index,
                num_outputs=sampling.n if forks else 1,
                grammar=request.grammar,
                adapter=adapter,
                may_move=request.preemptions is not None,
                expected_pause_seconds=request.expected_pause_seconds,
                num_preemptions=min(request.preemptions or 0, self.scheduler.config.max_preemptions),
                deadline=None if request.deadline_seconds is None else now + request.deadline_seconds,
            )
            self._next_sequence += 1
            sequences.append(sequence)
        return sequences

    def cancel(self, request_id: RequestId, index: int | None = None) -> bool:
        """End a request, or one of its outputs, in any state. Unknown or ended ones are ignored.

        Return whether anything of the request continues. If not, no output of it follows.
        """
        if request_id not in self._requests:
            return False
        num_ended = self.scheduler.cancel_request(request_id, index)
        if self._requests.end_outputs(request_id, None if index is None else num_ended):
            self._watches.pop(request_id, None)
            return False
        return True

    def step(self) -> StepResult:
        """End late requests. Then plan, run and commit one step, or start it and commit the one before.

        Where a step raises, its failing requests end as FAILED. Where every sequence waits for a mask, this waits for
        `wake`, HELD_SECONDS at most, and returns no output. Raises EngineFailed at the beginning of a step after
        MAX_FAILURES_IN_A_ROW.
        """
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise EngineFailed(f"{self._failures_in_a_row} requests in a row have failed")
        now = self.pool.now_seconds = self._clock()
        self.scheduler.pulls.release_late(now)
        expired = self._expire(now)
        outputs, has_stepped = expired, self.steps.is_any_in_flight
        for ended in self.steps.advance():
            outputs += self._take(ended)
            has_stepped = True
        for request_id in self.scheduler.take_given_back():
            if request_id in self._requests:
                outputs.append(self._unanswered(request_id, is_given_back=True))
        if not (has_stepped or outputs or self.steps.is_any_in_flight) and self.scheduler.has_work:
            self._woken.wait(HELD_SECONDS)
            # A thread that wakes this one between the two calls has queued its command or made its mask before that.
            # The next step sees either.
            self._woken.clear()
        phases = self._phases(now) if self._watches else ()
        return StepResult(outputs=tuple(outputs), changes=self.cache.take_changes(), phases=phases)

    def _phases(self, step_began_at: float) -> tuple[tuple[RequestId, Phase], ...]:
        now, ended = self._clock(), list[tuple[RequestId, Phase]]()
        for request_id, watch in list(self._watches.items()):
            ended += ((request_id, phase) for phase in watch.observe(step_began_at, now))
            if watch.is_over:
                del self._watches[request_id]
        return tuple(ended)

    def wake(self) -> None:
        """End the wait of a step: a mask may have been made, or a command waits. Any thread may call this."""
        self._woken.set()

    def _take(self, ended: EndedStep) -> list[SequenceOutput]:
        self.adapters.note_loads(ended.adapter_seconds)
        if ended.num_failed_alone:
            self._failures_in_a_row += ended.num_failed_alone
        else:
            self._failures_in_a_row = 0
            self.mixed_steps.observe(ended.plan, ended.seconds)
            self._observe_drafts(ended)
        return [output for update in ended.updates for output in self._outputs(update)]

    def _observe_drafts(self, ended: EndedStep) -> None:
        rows, speculation = ended.plan.rows, self.scheduler.speculation
        if speculation is not None and rows and all(row.num_tokens == 1 for row in rows):
            num_drafts = ended.plan.num_drafts
            speculation.observe(
                len(rows) - num_drafts,
                num_drafts,
                ended.seconds,
                waited_seconds=ended.waited_seconds,
                wasted_seconds=ended.wasted_seconds,
            )

    def _expire(self, now: float) -> list[SequenceOutput]:
        """End requests past their deadline, and waiting ones that cannot meet it. Return one result for each."""
        late = self._requests.late(now)
        rates, queued_seconds = self.mixed_steps.rates, 0.0
        for sequence in self.scheduler.waiting if rates.prefill_tokens_per_second else ():
            tokens, pairs = uncached_work(sequence)
            estimate = (
                queued_seconds + tokens / rates.prefill_tokens_per_second + pairs * rates.seconds_per_pair
            )
            if is_late(sequence.deadline, now + SHED_AT_SHARE_OF_ESTIMATE * estimate):
                late.add(sequence.request_id)
            else:
                queued_seconds = estimate
        return [self._unanswered(request_id, expired=True) for request_id in sorted(late)]

    def _unanswered(self, request_id: RequestId, **how: Unpack[Ending]) -> SequenceOutput:
        """End all outputs of a request, and return the result without tokens that says so."""
        self.scheduler.cancel_request(request_id)
        return self._requests.end(request_id, **how)

    def _outputs(self, update: Update) -> list[SequenceOutput]:
        request_id = update.sequence.request_id
        if request_id not in self._requests:
            return []  # another output of it has failed in this step
        if isinstance(update, SequenceUpdate) and update.token is None and not update.embedding:
            state, has_no_choice = update.sequence.state, update.has_no_choice
            return [self._unanswered(request_id, state=state, has_no_choice=has_no_choice)]
        return self._requests.outputs(update)

    def end_pull(self, pull: Pull, num_blocks: int) -> None:
        """Cache the blocks of a pull that have arrived. Nothing may write to its slots any more."""
        now = self._clock()
        for sequence, order, deadline in self.scheduler.pulls.end(pull, num_blocks):
            self._pull(sequence, replace(order, seconds=deadline - now))

    def _pull(self, sequence: Sequence, order: PullOrder) -> None:
        """Let a sequence that is not admitted wait for blocks from another worker, if this engine fetches any."""
        if self.start_pull is not None:
            pull = self.scheduler.pulls.begin(sequence, order, self._clock())
            if pull is not None:
                self.start_pull(pull)

    def note_room(self, blocks: int, setup_seconds: float, bytes_per_second: float) -> None:
        """Take note of another worker with room for so many blocks, and of the link by which they reach it. 0 blocks
        or an unknown rate: no worker has room."""
        is_known = blocks > 0 and 0 < bytes_per_second < inf and 0 <= setup_seconds < inf
        self.scheduler.elsewhere = (
            Elsewhere(
                num_blocks=blocks,
                setup_seconds=setup_seconds,
                blocks_per_second=bytes_per_second / self.bytes_per_block,
            )
            if is_known and self.bytes_per_block
            else None
        )

    def order_pull(
        self, names: list[BlockName], order: PullOrder, tenant: TenantId
    ) -> tuple[Pull | None, int]:
        """Begin a pull of a prefix for which no request waits. Return it, and how many of its blocks are here.

        The pull is None where all are here. Raises NoHostMemory, PullsBusy or UnderWay.
        """
        if self.start_pull is None:
            raise NoHostMemory
        pull, num_here = self.scheduler.pulls.order(names, order, tenant, self._clock())
        if pull is not None:
            self.start_pull(pull)
        return pull, num_here

    def lend(self, names: list[BlockName], *, first: int = 0) -> Loan:
        """Keep the leading blocks of a prefix that are here until `end_loan`, so that another worker can fetch those
        from index `first` on."""
        most_blocks = inf if self.lends_all else self.scheduler.config.most_lent_blocks
        loan = self.scheduler.tables.lend(names, most_blocks=most_blocks)
        loan.num_unsent = max(0, len(loan) - first)
        self._loans.add(loan)
        return loan

    def end_loan(self, loan: Loan) -> None:
        self._loans.remove(loan)
        self._num_lent_blocks += loan.num_sent
        self.scheduler.tables.end_loan(loan)

    def flush(self) -> tuple[int, int]:
        """Drop all cached blocks. Return how many were dropped on the device, and how many in host memory."""
        host_cache = self.scheduler.host_cache
        num_host_blocks = 0 if host_cache is None else len(host_cache)
        if host_cache is not None:
            host_cache.clear()
        return self.cache.flush(), num_host_blocks

    def forget_history(self, *, keeps_rates: bool) -> None:
        """Reset the token counters after a trial, and unless `keeps_rates` the measured rates too."""
        self._requests.counters = TokenCounters()
        if not keeps_rates:
            self.mixed_steps.forget_measurements()

    def seconds_since(self, moment: float) -> float:
        """Return the seconds since `moment` on the clock that steps use."""
        return self._clock() - moment

    def load(self) -> EngineLoad:
        counters, rates, host_cache = (
            self._requests.counters,
            self.mixed_steps.rates,
            self.scheduler.host_cache,
        )
        queued_tokens, queued_pairs = self.scheduler.queued_prefill()
        work, pulls = self.mixed_steps.work, self.scheduler.pulls
        speculation = self.scheduler.speculation
        return EngineLoad(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            queued_prefill_tokens=queued_tokens,
            queued_pairs=queued_pairs,
            context_tokens=sum(len(sequence.tokens) for sequence in self.scheduler.running),
            free_blocks=self.pool.num_free,
            cached_blocks=self.pool.num_cached,
            used_blocks=self.pool.num_used,
            prefill_tokens_per_second=rates.prefill_tokens_per_second,
            decode_tokens_per_second=rates.decode_tokens_per_second,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=self.scheduler.num_preemptions,
            swaps=self.scheduler.num_swaps,
            moves=self.scheduler.num_moves,
            host_cached_blocks=len(host_cache) if host_cache is not None else 0,
            # Blocks take half of a round trip to come back.
            host_tokens_per_second=2 * rates.swap_blocks_per_second * self.scheduler.config.block_size,
            step_seconds=work.seconds,
            steps=work.steps,
            prompt_steps=work.prompt_steps,
            step_prompt_tokens=work.prompt_tokens,
            step_excess_tokens=work.excess_tokens,
            step_decodes=work.decodes,
            step_context_tokens=work.context_tokens,
            step_pairs=work.pairs,
            pull_setup_seconds=self.pull_rates.setup_seconds,
            pull_bytes_per_second=self.pull_rates.bytes_per_second,
            pulling_bytes=self.bytes_per_block * pulls.num_coming,
            lending_bytes=self.bytes_per_block * sum(loan.num_unsent for loan in self._loans),
            pulled_blocks=pulls.num_blocks,
            lent_blocks=self._num_lent_blocks,
            failed_pulls=pulls.num_failed,
            adapters=self.adapters.resident(self.scheduler.running, self._clock()),
            adapter_load_seconds=self.adapters.average_seconds,
            adapter_loads=self.adapters.num_loads,
            drafted_tokens=0 if speculation is None else speculation.num_drafted,
            accepted_tokens=0 if speculation is None else speculation.num_right,
        )
