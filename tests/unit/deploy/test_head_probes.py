"""Probes of a raylet and a dashboard: which replies count as answers, and when silence means a hang."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
from blockyard.deploy.ray.guardian import (
    MAX_PAUSE_SECONDS,
    RAYLET,
    STEADY_SECONDS,
    as_new_node,
    next_pause_seconds,
)
from blockyard.deploy.ray.head_probes import (
    HUNG_SECONDS,
    QUESTION_SECONDS,
    RAYLET_METHOD,
    STARTING_SECONDS,
    ProbeHistory,
    does_dashboard_answer,
    does_raylet_answer,
    ray_token,
)
from hypothesis import given
from hypothesis import strategies as st

from .rig import listening

PATIENCE_SECONDS = 60.0
"""Timeout for probes that get an answer."""
SILENCE_SECONDS = 0.5
"""Timeout for probes that get none."""
QUESTIONS = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=100)


@given(questions=QUESTIONS)
def test_a_part_hangs_once_it_has_missed_all_that_count_for_as_long_as_its_patience(
    questions: list[tuple[bool, bool]],
) -> None:
    history = ProbeHistory()
    for answered, was_late in questions:
        history = history.after(answered=answered, was_late=was_late)
    last_answer = max((number for number, (answered, _) in enumerate(questions) if answered), default=None)
    since = questions if last_answer is None else questions[last_answer + 1 :]
    missed_seconds = QUESTION_SECONDS * sum(not was_late for _, was_late in since)
    assert STARTING_SECONDS > HUNG_SECONDS >= max(30.0, 3 * QUESTION_SECONDS)
    assert history.hangs == (missed_seconds >= (STARTING_SECONDS if last_answer is None else HUNG_SECONDS))


@pytest.mark.parametrize("token", ["", "short", "t" * 108, "t" * 120, "t" * 5000])
def test_a_server_of_grpc_is_called_by_name_with_the_token(token: str) -> None:
    """Lengths of a header below 127, near it and far beyond it."""
    seen: list[object] = []

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        seen.append((request, dict(context.invocation_metadata()).get("authorization")))
        return b"configuration"

    with raylet(answer) as port:
        assert does_raylet_answer({port}, token, seconds=PATIENCE_SECONDS)
    assert seen == [(b"", f"Bearer {token}" if token else None)]


def test_an_error_is_an_answer() -> None:
    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
        raise AssertionError

    with raylet(refuse) as port:
        assert does_raylet_answer({port}, "", seconds=PATIENCE_SECONDS)
    with raylet(refuse, method="/another/Method") as port:
        assert does_raylet_answer({port}, "", seconds=PATIENCE_SECONDS)


def test_settings_without_an_answer_to_the_call_are_silence() -> None:
    """A raylet behaves like this when its event loop hangs."""
    over, called = threading.Event(), threading.Event()

    def hang(request: bytes, context: grpc.ServicerContext) -> bytes:
        called.set()
        over.wait()
        return b""

    with raylet(hang) as port:
        try:
            assert not does_raylet_answer({port}, "", seconds=SILENCE_SECONDS)
            assert called.wait(PATIENCE_SECONDS)
        finally:
            over.set()


def test_a_raylet_answers_once_all_its_ports_do() -> None:
    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        return b""

    with raylet(answer) as port, raylet(answer) as other, listening() as mute:
        assert does_raylet_answer({port, other}, "", seconds=PATIENCE_SECONDS)
        assert not does_raylet_answer({port, mute}, "", seconds=SILENCE_SECONDS)
    assert not does_raylet_answer(set(), "", seconds=SILENCE_SECONDS)
    assert not does_raylet_answer({port}, "", seconds=SILENCE_SECONDS), "nothing listens there any more"


@pytest.mark.parametrize("goodbye", [b"", b"\x15\3\3\0\2\2\n"])
def test_a_closed_connection_is_no_silence(goodbye: bytes) -> None:
    """A raylet that accepts only TLS behaves like this."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as threads:

        def close() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(goodbye)

        closing = threads.submit(close)
        assert does_raylet_answer({server.getsockname()[1]}, "", seconds=PATIENCE_SECONDS)
        closing.result()


def test_a_dashboard_is_asked_for_its_version_with_the_token() -> None:
    seen: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers["Authorization"]))
            self.send_error(401)

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = ("127.0.0.1", server.server_port)
        for token in ("secret", ""):
            assert does_dashboard_answer(address, token, seconds=PATIENCE_SECONDS)
        server.shutdown()
    assert seen == [("/api/version", "Bearer secret"), ("/api/version", None)]
    assert not does_dashboard_answer(address, "", seconds=SILENCE_SECONDS), "nothing listens there any more"


def test_a_dashboard_that_takes_a_connection_and_says_nothing_does_not_answer() -> None:
    with listening() as port:
        assert not does_dashboard_answer(("127.0.0.1", port), "", seconds=SILENCE_SECONDS)


def test_the_token_is_that_of_the_parts_environment(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("from the file\n")
    in_file = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    assert ray_token(in_file) == "from the file"
    assert ray_token({**in_file, "RAY_AUTH_TOKEN": "from the variable"}) == "from the variable"
    assert ray_token({**in_file, "RAY_AUTH_MODE": "disabled"}) == ""
    path.unlink()
    with pytest.raises(FileNotFoundError):
        ray_token(in_file)


def test_a_part_that_dies_again_and_again_is_started_less_and_less_often() -> None:
    pauses = [0.0]
    for _ in range(7):
        pauses.append(next_pause_seconds(pauses[-1], alive_seconds=1.0))
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS]
    assert next_pause_seconds(pauses[-1], alive_seconds=STEADY_SECONDS) == 0.0
    with pytest.raises(ValueError, match="no --node_id"):
        as_new_node([RAYLET, "--node=first"], "second")


@contextmanager
def raylet(
    answer: Callable[[bytes, grpc.ServicerContext], bytes], method: str = RAYLET_METHOD
) -> Iterator[int]:
    _, service, name = method.split("/")
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    handlers = {name: grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait()
