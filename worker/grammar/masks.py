"""Which tokens the rows of a step may sample: filled in a thread beside the model's pass, applied to its logits.

Implements the runner's GrammarMasks. Owns one matcher for each sequence with a grammar. A matcher knows the tokens it
has accepted and takes in what the sequence has beyond them; where that does not fit (it is new, was preempted, moved
here or forked) a new one replays the whole output. So the mask depends on the sequence's tokens alone.

Every token before the one to be sampled must be committed to its sequence: the engine commits a step before it plans
the next.

Shapes: S rows that sample, G of them with a grammar, V width of the logits, W words of 32 tokens in a mask.
"""

import logging
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from blockyard.worker.grammar.compiled import CompiledGrammar, Mask, Matcher
from blockyard.worker.sequence import ScheduledRow, SequenceId, token_array

logger = logging.getLogger(__name__)


class _Follower:
    """One output, and how far it is followed."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.grammar = grammar
        self.has_given_up = False
        self._begin()

    def _begin(self) -> None:
        self._matcher: Matcher = self.grammar.matcher()
        self._generation = self.grammar.generation
        self._accepted = token_array()

    def fill(self, output: "array[int]", mask_W: Mask) -> bool:
        """False, and nothing allowed, where the output does not follow the grammar or a limit is reached."""
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
        return self._matcher.fill(mask_W)


class Masks:
    """One for a runner, and used as the runner is: by one thread, `start` before `apply`."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size` is the width of the logits, and that for which the grammars are compiled."""
        self._vocab_size = vocab_size
        self._followers: dict[SequenceId, _Follower] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-masks")
        self._filling: Future[Mask] | None = None

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

    def close(self) -> None:
        self._settle()
        self._followers.clear()
        self._thread.shutdown()

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
        follower = self._followers.get(sequence.sequence_id)
        if follower is None or follower.grammar is not grammar:
            follower = self._followers[sequence.sequence_id] = _Follower(grammar)
        had_given_up = follower.has_given_up
        output = sequence.tokens[sequence.prompt_length : row.end]
        if not follower.fill(output, mask_W) and not had_given_up:
            logger.warning(
                "sequence %d does not follow its grammar after %d tokens", sequence.sequence_id, len(output)
            )


def _forbidden(mask_GW: Mask, logits_SV: torch.Tensor) -> torch.Tensor:
    """[G, V], true where a token may not come. What lies beyond the masks is forbidden."""
    bytes_GB = torch.from_numpy(mask_GW.view(np.uint8)).to(logits_SV.device)
    shifts_8 = torch.arange(8, dtype=torch.uint8, device=logits_SV.device)
    bits_GB8 = (bytes_GB[:, :, None] >> shifts_8) & 1
    allowed_GV = bits_GB8.flatten(1)[:, : logits_SV.shape[1]]
    surplus = logits_SV.shape[1] - allowed_GV.shape[1]
    return torch.nn.functional.pad(allowed_GV, (0, max(0, surplus))) == 0
