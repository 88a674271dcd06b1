"""A fixture that compares rendered text with a stored file, and `--update-snapshots`, which writes the files anew."""

from collections.abc import Callable

import pytest

OPTION = "--update-snapshots"


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return a function that compares a text with `snapshots/TEST.txt` beside the test's module."""
    path = request.path.parent / "snapshots" / f"{request.node.name}.txt"

    def compare(text: str) -> None:
        shown = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
        if request.config.getoption(OPTION):
            path.parent.mkdir(exist_ok=True)
            path.write_text(shown, encoding="utf-8")
        assert shown == path.read_text(encoding="utf-8"), f"if this is meant, run pytest with {OPTION}"

    return compare
