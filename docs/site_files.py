"""Chooses the files of the documentation site: the README and all that its links reach, at their own paths.

mkdocs takes one folder, and the documents link to files outside of docs/. So this hook replaces the list of files. In
the search it ranks reports and generated references below the guides. It also warns of blocks of code that a page does
not show as such, of which mkdocs says nothing.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

logger = logging.getLogger("mkdocs.hooks.site_files")
"""mkdocs fails on a warning of its own loggers."""
ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^ *(?:```|~~~)", re.MULTILINE)
BOOSTS = {"bench/reports/": 1e-5, "CHANGELOG.md": 1e-5, "docs/cli.md": 0.5, "docs/api.md": 0.5}
"""Factors of a page's rank in the search, by the begin of its path. Other pages have 1. A word in the title counts a
thousand times as much as one in the text, so the factor of reports is small."""
LINK = re.compile(r"\]\(([^)\s#]+)|<img [^>]*src=\"([^\"]+)\"")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the theme's files and the documents."""
    own = [file for file in files if not (file.abs_src_path or "").startswith(str(ROOT / "docs"))]
    documents = [
        File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path))
        for path in sorted(reached_from(ROOT / "README.md"))
    ]
    return Files([*own, *documents])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Give a page its rank in the search."""
    for begin, boost in BOOSTS.items():
        if page.file.src_uri.startswith(begin):
            page.meta["search"] = {"boost": boost}


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Warn where fences of the document are not blocks of code of the page. What follows them is then inside out."""
    num_fences, num_blocks = len(FENCE.findall(page.markdown or "")), html.count("<pre")
    if num_fences != 2 * num_blocks:
        logger.warning(
            "Doc file '%s' has %d fences, but %d blocks of code: a fence takes one word at most, and needs an end.",
            page.file.src_uri,
            num_fences,
            num_blocks,
        )


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
