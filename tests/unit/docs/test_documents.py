"""Content of the documents: commands parse, Python compiles, links resolve, metrics and files exist."""

import re
import shlex
from itertools import takewhile
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
from blockyard.deploy.cli import main

from .rig import DOCUMENTS, ROOT, Block, blocks

LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(
    r"`((?:bench|deploy|examples|kernels|proto|router|simulation|supply_chain|tests|tools|worker)/[\w./*-]+)[`:]"
)
SHELL = {">", ">>", "|", "&&", "||", ";", "&"}
"""Shell operators that end a command's own words."""


def typed() -> list[object]:
    """Return the arguments of each line of a document that calls `blockyard`, as parameters of a test."""
    found = []
    for block in blocks("bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words and words[0] in ("blockyard", ".venv/bin/blockyard"):
                arguments = [*takewhile(lambda word: word not in SHELL, words[1:])]
                found.append(pytest.param(arguments, id=f"{block} {' '.join(arguments)}"[:80]))
    return found


@pytest.mark.parametrize("arguments", typed())
def test_a_command_of_a_document_is_one_that_the_command_line_takes(arguments: list[str]) -> None:
    """Its names and options, and the values of those that need no file: nothing is done."""
    command: click.Command = main
    context = click.Context(main, info_name="blockyard")
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        name, found, arguments = command.resolve_command(context, arguments)
        assert found is not None
        command, context = found, click.Context(found, info_name=name, parent=context)
    parser = command.make_parser(context)
    values, left, _ = parser.parse_args(arguments)
    assert left == [], f"more than {command.name} takes"
    for parameter in command.params:
        if isinstance(parameter.type, click.Path) or "FILE" in str(values.get(parameter.name or "")):
            continue
        if parameter.name in values and "..." not in str(values[parameter.name]):
            parameter.type_cast_value(context, values[parameter.name])


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_a_program_of_a_document_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


def test_there_are_commands_and_programs_to_test_and_curl_says_that_its_body_is_json() -> None:
    """The gateway refuses any other body than JSON, and curl calls its own a form unless told."""
    assert len(typed()) > 10
    assert sum(block.is_run for block in blocks("python")) > 5
    lines = [line for block in blocks("bash") for line in block.text.replace("\\\n", " ").splitlines()]
    posts = [line for line in lines if line.startswith("curl") and " -d " in line]
    assert [line for line in posts if "Content-Type: application/json" not in line] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_of_a_document_lead_to_files_and_headings_and_each_file_that_it_names_exists(
    document: Path,
) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    broken = [name for name in FILE.findall(text) if not any(ROOT.glob(name))]
    for target in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        path, _, heading = target.partition("#")
        found = (ROOT / document).parent / path if path else ROOT / document
        if not re.match(r"[a-z]+:", target) and (
            not found.exists() or (heading and heading not in _headings(found))
        ):
            broken.append(target)
    assert broken == []


def _headings(path: Path) -> set[str]:
    """Return the anchors of the headings, in GitHub's form."""
    lines = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


def test_every_metric_that_tuning_names_is_one_that_operating_explains() -> None:
    tables = re.findall(r"^\| `-.*\| ([^|]+) \|$", (ROOT / "docs/tuning.md").read_text(), flags=re.MULTILINE)
    named = {name for cell in tables for name in re.findall(r"`([a-z_]+)`", cell)}
    explained = set(
        re.findall(r"^- `([a-z_]+)` \(", (ROOT / "docs/operating.md").read_text(), flags=re.MULTILINE)
    )
    assert len(named) > 10
    assert named <= explained


@pytest.mark.parametrize("name", ["architecture", "worker", "control-plane"])
def test_a_picture_of_the_architecture_has_a_title_a_description_and_both_themes(name: str) -> None:
    text = (ROOT / f"docs/{name}.svg").read_text(encoding="utf-8")
    assert f"]({name}.svg)" in (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    picture = ElementTree.fromstring(text)
    assert picture.findtext("{http://www.w3.org/2000/svg}title")
    assert picture.findtext("{http://www.w3.org/2000/svg}desc")
    assert "prefers-color-scheme: dark" in text
    width, height = map(float, picture.attrib["viewBox"].split()[2:])
    places = [
        (float(word.attrib["x"]), float(word.attrib["y"]))
        for word in picture.iter("{http://www.w3.org/2000/svg}text")
    ]
    assert all(0 < x < width and 0 < y < height for x, y in places)


def test_the_documents_stay_short_enough_to_be_read() -> None:
    words = {path.name: len(path.read_text(encoding="utf-8").split()) for path in ROOT.glob("docs/*.md")}
    assert sum(words.values()) <= 45_000
    assert words["architecture.md"] <= 5_000


def test_of_each_kind_of_report_the_newest_alone_is_kept() -> None:
    dated = sorted(path.stem for path in ROOT.glob("bench/reports/2???-??-??-*.md"))
    kinds = {name[len("2026-11-23-") :]: name for name in dated}
    assert sorted(kinds.values()) == dated
