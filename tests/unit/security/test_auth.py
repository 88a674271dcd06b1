"""Rules of tokens and roles, without a server; and the token file as an operator edits it."""

import asyncio
import json
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from blockyard.deploy.commands.tokens import append_entry
from blockyard.deploy.settings.page_token import draw_page_token, page_token_sha256
from blockyard.router.admission.auth import (
    METHOD_ROLES,
    OPEN,
    KnownToken,
    Principal,
    Role,
    TokenTable,
    authenticate,
    check_role,
)
from blockyard.router.admission.rate_limits import RateLimit
from blockyard.router.admission.token_entries import new_token, parse_tokens, revoked, rotated
from blockyard.router.admission.token_file import GRACE_SECONDS, TokenFile
from blockyard.router.calls.gate import CallGate
from blockyard.router.errors import AuthUnavailable, Forbidden, Unauthenticated

from tests.unit.router.rig import until

GENERATE = "/blockyard.v1.InferenceService/Generate"
HEALTH = "/grpc.health.v1.Health/Check"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def entry(name: str = "ann", **fields: object) -> dict[str, object]:
    return {**new_token("ann", "user")[1], "name": name, **fields}


def test_a_token_is_known_by_its_hash_and_found_with_its_principal() -> None:
    token, made = new_token("ann", "user", "acme")
    assert token not in json.dumps(made)
    table = parse_tokens(json.dumps([made, entry("bob")]))
    assert table.find(token) == Principal(name="ann", role=Role.USER, tenant="acme")
    token, made = new_token("ann", "user")
    principal = parse_tokens(json.dumps([made])).find(token)
    assert principal is not None
    assert principal.tenant == "ann", "who has no tenant is one of his own"


def test_the_live_pages_own_token_is_a_viewers_beside_the_files_and_stays_when_that_changes(
    tmp_path: Path,
) -> None:
    page_token = draw_page_token(tmp_path)
    assert page_token.stat().st_mode & 0o777 == 0o600
    digest = page_token_sha256(str(tmp_path))
    assert page_token_sha256(None) is None
    path = tmp_path / "tokens.json"
    for name in ("ann", "bob"):
        path.unlink(missing_ok=True)
        append_entry(path, new_token(name, "user")[1])
        if name == "ann":
            token_file = TokenFile(path, page_token_sha256=digest)
        token_file.refresh()
        principal = token_file.tokens.find(page_token.read_text())
        assert principal == Principal(name="live-page", role=Role.VIEWER, tenant="live-page")
        assert len(token_file.tokens) == 2


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ("{", "it is not JSON"),
        ("\n", "it is empty"),
        ("[" * 100_000, "it is not JSON"),
        ({}, "must be a JSON list"),
        ({"tokens": [], "hunter2": {}}, "must be a JSON list"),
        ({"tokens": {}}, "must be a JSON list"),
        (
            [entry(requests_per_minute=0)],
            r"entry 1 \(ann\): requests_per_minute must be a whole number from 1",
        ),
        ([entry(tokens_per_minute="hunter2")], r"entry 1 \(ann\): tokens_per_minute must be a whole number"),
        ([entry(expires="hunter2")], r"entry 1 \(ann\): expires must be a time in UTC, such as 20"),
        ([entry(expires=1893456000)], r"entry 1 \(ann\): expires must be a time in UTC"),
        ([entry(expires="2030-01-01T00:00:00+02:00")], r"entry 1 \(ann\): expires must be a time in UTC"),
        (
            [entry(), entry(expires="2030-01-01T00:00:00Z", role="admin")],
            "entry 2: the name 'ann' has another role",
        ),
        ({"tokens": [], "tenants": {"a b": {}}}, "tenants: a name must be"),
        ({"tokens": [], "tenants": {"acme": {"hunter2": 1}}}, "tenants: acme must have nothing besides"),
        (
            {"tokens": [], "tenants": {"acme": {"tokens_per_minute": 0}}},
            "tenants: acme: tokens_per_minute must be",
        ),
        (["hunter2"], "entry 1 is not a JSON object"),
        ([entry(), entry("b d")], "entry 2: name must be"),
        ([entry(token="hunter2")], r"entry 1 \(ann\) has fields besides"),
        ([entry(token_sha256="hunter2")], r"entry 1 \(ann\): token_sha256 must be 64 digits"),
        ([entry(role="root")], r"entry 1 \(ann\): role must be one of user, viewer, admin"),
        ([entry(role=["user"])], r"entry 1 \(ann\): role must be one of"),
        ([entry(tenant="")], r"entry 1 \(ann\): tenant must be"),
        ([entry(tenant=7)], r"entry 1 \(ann\): tenant must be"),
        ([entry(), entry()], "entry 2: the name 'ann' is used"),
        ([(same := entry()), {**same, "name": "bob"}], "'bob' has the same token as 'ann'"),
    ],
)
def test_a_bad_file_is_refused_by_a_sentence_that_repeats_no_secret(document: object, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        parse_tokens(document if isinstance(document, str) else json.dumps(document))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "shown",
    [
        (),
        (("authorization", ""),),
        (("authorization", "Bearer "),),
        (("authorization", "Basic {token}"),),
        (("authorization", "Bearer {token}x"),),
        (("authorization", "Bearer {token}"), ("authorization", "Bearer {token}")),
        (("authorization", b"Bearer {token}"),),
    ],
)
def test_only_one_whole_bearer_token_counts(shown: tuple[tuple[str, str | bytes], ...]) -> None:
    token, made = new_token("ann", "user")
    tokens = parse_tokens(json.dumps([made]))
    good = (("authorization", f"bearer {token}"),)
    assert authenticate(GENERATE, good, tokens) is not None
    filled = [(key, value.format(token=token) if isinstance(value, str) else value) for key, value in shown]
    with pytest.raises(Unauthenticated) as caught:
        authenticate(GENERATE, filled, tokens)
    assert token not in caught.value.message


