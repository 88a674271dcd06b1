"""Chooses the files of the documentation site: the README and all that its links reach, at their own paths.

mkdocs takes one folder, and the documents link to files outside of docs/. So this hook replaces the list of files.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)\s#]+)|<img [^>]*src=\"([^\"]+)\"")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the theme's files and the documents."""
    own = [file for file in files if not (file.abs_src_path or "").startswith(str(ROOT / "docs"))]
    documents = [
        File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path))
        for path in sorted(reached_from(ROOT / "README.md"))
    ]
    return Files([*own, *documents])


def reached_from(document: Path) -> set[Path]:
    """Find the files that a document's links reach, over any number of documents."""
    reached, left = {document}, [document]
    while left:
        for path in linked_from(left.pop()):
            if path not in reached:
                reached.add(path)
                if path.suffix == ".md":
                    left.append(path)
    return reached


def linked_from(document: Path) -> Iterator[Path]:
    for match in LINK.finditer(document.read_text(encoding="utf-8")):
        path = (document.parent / (match[1] or match[2])).resolve()
        if path.is_file() and path.is_relative_to(ROOT):
            yield path
