"""Content of the documents works: commands parse, Python compiles and runs where marked, links resolve.

Python blocks of RUN_DOCUMENTS run against the cluster of these tests, each with the imports of the blocks before it.
`<!-- not run: why -->` in the line above excludes a block. In other documents only blocks below `<!-- run -->` run.
"""

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import click
import pytest
from blockyard.deploy.cli import main

from .rig import DOCUMENTS, ROOT

BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>run|not run: [^\n]+) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
IMPORT = re.compile(r"^(?:from|import) .*\n", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(
    r"`((?:bench|deploy|examples|kernels|proto|router|simulation|supply_chain|tests|tools|worker)/[\w./*-]+)[`:]"
)
RUN_DOCUMENTS = {Path("README.md"), Path("docs/client.md"), Path("docs/tuning.md")}
SHELL = {">", ">>", "|", "&&", "||", ";", "&"}
"""Shell operators that end a command's own words."""
DEFAULT_ROUTER = "127.0.0.1:50051"
RUN_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    document: Path
    line: int
    text: str
    mark: str
    imports: str
    """Imports of the Python blocks before it."""

    @property
    def is_run(self) -> bool:
        return self.mark == "run" or (self.document in RUN_DOCUMENTS and not self.mark)

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(kind: str) -> list[Block]:
    found = []
    for document in DOCUMENTS:
        text, imports = (ROOT / document).read_text(encoding="utf-8"), ""
        for match in BLOCK.finditer(text):
            if match["kind"] != kind:
                continue
            line = text.count("\n", 0, match.start("text")) + 1
            mark = match["mark"] or ""
            found.append(Block(document=document, line=line, text=match["text"], mark=mark, imports=imports))
            if kind == "python":
                imports += "".join(IMPORT.findall(match["text"]))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """A line of a document that calls `blockyard`."""

    block: Block
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.block} {' '.join(self.arguments)}"[:80]


def typed() -> list[Typed]:
    found = []
    for block in blocks("bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words and words[0] in ("blockyard", ".venv/bin/blockyard"):
                arguments = takewhile(lambda word: word not in SHELL, words[1:])
                found.append(Typed(block=block, arguments=tuple(arguments)))
    return found


@pytest.mark.parametrize("line", typed(), ids=str)
def test_a_command_of_a_document_is_one_that_the_command_line_takes(line: Typed) -> None:
    """Its names and options, and the values of those that need no file: nothing is done."""
    command: click.Command = main
    arguments, context = list(line.arguments), click.Context(main, info_name="blockyard")
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


def test_there_are_commands_and_programs_to_test() -> None:
    assert len(typed()) > 10
    assert sum(block.is_run for block in blocks("python")) > 5


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_a_program_of_a_document_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("block", [block for block in blocks("python") if block.is_run], ids=str)
def test_a_program_of_a_document_runs(block: Block, router: str) -> None:
    program = (block.imports + block.text).replace(DEFAULT_ROUTER, router)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=RUN_SECONDS, cwd=ROOT
    )
    assert result.returncode == 0, f"{block}\n{result.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_relative_links_of_a_document_lead_to_files_and_headings(document: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    broken = []
    for target in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        found = (ROOT / document).parent / path if path else ROOT / document
        if not found.exists() or (heading and heading not in _headings(found)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_each_file_that_a_document_names_exists(document: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    missing = [name for name in FILE.findall(text) if not any(ROOT.glob(name))]
    assert missing == []


def _headings(path: Path) -> set[str]:
    """Return the anchors of the headings, in GitHub's form."""
    lines = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


def test_curl_says_that_its_body_is_json() -> None:
    """The gateway refuses any other body than JSON, and curl calls its own a form unless told."""
    for block in blocks("bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.startswith("curl") and " -d " in line:
                assert "Content-Type: application/json" in line, f"{block}: {line}"
