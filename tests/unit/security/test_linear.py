"""Text from clients is read in linear time: every regular expression that may see it, and the code that reads whole
inputs.

The steps of a text and of one twice as long are counted. Texts of 64 KiB are read too, without a clock: a linear pass
takes milliseconds and a quadratic one minutes, which the time limit of the test ends.
"""

import ast
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.dashboard.prompt_queries import prompt_arguments
from blockyard.proto.naming.block_hash import split_names, unpack_tokens
from blockyard.proto.text import load_tokenizer
from blockyard.proto.v1 import inference_pb2, session_pb2
from blockyard.router.admission.auth import TokenTable, authenticate
from blockyard.router.errors import RouterError
from blockyard.router.openai.http import body
from blockyard.router.openai.requests.chat import chat_wanted
from blockyard.router.openai.requests.completion import completion_wanted
from blockyard.router.request.sampling_checks import SamplingLimits
from blockyard.router.request.structured_output import structured_problem
from blockyard.router.request.validation import valid_generation, valid_tenant
from blockyard.router.tokenizing.guard import Guard
from blockyard.router.tokenizing.model_facts import ModelFacts
from blockyard.worker.session.submits import Refused, engine_request
from google.protobuf.message import Message

from tests.counted_work import CountedPattern, lines_run

MODEL = Path(__file__).parents[3] / "deploy" / "demo_model" / "checkpoint"
PACKAGES = ("router", "proto", "worker", "deploy.dashboard")
"""Packages with all the code that reads a client's text."""
NOT_OF_MODULES = {
    "router.tokenizing.guard": 4,  # control tokens and tags, tried here by themselves
    "router.client.retry": 1,  # reads addresses that a caller of the client gives
    "router.openai.http.errors": 1,  # literal names of fields, in our own messages
    "worker.grammar.tool_calls": 1,  # literal marks of the model's format
    "worker.model.quantisation.scheme": 4,  # names in the config.json of the operator's model
}
"""Number of uses of `re` in functions, by module."""
NO_USES = ("Pattern", "Match", "escape", "DOTALL")
SEARCHED = {
    "worker.model.traits.mixture._MIXTRAL_EXPERT",
    "worker.grammar.refusals._QUOTED",
    "proto.index.scripts._INCLUDE",
    "proto.index.shards._BETWEEN",
}
SIZE, WHOLE_SIZE = 128, 2**14
"""Sizes in characters: where steps are counted, there and at twice the size, and where all is read."""
MOST_GROWTH = 2.2
"""Steps for a text twice as long. Quadratic work takes four times as many."""
OVERHEAD_STEPS = 100
STEPS_A_CHARACTER = 1000
"""Bound of the steps, beyond which an expression of exponential time ends."""
pytestmark = pytest.mark.timeout(200)