def test_health_needs_no_token_and_a_method_that_nobody_has_listed_is_nobodys() -> None:
    tokens = parse_tokens(json.dumps([new_token("ada", "admin")[1]]))
    assert authenticate(HEALTH, (), tokens) is None
    with pytest.raises(Unauthenticated):
        authenticate("/blockyard.v1.InferenceService/New", (), tokens)
    with pytest.raises(Forbidden):
        check_role("/blockyard.v1.InferenceService/New", Principal(name="ada", role=Role.ADMIN, tenant="ops"))


@pytest.mark.parametrize(
    ("role", "services"),
    [
        (Role.USER, {"InferenceService"}),
        (Role.VIEWER, {"ClusterService", "ServerReflection"}),
        (Role.ADMIN, {"InferenceService", "ClusterService", "ServerReflection", "AdminService"}),
    ],
)
def test_each_role_has_whole_services(role: Role, services: set[str]) -> None:
    def allows(method: str) -> bool:
        try:
            check_role(method, Principal(name="x", role=role, tenant="x"))
        except Forbidden:
            return False
        return True

    closed = [method for method, roles in METHOD_ROLES.items() if roles is not OPEN]
    for method in closed:
        service = method.split("/")[1].rpartition(".")[2]
        assert allows(method) is (service in services), method


def write(path: Path, *entries: dict[str, object]) -> None:
    path.touch(mode=0o600)
    path.write_text(json.dumps(entries))
    # Two changes within one tick of the file system's clock would look like one.
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000 * len(entries)))


def test_a_file_for_everybody_that_is_not_there_or_no_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    write(path, entry())
    for mode in (0o600, 0o640):
        path.chmod(mode)
        TokenFile(path)
    for mode in (0o644, 0o602, 0o620, 0o777):
        path.chmod(mode)
        with pytest.raises(
            ValueError, match=rf"{path} may be read by everybody .*mode {mode:04o}.*chmod 600"
        ):
            TokenFile(path)
    for missing, told in (
        ("nowhere", "nowhere cannot be read: No such file"),
        ("", "cannot be read: Is a directory"),
    ):
        with pytest.raises(ValueError, match=told):
            TokenFile(tmp_path / missing)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_token_is_refused_from_its_end_on_and_its_holder_alone_is_told_why() -> None:
    clock = Clock()
    token, made = new_token("ann", "user")
    digest = bytes.fromhex(made["token_sha256"])
    principal = Principal(name="ann", role=Role.USER, tenant="ann")
    tokens = TokenTable({digest: KnownToken(principal=principal, expires=1060.0)}, clock=clock)
    shown = (("authorization", f"Bearer {token}"),)
    assert authenticate(GENERATE, shown, tokens) == principal
    clock.now = 1060.0
    with pytest.raises(Unauthenticated, match="this token has expired"):
        authenticate(GENERATE, shown, tokens)
    with pytest.raises(Unauthenticated, match="this token is not known here"):
        authenticate(GENERATE, (("authorization", f"Bearer {token}x"),), tokens)


