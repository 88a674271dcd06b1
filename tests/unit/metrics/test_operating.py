"""docs/operating.md matches the code: its table, a line for each metric and alert, commands that exist."""

import re

import pytest
from blockyard.deploy.cli import main
from blockyard.proto.metrics.readings import Kind
from blockyard.proto.metrics.table import METRICS, ROUTER_METRICS, WORKER_METRICS
from click import Command, Group

from .document import ADVICE, PATH, with_table

DOCUMENT = PATH.read_text(encoding="utf-8")


def anchors() -> set[str]:
    """Return the anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", DOCUMENT, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def options_below(command: Command) -> set[str]:
    below = command.commands.values() if isinstance(command, Group) else ()
    own = {option for parameter in command.params for option in parameter.opts}
    return own.union(*map(options_below, below))


def test_its_table_is_that_of_the_code() -> None:
    assert with_table(DOCUMENT) == DOCUMENT, "run python -m tests.unit.metrics.document"


def test_its_table_of_vllms_names_has_those_that_are_served_and_from_where() -> None:
    served = {
        (f"{name}_total" if metric.kind is Kind.COUNTER else name, kind)
        for kind, table in (("router", ROUTER_METRICS), ("worker", WORKER_METRICS))
        for metric in table
        for name in metric.vllm
    }
    assert set(re.findall(r"^\| `(vllm:\w+)` \| (\w+) \|", DOCUMENT, re.MULTILINE)) == served


def test_it_says_of_each_metric_what_is_normal_in_the_tables_order() -> None:
    assert [name for name, _ in ADVICE.findall(DOCUMENT)] == [metric.name for metric in METRICS]


def test_its_links_lead_somewhere() -> None:
    inside = set(re.findall(r"\]\(#([\w-]+)\)", DOCUMENT))
    assert inside <= anchors(), inside - anchors()
    for path in re.findall(r"\]\(([^#)][^)]*)\)", DOCUMENT):
        assert (PATH.parent / path).exists(), path


@pytest.mark.parametrize("line", sorted(set(re.findall(r"`blockyard ([a-z][^`]*)`", DOCUMENT))))
def test_a_command_that_it_names_exists_with_its_options(line: str) -> None:
    command: object = main
    for word in line.split():
        if isinstance(command, Group):
            assert word in command.commands, word
            command = command.commands[word]
    options = {option for parameter in command.params for option in parameter.opts}  # type: ignore[attr-defined]
    assert set(re.findall(r"--[a-z-]+", line)) <= options


def test_an_option_that_it_names_is_one_of_ours() -> None:
    processes = {"--metrics-port", "--router-id", "--config"}
    assert set(re.findall(r"(?<![\w<!-])--[a-z][a-z-]+", DOCUMENT)) <= options_below(main) | processes
