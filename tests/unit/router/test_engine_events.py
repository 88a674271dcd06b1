"""Columns become one event a row, and columns that contradict each other are refused."""

from typing import Any

import pytest
from blockyard.proto.v1 import session_pb2
from blockyard.router.cluster.events import Refused, Tokens, events_of

from .fake_worker import token_logprobs


def step(**changes: Any) -> session_pb2.StepOutput:
    columns: dict[str, Any] = {
        "handles": [7, 7, 9],
        "indexes": [0, 1, 0],
        "token_offsets": [0, 4, 2],
        "token_counts": [2, 0, 1],
        "token_ids": [10, 11, 12],
        "finish_reasons": [0, 2, 1],
        "stop_tokens": [0, 0, 13],
        "cached_tokens": [16, 16, 32],
        "details": [
            {"row": 2, "cumulative_logprob": 0.0, "beam_score": -1.5},
            {"row": 0, "logprobs": token_logprobs([10, 11], 2), "prompt_logprobs": token_logprobs([5], 1)},
        ],
        "failed_handles": [8],
        "failed_reasons": [session_pb2.REJECT_REASON_INTERNAL],
        **changes,
    }
    return session_pb2.StepOutput(**columns)


def test_each_row_gets_its_tokens_and_its_details() -> None:
    common: dict[str, Any] = {"finish_reason": 0, "stop_token": None, "cached_tokens": 16}
    logprobs = {
        "logprobs": tuple(token_logprobs([10, 11], 2)),
        "prompt_logprobs": tuple(token_logprobs([5], 1)),
    }
    beam = {
        "finish_reason": 1,
        "stop_token": 12,
        "cached_tokens": 32,
        "cumulative_logprob": 0.0,
        "beam_score": -1.5,
    }
    assert events_of(step()) == [
        (7, Tokens(offset=0, token_ids=[10, 11], **common, **logprobs)),
        (7, Tokens(index=1, offset=4, token_ids=[], **common | {"finish_reason": 2})),
        (9, Tokens(offset=2, token_ids=[12], **beam)),
        (8, Refused(reason=session_pb2.REJECT_REASON_INTERNAL)),
    ]
    events = [event for _, event in events_of(step(indexes=[]))]
    assert [event.index for event in events if isinstance(event, Tokens)] == [0, 0, 0], "without indexes"


@pytest.mark.parametrize(
    "changes",
    [
        {"handles": [7, 7]},
        {"indexes": [0]},
        {"stop_tokens": []},
        {"token_counts": [2, 0, 0]},
        {"token_counts": [2, 0, 2]},
        {"failed_reasons": []},
        {"details": [{"row": 3}]},
        {"details": [{"row": 1}, {"row": 1}]},
        {"details": [{"row": 0, "logprobs": token_logprobs([10], 0)}]},
    ],
    ids=str,
)
def test_columns_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"column|argument|details|row"):
        events_of(step(**changes))


def test_details_do_not_hold_the_whole_step_in_memory() -> None:
    message = step()
    tokens = events_of(message)[0][1]
    assert isinstance(tokens, Tokens)
    message.details[1].logprobs[0].token_id = 99
    assert tokens.logprobs[0].token_id == 10