def pumped(units: tuple[str, ...], size: int) -> Iterator[str]:
    for unit in units:
        text = unit * (size // len(unit))
        yield from (text, text + "!", '"' + text, "(" + text + "\\")


def patterns() -> dict[str, "re.Pattern[str]"]:
    found = {}
    for package in PACKAGES:
        folder = importlib.import_module(f"blockyard.{package}")
        for module in pkgutil.walk_packages(folder.__path__, f"blockyard.{package}."):
            if module.name.rpartition(".")[2] in ("__main__", "start_hook"):
                continue
            loaded = importlib.import_module(module.name)
            for name, value in vars(loaded).items():
                if isinstance(value, re.Pattern):
                    found[f"{module.name.removeprefix('blockyard.')}.{name}"] = value
    return found


def units_of(pattern: "re.Pattern[str]") -> tuple[str, ...]:
    """Return an expression's own literals, and samples of its character classes."""
    words = re.findall(r"[A-Za-z<:\[' ]{2,}", pattern.pattern)
    return tuple(
        dict.fromkeys((*words, "a", "0", "a0", " ", ":", '"', '\\"', "'", "[", "]", ".", "\n", "é", "a a"))
    )


def uses_of(pattern: Any, *, is_searched: bool) -> tuple[Callable[[str], Any], ...]:
    return (pattern.match, pattern.fullmatch, *((pattern.findall,) if is_searched else ()))


def steps_of(pattern: "re.Pattern[str]", text: str, *, is_searched: bool) -> list[int]:
    """Return the steps of each use, which finds what `re` finds."""
    steps = []
    for number, use in enumerate(uses_of(pattern, is_searched=is_searched)):
        counted = CountedPattern(pattern, most=STEPS_A_CHARACTER * len(text))
        found, expected = uses_of(counted, is_searched=is_searched)[number](text), use(text)
        if isinstance(expected, list):
            assert found == len(expected), (pattern.pattern, text[:20])
        else:
            assert found == (None if expected is None else expected.end()), (pattern.pattern, text[:20])
        steps.append(counted.steps)
    return steps


def check_pattern(
    pattern: "re.Pattern[str]", units: tuple[str, ...], *, is_searched: bool = False, size: int = SIZE
) -> None:
    for text, longer in zip(pumped(units, size), pumped(units, 2 * size), strict=True):
        few, many = (steps_of(pattern, one, is_searched=is_searched) for one in (text, longer))
        for before, after in zip(few, many, strict=True):
            assert after <= MOST_GROWTH * before + OVERHEAD_STEPS, (pattern.pattern, text[:20], before, after)


def test_every_regular_expression_passes_over_pumped_text_in_linear_time() -> None:
    found = patterns()
    assert {
        "proto.naming.identifiers._NAME",
        "worker.grammar.refusals._BAD_VALUE",
    } <= set(found)
    for name, pattern in found.items():
        units, is_searched = units_of(pattern), name in SEARCHED
        check_pattern(pattern, units, is_searched=is_searched)
        for text in pumped(units, WHOLE_SIZE):
            for use in uses_of(pattern, is_searched=is_searched):
                use(text)


def test_expressions_of_control_tokens_are_linear() -> None:
    tokenizer = load_tokenizer(MODEL)
    many = [f"<|special_{number}|>" for number in range(100)]
    tokenizer.add_special_tokens({"additional_special_tokens": ["STOP", *many]})
    guard, units = Guard(tokenizer), ("<", "<|im_start|", "<|special_1", "STO", "<tool_call>")
    for pattern in (guard.cut, guard.written, guard.tags, guard.words):
        assert pattern is not None
        check_pattern(pattern, units, is_searched=True, size=16)
        for text in pumped(units, 2**12):
            pattern.split(text)


def test_no_regular_expression_is_made_or_searched_with_unseen() -> None:
    """All expressions of modules are tried above. A search at each position of a text costs more than a match."""
    searched = set()
    for package in PACKAGES:
        (folder,) = importlib.import_module(f"blockyard.{package}").__path__
        files = sorted(Path(folder).rglob("*.py"))
        assert files
        for file in files:
            name = ".".join((package, *file.relative_to(folder).with_suffix("").parts))
            tree = ast.parse(file.read_text())
            inner = list(uses_in_functions(tree))
            assert len(inner) == NOT_OF_MODULES.get(name, 0), (name, inner)
            searched |= {f"{name}.{pattern}" for pattern in searches(tree)}
    assert searched == SEARCHED


def searches(tree: ast.Module) -> Iterator[str]:
    """Yield the module's patterns that are searched for."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(
                value=ast.Name(id=name), attr="search" | "findall" | "finditer" | "sub" | "split"
            ) if name.isupper():
                yield name


def uses_in_functions(tree: ast.Module) -> Iterator[str]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    for function in functions:
        for node in ast.walk(function):
            match node:
                case ast.Attribute(value=ast.Name(id="re"), attr=name) if name not in NO_USES:
                    yield f"re.{name} in {function.name}"


@pytest.mark.parametrize(
    ("pattern", "is_searched", "is_linear"),
    [
        (r"(?:a*a*)!!", False, False),
        (r"(?:a|a)*!!", False, False),
        (r"(?:a+)+!!", False, False),
        (r"a*a*a*", False, False),
        (r"[a0]*a?", False, True),
        (r"a*!!", False, True),
        (r"a*!!", True, False),
        (r"(?:a[0-9]?)*!!", False, True),
    ],
)
def test_the_check_finds_quadratic_and_exponential_expressions_and_no_other(
    pattern: str, is_searched: bool, is_linear: bool
) -> None:
    with nullcontext() if is_linear else pytest.raises(AssertionError):
        check_pattern(re.compile(pattern), ("a", "a0"), is_searched=is_searched, size=24)


FACTS = ModelFacts(
    names=("demo",),
    vocab_size=4096,
    max_position_embeddings=2**15,
    eos_token_ids=frozenset({2}),
    longest_token_bytes=16,
)
TOKENS = TokenTable({})


def parse(text: str) -> None:
    body.parse_json(text.encode(), most_values=2**17)


def attempt(read: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """A refusal is as good an end as another."""
    with suppress(RouterError, ValueError, Refused):
        read(*arguments, **named)


def wanted(text: str) -> None:
    fields = ("messages", "prompt", "stop", "user", "model", "regex", "json_schema", "logit_bias", text)
    for read, field in product((chat_wanted, completion_wanted), fields):
        attempt(read, {"messages": [{"role": "user", "content": text}], field: text})


def generation(text: str) -> None:
    for fields in (
        {"request_id": text},
        {"session_id": text},
        {"cache_salt": text},
        {"sampling": {"stop": [text]}},
        {"prompt": text},
    ):
        message = inference_pb2.GenerateRequest(**{"prompt": "x", **fields})
        attempt(valid_generation, message, FACTS, max_model_len=2**15, limits=SamplingLimits())


def structure(text: str) -> None:
    for kind in ("json_schema", "regex"):
        attempt(structured_problem, inference_pb2.StructuredOutput(**{kind: text}))


def submit(text: str) -> None:
    data = text.encode()
    attempt(split_names, data[: len(data) // 16 * 16])
    attempt(unpack_tokens, data[: len(data) // 4 * 4])
    for fields in ({"request_id": text}, {"token_ids": data, "block_names": data}):
        message = session_pb2.Submit(prompt_tokens=2**15, **fields)
        attempt(engine_request, message, vocab_size=4096, block_size=16, max_model_len=2**15)


READERS: dict[str, Callable[[str], Any]] = {
    "a body": parse,
    "the fields of a body": wanted,
    "a generation": generation,
    "a structured output": structure,
    "a submit": submit,
    "a tenant": lambda text: valid_tenant([("blockyard-tenant", text)] * 2),
    "a token": lambda text: authenticate("/a/b", [("authorization", text)], TOKENS),
    "a question of the live page": lambda text: prompt_arguments({"x-blockyard-question-0": text}),
}
UNITS = ("a", "[", '{"a":', '"', '\\"', "\\", "1,", '"",', ":", "Bearer ", "(a+)+", " ", "é", "=", "[],", "0")


@pytest.mark.parametrize("name", READERS)
def test_what_reads_a_whole_input_is_linear(name: str) -> None:
    read = READERS[name]
    for text, longer in zip(pumped(UNITS, SIZE), pumped(UNITS, 2 * SIZE), strict=True):
        attempt(read, text)  # what is done once only
        few, many = (lines_run(partial(attempt, read, one)) for one in (text, longer))
        assert many <= MOST_GROWTH * few + OVERHEAD_STEPS, (text[:20], few, many)
    for text in pumped(UNITS, WHOLE_SIZE):
        attempt(read, text)


def test_each_field_is_read_whatever_is_refused_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that no field may hold."""
    seen: list[set[str]] = []

    def noted(read: Callable[..., Any]) -> Callable[..., Any]:
        def call(message: Message, *arguments: Any, **named: Any) -> Any:
            seen[-1] |= {field.name for field, value in message.ListFields() if value != "x"}
            return read(message, *arguments, **named)

        return call

    for reader in ("valid_generation", "engine_request"):
        monkeypatch.setattr(sys.modules[__name__], reader, noted(globals()[reader]))
    for read in (generation, submit):
        seen.append(set())
        read("a b!" * 2**12)
    assert seen[0] == {"request_id", "session_id", "cache_salt", "sampling", "prompt"}
    assert seen[1] == {"request_id", "token_ids", "block_names", "prompt_tokens"}
