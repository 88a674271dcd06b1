"""Parses the page's questions about a prompt, and formats blocks, sequences and placements for it. Pure.

A prompt comes in request headers, x-blockyard-question-0 and following, as base64 of JSON. Ray's dashboard refuses a
browser's POST, and it logs the URL of every GET, where no prompt may appear.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

from blockyard.proto.v1 import cluster_pb2

HEADER = "x-blockyard-question-"
MAX_HEADERS = 24
"""Limit on a question's headers. The page puts 7,000 characters into each. The dashboard accepts 8,190."""
MAX_TOKEN_IDS = 32_768
MAX_REQUESTS = 200
"""Limit on the requests that the page shows."""
BLOCK_STATES = {
    cluster_pb2.BLOCK_STATE_FREE: "free",
    cluster_pb2.BLOCK_STATE_CACHED: "cached",
    cluster_pb2.BLOCK_STATE_USED: "used",
}
SEQUENCE_STATES = {
    cluster_pb2.SEQUENCE_STATE_RUNNING: "running",
    cluster_pb2.SEQUENCE_STATE_WAITING: "waiting",
}
REQUEST_STATES = {
    cluster_pb2.REQUEST_STATE_QUEUED: "queued",
    cluster_pb2.REQUEST_STATE_PLACED: "placed",
    cluster_pb2.REQUEST_STATE_STREAMING: "streaming",
}

UNPRICED = frozenset({cluster_pb2.PULL_VERDICT_UNMEASURED, cluster_pb2.PULL_VERDICT_MEMORY})
VERDICTS = {
    cluster_pb2.PULL_VERDICT_CHOSEN: "chosen",
    cluster_pb2.PULL_VERDICT_TIE: "not chosen: it saves too little",
    cluster_pb2.PULL_VERDICT_OTHER_SOURCE: "not chosen: the other source saves as much or more",
    cluster_pb2.PULL_VERDICT_UNMEASURED: "not possible: no host cache, or its rates are not measured yet",
    cluster_pb2.PULL_VERDICT_MEMORY: "not chosen: the worker's memory is short",
}
"""Why a source is chosen or not, for `blockyard explain` too."""


def prompt_arguments(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return a question's arguments for the client's lookup_prefix and explain_placement.

    Raise ValueError for a question that cannot be read. It never quotes the prompt.
    """
    parts = [headers[name] for name in map(f"{HEADER}{{}}".format, range(MAX_HEADERS)) if name in headers]
    try:
        asked = json.loads(base64.b64decode("".join(parts), validate=True))
        is_public, prompt, token_ids = asked["public"], asked.get("prompt"), asked.get("token_ids")
    except (
        binascii.Error,
        UnicodeDecodeError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
    ):
        raise ValueError("the question cannot be read") from None
    public = {"public_prefix": True} if is_public is True else {}
    if isinstance(prompt, str) and prompt and token_ids is None:
        return {"prompt": prompt, **public}
    if prompt is None and _are_tokens(token_ids):
        return {"prompt_token_ids": token_ids, **public}
    raise ValueError(f"give a prompt, or 1 to {MAX_TOKEN_IDS} token ids")


def _are_tokens(token_ids: Any) -> bool:
    return (
        isinstance(token_ids, list)
        and 0 < len(token_ids) <= MAX_TOKEN_IDS
        and all(type(token) is int and 0 <= token < 2**31 for token in token_ids)
    )


def block_dict(block: cluster_pb2.Block) -> dict[str, Any]:
    return {
        "id": block.block_id,
        "state": BLOCK_STATES.get(block.state, "unknown"),
        "references": block.references,
        "name": block.name.hex(),
        "parent": block.parent.hex(),
        "age_seconds": round(block.age_seconds, 1) if block.HasField("age_seconds") else None,
        "request_ids": list(block.request_ids),
    }


def sequence_dict(sequence: cluster_pb2.SequenceInfo) -> dict[str, Any]:
    names = (
        *("request_id", "index", "prompt_tokens", "generated_tokens", "computed_tokens", "cached_tokens"),
        *("preemptions", "priority", "num_blocks"),
    )
    return {
        "id": sequence.sequence_id,
        "state": SEQUENCE_STATES.get(sequence.state, "unknown"),
        **{name: getattr(sequence, name) for name in names},
        "block_table": list(sequence.block_table),
    }


def requests_dict(answers: Mapping[str, Sequence[cluster_pb2.RequestInfo] | None]) -> dict[str, Any]:
    """Return the oldest MAX_REQUESTS requests of all routers, oldest first. Routers never reveal their prompts."""
    known = [
        (router, request)
        for router, requests in answers.items()
        if requests is not None
        for request in requests
    ]
    known.sort(key=lambda entry: -entry[1].age_seconds)
    return {
        "total": len(known),
        "silent": sorted(router for router, requests in answers.items() if requests is None),
        "requests": [_request_dict(router, request) for router, request in known[:MAX_REQUESTS]],
    }


def _request_dict(router: str, request: cluster_pb2.RequestInfo) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "tenant": request.tenant,
        "router": router,
        "worker": request.worker_id,
        "state": REQUEST_STATES.get(request.state, "unknown"),
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens if request.HasField("cached_tokens") else None,
        "pulled_blocks": request.pulled_blocks,
        "pulled_from": request.pulled_from,
        "generated_tokens": request.generated_tokens,
        "age_seconds": round(request.age_seconds, 1),
    }


def prefix_dict(found: cluster_pb2.LookupPrefixResponse) -> dict[str, Any]:
    return {
        "prompt_tokens": found.prompt_tokens,
        "prompt_blocks": found.prompt_blocks,
        "index_available": found.index_available,
        "holders": [
            {
                "worker": holder.worker_id,
                "blocks": holder.cached_blocks,
                "host_blocks": holder.host_cached_blocks,
            }
            for holder in found.holders
        ],
    }


def placement_dict(explained: cluster_pb2.ExplainPlacementResponse) -> dict[str, Any]:
    fields = [field.name for field in cluster_pb2.PlacementCandidate.DESCRIPTOR.fields]
    terms = [name for name in fields if name != "pull_options"]
    return {
        "policy": explained.policy,
        "chosen": explained.chosen_worker_id,
        "index_available": explained.index_available,
        "split": _split_dict(explained.split) if explained.HasField("split") else None,
        "candidates": [
            {name: getattr(candidate, name) for name in terms}
            | {"pull_options": [_option_dict(option) for option in candidate.pull_options]}
            for candidate in explained.candidates
        ],
    }


def _split_dict(split: cluster_pb2.SplitPlacement) -> dict[str, Any]:
    return {
        "first": split.prefill.worker_id,
        "computed_tokens": split.prefill.uncached_tokens,
        "first_ms": split.prefill.total_ms,
        "second": split.decode.worker_id,
        "pulled_tokens": split.decode.pulled_tokens,
        "second_ms": split.decode.total_ms,
        "local_ms": split.local_ms,
        "is_chosen": split.is_chosen,
    }


def _option_dict(option: cluster_pb2.PullOption) -> dict[str, Any]:
    return {
        "source": option.source_id,
        "verdict": VERDICTS.get(option.verdict, "unknown"),
        "is_chosen": option.verdict == cluster_pb2.PULL_VERDICT_CHOSEN,
        "is_priced": option.verdict not in UNPRICED,
        "tokens": option.pulled_tokens,
        "time_ms": option.time_ms,
        "saved_ms": option.saved_ms,
    }
