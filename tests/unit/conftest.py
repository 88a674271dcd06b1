"""A unit test starts no process: whatever needs one is in tests/system or tests/nightly.

The compiler of the CPU kernels is allowed, and matplotlib's list of fonts. Each runs once on a machine. Routers
tokenise in place: no tokenizer process is started.
"""

import sys
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ALLOWED = frozenset({"c++", "g++", "gcc", "cc", "ld", "ninja", "uname", "fc-list"})
_started: list[str] = []
_is_watching = False


def _note_process(event: str, arguments: tuple[object, ...]) -> None:
    if _is_watching and event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"):
        program = str(arguments[0]) if arguments else event
        if Path(program).name not in ALLOWED:
            _started.append(program)


def pytest_configure() -> None:
    sys.addaudithook(_note_process)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    global _is_watching
    _is_watching = True
    _started.clear()
    try:
        return (yield)
    finally:
        _is_watching = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    yield
    if _started:
        pytest.fail(f"a unit test started {', '.join(sorted(set(_started)))}: move it to tests/system")


@pytest.fixture(scope="session", autouse=True)
def tokenizers_in_place() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # A bare machine with a GPU runs the kernels' tests without these.
        if find_spec("tokenizers") and find_spec("grpc"):
            from tests.unit.tokenizer_in_place import tokenise_in_place

            tokenise_in_place(patch)
        yield
