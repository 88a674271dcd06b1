"""Compiled grammar: from a grammar's text to matchers that fill token masks. The only file that knows llguidance.

llguidance compiles lazily: building a grammar takes a millisecond, and the states of its lexer are made when a mask
needs them. All copies of a matcher share these states, so one that runs warms the others. The limits below bound the
cost of one mask in the library's own units, not in seconds. So a grammar that stays within them in one process does so
in every other.

Not thread-safe: a compiled grammar and its matchers belong to one thread at a time, which holds the grammar's lock.

Shapes: W words of 32 tokens in a mask.
"""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
from blockyard.worker.grammar.grammar import Grammar
from blockyard.worker.grammar.refusals import refused, stuck
from blockyard.worker.grammar.schema import prepared
from blockyard.worker.grammar.tool_calls import ToolCalls
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Mask: TypeAlias = npt.NDArray[np.uint32]
"""One bit for each token, 1 where it is allowed, the lowest bit first."""

MAX_LEXER_STATES = 20_000
"""Limit of one grammar: 12 MB and 40 ms in all, measured. A grammar that has used them up is built again."""
TRIAL_MASKS = 24
SLOW_MASK_SECONDS = 0.005
"""CPU time of a mask. A grammar with a slower one keeps no step waiting until it has proved fast (masks.py)."""
PROOF_MASKS = 32
"""Number of consecutive fast masks that prove a slow grammar fast. It doubles each time that the grammar is slow
again."""
MAX_TIMES_SLOW = 16
SILENT = 0
WHITESPACE = r"[\x20\x0A]"
"""At most one such character between two parts of JSON. With up to 32, small models fill four fifths of an output with
whitespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """The files and values that make a tokenizer, in this process and in the trial process."""

    file: Path
    """tokenizer.json of a model folder."""
    vocab_size: int
    """The width of the logits. Tokens beyond the tokenizer's are never allowed."""
    eos_token_ids: tuple[int, ...]
    """Allowed exactly where the output is complete."""

    def load(self) -> LLTokenizer:
        """Return the tokenizer. Raises ValueError, with the reason, for a model that cannot follow grammars."""
        if not self.eos_token_ids:
            raise ValueError("a model without end-of-sequence tokens cannot end a structured output")
        try:
            text = self.file.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"structured output needs the model's {self.file.name}: {error}") from error
        return LLTokenizer(text, n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids))


class Matcher:
    """One output's position in its grammar. Raises nothing; `has_failed` is permanent."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def has_failed(self) -> bool:
        """Whether a token was refused or a limit reached."""
        return self._matcher.is_error()

    @property
    def error(self) -> str:
        """The library's text for a failure. It quotes the grammar, so only refusals.py may use it."""
        return self._matcher.get_error()

    def copy(self) -> "Matcher":
        """Return another matcher at the same position."""
        return Matcher(self._matcher.deep_copy())

    def accept(self, tokens: Sequence[int]) -> bool:
        # One by one: the library's call for several refuses an end token after the end, which this one takes.
        return all(self._matcher.consume_token(token) for token in tokens)

    def fill(self, mask_W: Mask) -> bool:
        """Fill the mask with the tokens that may come next, and return True. After a failure allow none, return
        False."""
        assert mask_W.flags["C_CONTIGUOUS"], "the library writes to its address"
        self._matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        if self.has_failed:
            mask_W.fill(0)
        return not self.has_failed


