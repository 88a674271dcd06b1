"""Messages that a broken or hostile router may send to a worker: the stream may end, and nothing else does."""

import contextlib
import math
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from blockyard.proto.naming.block_hash import chain, pack_tokens
from blockyard.proto.v1 import cluster_pb2, session_pb2
from blockyard.proto.v1.session_pb2 import Cancel, RejectReason, Submit, ToRouter, ToWorker

from .rig import CANARY, CONTEXT, VOCABULARY, House, Outcome, assert_discreet, outcome_of, session_channel

SESSION = "/blockyard.v1.EngineService/Session"
ROOT = bytes(16)
TOKENS = [7] * 40
LISTEN_SECONDS = 20.0


def submit(**changes: Any) -> bytes:
    """Return a message that the worker accepts, with these changes."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 4, "length_penalty": 1.0}
    fields = {
        "handle": 1,
        "request_id": "hostile",
        "token_ids": pack_tokens(TOKENS),
        "prompt_tokens": len(TOKENS),
        "block_names": b"".join((ROOT, *chain(ROOT, TOKENS, 16))),
        "sampling": sampling | changes.pop("sampling", {}),
    }
    return ToWorker(submit=Submit(**(fields | changes))).SerializeToString()


class Stream:
    """The router's end of a session, in raw bytes."""

    def __init__(self, house: House, *messages: bytes, channel: grpc.Channel | None = None) -> None:
        self._is_over = threading.Event()
        self._call = (channel or house.worker_channel).stream_stream(SESSION)(
            self._requests(messages), timeout=LISTEN_SECONDS
        )

    def _requests(self, messages: tuple[bytes, ...]) -> Iterator[bytes]:
        yield from messages
        self._is_over.wait(LISTEN_SECONDS)

    def answers(self, *, until: Callable[[ToRouter], bool]) -> list[ToRouter]:
        """Return all messages up to that one, and close the stream."""
        seen = []
        for raw in self._call:
            seen.append(ToRouter.FromString(raw))
            if until(seen[-1]):
                break
        self.end()
        return seen

    def outcome(self) -> Outcome:
        """Return how the worker ends the stream."""
        try:
            for _ in self._call:
                pass
            return Outcome(grpc.StatusCode.OK)
        except grpc.RpcError as error:
            return outcome_of(error)
        finally:
            self.end()

    def end(self) -> None:
        self._is_over.set()
        self._call.cancel()


def rejection(house: House, *messages: bytes) -> Any:
    """Return why the last request does not run, whether the worker says so at once or with a step."""

    def is_it(message: ToRouter) -> bool:
        return message.HasField("rejected") or bool(message.step.failed_handles)

    answer = Stream(house, *messages).answers(until=is_it)[-1]
    return answer.rejected.reason if answer.HasField("rejected") else answer.step.failed_reasons[0]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "raw",
    [b"", b"\xff\xff", b"\x0a\x05\xff\xfe", b"\x0a\x04\x12\x02\xff\xfe", b"\x0a" * 300],
    ids=["empty", "noise", "truncated", "bad text", "nested"],
)
def test_what_is_no_message_ends_the_stream(house: House, raw: bytes) -> None:
    outcome = Stream(house, raw).outcome()
    assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
    assert_discreet(outcome)
    house.check()


@pytest.mark.parametrize("secret", [None, CANARY], ids=["plaintext", "another secret"])
def test_without_the_secret_nothing_is_read(house: House, secret: str | None) -> None:
    address = house.worker.address
    with session_channel(address, secret) if secret else grpc.insecure_channel(address) as channel:
        outcome = Stream(house, submit(), channel=channel).outcome()
        assert outcome.code is grpc.StatusCode.UNAVAILABLE
        for method in session_pb2.DESCRIPTOR.services_by_name["EngineService"].methods:
            called = house.call(f"EngineService/{method.name}", b"\xff\xff", channel=channel)
            assert called.code is grpc.StatusCode.UNAVAILABLE
    house.check()


