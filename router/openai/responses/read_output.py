"""Read output: a tally that also parses the one output of a response, delta by delta, and counts its reasoning."""

from collections.abc import Sequence
from typing import Any

from blockyard.proto.v1 import inference_pb2
from blockyard.router.generation.client_buffer import Delta
from blockyard.router.openai.answers.answer_text import ParsedOutput
from blockyard.router.openai.answers.tally import Tally
from blockyard.router.openai.requests.wanted import Wanted
from blockyard.router.openai.responses.items import Item
from blockyard.router.openai.responses.output import EventWriter, OutputForm, OutputItems, Status
from blockyard.router.parsing.events import Event, Said, Thought


class ReadOutput(Tally):
    """Counts a call's tokens and reads its output. So an answer is the same whole and streamed."""

    def __init__(self, wanted: Wanted, writer: EventWriter, form: OutputForm) -> None:
        super().__init__(wanted.outputs_a_prompt)
        self._reading = wanted.reading
        self._reads_reasoning = wanted.reading is not None and wanted.reading.reads_reasoning
        self._writer = writer
        self._form = form
        self._output: ParsedOutput | None = None
        self._items: OutputItems | None = None
        self._unread_tokens = 0
        """Tokens whose text the parser still holds back, or that have none."""
        self._reasoning_tokens = 0.0
        self.told = b""
        """Events of the last delta."""
        self.status: Status = "completed"
        self.worker_id = ""

    @property
    def items(self) -> list[Item]:
        """Return the items so far."""
        return [] if self._items is None else self._items.items

    def add(self, delta: Delta) -> None:
        super().add(delta)
        if self._output is None or self._items is None:
            self._output = ParsedOutput(self._reading, self.prompt_end)
            self._items = OutputItems(self._output, self._writer, self._form)
        events = self._output.push(delta.text, is_last=delta.finish is not None)
        self._unread_tokens += len(delta.token_ids)
        if events and self._reads_reasoning:
            self._reasoning_tokens += self._unread_tokens * _share_of_reasoning(events)
            self._unread_tokens = 0
        self.told = self._items.take(events)
        if delta.finish is not None:
            if delta.finish.reason == inference_pb2.FINISH_REASON_LENGTH:
                self.status = "incomplete"
            self.worker_id = delta.finish.worker_id
            self.told += self._items.end(self.status)

    def usage(self) -> dict[str, Any]:
        """Return the usage so far in the form of OpenAI's responses."""
        return {
            "input_tokens": self.prompt_tokens,
            # The client's type demands the number of tokens written. Nothing counts or charges them here.
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": round(self._reasoning_tokens)},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


def _share_of_reasoning(events: Sequence[Event]) -> float:
    """Return the share of reasoning in the text of one delta. Of a single token it is 0 or 1."""
    thought = sum(len(event.text) for event in events if isinstance(event, Thought))
    said = sum(
        len(event.text) if isinstance(event, Said) else 1
        for event in events
        if not isinstance(event, Thought)
    )
    return thought / max(thought + said, 1)
