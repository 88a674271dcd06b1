"""`generate` and `chat`: the requests that they send and the text that they show, against a scripted gRPC server."""

import json
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.requests.waiting_messages import with_waiting_notice
from blockyard.proto.v1 import inference_pb2, inference_pb2_grpc
from blockyard.proto.v1.cluster_pb2 import Worker
from blockyard.router.client import Client, Delta
from blockyard.router.client.arguments import ChatArguments, GenerateArguments
from click.testing import Result

from .rig import run


def message(
    text: str, tokens: list[int], offset: int, index: int = 0, *, ends: bool = False, **finish: Any
) -> inference_pb2.GenerateStreamResponse:
    total = offset + len(tokens)
    usage = inference_pb2.Usage(completion_tokens=total)
    ended = inference_pb2.Finish(reason=1, usage=usage, worker_id=f"w{index}", **finish)
    return inference_pb2.GenerateStreamResponse(
        request_id="r",
        delta=inference_pb2.OutputDelta(text=text, token_ids=tokens, token_offset=offset, index=index),
        finish=ended if ends else None,
    )


@dataclass
class FixedRouter(inference_pb2_grpc.InferenceServiceServicer):
    answers: list[inference_pb2.GenerateStreamResponse] = field(default_factory=list)
    breaks: bool = False
    delay_seconds: float = 0.0
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)

    def GenerateStream(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateStreamResponse]:
        self.requests.append(request)
        time.sleep(self.delay_seconds)
        yield from self.answers
        if self.breaks:
            context.abort(grpc.StatusCode.INTERNAL, "the engine failed")


@dataclass
class Terminal:
    """The command line before that router."""

    router: FixedRouter
    address: str

    def run(self, line: str, *more: str, **options: Any) -> Result:
        return run(line, *more, "--router", self.address, **options)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    server = grpc.server(ThreadPoolExecutor(2))
    router = FixedRouter()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield Terminal(router, f"127.0.0.1:{port}")
    server.stop(None)


ONE = [message("Hel", [1], 0), message("lo", [2], 1, ends=True)]
SEVERAL = [
    message("a", [1], 0),
    message("x", [7], 0, 1),
    message("y", [8], 1, 1, ends=True, cumulative_logprob=-1.5, beam_score=-0.75),
    message("b", [2], 1, ends=True, cumulative_logprob=-2.5),
]


@pytest.mark.parametrize(
    ("migrations", "told"), [(0, "seed 0]"), (1, "seed 0, 1 migration]"), (2, "seed 0, 2 migrations]")]
)
def test_one_output_is_printed_as_it_is_and_the_last_line_says_how_often_the_worker_was_lost(
    terminal: Terminal, migrations: int, told: str
) -> None:
    last = message("lo", [2], 1, ends=True, migrations=migrations)
    terminal.router.answers = [message("Hel", [1], 0), last]
    result = terminal.run("generate x")
    assert (result.exit_code, result.stdout) == (0, "Hello\n")
    assert "2 generated" in result.stderr
    assert result.stderr.rstrip().endswith(told)
    (request,) = terminal.router.requests
    assert request.sampling == inference_pb2.SamplingParams(max_tokens=256), "the rest is left to the server"
    assert not request.HasField("model")


def test_several_outputs_are_labelled_by_their_index_and_json_has_all(terminal: Terminal) -> None:
    terminal.router.answers = SEVERAL
    result = terminal.run("generate x --n 2")
    assert (result.exit_code, result.stdout) == (0, "--- output 1\nxy\n--- output 0\nab\n")
    assert "logprob -1.500 score -0.750" in result.stderr
    assert terminal.router.requests[0].sampling.n == 2
    document = json.loads(terminal.run("generate x --n 2 --output json").stdout)
    outputs = [(o["index"], o["text"], o["token_ids"]) for o in document["outputs"]]
    assert outputs == [(0, "ab", [1, 2]), (1, "xy", [7, 8])]
    assert document["outputs"][1]["finish"]["beam_score"] == -0.75
    assert (document["text"], document["request_id"]) == ("ab", "r")


