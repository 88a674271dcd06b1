"""The paths of the documents, and their blocks of code."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for folder in (".", "docs", "examples", "proto")
    for path in (ROOT / folder).glob("*.md")
)
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>run|not run: [^\n]+) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
IMPORT = re.compile(r"^(?:from|import) .*\n", re.MULTILINE)
RUN_DOCUMENTS = {Path("README.md"), Path("docs/client.md"), Path("docs/tuning.md")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of code of a document. One of Python may run, with the imports of the blocks before it.

    Those of RUN_DOCUMENTS do. `<!-- not run: why -->` in the line above excludes one. In other documents only blocks
    below `<!-- run -->` run.
    """

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
