"""Work counted in steps, whatever the machine's speed: of a regular expression, and of Python code.

The steps of an expression are those of a backtracking matcher over the parse tree of the standard library. It tries
alternatives in the order of `re`, so it backtracks as `re` does. Operations that no expression here uses raise
NotImplementedError.
"""

import re
import sys
from collections.abc import Callable, Sequence
from re import _constants as c  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

Then = Callable[[int], bool]
_RECURSION = 100_000
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    c.CATEGORY_DIGIT: str.isdecimal,
    c.CATEGORY_SPACE: str.isspace,
    c.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
    c.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
}
_OF_ONE_CHARACTER = (c.LITERAL, c.NOT_LITERAL, c.ANY, c.IN)


class TooManySteps(AssertionError):
    """Raised where an expression takes more steps than it may."""


class CountedPattern:
    """An expression that counts the steps of its matches in `steps`. Raises TooManySteps beyond `most`."""

    def __init__(self, pattern: "re.Pattern[str]", *, most: int) -> None:
        self._nodes = list(_parser.parse(pattern.pattern, pattern.flags))
        self._flags = pattern.flags
        self._most = most
        self._text = ""
        self.steps = 0

    def match(self, text: str) -> int | None:
        """Return the end of a match at the beginning of a text, or None."""
        return self._match_at(text, 0, lambda end: True)

    def fullmatch(self, text: str) -> int | None:
        return self._match_at(text, 0, lambda end: end == len(text))

    def findall(self, text: str) -> int:
        """Return the number of matches."""
        count = start = 0
        while start <= len(text):
            end = self._match_at(text, start, lambda end: True)
            count += end is not None
            start = start + 1 if end is None or end == start else end
        return count

    def _match_at(self, text: str, start: int, accepts: Then) -> int | None:
        self._text, ends = text, list[int]()

        def then(end: int) -> bool:
            if accepts(end):
                ends.append(end)
            return bool(ends)

        before = sys.getrecursionlimit()
        sys.setrecursionlimit(_RECURSION)
        try:
            return ends[0] if self._follow(self._nodes, 0, start, then) else None
        finally:
            sys.setrecursionlimit(before)

    def _step(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > self._most:
            raise TooManySteps(f"more than {self._most} steps for {self._text[:20]!r}...")

    def _follow(self, nodes: Sequence[Any], index: int, at: int, then: Then) -> bool:
        """Match the nodes from `index` on at a position of the text, and what follows them."""
        self._step()
        if index == len(nodes):
            return then(at)
        (op, value), text = nodes[index], self._text

        def rest(end: int) -> bool:
            return self._follow(nodes, index + 1, end, then)

        if op in _OF_ONE_CHARACTER:
            return at < len(text) and self._fits(op, value, text[at]) and rest(at + 1)
        if op is c.SUBPATTERN:
            return self._follow(list(value[3]), 0, at, rest)
        if op is c.BRANCH:
            return any(self._follow(list(alternative), 0, at, rest) for alternative in value[1])
        if op is c.MAX_REPEAT:
            least, most, repeated = value
            if len(repeated) == 1 and repeated[0][0] in _OF_ONE_CHARACTER:
                return self._run(*repeated[0], at, least, most, rest)
            return self._repeat(list(repeated), at, least, most, rest)
        if op is c.AT and value is c.AT_BEGINNING:
            is_line = bool(self._flags & re.MULTILINE) and text[at - 1 : at] == "\n"
            return (at == 0 or is_line) and rest(at)
        if op is c.AT and value in (c.AT_BEGINNING_STRING, c.AT_END_STRING):
            return at == (0 if value is c.AT_BEGINNING_STRING else len(text)) and rest(at)
        if op in (c.ASSERT, c.ASSERT_NOT):
            direction, looked_for = value
            begin = at if direction > 0 else at - looked_for.getwidth()[0]
            holds = begin >= 0 and self._follow(list(looked_for), 0, begin, lambda end: True)
            return holds == (op is c.ASSERT) and rest(at)
        raise NotImplementedError(f"{op} in {self._nodes}")

    def _run(self, op: Any, value: Any, at: int, least: int, most: Any, rest: Then) -> bool:
        """Match as many characters as possible, then ever fewer."""
        end, last = at, min(len(self._text), at + int(most))
        while end < last and self._fits(op, value, self._text[end]):
            self._step()
            end += 1
        while end >= at + least:
            if rest(end):
                return True
            end -= 1
        return False

    def _repeat(self, nodes: Sequence[Any], at: int, least: int, most: Any, rest: Then) -> bool:
        def again(count: int, begin: int) -> bool:
            def one_more(end: int) -> bool:
                return (end > begin or count < least) and again(count + 1, end)

            return (count < int(most) and self._follow(nodes, 0, begin, one_more)) or (
                count >= least and rest(begin)
            )

        return again(0, at)

    def _fits(self, op: Any, value: Any, char: str) -> bool:
        chars = {char, char.lower(), char.upper()} if self._flags & re.IGNORECASE else {char}
        if op is c.ANY:
            return char != "\n" or bool(self._flags & re.DOTALL)
        if op is c.IN:
            is_negated = value[0][0] is c.NEGATE
            return is_negated != any(_is_in(value[is_negated:], one) for one in chars)
        return (op is c.LITERAL) == any(ord(one) == value for one in chars)


def _is_in(members: Sequence[Any], char: str) -> bool:
    for op, value in members:
        if op is c.LITERAL:
            found = ord(char) == value
        elif op is c.RANGE:
            found = value[0] <= ord(char) <= value[1]
        else:
            found = _CATEGORIES[value](char)
        if found:
            return True
    return False


def lines_run(call: Callable[[], Any]) -> int:
    """Return the number of lines of Python that a call runs."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
