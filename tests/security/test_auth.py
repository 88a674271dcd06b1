"""The rules of tokens and roles, without a server; the file of tokens as an operator edits it."""

import json
import os
from pathlib import Path

import pytest
from blockyard.deploy.dashboard.page_token import draw_page_token, page_token_sha256
from blockyard.deploy.security import append_entry
from blockyard.router.auth import (
    METHOD_ROLES,
    OPEN,
    Principal,
    Role,
    authenticate,
    check_role,
    new_token,
    parse_tokens,
)
from blockyard.router.errors import Forbidden, Unauthenticated
from blockyard.router.token_file import TokenFile

GENERATE = "/blockyard.v1.InferenceService/Generate"
HEALTH = "/grpc.health.v1.Health/Check"


def entry(name: str = "ann", **fields: object) -> dict[str, object]:
    return {**new_token("ann", "user")[1], "name": name, **fields}


def test_a_token_is_known_by_its_hash_and_found_with_its_principal() -> None:
    token, made = new_token("ann", "user", "acme")
    assert token not in json.dumps(made)
    principal = parse_tokens(json.dumps([made, entry("bob")])).find(token)
    assert principal == Principal(name="ann", role=Role.USER, tenant="acme")


def test_who_has_no_tenant_is_one_of_his_own() -> None:
    token, made = new_token("ann", "user")
    principal = parse_tokens(json.dumps([made])).find(token)
    assert principal is not None
    assert principal.tenant == "ann"


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
        ("[" * 100_000, "it is not JSON"),
        ([], "at least one entry"),
        ({}, "must be a JSON list"),
        (["hunter2"], "entry 1 is no JSON object"),
        ([entry(), entry("b d")], "entry 2: name must be"),
        ([entry(token="hunter2")], r"entry 1 \(ann\) has fields besides"),
        ([entry(token_sha256="hunter2")], r"entry 1 \(ann\): token_sha256 must be 64 digits"),
        ([entry(role="root")], r"entry 1 \(ann\): role must be one of user, viewer, admin"),
        ([entry(role=["user"])], r"entry 1 \(ann\): role must be one of"),
        ([entry(tenant="")], r"entry 1 \(ann\): tenant must be"),
        ([entry(tenant=7)], r"entry 1 \(ann\): tenant must be"),
        ([entry(), entry()], "entry 2: the name 'ann' is taken"),
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


@pytest.mark.parametrize("mode", [0o644, 0o602, 0o620, 0o777])
def test_a_file_for_everybody_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "tokens.json"
    write(path, entry())
    TokenFile(path)
    path.chmod(0o640)
    TokenFile(path)
    path.chmod(mode)
    with pytest.raises(ValueError, match=rf"{path} may be read by everybody .*mode {mode:04o}.*chmod 600"):
        TokenFile(path)


def test_a_file_that_is_not_there_or_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere cannot be read: No such file"):
        TokenFile(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"cannot be read: Is a directory"):
        TokenFile(tmp_path)


def test_a_change_is_taken_and_a_bad_one_leaves_the_tokens_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens.json"
    (ann, first), (bob, second) = new_token("ann", "user"), new_token("bob", "user")
    write(path, first)
    file = TokenFile(path)
    assert file.tokens.find(bob) is None
    path.write_text('[{"name": "ann", "token_sha')
    for _ in range(3):
        file.refresh()
    assert file.tokens.find(ann) is not None
    told = [record for record in caplog.records if "stay as they were" in record.message]
    assert len(told) == 1
    path.unlink()
    file.refresh()
    assert file.tokens.find(ann) is not None
    write(path, second, first)
    file.refresh()
    assert file.tokens.find(bob) is not None
    write(path, second)
    file.refresh()
    assert file.tokens.find(ann) is None, "a token that was taken out is no longer known"
