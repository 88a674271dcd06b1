"""Attempt: one submit of a request to one worker, until it ends there.

Takes the events of the worker's link, and notes why the worker gave the request up. Does not own what follows from that
(relay.py).

Tokens go to the caller in the callback of the link that read them. A switch of tasks would cost as much as the token's
text.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from blockyard.proto.v1 import session_pb2
from blockyard.router.cluster.bookings import Placed
from blockyard.router.cluster.events import Event, Lost, PhaseEnded, Pulled, Refused, Tokens
from blockyard.router.cluster.link import EngineLink
from blockyard.router.dispatch.placer import Placer
from blockyard.router.errors import DeadlinePassed, EngineFailed, InvalidRequest, RequestTooLarge
from blockyard.router.generation.joined_outputs import Outputs, TokenChunk
from blockyard.router.generation.losses import WorkerKey
from blockyard.router.generation.pulls import Pull, Pulls
from blockyard.router.generation.request_trace import AttemptEnd, AttemptTrace, RequestTrace

logger = logging.getLogger(__name__)

LINK_DOWN_SECONDS = 0.01
"""Wait before the next placement if a link was down. The cluster view learns of it in that time."""

Take = Callable[[TokenChunk], bool]
"""Takes the next tokens of an output. Returns True to end that output. Must not wait."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """Progress of a request. The relay writes it. Metrics, ListRequests and the Finish message read it."""

    worker_id: str = ""
    """Id of the worker that has the request, or had it last."""
    cached_tokens: int | None = None
    """Reused prompt tokens, as reported by the first worker that answered."""
    num_generated: int = 0
    """Generated tokens of all outputs together."""
    num_migrations: int = 0
    """How often its worker was lost, or a step failed, and the request went on."""
    num_preemptions: int = 0
    """How often a worker preempted it and gave it back."""
    is_placed: bool = False
    sent_at: float | None = None
    """When it was first sent to a worker, on the relay's clock."""
    pull: Pull | None = None
    """Its last pull. None: no worker was to fetch blocks for it."""
    trace: RequestTrace | None = None
    """None: the request is not traced."""