def test_strangers_cost_the_worker_next_to_nothing(house: House) -> None:
    """Strangers send any number of bytes without a certificate, with or without a TLS greeting."""
    host, _, port = house.worker.address.rpartition(":")
    before = house.worker.resident_bytes
    with ExitStack() as stack:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        for number in range(60):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            with contextlib.suppress(OSError):
                if number % 2:
                    connection = stack.enter_context(context.wrap_socket(connection))
                for _ in range(64):
                    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64 * 1024))
        assert house.worker.resident_bytes - before < 32 * 2**20
        house.check()


INVALID = {
    "no tokens": {"token_ids": b""},
    "bytes that are no tokens": {"token_ids": b"\1\2\3"},
    "a token beyond": {"token_ids": pack_tokens([VOCABULARY] * 40)},
    "a negative token": {"token_ids": pack_tokens([-1] * 40)},
    "4 million tokens": {"token_ids": bytes(15 * 2**20)},
    "a prompt longer than its tokens": {"prompt_tokens": 41},
    "a prompt of 2^32": {"prompt_tokens": 2**32 - 1},
    "no names": {"block_names": b""},
    "half a name": {"block_names": ROOT + b"half"},
    "a million names": {"block_names": ROOT * 900_000, "prompt_tokens": 2**32 - 1},
    "names of another prompt": {"block_names": b"".join((ROOT, *chain(ROOT, [8] * 40, 16)))},
    "a root for a name": {"block_names": ROOT * 3},
    "a request id of 1 MB": {"request_id": CANARY * 80_000},
    "a request id of two lines": {"request_id": f"a\n{CANARY}"},
    "a priority of 2^31": {"priority": 2**31 - 1},
    "a deadline of NaN": {"deadline_seconds": math.nan},
    "a deadline before now": {"deadline_seconds": -1.0},
    "NaN for a temperature": {"sampling": {"temperature": math.nan}},
    "top_p 0": {"sampling": {"top_p": 0.0}},
    "nothing to generate": {"sampling": {"max_tokens": 0}},
    "logprobs of all": {"sampling": {"logprobs": 2**32 - 1}},
    "a million stop tokens": {"sampling": {"stop_token_ids": [5] * 10**6}},
    "4 million allowed tokens": {"sampling": {"allowed_token_ids": [5] * 4 * 10**6}},
    "a bias beyond": {"sampling": {"logit_bias": {VOCABULARY: 1.0}}},
    "an empty continuation": {"continuations": [{"index": 0}], "sampling": {"n": 2}},
    "a continuation of nobody": {"continuations": [{"index": 9, "token_ids": pack_tokens([7])}]},
    "one continued twice": {
        "continuations": [{"index": 0, "token_ids": pack_tokens([7])}] * 2,
        "sampling": {"n": 2},
    },
    "100,000 continuations": {
        "continuations": [{"index": index, "token_ids": pack_tokens([7])} for index in range(100_000)],
        "sampling": {"n": 2**31},
    },
    "beams of NaN": {"sampling": {"beam_width": 2, "length_penalty": math.nan}},
    "a structure of nothing": {"sampling": {"structured_output": {}}},
}
GRAMMARS = {
    text[:9]: {"sampling": {"structured_output": {"regex": text}, "eos_token_ids": [2]}}
    for text in ("a" * 2**20, "(", '{"a": 1}' * 10_000)
}
TOO_LARGE = {
    "more than the context": {"sampling": {"max_tokens": CONTEXT}},
    "2^32 tokens": {"sampling": {"max_tokens": 2**32 - 1}},
    "10^9 outputs": {"sampling": {"n": 10**9}},
    "10^9 beams": {"sampling": {"beam_width": 10**9}},
    "300 continuations": {
        "continuations": [{"index": index, "token_ids": pack_tokens([7])} for index in range(300)],
        "sampling": {"n": 2**31},
    },
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *((changes, RejectReason.REJECT_REASON_INVALID) for changes in INVALID.values()),
        *((changes, RejectReason.REJECT_REASON_TOO_LARGE) for changes in TOO_LARGE.values()),
        *((changes, RejectReason.REJECT_REASON_GRAMMAR) for changes in GRAMMARS.values()),
    ],
    ids=[*INVALID, *TOO_LARGE, *GRAMMARS],
)
def test_a_submit_that_no_router_sends_is_rejected(
    house: House, changes: dict[str, Any], reason: int
) -> None:
    assert rejection(house, submit(**changes)) == reason
    house.check()


