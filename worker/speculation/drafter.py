"""Drafter: guesses a sequence's next tokens. The one that serves finds them in the sequence itself."""

from collections.abc import Iterable
from typing import Protocol

from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.speculation.suffix_index import SuffixIndex


class Drafter(Protocol):
    """Guesses tokens. It is asked only where all tokens of the sequence are known."""

    def draft(self, sequence: Sequence, most: int) -> tuple[list[int], int]:
        """Return up to `most` tokens, at least one, and the length of the match that they rest on. Nothing and 0 where
        there is no guess."""
        ...

    def forget(self, ended: Iterable[SequenceId]) -> None:
        """Drop sequences that have ended. Unknown ones are ignored."""
        ...


class SuffixDrafter:
    """Drafts what followed the last tokens earlier in the prompt or the output of the same sequence."""

    def __init__(self) -> None:
        self._indexes: dict[SequenceId, SuffixIndex] = {}

    def draft(self, sequence: Sequence, most: int) -> tuple[list[int], int]:
        index = self._indexes.get(sequence.sequence_id)
        if index is None:
            index = SuffixIndex(sequence.prompt_length + sequence.sampling.max_tokens)
            self._indexes[sequence.sequence_id] = index
        return index.draft(sequence.tokens, most)

    def forget(self, ended: Iterable[SequenceId]) -> None:
        for sequence_id in ended:
            self._indexes.pop(sequence_id, None)
