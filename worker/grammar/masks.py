"""Which tokens the rows of a step may sample: filled in a thread beside the model's pass, applied to its logits.

Implements the runner's GrammarMasks, and says which sequences a step must do without: masks of grammars that are slow
are made ahead in a thread of their own, and their sequences join a step when their masks are there. So a slow grammar
delays its own outputs alone; before it is known for slow, one mask of it may delay a step.

Owns one matcher for each sequence with a grammar. A matcher knows the tokens it has accepted and takes in what the
sequence has beyond them; where that does not fit (it is new, was preempted, moved here or forked) a new one replays the
whole output. So the mask depends on the sequence's tokens alone.

Every token before the one to be sampled must be committed to its sequence: the engine commits a step before it plans
the next.

Shapes: S rows that sample, G of them with a grammar, V width of the logits, W words of 32 tokens in a mask.
"""

import logging
import time
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from blockyard.worker.grammar.compiled import CompiledGrammar, Mask, Matcher
from blockyard.worker.sequence import ScheduledRow, SequenceId, token_array
from blockyard.worker.sequence import Sequence as EngineSequence

logger = logging.getLogger(__name__)


class _Follower:
    """One output, and how far it is followed."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        """Begins with its first mask, in the thread that makes it."""
        self.grammar = grammar
        self.has_given_up = False
        self._has_begun = False

    def _begin(self) -> None:
        self._matcher: Matcher = self.grammar.matcher()
        self._generation = self.grammar.generation
        self._accepted = token_array()
        self._has_begun = True

    def fill(self, output: "array[int]", mask_W: Mask) -> bool:
        """False, and nothing allowed, where the output does not follow the grammar or a limit is reached."""
        if not self._has_begun:
            self._begin()
        if not self.has_given_up:
            if self._follow(output, mask_W) or (self._can_begin_anew() and self._follow(output, mask_W)):
                return True
            self.has_given_up = True
        mask_W.fill(0)
        return False

    def _can_begin_anew(self) -> bool:
        """Where the lexer's states, which all matchers of a grammar share, were used up."""
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
        began = time.thread_time()
        has_choice = self._matcher.fill(mask_W)
        self.grammar.note_mask(time.thread_time() - began)
        return has_choice


@dataclass(slots=True, eq=False)
class _Ahead:
    """The next mask of one sequence of a slow grammar."""

    follower: _Follower
    """Of the slow thread, while the mask is being made."""
    end: int
    """Of the sequence's tokens for which it is made."""
    mask: Future[Mask]