def test_a_handle_in_use_and_cancels_of_nothing_touch_nobody(house: House) -> None:
    long = submit(sampling={"max_tokens": 100})
    cancels = [
        ToWorker(cancel=Cancel(handle=handle, index=index)).SerializeToString()
        for handle in (0, 2, 2**64 - 1)
        for index in (0, 9, 2**32 - 1)
    ]
    stream = Stream(house, long, submit(), *cancels)
    reasons: list[int] = []
    tokens = 0

    def is_finished(message: ToRouter) -> bool:
        nonlocal tokens
        if message.HasField("rejected"):
            reasons.append(message.rejected.reason)
        tokens += len(message.step.token_ids)
        return any(message.step.finish_reasons)

    stream.answers(until=is_finished)
    assert reasons == [RejectReason.REJECT_REASON_INVALID]
    assert tokens == 100
    house.check()


def test_nothing_is_cached_under_a_name_that_is_not_its_own(house: House) -> None:
    """A router that gives its tokens the names of another prompt would poison that prompt's cache."""
    prompt, lie = [9] * 64, [11] * 64
    names = b"".join((ROOT, *chain(ROOT, prompt, 16)))

    def run(handle: int, tokens: list[int]) -> Any:
        message = submit(
            handle=handle,
            token_ids=pack_tokens(tokens),
            prompt_tokens=64,
            block_names=names,
            sampling={"temperature": 0.0, "max_tokens": 8},
        )
        seen = Stream(house, message).answers(
            until=lambda answer: answer.HasField("rejected") or any(answer.step.finish_reasons)
        )
        if seen[-1].HasField("rejected"):
            return seen[-1].rejected.reason
        return [token for answer in seen for token in answer.step.token_ids], seen[-1].step.cached_tokens[0]

    assert run(1, lie) == RejectReason.REJECT_REASON_INVALID
    tokens, cached = run(2, prompt)
    assert cached == 0
    assert run(3, prompt) == (tokens, 48)
    house.check()


def test_a_flood_of_cancels_and_bad_submits_holds_nobody_up(house: House) -> None:
    reference = house.tokens(max_tokens=60)
    cancel = ToWorker(cancel=Cancel(handle=5)).SerializeToString()
    stream = Stream(house, *([cancel, submit(token_ids=b"")] * 10_000))
    victims = [house.tokens(max_tokens=60) for _ in range(3)]
    stream.end()
    assert victims == [reference] * 3
    house.check()


@pytest.mark.parametrize("raw", [b"\xff\xff", b"\x0a\x02\xff\xfe"])
@pytest.mark.parametrize(
    "method", [method.name for method in session_pb2.DESCRIPTOR.services_by_name["EngineService"].methods]
)
def test_malformed_bytes_to_every_call_of_a_worker_are_invalid(house: House, method: str, raw: bytes) -> None:
    if method != "Session":
        outcome = house.call(f"EngineService/{method}", raw, channel=house.worker_channel)
        assert outcome.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
        assert_discreet(outcome)
    house.check()


def test_a_page_of_a_thousand_blocks_and_no_more(house: House) -> None:
    for size in (1_001, 2**32 - 1):
        outcome = house.call(
            "EngineService/ListBlocks",
            cluster_pb2.ListBlocksRequest(page_size=size),
            channel=house.worker_channel,
        )
        assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