class Attempt:
    """One submit of a request to one worker, until it ends there."""

    def __init__(
        self,
        link: EngineLink,
        placer: Placer,
        placed: Placed,
        progress: Progress,
        worker: WorkerKey,
        outputs: Outputs,
        take: Take,
        pulls: Pulls,
        pull: Pull | None,
    ) -> None:
        self.worker = worker
        self.found_busy = False
        self.was_lost = False
        self.saw_death = False
        self.has_failed = False
        self.was_preempted = False
        self.was_drained = False
        self.was_handed_over = False
        """True if the worker gave the request back in the middle, and still has its blocks."""
        self.was_split = False
        """True if it did so because its placement was a split."""
        self.brought_tokens = False
        self.lacked_adapter = False
        self.trace: AttemptTrace | None = None
        self._end: asyncio.Future[Event | Exception | None] = asyncio.get_running_loop().create_future()
        """Why the attempt is over. None if no output runs any more."""
        self._link, self._placer = link, placer
        self._handle = 0
        self._may_move = False
        self._placed = placed
        self._progress = progress
        self._outputs, self._take = outputs, take
        self._pulls, self._pull = pulls, pull

    def submit(self, submit: session_pb2.Submit) -> None:
        self._may_move = submit.HasField("preemptions")
        submitted = self._outputs.submitted(submit.continuations)
        self._handle = self._placed.handle = self._link.submit(submit, self._receive, submitted)
        for index in submitted - self._outputs.running:
            self.cancel(index)

    def cancel(self, index: int | None = None) -> None:
        """Cancel the whole request, or one output of it."""
        self._link.cancel(self._handle, index)

    @property
    def end_of_trace(self) -> AttemptEnd:
        if self.was_lost:
            return "lost"
        if self.has_failed:
            return "failed"
        if self.was_preempted:
            return "preempted"
        if self.was_split:
            return "split"
        if self.was_drained:
            return "draining"
        if self.lacked_adapter:
            return "no adapter"
        if self.found_busy:
            return "busy"
        if not self._outputs.running:
            return "finished"
        is_down = self._end.done() and not self._end.cancelled() and isinstance(self._end.result(), Lost)
        return "unreachable" if is_down else "stopped"

    async def until_over(self) -> None:
        """Wait until no output runs here any more. Note the cause if the others must be placed again.

        Raises a RouterError if the worker refused the request for good, or what the request's `take` raised.
        """
        match await self._end:
            case Tokens():
                logger.error(
                    "worker %s sent tokens that do not follow the earlier ones", self._progress.worker_id
                )
                self.was_lost = True
            case Lost(was_sent=True, is_death=is_death):
                self.was_lost, self.saw_death = True, is_death
            case Lost():
                await asyncio.sleep(LINK_DOWN_SECONDS)
            case Refused() as refused:
                self._refused(refused)
            case Exception() as error:
                raise error
            case None:
                pass

    def _receive(self, event: Event) -> None:
        """Take an event, called by the link that read it. So a failure must end this request alone."""
        if self._end.done():
            return
        match event:
            case Tokens():
                try:
                    if not self._outputs.follows(event):
                        self._end.set_result(event)
                        return
                    self._pass_on(event)
                except Exception as error:
                    self._end.set_result(error)
                    return
                if not self._outputs.running:
                    self._end.set_result(None)
            case Pulled():
                self._placer.pull_ended(self._placed)
                self._pulls.end(self._pull, event.report)
            case PhaseEnded():
                if self.trace is not None:
                    self.trace.hear(event.phase)
            case _:
                self._end.set_result(event)

    def _pass_on(self, tokens: Tokens) -> None:
        if not self.brought_tokens:
            self._note_first(tokens)
        chunk = self._outputs.take(tokens)
        if chunk is None:
            return
        self._progress.num_generated = self._outputs.num_tokens
        if self._take(chunk):
            self._outputs.end(chunk.index)
            self.cancel(chunk.index)

    def _note_first(self, tokens: Tokens) -> None:
        self.brought_tokens = True
        if self.trace is not None:
            self.trace.note_first_token()
        self._pulls.answered(self._pull)
        self._placer.started(self._placed, cached_tokens=tokens.cached_tokens)
        if self._progress.cached_tokens is None:
            self._progress.cached_tokens = tokens.cached_tokens

    def _refused(self, refused: Refused) -> None:
        match refused.reason:
            case session_pb2.REJECT_REASON_BUSY:
                self.found_busy = True
            case session_pb2.REJECT_REASON_DRAINING:
                self.was_drained = True
                self.was_handed_over = self.brought_tokens
                self._placer.draining(self._placed.address)
            case session_pb2.REJECT_REASON_PREEMPTED if self._may_move:
                self.was_preempted, self.was_handed_over = True, self.brought_tokens
            case session_pb2.REJECT_REASON_HANDED_OVER:
                self.was_handed_over = self.was_split = self.brought_tokens
                self.has_failed = not self.brought_tokens
            case session_pb2.REJECT_REASON_INTERNAL:
                self.has_failed = True
            case session_pb2.REJECT_REASON_ADAPTER:
                self.lacked_adapter = True
            case session_pb2.REJECT_REASON_TOO_LARGE:
                raise RequestTooLarge(
                    "prompt and max_tokens, for all outputs or beams, can never fit a worker"
                )
            case session_pb2.REJECT_REASON_DEADLINE:
                raise DeadlinePassed("the deadline passed before the output was complete")
            case session_pb2.REJECT_REASON_GRAMMAR:
                raise InvalidRequest.of(
                    "sampling.structured_output",
                    refused.detail or "cannot be compiled, or not within the server's limits",
                )
            case session_pb2.REJECT_REASON_NO_CHOICE:
                raise InvalidRequest.of(
                    "sampling.structured_output",
                    "leaves no token to choose, together with the lists of tokens",
                )
            case _:
                raise EngineFailed("the engine failed on this request")
