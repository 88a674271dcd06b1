"""Echo: puts the prompt's text and log-probabilities before its outputs, if a completion asks for it (`echo`).

Changes deltas between the engine and their choices. Does not own the log-probabilities (the engine).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan

from blockyard.proto.v1 import inference_pb2
from blockyard.router.generation.client_buffer import Delta, Emit, Run

TextOf = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """Form in which a call wants its prompts returned."""

    only_prompt: bool
    """True if `max_tokens` was 0. The engine still makes one token, which is dropped."""
    shows_token_ids: bool
    """True if the client itself asked for the prompt's token ids. The echo asks for them in any case."""


def echoed(
    run: Run,
    echo: Echo,
    prompts: Sequence[str | None],
    outputs_a_prompt: int,
    text_of: TextOf,
) -> Run:
    """Return `run` with the prompt's text and log-probabilities before each output.

    `prompts` are the texts that the client sent. For None, `text_of` decodes the prompt's tokens.
    """

    async def run_with_prompts(emit: Emit) -> None:
        def add_prompt(delta: Delta) -> None:
            if echo.only_prompt:
                _drop_output(delta)
            if delta.prompt_token_ids:  # With the first piece of each output.
                given = prompts[delta.index // outputs_a_prompt]
                delta.text = (text_of(delta.prompt_token_ids) if given is None else given) + delta.text
                if delta.prompt_logprobs:
                    first = inference_pb2.TokenLogprob(token_id=delta.prompt_token_ids[0], logprob=nan)
                    delta.logprobs = [first, *delta.prompt_logprobs, *delta.logprobs]
                if not echo.shows_token_ids:
                    delta.prompt_token_ids = ()
            emit(delta)

        await run(add_prompt)

    return run_with_prompts


def _drop_output(delta: Delta) -> None:
    delta.text, delta.token_ids, delta.logprobs = "", [], []
    if delta.finish is not None:
        delta.finish.reason = inference_pb2.FINISH_REASON_LENGTH
        delta.finish.ClearField("stop_reason")
