"""Masks: which tokens the rows of a step may sample. A thread fills them beside the forward pass.

Implements the runner's GrammarMasks, and says which sequences a step must leave out. Masks of slow grammars are made
ahead in a thread of their own, and their sequences join a step when their masks are there. So a slow grammar delays its
own outputs alone. Other requests wait for its masks only in the step in which it is found to be slow.

Owns one matcher for each sequence with a grammar. A matcher knows the tokens that it has accepted, and takes the
sequence's later ones. Where they do not fit (the sequence is new, was preempted, moved here or forked) a new matcher
replays the whole output. So the mask depends on the sequence's tokens alone.

Every token before the one to be sampled must be committed to its sequence: the engine commits a step before it plans
the next. Rows of drafts are the exception. A copy of the matcher follows their tokens, and is dropped with the step.

Shapes: S rows that sample, G of them with a grammar, V width of the logits, W words of 32 tokens in a mask.
"""

import logging
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock

import numpy as np
import torch
from blockyard.worker.grammar.compiled import CompiledGrammar, Mask, Matcher
from blockyard.worker.grammar.rotation import ClientQueue
from blockyard.worker.memory.transfers import upload
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.sequence import Sequence as EngineSequence
from blockyard.worker.sequences.sequence import token_array
from blockyard.worker.sequences.step_plan import ScheduledRow

logger = logging.getLogger(__name__)


class _Follower:
    """Follows one output through its grammar."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        """The matcher is made with the first mask, in the thread that makes the mask."""
        self.grammar = grammar
        self.has_given_up = False
        self.ahead: _Ahead | None = None
        """Its newest mask from the slow thread, to which the follower belongs until the mask is made."""
        self._has_begun = False
        self._guessing: Matcher | None = None
        """A copy that follows guessed tokens of the step."""

    def _begin(self) -> None:
        self._matcher: Matcher = self.grammar.matcher()
        self._generation = self.grammar.generation
        self._accepted = token_array()
        self._has_begun = True

    def fill(self, output: "array[int]", mask_W: Mask) -> bool:
        """Fill the mask. Return False, with nothing allowed, where the output breaks the grammar or a limit is
        reached."""
        if not self._has_begun:
            self._begin()
        if not self.has_given_up:
            if self._follow(output, mask_W) or (self._can_begin_anew() and self._follow(output, mask_W)):
                return True
            self.has_given_up = True
        mask_W.fill(0)
        return False

    def fill_draft(self, drafts: Sequence[int], mask_W: Mask) -> None:
        """Fill the mask behind the output of the last `fill` and drafts. Call it for each draft in turn.

        Nothing is allowed behind a draft that breaks the grammar: no earlier mask allows that token.
        """
        if len(drafts) == 1:
            self._guessing = self._matcher.copy() if self._has_begun and not self.has_given_up else None
        if self._guessing is not None and self._guessing.accept(drafts[-1:]):
            self._fill_from(self._guessing, mask_W)
            return
        self._guessing = None
        mask_W.fill(0)

    def _fill_from(self, matcher: Matcher, mask_W: Mask) -> bool:
        began = time.thread_time()
        has_choice = matcher.fill(mask_W)
        self.grammar.note_mask(time.thread_time() - began)
        return has_choice

    def _can_begin_anew(self) -> bool:
        """Begin the output anew where the lexer's states were used up, and return whether they were."""
        if self._generation == self.grammar.generation:
            if not self.grammar.is_used_up:
                return False
            self.grammar.renew()
        self._begin()
        return True

    def _follow(self, output: "array[int]", mask_W: Mask) -> bool:
        known = len(self._accepted)
        if output[:known] != self._accepted:
            self._begin()
            known = 0
        news = output[known:]
        if news and not self._matcher.accept(news):
            return False
        self._accepted += news
        return self._fill_from(self._matcher, mask_W)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A mask that the slow thread makes or has made."""

    end: int
    """Length of the sequence's tokens for which it is made."""
    mask: Future[Mask]


