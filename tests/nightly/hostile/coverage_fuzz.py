"""A fuzzer guided by coverage (atheris) for the code that reads a client's bytes: bodies, headers, messages of both
protocols.

`python -m tests.nightly.hostile.coverage_fuzz body --minutes 10` fuzzes one target from its folder `corpus`.
With `--keep` it adds inputs that reach new code. It fails at the first input that raises anything but a client's error,
and names the file with that input. Given that file, it runs the input again. fuzz.py sends messages to processes; this
one calls functions, thousands of times a second.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import atheris

with atheris.instrument_imports(include=["blockyard"]):
    from blockyard.deploy.dashboard.prompt_queries import prompt_arguments
    from blockyard.proto.v1 import inference_pb2, session_pb2
    from blockyard.router.admission.auth import TokenTable
    from blockyard.router.calls.gate import CallGate
    from blockyard.router.errors import RouterError
    from blockyard.router.openai.http import body
    from blockyard.router.openai.http.call import call_id, call_metadata, http_call
    from blockyard.router.openai.http.errors import HttpRefusal, error_body, error_headers, status_of
    from blockyard.router.openai.requests.chat import chat_wanted
    from blockyard.router.openai.requests.completion import completion_wanted
    from blockyard.router.parsing.formats import HERMES, THINK, AnswerFormat
    from blockyard.router.request.sampling_checks import SamplingLimits
    from blockyard.router.request.validation import valid_generation, valid_tenant
    from blockyard.router.services.grpc_status import trailing_metadata
    from blockyard.router.tokenizing.model_facts import ModelFacts
    from blockyard.worker.session.submits import Refused, engine_request

from google.protobuf.message import DecodeError
from multidict import CIMultiDict, CIMultiDictProxy

CORPUS = Path(__file__).parent / "corpus"
CONTEXT = 512
VOCABULARY = 4096
MAX_INPUT_BYTES = 4096
SECONDS_AN_INPUT = 10
"""Wall-clock bound per input. A slower input is reported."""
METHOD = "/blockyard.v1.InferenceService/Generate"
FACTS = ModelFacts(
    names=("demo",),
    vocab_size=VOCABULARY,
    max_position_embeddings=CONTEXT,
    eos_token_ids=frozenset({2}),
    longest_token_bytes=16,
)
LIMITS = SamplingLimits()
ANSWERS = AnswerFormat(tools=HERMES, reasoning=THINK)
GATE = CallGate(lambda: TokenTable({}))


def told(error: RouterError) -> None:
    """Return whether the error travels by both protocols, and is a sentence."""
    assert 400 <= status_of(error) < 600
    assert len(error.message) <= 600
    json.dumps(error_body(error))
    error_headers(error)
    if not isinstance(error, HttpRefusal):
        trailing_metadata(error)


def fuzz_body(data: bytes) -> None:
    """Fuzz a body, by either route, up to the requests that it asks for."""
    parse = partial(chat_wanted, answers=ANSWERS) if data[:1] < b"\x80" else completion_wanted
    try:
        wanted = parse(body.parse_json(data[1:], most_values=body.max_values(CONTEXT)))
        for request in wanted.requests:
            valid_generation(request, FACTS, limits=LIMITS, max_model_len=CONTEXT)
    except RouterError as error:
        told(error)


def fuzz_message(data: bytes) -> None:
    """Fuzz a GenerateRequest."""
    with suppress(DecodeError):
        message = inference_pb2.GenerateRequest.FromString(data)
        try:
            valid_generation(message, FACTS, limits=LIMITS, max_model_len=CONTEXT)
        except RouterError as error:
            told(error)


def fuzz_head(data: bytes) -> None:
    """Fuzz headers, a line each, as both protocols and the live page read them."""
    lines = (line.partition(b":") for line in data.split(b"\n"))
    pairs = [
        (name.decode("latin-1").strip().lower(), value.decode("utf-8", "surrogateescape").strip())
        for name, _, value in lines
    ]
    with suppress(ValueError):
        prompt_arguments(dict(pairs))
    request: Any = SimpleNamespace(
        headers=CIMultiDictProxy(CIMultiDict(pairs)), content_length=len(data), transport=None
    )
    for read in (
        lambda: call_id(request),
        lambda: body.check_head(request, body.max_body_bytes(CONTEXT)),
        lambda: valid_tenant(http_call(request, default_timeout_seconds=60.0).invocation_metadata()),
        lambda: GATE.admit(METHOD, call_metadata(request)),
    ):
        try:
            read()
        except RouterError as error:
            told(error)


def fuzz_session(data: bytes) -> None:
    """Fuzz a message from a router to a worker."""
    with suppress(DecodeError, ValueError, Refused):
        message = session_pb2.ToWorker.FromString(data)
        message.WhichOneof("message")
        engine_request(message.submit, vocab_size=VOCABULARY, block_size=16, max_model_len=CONTEXT)


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "body": fuzz_body,
    "head": fuzz_head,
    "message": fuzz_message,
    "session": fuzz_session,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.nightly.hostile.coverage_fuzz", description=__doc__
    )
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("inputs", nargs="*", help="files to run again, and nothing else")
    parser.add_argument("--runs", type=int, default=-1, help="inputs; without it, until the time is over")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep inputs that reach new code in the corpus")
    arguments = parser.parse_args()
    own = CORPUS / arguments.target
    with tempfile.TemporaryDirectory() as scratch:
        options = {
            "runs": arguments.runs,
            "max_total_time": round(60 * arguments.minutes),
            "seed": arguments.seed,
            "max_len": MAX_INPUT_BYTES,
            # The peak that the kernel tells is that of the process which has started this one.
            "rss_limit_mb": 0,
            "timeout": SECONDS_AN_INPUT,
            "artifact_prefix": f"{tempfile.gettempdir()}/blockyard-{arguments.target}-",
        }
        flags = [f"-{name}={value}" for name, value in options.items()]
        inputs = arguments.inputs or ([own] if arguments.keep else [scratch, own])
        atheris.Setup([sys.argv[0], *flags, *map(str, inputs)], TARGETS[arguments.target])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
