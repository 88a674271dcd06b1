"""Tokenizer process, and the connection to it. The process renders and encodes prompts, and names their blocks.

Owns the process from start to end: it answers questions in order and ends with its parent. Does not own deadlines or
what follows a death (service.py), or what is computed (encoder.py).

The connection is a socket on the event loop (wire.py has its format). Python's own pool of processes puts two threads
between caller and process. They cost a request more than tokenizing its prompt does.
"""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from blockyard.proto.naming.block_hash import chain, pack_tokens
from blockyard.proto.text import load_tokenizer
from blockyard.router.tokenizing.encoder import PromptEncoder
from blockyard.router.tokenizing.prompts import PromptError
from blockyard.router.tokenizing.splices import place_of, unpack_answers
from blockyard.router.tokenizing.wire import (
    Answer,
    Frames,
    Prepared,
    Question,
    TokenizingError,
    answer_frame,
    parse_answer,
    parse_question,
    parse_start,
    question_frame,
    read_frame,
    start_frame,
)

MAX_EXTRA_BYTES = 2 * 2**30
"""Address space that the process may use beyond what it has once the tokenizer is loaded."""

_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}

__all__ = ["Prepared", "ProcessDied", "TokenizerProcess", "TokenizingError", "answer_to"]


class ProcessDied(Exception):
    """The process ended before it answered."""


class TokenizerProcess:
    """The router's handle of one tokenizer process, which begins to load at once. Call `connect` before `prepare`."""

    def __init__(self, path: str, chat_template: str | None = None) -> None:
        self._socket, theirs = socket.socketpair()
        # Python's multiprocessing would run this process's own program there too, which in an actor loads Ray.
        found_at = os.pathsep.join(map(os.path.abspath, sys.path))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), path],
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": found_at},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        with suppress(BrokenPipeError):  # it has died, and `connect` says so
            self._socket.sendall(start_frame(chat_template))
        self._wire: _Wire | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def connect(self) -> asyncio.Future[Any]:
        """Connect, and return a future that ends when the tokenizer is loaded. It raises OSError, ValueError or
        ProcessDied."""
        if self._wire is None:
            wire = self._wire = _Wire()
            await asyncio.get_running_loop().create_connection(lambda: wire, sock=self._socket)
        return self._wire.ready

    def prepare(self, question: Question) -> asyncio.Future[Prepared]:
        """Send a question, and return the future of its prepared prompt. It raises PromptError, TokenizingError or
        ProcessDied."""
        assert self._wire is not None
        return self._wire.ask(question)

    def end(self) -> None:
        """Kill the process. Unanswered questions end with ProcessDied."""
        self._process.kill()
        threading.Thread(target=self.join, daemon=True).start()  # the caller need not wait for the end
        if self._wire is not None:
            self._wire.close()
        else:
            self._socket.close()

    def join(self) -> None:
        """Wait until the process has ended."""
        self._process.wait()


class _Wire(asyncio.Protocol):
    """The router's end of the connection. First it receives that the tokenizer is loaded, then answers in the order of
    the questions."""

    def __init__(self) -> None:
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._awaited: deque[asyncio.Future[Any]] = deque((self.ready,))
        self._frames = Frames()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Transports of uvloop, which Ray prefers where it is installed, are of classes of their own.
        self._transport = cast(asyncio.WriteTransport, transport)

    def ask(self, question: Question) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._transport is None or self._transport.is_closing():
            answer.set_exception(ProcessDied())
        else:
            self._awaited.append(answer)
            self._transport.write(question_frame(question))
        return answer

    def data_received(self, data: bytes) -> None:
        for content in self._frames.push(data):
            _resolve(self._awaited.popleft(), parse_answer(content))

    def connection_lost(self, exc: Exception | None) -> None:
        for future in self._awaited:
            _resolve(future, ProcessDied())

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _resolve(future: asyncio.Future[Any], answer: object) -> None:
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
        # Mark the exception as retrieved: the caller may have gone.
        future.exception()
    else:
        future.set_result(answer)


def _serve(connection: socket.socket, path: str) -> None:
    """Run the process: load the tokenizer, report it, and answer questions until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    # transformers imports torch if it can. That takes 2 s and 200 MB, and no tokenizer needs it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    with connection, connection.makefile("rb") as questions:
        started = read_frame(questions)
        assert started is not None
        chat_template = parse_start(started)
        try:
            encoder = PromptEncoder(load_tokenizer(path, chat_template))
        except Exception as error:
            connection.sendall(answer_frame(error))
            return
        _limit_memory()
        connection.sendall(answer_frame(None))
        while (content := read_frame(questions)) is not None:
            connection.sendall(answer_frame(answer_to(encoder, parse_question(content))))


def _limit_memory() -> None:
    """Limit the process's memory: a chat template may write gigabytes before the deadline."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    most = pages * resource.getpagesize() + MAX_EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _end_with_parent(connection: socket.socket) -> None:
    """End the process when the parent closes the socket. A long computation would not notice it."""
    hang_up = select.poll()
    hang_up.register(connection, 0)
    hang_up.poll()
    os._exit(1)


def answer_to(encoder: PromptEncoder, question: Question) -> Answer:
    """Return the prepared prompt, or the error that the router raises."""
    try:
        answers = unpack_answers(question.answers or b"")
        encoded = encoder.encode_with(question.prompt, answers, max_tokens=question.max_tokens)
    except PromptError as error:
        return error
    except Exception as error:
        # Only the type: the message may quote the prompt, and it goes to a log.
        return TokenizingError(f"tokenising failed with {type(error).__name__}")
    token_ids = encoded.token_ids
    if question.keep_last is not None:
        token_ids = token_ids[-question.keep_last :]
    # The answer to a prompt that was cut belongs to no later prompt.
    keeps = question.answers is not None and encoded.text and len(token_ids) == len(encoded.token_ids)
    packed = pack_tokens(token_ids)
    root = question.root
    names = [] if root is None else [root, *chain(root, packed, question.block_size)]
    return Prepared(
        token_ids=packed,
        num_tokens=len(token_ids),
        block_names=b"".join(names),
        place=place_of(encoded.text) if keeps else b"",
        num_spliced=encoded.num_spliced,
        end=encoded.end,
        is_guarded=encoded.is_guarded,
    )


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
