"""A whole cluster by `up`, with everything that SECURITY.md asks of an operator, and the commands beside it."""

import json
from pathlib import Path

from blockyard.proto.security.peer_sockets import SESSION_NAME

from tests.system.harness import UP, Command, remembered_state
from tests.unit.security.certificates import Authority
from tests.unit.security.conftest import Tokens


def test_a_secured_cluster_serves_who_may_and_nobody_else(tmp_path: Path, tokens: Tokens) -> None:
    public, internal = Authority(tmp_path, "public"), Authority(tmp_path, "internal")
    server, session = public.pair("server"), internal.pair("session", dns=SESSION_NAME)
    command = Command(home=tmp_path / "home", cluster="secured")
    started = command.run(
        *(*UP, "--auth-file", str(tokens.path), "--tls-cert", server.cert, "--tls-key", server.key),
        *(
            "--session-tls-cert",
            session.cert,
            "--session-tls-key",
            session.key,
            "--session-tls-ca",
            internal.ca,
        ),
    )
    assert started.returncode == 0, started.stderr
    try:
        state = remembered_state(command)
        for secret in (state.secret, state.redis_url, state.router_redis_url):
            assert secret
            assert secret not in started.stdout + started.stderr
        assert state.redis_url.startswith("redis://blockyard-worker:")
        assert state.router_redis_url.startswith("redis://blockyard-router:")

        def shown(name: str) -> tuple[str, ...]:
            file = tmp_path / f"{name}.token"
            file.touch(mode=0o600)
            file.write_text(tokens.of[name] + "\n")
            return ("--tls-ca", public.ca, "--token-file", str(file))

        for refused, told in (
            (("workers",), "closed, as by one that wants TLS"),
            (("workers", "--tls-ca", internal.ca), "of no CA that this client trusts"),
            (("workers", "--tls-ca", public.ca), "one bearer token is required"),
            (("workers", *shown("ann")), "the role user may not make this call"),
            (("drain", "worker-0", *shown("vic")), "the role viewer may not make this call"),
            (("generate", "x", *shown("vic")), "the role viewer may not make this call"),
        ):
            result = command.run(*refused)
            assert result.returncode == 1, refused
            assert told in result.stderr
            assert "Traceback" not in result.stderr
        workers = command.json("workers", *shown("vic"))
        assert [worker["state"] for worker in workers] == ["WORKER_STATE_READY"] * 2
        prompt = "def f(x): return x + 1\n" * 20
        answers = [
            json.loads(
                command.run("generate", prompt, "--max-tokens", "4", *shown(name), "--output", "json").stdout
            )
            for name in ("ann", "amy", "bob")
        ]
        cached = [answer["finish"]["cached_tokens"] for answer in answers]
        assert cached[0] == cached[2] == 0, "nobody else's prompt is found"
        assert cached[1] > 0, "one's own tenant's is"
        report = command.json("status", *shown("vic"))
        assert report["cluster"]["index_state"] == "INDEX_STATE_EXACT"
        assert command.run("status").returncode == 0, "what Ray knows is shown to whoever has the state file"
    finally:
        ended = command.run("down", "--drain", "0")
    assert ended.returncode == 0, ended.stderr


def test_files_that_routers_could_not_use_are_told_before_anything_starts(tmp_path: Path) -> None:
    command = Command(home=tmp_path / "home", cluster="unsecured")
    shown = tmp_path / "shown.json"
    shown.write_text("[]")
    shown.chmod(0o644)
    for options, code, told in (
        (("--auth-file", str(shown)), 1, "shown.json may be read by everybody"),
        (("--auth-file", str(tmp_path / "none")), 1, "cannot be read"),
        (("--tls-cert", str(shown)), 2, "--tls-cert and --tls-key go together"),
        (("--session-tls-ca", str(shown)), 2, "go together"),
    ):
        result = command.run(*UP, *options)
        assert result.returncode == code, result.stderr
        assert told in result.stderr
        assert not list((tmp_path / "home").glob("*.json"))
