"""Completion requests: the body of /v1/completions as GenerateRequests, one per prompt.

A prompt is text or token ids.
"""

from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.requests.echo import Echo
from blockyard.router.openai.requests.fields import (
    UINT32,
    Body,
    Fields,
    boolean,
    given,
    integer,
    refuse_others,
)
from blockyard.router.openai.requests.prompts import prompts_kind, with_prompts
from blockyard.router.openai.requests.sampling import SHARED, generate_request, num_outputs
from blockyard.router.openai.requests.unsupported import UNSUPPORTED, refuse_unsupported
from blockyard.router.openai.requests.wanted import STREAM_FIELDS, Wanted, answering, field_names

NAMES = {"input": "prompt", "sampling.prompt_logprobs": "logprobs"}
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of max_tokens for this route."""
MAX_PROMPTS = 64
"""Most prompts of one call. Each is charged, placed and counted like a call of its own."""


def completion_wanted(body: Body) -> Wanted:
    """Return a body of /v1/completions as checked requests, one per prompt. Raises InvalidRequest or Unsupported."""
    refuse_others(body, FIELDS)
    refuse_unsupported(body, but=("echo",))
    wanted = answering(body)
    template = generate_request(body)
    if not template.sampling.HasField("max_tokens"):
        template.sampling.max_tokens = DEFAULT_MAX_TOKENS
    num_top = given(body, "logprobs", FIELDS["logprobs"])
    if num_top is not None:
        template.sampling.logprobs = num_top
    echo = _with_echo(template) if given(body, "echo", FIELDS["echo"]) else None
    requests = with_prompts(template, "prompt", _PROMPT("prompt", body.get("prompt")))
    names = field_names(body, NAMES)
    return Wanted(requests=requests, answering=wanted, names=names, echo=echo)


def _with_echo(template: inference_pb2.GenerateRequest) -> Echo:
    """Change the template to ask for what an echo needs, and return the echo. Raises InvalidRequest."""
    if template.prefetch:
        raise InvalidRequest.of("echo", "excludes prefetch")
    sampling = template.sampling
    echo = Echo(only_prompt=not sampling.max_tokens, shows_token_ids=template.return_prompt_token_ids)
    if sampling.HasField("logprobs"):
        # The engine sends them with the first output alone.
        if num_outputs(template) > 1:
            raise InvalidRequest.of("n", "must be 1 with echo and logprobs")
        sampling.prompt_logprobs = sampling.logprobs
    sampling.max_tokens = max(sampling.max_tokens, 1)
    template.return_prompt_token_ids = True
    return echo


_PROMPT = prompts_kind(MAX_PROMPTS)
FIELDS: Fields = {
    "prompt": _PROMPT,
    **SHARED,
    "max_tokens": integer(UINT32).said(f"Tokens to generate at most. Default {DEFAULT_MAX_TOKENS}."),
    "logprobs": integer(UINT32),
    **STREAM_FIELDS,
    **UNSUPPORTED,
    "echo": boolean.said(
        "Whether the prompt comes before each output, also in logprobs. With it max_tokens may be 0. Default false."
    ),
}