class Masks:
    """The masks of one runner. One thread uses it, as it uses the runner: `start` before `apply`."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size` is the width of the logits. The grammars must be compiled for it."""
        self.on_made: Callable[[], object] = lambda: None
        """Called on the slow thread after each mask, because a sequence may no longer be held."""
        self._vocab_size = vocab_size
        self._followers: dict[SequenceId, _Follower] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-masks")
        self._filling: Future[Mask] | None = None
        self._slow_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slow-grammar-masks")
        self._to_make = ClientQueue[Callable[[], None]]()
        self._lock = Lock()
        """Guards `_to_make`."""

    def holds(self, sequence: EngineSequence) -> bool:
        """Return whether a step would have to wait for a mask of this sequence. If so, one is now being made."""
        grammar = sequence.grammar
        if not isinstance(grammar, CompiledGrammar):
            return False
        self._drop_leftovers()
        follower, end = self._follower(sequence.sequence_id, grammar), len(sequence.tokens)
        if follower.ahead is not None and not follower.ahead.mask.done():
            return True
        if not grammar.is_slow or (follower.ahead is not None and follower.ahead.end == end):
            return False
        output, mask = sequence.tokens[sequence.prompt_length : end], Future[Mask]()
        follower.ahead = _Ahead(end, mask)
        with self._lock:
            self._to_make.put(
                sequence.client, partial(self._make, follower, sequence.sequence_id, output, mask)
            )
        self._slow_thread.submit(self._make_next)
        return True

    def takes_drafts(self, sequence: EngineSequence) -> bool:
        """Return whether masks behind guessed tokens of a sequence delay no step. Those of a slow grammar would."""
        grammar = sequence.grammar
        return isinstance(grammar, CompiledGrammar) and not grammar.is_slow

    def start(self, rows: Sequence[ScheduledRow]) -> None:
        self._drop_leftovers()
        followed = [row for row in rows if isinstance(row.sequence.grammar, CompiledGrammar)]
        if followed:
            self._filling = self._thread.submit(self._fill, followed)

    def apply(self, logits_SV: torch.Tensor, rows: Sequence[ScheduledRow]) -> None:
        """Mask the logits in place. `rows` are those that `start` got."""
        filling, self._filling = self._filling, None
        if filling is None:
            return
        indices = [i for i, row in enumerate(rows) if isinstance(row.sequence.grammar, CompiledGrammar)]
        forbidden_GV = _forbidden(filling.result(), logits_SV)
        if len(indices) == len(rows):
            logits_SV.masked_fill_(forbidden_GV, float("-inf"))
            return
        index_G = upload(indices, logits_SV.device)
        logits_SV[index_G] = logits_SV[index_G].masked_fill_(forbidden_GV, float("-inf"))

    def forget(self, ended: Iterable[SequenceId]) -> None:
        self._drop_leftovers()
        for sequence_id in ended:
            follower = self._followers.pop(sequence_id, None)
            if follower is not None and follower.ahead is not None:
                follower.ahead.mask.cancel()

    def close(self) -> None:
        self._drop_leftovers()
        self._followers.clear()
        self._thread.shutdown()
        self._slow_thread.shutdown(cancel_futures=True)

    def _drop_leftovers(self) -> None:
        """Wait for the masks that a step left behind when it failed between `start` and `apply`."""
        if self._filling is not None:
            self._filling.result()
            self._filling = None

    def _fill(self, rows: Sequence[ScheduledRow]) -> Mask:
        mask_GW = np.zeros((len(rows), -(-self._vocab_size // 32)), np.uint32)
        for row, mask_W in zip(rows, mask_GW, strict=True):
            self._fill_row(row, mask_W)
        return mask_GW

    def _fill_row(self, row: ScheduledRow, mask_W: Mask) -> None:
        sequence = row.sequence
        grammar = sequence.grammar
        assert isinstance(grammar, CompiledGrammar)
        follower = self._follower(sequence.sequence_id, grammar)
        if row.drafts:
            with _logging_failures(mask_W), grammar.lock:
                follower.fill_draft(row.drafts, mask_W)
            return
        assert len(sequence.tokens) >= row.end, "a token before the one to be sampled is not committed yet"
        if follower.ahead is not None:
            made_W = follower.ahead.mask.result()  # it is made: until then the sequence is held
            if follower.ahead.end == row.end:
                mask_W[:] = made_W
                return
        # Used also where the grammar is found slow in this very step: the slow thread has other masks to make.
        output = sequence.tokens[sequence.prompt_length : row.end]
        _fill_one(follower, sequence.sequence_id, output, mask_W)

    def _follower(self, sequence_id: SequenceId, grammar: CompiledGrammar) -> _Follower:
        follower = self._followers.get(sequence_id)
        if follower is None or follower.grammar is not grammar:
            follower = self._followers[sequence_id] = _Follower(grammar)
        return follower

    def _make_next(self) -> None:
        """Make, in the slow thread, the mask of the client that has its turn."""
        with self._lock:
            make = self._to_make.take()
        make()

    def _make(
        self, follower: _Follower, sequence_id: SequenceId, output: "array[int]", mask: Future[Mask]
    ) -> None:
        if not mask.set_running_or_notify_cancel():
            return
        mask_W = np.zeros(-(-self._vocab_size // 32), np.uint32)
        _fill_one(follower, sequence_id, output, mask_W)
        mask.set_result(mask_W)
        self.on_made()


def _fill_one(follower: _Follower, sequence_id: SequenceId, output: "array[int]", mask_W: Mask) -> None:
    """Fill one mask. Raises nothing: one row fails, not the step."""
    had_given_up, is_followed = follower.has_given_up, True
    with _logging_failures(mask_W), follower.grammar.lock:
        is_followed = follower.fill(output, mask_W)
    if not is_followed and not had_given_up:
        logger.warning("sequence %d does not follow its grammar after %d tokens", sequence_id, len(output))


@contextmanager
def _logging_failures(mask_W: Mask) -> Iterator[None]:
    """Allow nothing in the mask where an exception is raised, and log it."""
    try:
        yield
    except Exception as error:
        # Log only the type: the message may quote the grammar.
        logger.error("a mask could not be made: %s", type(error).__name__)
        mask_W.fill(0)


def _forbidden(mask_GW: Mask, logits_SV: torch.Tensor) -> torch.Tensor:
    """Return [G, V], true where a token is forbidden. Tokens beyond the masks are forbidden."""
    bytes_GB = upload(mask_GW.view(np.uint8), logits_SV.device)
    shifts_8 = torch.arange(8, dtype=torch.uint8, device=logits_SV.device)
    bits_GB8 = (bytes_GB[:, :, None] >> shifts_8) & 1
    allowed_GV = bits_GB8.flatten(1)[:, : logits_SV.shape[1]]
    surplus = logits_SV.shape[1] - allowed_GV.shape[1]
    return torch.nn.functional.pad(allowed_GV, (0, max(0, surplus))) == 0
