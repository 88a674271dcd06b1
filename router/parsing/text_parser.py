"""Parser of outputs in the known formats: reasoning, content and calls, told apart while the text streams. Pure.

Nothing is lost: a call that cannot be read, or names no known tool, is content as the model wrote it. Only whitespace
around reasoning and calls is dropped. A text is held back while it may begin a mark, such as `<tool_call>`.
"""

from collections.abc import Callable, Collection

from blockyard.router.parsing.events import CallBegun, Event, Said, Thought
from blockyard.router.parsing.formats import ReasoningFormat, ToolFormat
from blockyard.router.parsing.json_call import CallReader

_NAME_STOPS = ("[ARGS]", "[CALL_ID]", "{")
"""Texts that end a name that comes without JSON."""
_ARGUMENTS = "[ARGS]"
MAX_NAME_CHARS = 256
"""Most characters that are held back for a name without JSON."""


class TextParser:
    """Parses one output. `tools` are the names that may be called, none if calls are content."""

    def __init__(
        self,
        calls: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        tools: Collection[str] = (),
        *,
        is_thinking: bool = False,
        begun: str = "",
    ) -> None:
        """`is_thinking`: the prompt ends within the reasoning. `begun` is the text of the answer in the prompt. It has
        no events, but a call that begins there has all of its own."""
        self._calls = calls if tools else None
        self._reasoning = reasoning
        self._tools = tools
        self._rest = ""
        """Text that no event has yet."""
        self._is_last = False
        self._read = ""
        """Text of the call at hand, from the whitespace before it, as long as it may be content."""
        self._reader: CallReader | None = None
        self._in_list = False
        """Whether the call at hand is in a list of calls."""
        self._has_thought = False
        """Whether the reasoning has more than whitespace."""
        self._drops_space = False
        """Whether whitespace before content is dropped: after reasoning and after a call."""
        self._state: Callable[[list[Event]], bool] = self._at_start
        if is_thinking and reasoning is not None:
            self._state = self._in_reasoning
        self._told = ""
        """Text of the prompt that the next event may repeat."""
        self._begun: list[Event] = []
        """Events of the call that begins in the prompt, until the first text."""
        if begun:
            self._begin(begun)

    def _begin(self, text: str) -> None:
        events = self.push(text)
        calls = [at for at, event in enumerate(events) if isinstance(event, CallBegun)]
        if calls and self._state in (self._in_call, self._before_arguments):
            self._begun = events[calls[-1] :]
        self._told = self._read + self._rest

    def push(self, text: str) -> list[Event]:
        """Return the events that this text completes."""
        self._rest += text
        events, self._begun = self._begun, []
        num_begun = len(events)
        while self._state(events):
            pass
        if self._told and len(events) > num_begun:
            match events[num_begun]:
                case Said(said) if said.startswith(self._told):
                    events[num_begun] = Said(said.removeprefix(self._told))
                case Thought(thought) if thought.startswith(self._told):
                    events[num_begun] = Thought(thought.removeprefix(self._told))
                case _:
                    pass
            self._told = ""
        return [event for event in events if event not in (Said(""), Thought(""))]

    def finish(self) -> list[Event]:
        """Return the events of the text that was held back."""
        self._is_last = True
        return self.push("")

    # A state takes of the rest what is decided. It returns False where only more text can tell.

    def _at_start(self, events: list[Event]) -> bool:
        text = self._rest.lstrip()
        opening = "" if self._reasoning is None else self._reasoning.open
        if opening and text.startswith(opening):
            self._rest = text[len(opening) :]
            self._state = self._in_reasoning
            return True
        if not self._is_last and (not text or self._may_become(text, opening)):
            return False
        self._state = self._between if self._calls is not None and self._calls.is_bare else self._in_content
        return True

    def _in_reasoning(self, events: list[Event]) -> bool:
        assert self._reasoning is not None
        if not self._has_thought:
            self._rest = self._rest.lstrip()
        thought, closing, after = self._rest.partition(self._reasoning.close)
        if closing:
            self._rest = after
            thought = thought.rstrip()
            self._drops_space = True
            self._state = self._between
        else:
            thought = self._settled(self._rest, self._reasoning.close)
            self._rest = self._rest[len(thought) :]
        if thought:
            self._has_thought = True
            events.append(Thought(thought))
        return bool(closing)

    def _in_content(self, events: list[Event]) -> bool:
        mark = "" if self._calls is None else self._calls.open
        at = self._rest.find(mark) if mark else -1
        if at >= 0:
            said = self._rest[:at].rstrip()
            self._begin_call(len(said), at + len(mark))
        else:
            said = self._settled(self._rest, mark)
            self._rest = self._rest[len(said) :]
        if said:
            events.append(Said(said))
        return at >= 0

    def _between(self, events: list[Event]) -> bool:
        """Skip what separates reasoning, calls and content."""
        calls, text = self._calls, self._rest.lstrip()
        start = len(self._rest) - len(text)
        marks = () if calls is None else tuple(filter(None, (calls.open, calls.close)))
        if not self._is_last and (not text or any(self._may_become(text, mark) for mark in marks)):
            return False
        if calls is None:
            pass
        elif calls.close and text.startswith(calls.close):
            self._rest = text[len(calls.close) :]
            return True
        elif text.startswith(calls.open):
            self._begin_call(0, start + len(calls.open))
            return True
        elif self._in_list and text[:1] in (",", "]"):
            self._in_list, self._rest = text[0] == ",", text[1:]
            return True
        elif calls.is_bare or self._in_list:
            following = text[1:].lstrip() if text.startswith(";") and self._drops_space else text
            if not following and not self._is_last:
                return False
            if following.startswith("{"):
                self._begin_call(0, len(self._rest) - len(following))
                return True
        self._in_list = False
        self._rest = text if self._drops_space else self._rest
        self._state = self._in_content
        return True

    def _begin_call(self, start: int, end: int) -> None:
        """Take the rest from `start` to `end`, which announces a call."""
        self._read, self._rest = self._rest[start:end], self._rest[end:]
        self._state = self._at_call

    def _at_call(self, events: list[Event]) -> bool:
        """Find out how the call is written: as an object, in a list of them, or as a name before its arguments."""
        assert self._calls is not None
        text = self._rest.lstrip()
        if not text and not self._is_last:
            return False
        if text.startswith("[") and not self._in_list:
            self._take(len(self._rest) - len(text) + 1)
            self._in_list = True
        elif text.startswith("{"):
            self._reader = CallReader(self._tools, self._calls.close)
            self._state = self._in_call
        elif self._calls.has_names and not self._in_list:
            self._state = self._in_name
        else:
            self._give_up(events)
        return True

    def _in_name(self, events: list[Event]) -> bool:
        stops = [at for stop in _NAME_STOPS if (at := self._rest.find(stop)) >= 0]
        if not stops and len(self._rest) <= MAX_NAME_CHARS and not self._is_last:
            return False
        name = self._rest[: min(stops)].strip() if stops else ""
        if name not in self._tools:
            self._give_up(events)
            return True
        events.append(CallBegun(name))
        self._rest, self._read = self._rest[min(stops) :], ""
        self._reader = CallReader.of_arguments(name)
        self._state = self._before_arguments
        return True

    def _before_arguments(self, events: list[Event]) -> bool:
        """Skip what stands between a name and its arguments, such as the call's id."""
        at = self._rest.find("{")
        if at < 0 and not self._is_last and len(self._rest) <= MAX_NAME_CHARS:
            return False
        self._rest = self._rest[at:] if at >= 0 else self._rest.partition(_ARGUMENTS)[2]
        self._state = self._in_call
        return True

    def _in_call(self, events: list[Event]) -> bool:
        reader = self._reader
        assert reader is not None
        num_chars, read = reader.read(self._rest, is_last=self._is_last)
        self._take(num_chars)
        events += read
        if reader.has_failed:
            self._give_up(events)
        elif reader.name is not None:
            self._read = ""
        if reader.is_done:
            self._drops_space = True
            self._state = self._between
        return reader.is_done or reader.has_failed

    def _take(self, num_chars: int) -> None:
        self._read += self._rest[:num_chars]
        self._rest = self._rest[num_chars:]

    def _give_up(self, events: list[Event]) -> None:
        """Make content of a call that is none, as far as it is read. What follows is content too."""
        events.append(Said(self._read))
        self._read, self._in_list = "", False
        self._state = self._in_content

    def _settled(self, text: str, mark: str) -> str:
        """Return the beginning of a text that neither the mark nor the whitespace before it can reach."""
        if self._is_last or not mark:
            return text
        return text[: len(text) - _overlap(text, mark)].rstrip()

    @staticmethod
    def _may_become(text: str, mark: str) -> bool:
        return len(text) < len(mark) and mark.startswith(text)


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that is a beginning of the mark."""
    return next(
        (size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0
    )
