"""Line routes: for each route that a batch may use, the function that turns the body of a line into work.

Does not own when a line runs or is tried again (batches/).
"""

from collections.abc import Awaitable, Callable

from blockyard.proto.limits import MAX_PRIORITY
from blockyard.router.calls.generating import Calls
from blockyard.router.errors import Unsupported
from blockyard.router.openai.answers.face import Asked
from blockyard.router.openai.batches.line_calls import Prepare, Work
from blockyard.router.openai.completions import Completions
from blockyard.router.openai.embeddings import embeddings
from blockyard.router.openai.http.call import CallNotes, HttpCall
from blockyard.router.openai.http.json_response import encoded
from blockyard.router.openai.requests import embedding as embedding_request
from blockyard.router.openai.requests.fields import Body, boolean, given


def generated(completions: Completions, ask: Callable[[Body], Asked]) -> Prepare:
    """Return the function for a route that generates text. `ask` checks the bodies of the route."""

    def prepare(body: Body) -> Work:
        asked = _in_background(ask(body))
        wanted = asked.wanted

        async def run(call: HttpCall, notes: CallNotes) -> bytes:
            notes.names = wanted.names
            return encoded(await completions.whole(asked, call, notes.request_id))

        return Work(run, wanted.sequences_a_prompt * len(wanted.requests))

    return prepare


def responded(completions: Completions, ask: Callable[[Body, HttpCall], Awaitable[Asked]]) -> Prepare:
    """Return the function for /v1/responses. An earlier response is read when the line runs."""

    def prepare(body: Body) -> Work:
        if given(body, "stream", boolean):
            raise _streams()

        async def run(call: HttpCall, notes: CallNotes) -> bytes:
            asked = _in_background(await ask(body, call))
            notes.names = asked.wanted.names
            return encoded(await completions.whole(asked, call, notes.request_id))

        return Work(run)

    return prepare


def embedded(calls: Calls) -> Prepare:
    """Return the function for /v1/embeddings."""

    def prepare(body: Body) -> Work:
        wanted = embedding_request.embeddings_wanted(body)
        for request in wanted.requests:
            request.priority = MAX_PRIORITY

        async def run(call: HttpCall, notes: CallNotes) -> bytes:
            notes.names = embedding_request.NAMES
            return await embeddings(calls, wanted, call, notes.request_id)

        return Work(run, len(wanted.requests))

    return prepare


def _in_background(asked: Asked) -> Asked:
    """Give the lowest priority to a call's requests. Raises Unsupported for one that streams."""
    if asked.wanted.answering.streams:
        raise _streams()
    for request in asked.wanted.requests:
        request.priority = MAX_PRIORITY
    return asked


def _streams() -> Unsupported:
    return Unsupported.of("stream", "a batch does not stream")