@pytest.mark.parametrize("line", ["generate x --output json", "chat"])
def test_an_answer_that_is_late_is_said_to_be_beside_it_once_and_in_it_never(
    terminal: Terminal, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(with_waiting_notice, "__kwdefaults__", {"silence_seconds": 0.1})
    terminal.router.answers, terminal.router.delay_seconds = ONE, 0.5
    result = terminal.run(line, input="hello\n")
    assert result.exit_code == 0
    # This router says nothing of workers, as a real one to a token that may only ask the model.
    assert result.stderr.count("[no answer yet; `") == 1
    assert "no answer yet" not in result.stdout


@pytest.mark.parametrize("line", ["generate x", "chat"])
def test_a_stream_that_breaks_says_so_on_a_line_of_its_own(terminal: Terminal, line: str) -> None:
    terminal.router.answers, terminal.router.breaks = ONE[:1], True
    result = terminal.run(line, input="hello\n")
    assert result.exit_code == 1
    assert result.output.splitlines() == ["Hel", "Error: the engine failed"]


def test_every_option_reaches_the_server(terminal: Terminal, tmp_path: Path) -> None:
    terminal.router.answers = ONE
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}', encoding="utf-8")
    line = (
        "generate x --min-tokens 3 --temperature 0.5 --top-k 4 --top-p 0.75 --min-p 0.25 --presence-penalty 1.5 "
        "--frequency-penalty -1.5 --repetition-penalty 2 --seed 7 --stop end --stop-token-id 9 --beam-width 4 "
        "--length-penalty 0.5 --logprobs 2 --priority -5 --early-stopping never --prompt-logprobs 3 "
        "--cache-salt tenant-a --request-id mine --logit-bias 5=-1.5 --logit-bias 6=2 --ignore-eos --include-stop "
        "--bad-token-id 7 --bad-token-id 8 --allowed-token-id 5 --allowed-token-id 6 --bad-word cat --bad-word dog "
        f"--keep-special-tokens --truncate-prompt-tokens -1 --json-schema @{schema}"
    )
    assert terminal.run(line).exit_code == 0
    (request,) = terminal.router.requests
    assert (request.priority, request.cache_salt, request.request_id) == (-5, "tenant-a", "mine")
    assert request.truncate_prompt_tokens == -1
    assert request.sampling == inference_pb2.SamplingParams(
        bad_words=["cat", "dog"],
        skip_special_tokens=False,
        max_tokens=256,
        min_tokens=3,
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        min_p=0.25,
        presence_penalty=1.5,
        frequency_penalty=-1.5,
        repetition_penalty=2.0,
        seed=7,
        stop=["end"],
        stop_token_ids=[9],
        beam_width=4,
        length_penalty=0.5,
        logprobs=2,
        structured_output={"json_schema": '{"type": "object"}'},
        ignore_eos=True,
        early_stopping=inference_pb2.EARLY_STOPPING_NEVER,
        prompt_logprobs=3,
        logit_bias={5: -1.5, 6: 2.0},
        allowed_token_ids=[5, 6],
        bad_token_ids=[7, 8],
        include_stop_in_output=True,
    )


@pytest.mark.parametrize("name", ["heuristic", "first", "never"])
def test_each_way_to_stop_a_search_early_has_its_name(terminal: Terminal, name: str) -> None:
    terminal.router.answers = ONE
    assert terminal.run(f"generate x --early-stopping {name}").exit_code == 0
    value = inference_pb2.EarlyStopping.Value(f"EARLY_STOPPING_{name.upper()}")
    assert terminal.router.requests[0].sampling.early_stopping == value


def test_any_json_object_can_be_asked_for_and_a_chat_gives_variables_to_the_template(
    terminal: Terminal,
) -> None:
    terminal.router.answers = ONE
    assert terminal.run("generate x --json-object").exit_code == 0
    variables = '{"enable_thinking": false}'
    result = terminal.run("chat --chat-template-kwargs", variables, input="hello\n")
    assert result.exit_code == 0, result.output
    generated, chat = terminal.router.requests
    assert generated.sampling.structured_output == inference_pb2.StructuredOutput(json_object=True)
    assert json.loads(chat.chat.template_kwargs) == {"enable_thinking": False}


def test_every_argument_of_the_client_that_is_no_prompt_is_an_option_of_generate() -> None:
    # The others belong to chats, name a prompt or the one model of a cluster, or are shown by no command. The policy is
    # an option of `bench --compare`, for admins.
    others = {"messages", "prompt_token_ids", "return_prompt_token_ids", "model", "policy"}
    arguments = GenerateArguments.__annotations__.keys() - ChatArguments.__annotations__.keys() - others
    options = {parameter.name: parameter for parameter in main.commands["generate"].params}
    assert arguments <= options.keys()
    assert all(getattr(options[name], "help", None) for name in arguments)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--json-schema @/no/such/file", "/no/such/file cannot be read"),
        (f"--seed {2**63}", "seed: "),
        ("--max-tokens -1", "max_tokens: "),
        ("--regex a --json-schema {}", "at most one of"),
        ("--regex a --json-object", "at most one of"),
        ("--logit-bias 5", "'5' is not ID=VALUE"),
        ("--logit-bias 5=1 --logit-bias 5=2", "token 5 has two biases"),
        ("--logit-bias=-5=1", "logit_bias: "),
        ("--early-stopping true", "'heuristic', 'first', 'never'"),
    ],
)
def test_a_mistake_is_told_before_anything_is_sent(terminal: Terminal, arguments: str, told: str) -> None:
    result = terminal.run(f"generate x {arguments}")
    assert result.exit_code in (1, 2)
    assert told in result.output
    assert terminal.router.requests == []


def test_a_look_at_the_workers_that_outlasts_the_command_ends_without_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, closed, raised = threading.Event(), threading.Event(), list[str]()
    lookers = list[threading.Thread]()
    onlooker = Client("127.0.0.1:1", timeout_seconds=60.0)

    def workers() -> list[Worker]:
        lookers.append(threading.current_thread())
        looking.set()
        assert closed.wait(60.0)
        return onlooker.list_workers()

    def deltas() -> Generator[Delta, None, None]:
        assert looking.wait(60.0)
        yield Delta(request_id="r", text="", token_ids=(), token_offset=0, finish=None)

    monkeypatch.setattr(threading, "excepthook", lambda hooked: raised.append(repr(hooked.exc_value)))
    assert len(list(with_waiting_notice(deltas(), workers, "", silence_seconds=0.0))) == 1
    onlooker.close()
    closed.set()
    lookers[0].join(60.0)
    assert raised == []
    assert capsys.readouterr().err == ""