class CompiledGrammar:
    """A grammar over one tokenizer. Raises GrammarError where the library cannot follow it."""

    def __init__(self, grammar: Grammar, tokenizer: LLTokenizer) -> None:
        self.grammar = grammar
        self.generation = 0
        """Number of times that it was built again."""
        self.lock = threading.Lock()
        self.is_slow = False
        self.times_slow = 0
        """Number of times that it was found slow after it counted as fast."""
        self._masks_to_prove = 0
        self._tokenizer = tokenizer
        self._template = self._build()

    def matcher(self) -> Matcher:
        """Return a matcher at the start of an output. A copy takes microseconds."""
        return Matcher(self._template.deep_copy())

    @property
    def is_used_up(self) -> bool:
        """Whether its lexer has no states left, so that not even an output's first mask can be made."""
        return not self.matcher().fill(self._empty_mask())

    def renew(self) -> None:
        """Build the grammar again, without the states that its lexer has gathered. Existing matchers keep them."""
        self._template = self._build()
        self.generation += 1

    def note_mask(self, seconds: float) -> None:
        """Note the seconds that one mask took. A slow one makes the grammar slow, enough fast ones make it fast
        again."""
        if seconds > SLOW_MASK_SECONDS:
            self.hold_for_slow(self.times_slow if self.is_slow else self.times_slow + 1)
        elif self.is_slow:
            self._masks_to_prove -= 1
            self.is_slow = self._masks_to_prove > 0

    def hold_for_slow(self, times_slow: int) -> None:
        """Treat the grammar as slow, as though it had been found so this many times."""
        self.is_slow = True
        self.times_slow = min(times_slow, MAX_TIMES_SLOW)
        self._masks_to_prove = PROOF_MASKS << (self.times_slow - 1)

    def try_out(self) -> None:
        """Follow an arbitrary output for TRIAL_MASKS tokens, which also makes the states that most outputs need.

        Raises GrammarError where no output is possible, or the very first masks cost too much.
        """
        matcher = self.matcher()
        mask_W = self._empty_mask()
        for step in range(TRIAL_MASKS):
            began = time.thread_time()
            if not matcher.fill(mask_W):
                raise stuck(matcher.error)
            self.note_mask(time.thread_time() - began)
            allowed = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little"))
            going_on = allowed[~np.isin(allowed, self._tokenizer.eos_tokens)]
            if not going_on.size:
                return
            # Spread over the vocabulary, the same in every process.
            if not matcher.accept([int(going_on[step * 7919 % going_on.size])]):
                raise stuck(matcher.error)

    def _empty_mask(self) -> Mask:
        return np.zeros(-(-self._tokenizer.vocab_size // 32), np.uint32)

    def _build(self) -> LLMatcher:
        try:
            text = _library_grammar(self.grammar)
            matcher = LLMatcher(self._tokenizer, text, log_level=SILENT, limits=_parser_limits())
        except ValueError:  # Python's JSON or text has what the library's has not: NaN, half a character
            raise refused(self.grammar) from None
        if matcher.is_error():
            raise refused(self.grammar, matcher.get_error())
        return matcher


def _library_grammar(grammar: Grammar) -> str:
    """Return the grammar in the library's format. The options override those that a schema may hold (`x-guidance`)."""
    match grammar.kind:
        case "json_schema":
            return _of_schema(prepared(json.loads(grammar.source)))
        case "json_object":
            return _of_schema({"type": "object"})
        case "regex":
            # Only ASCII for \d and \w, as in JavaScript and so in JSON Schema's patterns.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(grammar.source, 'dw')}/")
        case "tool_calls":
            return LLMatcher.grammar_from_lark(ToolCalls.from_source(grammar.source).lark(_part_of_schema))


def _of_schema(schema: object) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)


def _part_of_schema(schema: object) -> str:
    """Return a schema as a part of a grammar in Lark. Raises ValueError for one that allows nothing."""
    if schema is False:
        raise ValueError("false allows no output")
    described = prepared(schema)
    assert isinstance(described, dict)
    return f"%json {json.dumps(described | {'x-guidance': _JSON_OPTIONS})}"


_JSON_OPTIONS: "JsonCompileOptions" = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
}
"""Options of the library for JSON. They override those that a schema may hold."""


def _parser_limits() -> LLParserLimits:
    """Return the library's own limits, or lower ones where no common schema needs more.

    Within them a mask takes microseconds, a hostile grammar's up to 30 ms. One beyond them takes 165 ms at most,
    measured, after which its output has failed. An object of 500 optional properties is within them, one of 800 is not.
    """
    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=4_000,
        max_items_in_row=2_000,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=100_000,
        verbose_errors=False,
    )
