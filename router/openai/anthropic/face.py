"""Face of /v1/messages: the answer as a message, whole or as the events of a stream."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from blockyard.proto.v1 import inference_pb2
from blockyard.router.calls.generating import Calls
from blockyard.router.errors import RouterError
from blockyard.router.generation.client_buffer import Delta
from blockyard.router.model_groups import ModelGroups
from blockyard.router.openai.answers.answer_text import ParsedOutput
from blockyard.router.openai.answers.face import Asked, Head
from blockyard.router.openai.answers.tally import Tally
from blockyard.router.openai.anthropic.blocks import Blocks, sse
from blockyard.router.openai.anthropic.errors import anthropic_error
from blockyard.router.openai.anthropic.request import counted_chat, messages_wanted
from blockyard.router.openai.http.call import HttpCall
from blockyard.router.openai.http.json_response import encoded
from blockyard.router.openai.http.sse import event
from blockyard.router.openai.requests.fields import Body, given, text
from blockyard.router.openai.requests.wanted import Wanted

PING = sse("ping")


def messages_asked(groups: ModelGroups) -> Callable[[Body, HttpCall], Awaitable[Asked]]:
    """Return the function that checks a body of /v1/messages."""

    async def asked(body: Body, call: HttpCall) -> Asked:
        wanted = messages_wanted(body, groups.of(body.get("model")).parts.answers)
        return Asked(wanted, partial(MessagesFace, wanted))

    return asked


async def counted_tokens(calls: Calls, body: Body, call: HttpCall) -> dict[str, Any]:
    """Return the answer of /v1/messages/count_tokens. Raises any RouterError."""
    chat = counted_chat(body, calls.groups.of(body.get("model")).parts.answers)
    request = inference_pb2.TokenizeRequest(model=given(body, "model", text), chat=chat)
    return {"input_tokens": len((await calls.tokenize(request, call)).token_ids)}


class MessagesFace:
    def __init__(self, wanted: Wanted, head: Head) -> None:
        self.tally = Tally(1)
        self._wanted = wanted
        self._head = head
        self._blocks: Blocks | None = None
        """Blocks of a stream that has begun."""
        self._finish = inference_pb2.Finish()

    async def whole(self, outputs: Sequence[inference_pb2.Output]) -> dict[str, Any]:
        (output,) = outputs
        blocks = self._new_blocks()
        content = blocks.whole(output.text)
        return self._message(content) | {**self._end(output.finish, blocks), "usage": self._usage()}

    def events(self, delta: Delta) -> bytes:
        self.tally.add(delta)
        begin = b""
        if self._blocks is None:
            self._blocks = self._new_blocks()
            message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
            begin = sse("message_start", message=message) + PING
        is_last = delta.finish is not None
        if delta.finish is not None:
            self._finish = delta.finish
        return begin + self._blocks.streamed(delta.text, is_last=is_last)

    async def end(self) -> bytes:
        blocks = self._blocks or self._new_blocks()
        delta = sse("message_delta", delta=self._end(self._finish, blocks), usage=self._usage())
        return delta + sse("message_stop")

    def failed(self, error: RouterError) -> bytes:
        body = anthropic_error(error, self._head.request_id, self._wanted.names)
        return event(encoded(body), b"error")

    def _new_blocks(self) -> Blocks:
        return Blocks(ParsedOutput(self._wanted.reading, self.tally.prompt_end))

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._head.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
        }

    def _usage(self) -> dict[str, int]:
        """Return the usage so far. As in Anthropic's API, `input_tokens` counts no cached ones."""
        cached = self.tally.cached_tokens
        return {
            "input_tokens": self.tally.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.tally.completion_tokens,
        }

    def _end(self, finish: inference_pb2.Finish, blocks: Blocks) -> dict[str, Any]:
        request = self._wanted.requests[0]
        sampling = request.sampling
        reason, stop = "tool_use" if blocks.has_called else "end_turn", None
        if finish.reason == inference_pb2.FINISH_REASON_LENGTH:
            is_full = not request.prefetch and finish.usage.completion_tokens < sampling.max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif finish.HasField("stop_reason") and finish.stop_reason in sampling.stop:
            reason, stop = "stop_sequence", finish.stop_reason
        return {"stop_reason": reason, "stop_sequence": stop}
