"""Prompts of one call: texts or lists of token ids, one request each. Owns how many a call may have."""

from typing import Any, TypeVar

from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.requests.fields import Kind, text, token_ids

Request = TypeVar("Request", inference_pb2.GenerateRequest, inference_pb2.EmbedRequest)
Prompt = str | list[int]
MAX_FANOUT_BYTES = 5 * 1024 * 1024
"""Bound on the size of all other fields, times the number of prompts: each prompt gets a copy before admission.

It leaves room for 64 of the largest schemas.
"""


def prompts_kind(most: int) -> Kind[list[Prompt]]:
    """Return the kind of a field with one prompt, or with a list of at most `most`."""

    def read(name: str, value: Any) -> list[Prompt]:
        if not isinstance(value, list):
            return [text(name, value)]
        if value and type(value[0]) is int:
            return [token_ids(name, value)]
        if not 1 <= len(value) <= most:
            raise InvalidRequest.of(name, f"must have 1 to {most} prompts")
        return [_one(f"{name}[{number}]", item) for number, item in enumerate(value)]

    one = [{**text.schema, "minLength": 1}, {**token_ids.schema, "minItems": 1}]
    many = {"type": "array", "items": {"anyOf": one}, "minItems": 1, "maxItems": most}
    return Kind(read, {"anyOf": [*one, many]}).said(f"A text, token ids, or up to {most} of either.")


def with_prompts(template: Request, name: str, prompts: list[Prompt]) -> tuple[Request, ...]:
    """Return a copy of the template for each prompt. Raises InvalidRequest, about the field `name`, for too many large
    copies."""
    if len(prompts) * template.ByteSize() > MAX_FANOUT_BYTES:
        raise InvalidRequest.of(name, "has too many prompts for fields as large as these")
    return tuple(_with_prompt(template, prompt) for prompt in prompts)


def set_ids(
    requests: tuple[inference_pb2.GenerateRequest | inference_pb2.EmbedRequest, ...], call_id: str
) -> None:
    """Set the request ids: the call's id, with a number appended if there are several."""
    for number, request in enumerate(requests):
        request.request_id = call_id if len(requests) == 1 else f"{call_id}-{number}"


def _with_prompt(template: Request, prompt: Prompt) -> Request:
    request = type(template)()
    request.CopyFrom(template)
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.prompt_token_ids.ids.extend(prompt)
    return request


def _one(path: str, value: Any) -> Prompt:
    return token_ids(path, value) if isinstance(value, list) else text(path, value)
