"""Secrets are masked where configs are shown, and only the owner can read the files that hold them."""

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.commands.tokens import append_entry
from blockyard.deploy.machine import state
from blockyard.deploy.machine.redis_server import redis_user
from blockyard.deploy.machine.state import ClusterState
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.proto.index.acl import acl_rules, user_name
from blockyard.router.admission.token_entries import new_token
from blockyard.router.admission.token_file import TokenFile
from blockyard.router.client.connection import Connection
from blockyard.router.config import RouterConfig
from blockyard.worker.config import EngineConfig, WorkerConfig
from click.testing import CliRunner

HIDDEN = "hunter2"
URL = f"redis://:{HIDDEN}@127.0.0.1:1/0"
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "config",
    [
        RouterConfig(model="m", cluster_secret=HIDDEN, redis_url=URL),
        WorkerConfig(engine=EngineConfig(model="m"), cluster_secret=HIDDEN, redis_url=URL),
        ClusterState(cluster="c", model="m", secret=HIDDEN, redis_url=URL, router_redis_url=URL),
        Connection.of(("localhost:1",), token=HIDDEN, tenant=None, tls=None, allow_plaintext_token=False),
    ],
    ids=lambda config: type(config).__name__,
)
def test_no_config_shows_a_secret(config: object) -> None:
    assert HIDDEN not in repr(config)
    assert HIDDEN not in str(config)
    assert HIDDEN not in f"{config}"


def test_nor_does_a_user_of_redis() -> None:
    user = redis_user("router", "default")
    assert user.password not in repr(user)
    assert user.password not in user.setting(), "the server is given its hash"


def test_the_state_file_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(state.HOME_VARIABLE, str(tmp_path / "home"))
    state.save(ClusterState(cluster="c", model="m", secret=HIDDEN, router_redis_url=URL))
    assert stat.S_IMODE(state.state_path("c").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700
    assert state.load("c").router_redis_url == URL


def told(path: Path, *arguments: str, name: str | None = "ann", code: int = 0) -> str:
    """Run `blockyard token` with these arguments. The file stays private."""
    named = () if name is None else ("--name", name)
    result = CliRunner().invoke(main, ["token", *arguments, *named, "--auth-file", str(path)])
    assert result.exit_code == code, result.output
    assert not path.exists() or stat.S_IMODE(path.stat().st_mode) == 0o600
    return (result.output if code else result.stdout).strip()


def test_a_token_is_printed_once_and_its_entry_added_to_a_file_that_stays_private(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    tokens = [told(path, "new", "--role", "user", name=name) for name in ("ann", "bob")]
    table = TokenFile(path).tokens
    found = [table.find(token) for token in tokens]
    assert [principal and principal.name for principal in found] == ["ann", "bob"]
    assert not any(token in path.read_text() for token in tokens)
    assert "the name 'bob' is used" in told(path, "new", "--role", "user", name="bob", code=1)
    assert TokenFile(path).tokens.find(tokens[1]) is not None


def test_tokens_are_listed_rotated_and_revoked_without_a_secret_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    limits = ("--requests-per-minute", "60", "--tokens-per-minute", "9000")
    limits += ("--expires", "2999-01-01T00:00:00Z")
    first = told(path, "new", "--role", "user", "--tenant", "acme", *limits)
    other = told(path, "new", "--role", "viewer", name="bob")
    document = {"tokens": json.loads(path.read_text()), "tenants": {"acme": {"requests_per_minute": 5}}}
    path.write_text(json.dumps(document))
    second = told(path, "rotate", "--overlap-seconds", "3600")
    table = TokenFile(path).tokens
    assert table.find(first) == table.find(second) is not None
    listed = told(path, "list", name=None)
    assert listed.count("name=ann") == 2
    assert "requests_per_minute=60  tokens_per_minute=9000  expires=2999-01-01T00:00:00Z" in listed
    assert "limits of tenant acme:  requests_per_minute=5" in listed
    assert not any(token in listed + path.read_text() for token in (first, second, other))
    told(path, "revoke")
    table = TokenFile(path).tokens
    assert [table.find(token) is not None for token in (first, second, other)] == [False, False, True]
    assert table.limit_of_tenant("acme").requests_per_minute == 5
    told(path, "revoke", name="bob")
    assert len(TokenFile(path).tokens) == 0


def test_a_command_for_a_token_that_nobody_could_use_fails_and_writes_nothing(tmp_path: Path) -> None:
    path, past = tmp_path / "tokens.json", "2001-01-01T00:00:00Z"
    assert past in told(path, "new", "--role", "user", "--expires", past, code=1)
    assert not path.exists()
    append_entry(path, new_token("ann", "user", expires=datetime(2001, 1, 1, tzinfo=UTC))[1])
    append_entry(path, new_token("bob", "user")[1])
    before = path.read_text()
    assert past in told(path, "rotate", code=1)
    assert "1e+15 s" in told(path, "rotate", "--overlap-seconds", "1e15", name="bob", code=1)
    assert path.read_text() == before


def test_a_file_that_would_be_bad_is_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.touch(mode=0o600)
    path.write_text("{}")
    with pytest.raises(ValueError, match="must be a JSON list"):
        append_entry(path, new_token("ann", "user")[1])
    assert path.read_text() == "{}"
    assert [file.name for file in tmp_path.iterdir()] == ["tokens.json"]


def test_many_writers_at_once_lose_no_entry_and_its_readers_stay(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    append_entry(path, new_token("first", "user")[1])
    path.chmod(0o640)
    names = [f"user-{number}" for number in range(40)]
    with ThreadPoolExecutor(max_workers=8) as threads:
        list(threads.map(lambda name: append_entry(path, new_token(name, "user")[1]), names))
    assert {entry["name"] for entry in json.loads(path.read_text())} == {"first", *names}
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [file.name for file in tmp_path.iterdir()] == ["tokens.json"]


def test_the_docs_have_the_acl_that_the_tests_prove() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for role in ("router", "worker"):
        assert f"ACL SETUSER {user_name(role)} on #SHA256 {acl_rules(role, 'default')}" in text


def test_no_process_binds_every_interface_unless_it_is_told_to() -> None:
    """The two mentions are a worker's refusal without an address for routers, and the help of --host."""
    sources = [
        path for folder in ("router", "worker", "deploy", "proto") for path in (ROOT / folder).rglob("*.py")
    ]
    mentions = [path.name for path in sources if "0.0.0.0" in path.read_text(encoding="utf-8")]
    assert sorted(mentions) == ["config.py", "wanted_cluster.py"]
    hosts = [RouterConfig(model="m").host, WorkerConfig(engine=EngineConfig(model="m")).host]
    assert [*hosts, UpOptions(engine=EngineConfig(model="m")).host] == ["127.0.0.1"] * 3