class Masks:
    """One for a runner, and used as the runner is: by one thread, `start` before `apply`."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size` is the width of the logits, and that for which the grammars are compiled."""
        self._vocab_size = vocab_size
        self._followers: dict[SequenceId, _Follower] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-masks")
        self._filling: Future[Mask] | None = None
        self._slow_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slow-grammar-masks")
        self._ahead: dict[SequenceId, _Ahead] = {}

    def holds(self, sequence: EngineSequence) -> bool:
        """Whether a step would have to wait for this sequence's next mask; from now on that is being made."""
        grammar = sequence.grammar
        if not isinstance(grammar, CompiledGrammar) or not grammar.is_slow:
            return False
        self._settle()
        return not self._made_ahead(sequence, grammar, len(sequence.tokens)).done()

    def start(self, rows: Sequence[ScheduledRow]) -> None:
        self._settle()
        followed = [row for row in rows if isinstance(row.sequence.grammar, CompiledGrammar)]
        if followed:
            self._filling = self._thread.submit(self._fill, followed)

    def apply(self, logits_SV: torch.Tensor, rows: Sequence[ScheduledRow]) -> None:
        """In place. `rows` are those that `start` got."""
        filling, self._filling = self._filling, None
        if filling is None:
            return
        indices = [i for i, row in enumerate(rows) if isinstance(row.sequence.grammar, CompiledGrammar)]
        forbidden_GV = _forbidden(filling.result(), logits_SV)
        if len(indices) == len(rows):
            logits_SV.masked_fill_(forbidden_GV, float("-inf"))
            return
        index_G = torch.tensor(indices, device=logits_SV.device)
        logits_SV[index_G] = logits_SV[index_G].masked_fill_(forbidden_GV, float("-inf"))

    def forget(self, ended: Iterable[SequenceId]) -> None:
        self._settle()
        for sequence_id in ended:
            self._followers.pop(sequence_id, None)
            if ahead := self._ahead.pop(sequence_id, None):
                ahead.mask.cancel()

    def close(self) -> None:
        self._settle()
        self._followers.clear()
        self._ahead.clear()
        self._thread.shutdown()
        self._slow_thread.shutdown(cancel_futures=True)

    def _settle(self) -> None:
        """A step that failed between `start` and `apply` left its masks behind."""
        if self._filling is not None:
            self._filling.result()
            self._filling = None

    def _fill(self, rows: Sequence[ScheduledRow]) -> Mask:
        mask_GW = np.zeros((len(rows), -(-self._vocab_size // 32)), np.uint32)
        for row, mask_W in zip(rows, mask_GW, strict=True):
            try:
                self._fill_row(row, mask_W)
            except Exception as error:
                # Only the type: the message may quote the grammar. One row fails, not the step.
                logger.error("a mask could not be made: %s", type(error).__name__)
                mask_W.fill(0)
        return mask_GW

    def _fill_row(self, row: ScheduledRow, mask_W: Mask) -> None:
        sequence = row.sequence
        grammar = sequence.grammar
        assert isinstance(grammar, CompiledGrammar)
        assert len(sequence.tokens) >= row.end, "a token before the one to be sampled is not committed yet"
        if grammar.is_slow:
            mask_W[:] = self._made_ahead(sequence, grammar, row.end).result()
            return
        follower = self._followers.get(sequence.sequence_id)
        if follower is None or follower.grammar is not grammar:
            follower = self._followers[sequence.sequence_id] = _Follower(grammar)
        output = sequence.tokens[sequence.prompt_length : row.end]
        _fill_one(follower, sequence.sequence_id, output, mask_W)

    def _made_ahead(self, sequence: EngineSequence, grammar: CompiledGrammar, end: int) -> Future[Mask]:
        """All that such a grammar does is done in the one thread, as its matchers need."""
        sequence_id = sequence.sequence_id
        before = self._ahead.get(sequence_id)
        if before is not None and before.end == end and before.follower.grammar is grammar:
            return before.mask
        follower = before.follower if before is not None else self._followers.pop(sequence_id, None)
        if follower is None or follower.grammar is not grammar:
            follower = _Follower(grammar)
        output = sequence.tokens[sequence.prompt_length : end]
        mask = self._slow_thread.submit(self._make, follower, sequence_id, output)
        self._ahead[sequence_id] = _Ahead(follower, end, mask)
        return mask

    def _make(self, follower: _Follower, sequence_id: SequenceId, output: "array[int]") -> Mask:
        mask_W = np.zeros(-(-self._vocab_size // 32), np.uint32)
        _fill_one(follower, sequence_id, output, mask_W)
        return mask_W


def _fill_one(follower: _Follower, sequence_id: SequenceId, output: "array[int]", mask_W: Mask) -> None:
    had_given_up = follower.has_given_up
    if not follower.fill(output, mask_W) and not had_given_up:
        logger.warning("sequence %d does not follow its grammar after %d tokens", sequence_id, len(output))


def _forbidden(mask_GW: Mask, logits_SV: torch.Tensor) -> torch.Tensor:
    """[G, V], true where a token may not come. What lies beyond the masks is forbidden."""
    bytes_GB = torch.from_numpy(mask_GW.view(np.uint8)).to(logits_SV.device)
    shifts_8 = torch.arange(8, dtype=torch.uint8, device=logits_SV.device)
    bits_GB8 = (bytes_GB[:, :, None] >> shifts_8) & 1
    allowed_GV = bits_GB8.flatten(1)[:, : logits_SV.shape[1]]
    surplus = logits_SV.shape[1] - allowed_GV.shape[1]
    return torch.nn.functional.pad(allowed_GV, (0, max(0, surplus))) == 0
