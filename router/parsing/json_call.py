"""Reader of one tool call in JSON while it grows: the name, then the arguments piece by piece. Pure.

The arguments are passed on as the model wrote them, so they may be invalid JSON, as in OpenAI's API. Does not own what
is around a call (text_parser.py).
"""

import json
from collections.abc import Collection
from enum import Enum, auto

from blockyard.router.parsing.events import Arguments, CallBegun, Event
from blockyard.router.parsing.formats import ARGUMENT_KEYS

KEYS = frozenset({"name", "type", "id", *ARGUMENT_KEYS})
"""Keys that a call's object may have before its name is known."""
_SPACE = " \t\r\n"
_ALONE = ""
"""Key of arguments that no object surrounds."""


class _Phase(Enum):
    OBJECT = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    END = auto()


class CallReader:
    """Reads one call, from the opening brace of its object to the closing one."""

    def __init__(self, tools: Collection[str], close: str = "") -> None:
        """`tools` are the names that may be called. `close` also ends a call whose object is incomplete."""
        self._tools = tools
        self._close = close
        self._phase = _Phase.OBJECT
        self._key: str | None = None
        self._text = ""
        """Key or value at hand, as far as it is read and not yet passed on."""
        self._has_begun = False
        """Whether the key or value at hand has begun."""
        self._streams = False
        """Whether the value at hand is passed on as it comes."""
        self._depth = 0
        """Open brackets of the value at hand."""
        self._in_string = False
        self._is_escaped = False
        self._early: str | None = None
        """Arguments that came before the name."""
        self._has_arguments = False
        self._events: list[Event] = []
        self.name: str | None = None
        self.has_failed = False
        """Whether the text is no call of a known tool. All of it belongs to the answer then."""

    @classmethod
    def of_arguments(cls, name: str) -> "CallReader":
        """Return a reader of arguments alone, for a call that is announced."""
        reader = cls((name,))
        reader.name, reader._key, reader._phase = name, _ALONE, _Phase.VALUE
        return reader

    @property
    def is_done(self) -> bool:
        return self._phase is _Phase.END

    def read(self, text: str, *, is_last: bool) -> tuple[int, list[Event]]:
        """Return how many characters of a text are read, and their events.

        The rest is not the call's, or must come again with what follows it.
        """
        at = 0
        while at < len(text) and not (self.is_done or self.has_failed):
            if not self._in_string and self._close and text[at] == self._close[0]:
                if text.startswith(self._close, at):
                    self._break_off()
                    break
                if not is_last and self._close.startswith(text[at:]):
                    break
            at += self._step(text[at])
        if is_last and not (self.is_done or self.has_failed):
            self._break_off()
        self._pass_on()
        events, self._events = self._events, []
        return at, events

    def _step(self, character: str) -> bool:
        """Take a character, and return whether it is read. At the end of a number it is not."""
        if self._in_string:
            return self._in_text(character)
        if character in _SPACE and not self._depth:
            if self._phase is _Phase.VALUE and self._has_begun:
                self._end_value()
            return True
        match self._phase:
            case _Phase.OBJECT:
                return self._expect(character, "{", _Phase.KEY)
            case _Phase.KEY:
                return self._before_key(character)
            case _Phase.COLON:
                return self._expect(character, ":", _Phase.VALUE)
            case _Phase.VALUE:
                return self._in_value(character)
            case _Phase.END:
                return False

    def _in_text(self, character: str) -> bool:
        self._text += character
        if self._is_escaped or character == "\\":
            self._is_escaped = not self._is_escaped
        elif character == '"':
            self._in_string = False
            if self._phase is _Phase.KEY:
                self._end_key()
            elif not self._depth:
                self._end_value()
        return True

    def _expect(self, character: str, wanted: str, phase: _Phase) -> bool:
        if character != wanted:
            self._break_off()
            return False
        self._phase = phase
        return True

    def _before_key(self, character: str) -> bool:
        match character:
            case ",":
                return True
            case '"':
                self._text, self._in_string = character, True
                return True
            case "}" if self.name is not None:
                if not self._has_arguments:
                    self._events.append(Arguments("{}"))
                self._phase = _Phase.END
                return True
            case _:
                self._break_off()
                return False

    def _end_key(self) -> None:
        self._key, self._text, self._phase = str(_loaded(self._text)), "", _Phase.COLON
        if self.name is None and self._key not in KEYS:
            self._break_off()

    def _in_value(self, character: str) -> bool:
        is_first, self._has_begun = not self._has_begun, True
        if is_first:
            is_argument = self._key in (*ARGUMENT_KEYS, _ALONE) and not self._has_arguments
            self._streams = is_argument and self.name is not None and character == "{"
        if not self._depth and character in "}],":
            self._end_value()
            return False
        self._text += character
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if not self._depth:
                self._end_value()
        return True

    def _end_value(self) -> None:
        key, text = self._key, self._text
        if self._streams:
            self._pass_on()
            self._has_arguments = True
        elif key == "name" and self.name is None:
            name = _loaded(text)
            if not isinstance(name, str) or name not in self._tools:
                self.has_failed = True
                return
            self.name = name
            self._events.append(CallBegun(name))
            if self._early is not None:
                self._events.append(Arguments(self._early))
        elif key in (*ARGUMENT_KEYS, _ALONE) and not self._has_arguments:
            self._has_arguments = True
            self._early = _plain(text)
            if self.name is not None:
                self._events.append(Arguments(self._early))
        self._text, self._has_begun, self._streams = "", False, False
        self._phase = _Phase.END if key == _ALONE else _Phase.KEY

    def _break_off(self) -> None:
        """End a call that is no call, or incomplete. What was read of its arguments is passed on."""
        if self.name is None:
            self.has_failed = True
            return
        if self._key in (*ARGUMENT_KEYS, _ALONE) and not self._has_arguments and self._text:
            self._events.append(Arguments(self._text))
        self._text, self._phase = "", _Phase.END

    def _pass_on(self) -> None:
        if self._streams and self._text:
            self._events.append(Arguments(self._text))
            self._text = ""


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _plain(text: str) -> str:
    """Return arguments as JSON text of an object, where the model wrote null, or JSON within a string."""
    match _loaded(text):
        case None:
            return "{}" if text == "null" else text
        case str(inner):
            return inner
        case _:
            return text