def test_an_entrys_end_and_limits_and_a_tenants_limits_are_read() -> None:
    over, ended = new_token("ann", "user", "acme", expires=datetime(2001, 1, 1, tzinfo=UTC))
    limit = RateLimit(requests_per_minute=5, tokens_per_minute=700)
    token, made = new_token("bob", "user", "acme", limit=limit, expires=datetime(2999, 1, 1, tzinfo=UTC))
    of_acme = {"acme": {"tokens_per_minute": 9}}
    table = parse_tokens(json.dumps({"tokens": [ended, made], "tenants": of_acme}))
    assert table.has_expired(over)
    assert table.find(over) is None
    assert table.find(token) == Principal(name="bob", role=Role.USER, tenant="acme", limit=limit)
    assert table.limit_of_tenant("acme") == RateLimit(tokens_per_minute=9)
    assert table.limit_of_tenant("bravo") == RateLimit()


def test_a_rotated_token_is_good_for_the_overlap_beside_the_new_one_of_the_same_limits() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    first, made = new_token("ann", "user", "acme", limit=RateLimit(requests_per_minute=5))
    second, entries = rotated([made], "ann", overlap_seconds=3600.0, now=now)
    assert entries[0] == {**made, "expires": "2030-01-01T01:00:00Z"}
    table = parse_tokens(json.dumps(entries))
    both = [table.find(first), table.find(second)]
    assert (
        both[0]
        == both[1]
        == Principal(name="ann", role=Role.USER, tenant="acme", limit=RateLimit(requests_per_minute=5))
    )
    third, entries = rotated(entries, "ann", overlap_seconds=9 * 3600.0, now=now + timedelta(minutes=59))
    assert [entry.get("expires") for entry in entries] == [
        "2030-01-01T01:00:00Z",
        "2030-01-01T09:59:00Z",
        None,
    ]
    _, entries = rotated(entries, "ann", overlap_seconds=0.0, now=now + timedelta(hours=2))
    assert len(entries) == 3, "what has expired already is taken out"
    assert parse_tokens(json.dumps(entries)).find(third) is not None
    other = entry("bob")
    assert revoked([*entries, other], "ann") == [other]
    with pytest.raises(ValueError, match="no entry has the name 'ann'"):
        revoked([other], "ann")


def test_a_name_whose_tokens_have_all_expired_is_not_rotated() -> None:
    """The new token would have the same end as the last of them."""
    now = datetime(2030, 1, 1, tzinfo=UTC)
    ends = [now - timedelta(days=1), now]
    entries = [new_token("ann", "user", expires=end)[1] for end in ends]
    with pytest.raises(ValueError, match=r"'ann' has expired, the last on 2030-01-01T00:00:00Z"):
        rotated(entries, "ann", overlap_seconds=60.0, now=now)
    _, entries = rotated(entries, "ann", overlap_seconds=60.0, now=now - timedelta(hours=1))
    assert [entry["expires"] for entry in entries] == ["2029-12-31T23:01:00Z", "2030-01-01T00:00:00Z"]


def test_an_overlap_that_no_date_ends_is_refused() -> None:
    made = new_token("ann", "user")[1]
    for seconds in (1e12, 1e15, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="ends after the year 9999"):
            rotated([made], "ann", overlap_seconds=seconds, now=datetime(2030, 1, 1, tzinfo=UTC))


def _delete(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


HARMS: dict[str, Callable[[Path], object]] = {
    "deleted": _delete,
    "open to all": lambda path: path.chmod(0o644),
    "spoilt": lambda path: path.write_text(path.read_text()[:-20]),
    "empty": lambda path: path.write_bytes(b""),
    "a pipe": lambda path: (_delete(path), os.mkfifo(path, 0o600)),
    "a folder": lambda path: (_delete(path), path.mkdir()),
}


@pytest.mark.parametrize("harm", list(HARMS.values()), ids=list(HARMS))
def test_a_file_that_cannot_be_used_means_nobody_after_the_grace_until_it_is_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], object]
) -> None:
    path, clock, (page_token, page) = tmp_path / "tokens.json", Clock(), new_token("page", "viewer")
    token, made = new_token("ann", "user")
    write(path, made)
    good = path.read_bytes()
    file = TokenFile(path, page_token_sha256=page["token_sha256"], clock=clock)
    clock.now += 100.0
    harm(path)
    for seconds in (0.0, 5.0, 4.9):
        clock.now += seconds
        file.refresh()
        assert file.tokens.find(token) is not None, "an editor that writes in two parts revokes nobody"
    clock.now += 0.1
    file.refresh()
    file.refresh()
    assert file.tokens.find(token) is None
    assert file.tokens.find(page_token) is not None, "the live page's token is in no file"
    gate = CallGate(lambda: file.tokens, lambda: file.suspended)
    assert not file.is_good
    with pytest.raises(AuthUnavailable) as caught:
        gate.admit(GENERATE, bearer(token))
    assert caught.value.message == "the auth file cannot be read"
    for metadata in (bearer("by-wrong"), ()):
        with pytest.raises(Unauthenticated):
            gate.admit(GENERATE, metadata)
    gate.admit(HEALTH, ())
    assert gate.refused == {"AUTH_UNAVAILABLE": 1, "UNAUTHENTICATED": 2}
    assert [
        record.message.rpartition(": ")[2] for record in caplog.records if record.levelname == "ERROR"
    ] == [
        "its tokens end soon unless the file is repaired",
        "no token is valid",
    ]
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(good)
    file.refresh()
    assert file.is_good
    gate.admit(GENERATE, bearer(token))


