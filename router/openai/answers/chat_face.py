"""Face of /v1/chat/completions and /v1/completions: choices in an envelope, whole or as chunks of a stream."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import RouterError
from blockyard.router.model_groups import ModelGroups
from blockyard.router.openai.answers.choices import Route, choices_of
from blockyard.router.openai.answers.envelope import Chunks, Envelope
from blockyard.router.openai.answers.face import Asked, Head
from blockyard.router.openai.answers.tally import Tally
from blockyard.router.openai.http.errors import error_body
from blockyard.router.openai.http.json_response import encoded
from blockyard.router.openai.http.sse import DONE, event
from blockyard.router.openai.requests.fields import Body
from blockyard.router.openai.requests.wanted import Wanted
from blockyard.router.parsing.formats import AnswerFormat
from blockyard.router.tokenizing.token_texts import TokenTexts


def chat_asked(
    route: Route, wanted_of: Callable[[Body, AnswerFormat], Wanted], groups: ModelGroups
) -> Callable[[Body], Asked]:
    """Return the function that checks a body of the route, by the rules of the model that it names."""

    def asked(body: Body) -> Asked:
        parts = groups.of(body.get("model")).parts
        wanted = wanted_of(body, parts.answers)
        return Asked(wanted, partial(ChatFace, route, wanted, parts.texts))

    return asked


class ChatFace:
    def __init__(self, route: Route, wanted: Wanted, texts: TokenTexts, head: Head) -> None:
        self.tally = Tally(wanted.outputs_a_prompt)
        self._envelope = Envelope(route=route, wanted=wanted, head=head)
        self._choices = choices_of(route, wanted, texts)
        self._chunks = Chunks(envelope=self._envelope, choices=self._choices, tally=self.tally)
        self.events = self._chunks.events
        """Returns the events of a delta. Not a method of its own, because a stream calls it for every token."""

    async def whole(self, outputs: Sequence[inference_pb2.Output]) -> dict[str, Any]:
        choices = [self._choices.whole(output, self.tally.prompt_end) for output in outputs]
        return self._envelope.whole(choices, self.tally)

    async def end(self) -> bytes:
        if not self._envelope.wanted.answering.includes_usage:
            return DONE
        return event(encoded(self._envelope.usage_chunk(self.tally))) + DONE

    def failed(self, error: RouterError) -> bytes:
        return event(encoded(error_body(error, self._envelope.wanted.names)))
