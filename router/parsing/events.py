"""Events of a parsed output, in the order of its text."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Said:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool, whose arguments follow until the next call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the call's arguments, as JSON text."""

    text: str


Event = Said | Thought | CallBegun | Arguments


class AnswerParser(Protocol):
    """Parser of one output. All events together are the same for every way to cut the text into pieces."""

    def push(self, text: str) -> list[Event]:
        """Return the events that this text completes."""

    def finish(self) -> list[Event]:
        """Return the events of the text that was held back. Call this after the last text."""


def merged(events: Iterable[Event]) -> list[Event]:
    """Return the events with neighbours of one kind joined. A call's arguments are one event."""
    joined: list[Event] = []
    for event in events:
        match event, joined[-1] if joined else None:
            case (Said(text), Said(before)):
                joined[-1] = Said(before + text)
            case (Thought(text), Thought(before)):
                joined[-1] = Thought(before + text)
            case (Arguments(text), Arguments(before)):
                joined[-1] = Arguments(before + text)
            case _:
                joined.append(event)
    return joined