def test_a_file_that_comes_back_unchanged_is_good_again(tmp_path: Path) -> None:
    clock, (token, made) = Clock(), new_token("ann", "user")
    write(path := tmp_path / "tokens.json", made)
    file = TokenFile(path, clock=clock)
    away = path.rename(tmp_path / "away")
    file.refresh()
    clock.now += GRACE_SECONDS
    file.refresh()
    assert file.tokens.find(token) is None
    away.rename(path)
    file.refresh()
    assert file.tokens.find(token) is not None


async def test_a_look_that_hangs_is_a_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock, go_on = tmp_path / "tokens.json", Clock(), threading.Event()
    token, made = new_token("ann", "user")
    write(path, made)
    file = TokenFile(path, clock=clock)
    monkeypatch.setattr("blockyard.router.admission.token_file.POLL_SECONDS", 0.01)
    look = file._look
    monkeypatch.setattr(file, "_look", lambda: go_on.wait(60) and look())
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(file.follow())
        await until(lambda: not file.is_good, seconds=30)
        clock.now += GRACE_SECONDS
        await until(lambda: file.tokens.find(token) is None, seconds=30)
        go_on.set()
        await until(lambda: file.tokens.find(token) is not None, seconds=30)
        following.cancel()


async def test_a_router_that_stands_still_takes_no_good_token_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, loop, still_seconds, num_looks = tmp_path / "tokens.json", asyncio.get_running_loop(), 0.0, 0
    token, made = new_token("ann", "user")
    write(path, made)
    real_time = loop.time
    monkeypatch.setattr(loop, "time", lambda: real_time() + still_seconds)
    monkeypatch.setattr("blockyard.router.admission.token_file.POLL_SECONDS", 0.01)
    file = TokenFile(path, clock=loop.time)
    look = file._look

    def counted() -> TokenTable | str | None:
        nonlocal num_looks
        num_looks += 1
        return look()

    monkeypatch.setattr(file, "_look", counted)
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(file.follow())
        # An editor that has the file away for a moment, in which the router stands still.
        away = path.rename(tmp_path / "away")
        await until(lambda: not file.is_good, seconds=30)
        still_seconds += 10 * GRACE_SECONDS
        looks = num_looks
        await until(lambda: num_looks > looks + 1, seconds=30)
        assert file.tokens.find(token) is not None
        away.rename(path)
        await until(lambda: file.is_good, seconds=30)
        assert file.tokens.find(token) is not None
        following.cancel()


async def test_the_auth_file_is_checked_while_all_threads_of_the_loop_are_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, go_on = tmp_path / "tokens.json", threading.Event()
    (_, first), (added, second) = new_token("ann", "user"), new_token("bob", "user")
    write(path, first)
    file = TokenFile(path)
    monkeypatch.setattr("blockyard.router.admission.token_file.POLL_SECONDS", 0.01)
    async with asyncio.TaskGroup() as tasks:
        try:
            for _ in range(64):
                tasks.create_task(asyncio.to_thread(go_on.wait, 60))
            following = tasks.create_task(file.follow())
            write(path, first, second)
            await until(lambda: file.tokens.find(added) is not None, seconds=30)
        finally:
            go_on.set()
        following.cancel()


def test_a_change_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    (ann, first), (bob, second) = new_token("ann", "user"), new_token("bob", "user")
    write(path, first)
    file = TokenFile(path)
    for entries, known in (
        ((first,), [True, False]),
        ((second, first), [True, True]),
        ((second,), [False, True]),
    ):
        write(path, *entries)
        file.refresh()
        assert [file.tokens.find(token) is not None for token in (ann, bob)] == known
    write(path)
    file.refresh()
    assert len(file.tokens) == len(TokenFile(path).tokens) == 0, "an empty list means nobody"
