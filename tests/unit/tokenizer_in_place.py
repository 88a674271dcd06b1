"""A tokenizer "process" that answers in the process of the tests. tests/nightly/router tests the real one."""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from blockyard.proto.text import load_tokenizer
from blockyard.router.tokenizing import service
from blockyard.router.tokenizing.encoder import PromptEncoder
from blockyard.router.tokenizing.process import answer_to
from blockyard.router.tokenizing.wire import Prepared, Question

Files = tuple[tuple[str, int, int], ...]


class TokenizerInPlace:
    """TokenizerProcess without a process."""

    pid = 2**31 - 1
    """No process has this id."""

    def __init__(self, path: str, chat_template: str | None = None) -> None:
        self._loading = path, chat_template
        self._encoder: PromptEncoder | None = None

    async def connect(self) -> asyncio.Future[Any]:
        loaded: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            self._encoder = self._encoder or encoder_of(*self._loading, files_of(self._loading[0]))
        except Exception as error:
            loaded.set_exception(error if isinstance(error, OSError | ValueError) else ValueError(str(error)))
        else:
            loaded.set_result(None)
        return loaded

    def prepare(self, question: Question) -> asyncio.Future[Prepared]:
        assert self._encoder is not None
        answered: asyncio.Future[Prepared] = asyncio.get_running_loop().create_future()
        answer = answer_to(self._encoder, question)
        if isinstance(answer, Exception):
            answered.set_exception(answer)
            answered.exception()  # Mark it as retrieved: the caller may have gone.
        else:
            assert answer is not None
            answered.set_result(answer)
        return answered

    def end(self) -> None:
        self._encoder = None

    def join(self) -> None:
        pass


def files_of(path: str) -> Files:
    """Return what tells whether a folder has changed."""
    found = [(file.name, file.stat()) for file in sorted(Path(path).glob("*"))]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in found)


@cache
def encoder_of(path: str, chat_template: str | None, files: Files) -> PromptEncoder:
    return PromptEncoder(load_tokenizer(path, chat_template))


@cache
def tokenizer_of(path: str, chat_template: str | None, files: Files) -> Any:
    return load_tokenizer(path, chat_template)


def tokenise_in_place(patch: pytest.MonkeyPatch) -> None:
    """Let each folder be loaded once."""
    patch.setattr(service, "TokenizerProcess", TokenizerInPlace)
    patch.setattr(
        service, "load_tokenizer", lambda path, template: tokenizer_of(path, template, files_of(path))
    )
