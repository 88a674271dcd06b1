"""Routes /tokenize and /detokenize, in the shapes of vLLM: JSON to gRPC messages and back."""

import asyncio
from typing import Any

from blockyard.proto.v1 import inference_pb2
from blockyard.router.calls.generating import Calls
from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.http.call import HttpCall
from blockyard.router.openai.requests.chat import CHAT_FIELDS, chat_of
from blockyard.router.openai.requests.fields import (
    Body,
    Fields,
    boolean,
    given,
    refuse_others,
    text,
    token_ids,
)
from blockyard.router.openai.requests.sampling import REQUEST_SCALARS
from blockyard.router.openai.requests.tools import TOOL_FIELDS, given_tools
from blockyard.router.openai.requests.unsupported import unsupported
from blockyard.router.parsing.formats import AnswerFormat

TOKENIZE_FIELDS: Fields = {
    "prompt": text.said("Either this or messages."),
    **CHAT_FIELDS,
    "tools": TOOL_FIELDS["tools"],
    "model": REQUEST_SCALARS["model"],
    "return_token_strs": boolean.said("Whether the answer has the tokens as strings too. Default false."),
    "add_special_tokens": boolean.said("Must be true for a prompt and false for messages, as without it."),
}
DETOKENIZE_FIELDS: Fields = {"tokens": token_ids, "model": REQUEST_SCALARS["model"]}
TOKENS_PER_TICK = 4096
"""Token ids whose strings are looked up in one tick of the event loop."""


async def tokenized(calls: Calls, body: Body, call: HttpCall) -> dict[str, Any]:
    """Return the answer of /tokenize for a prompt or a chat. Raises any RouterError."""
    request = _tokenize_request(body, calls.groups.of(body.get("model")).parts.answers)
    shows_names = given(body, "return_token_strs", boolean)
    answer = await calls.tokenize(request, call)
    return {
        "count": len(answer.token_ids),
        "max_model_len": answer.max_model_len,
        "tokens": list(answer.token_ids),
        "token_strs": await _names(calls, request.model, list(answer.token_ids)) if shows_names else None,
    }


async def detokenized(calls: Calls, body: Body, call: HttpCall) -> dict[str, Any]:
    """Return the answer of /detokenize. As in vLLM, its text has special tokens too. Raises any RouterError."""
    refuse_others(body, DETOKENIZE_FIELDS)
    request = inference_pb2.DetokenizeRequest(
        model=given(body, "model", text),
        token_ids=token_ids("tokens", body.get("tokens")),
        skip_special_tokens=False,
    )
    return {"prompt": (await calls.detokenize(request, call)).text}


def _tokenize_request(body: Body, answers: AnswerFormat) -> inference_pb2.TokenizeRequest:
    refuse_others(body, TOKENIZE_FIELDS)
    request = inference_pb2.TokenizeRequest(model=given(body, "model", text))
    is_chat = body.get("messages") is not None
    if is_chat and body.get("prompt") is not None:
        raise InvalidRequest.of("prompt", "excludes messages")
    if is_chat:
        request.chat.CopyFrom(chat_of(body, answers))
        if (tools := given_tools(body, answers)) is not None:
            request.chat.tools = tools.listed
    else:
        request.prompt = text("prompt", body.get("prompt"))
    # A template writes its own special tokens. A text gets those that a completion gets.
    if given(body, "add_special_tokens", boolean) not in (None, not is_chat):
        raise unsupported("add_special_tokens")
    return request


async def _names(calls: Calls, model: str, ids: list[int]) -> list[str]:
    tokenizer = calls.groups.of(model).parts.tokenizing.tokenizer
    names: list[str] = []
    for at in range(0, len(ids), TOKENS_PER_TICK):
        names += tokenizer.convert_ids_to_tokens(ids[at : at + TOKENS_PER_TICK])
        await asyncio.sleep(0)
    return names
