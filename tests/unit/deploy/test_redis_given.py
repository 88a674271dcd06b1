"""A Redis that the operator names: each problem that shows without a server has a clear message."""

from pathlib import Path

import pytest
from blockyard.deploy.machine.redis_server import private_server_warning, redis_user
from blockyard.deploy.machine.redis_versions import SOUND, ServerVersion, version_of_reply
from blockyard.deploy.settings import redis_given
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.worker.config import EngineConfig

from .rig import dead_port, refusal

PASSWORD = "hunter2"

MALFORMED = (
    "localhost:6379",
    f"redis:/u:{PASSWORD}@h:1/0",
    f"redis://u:{PASSWORD}@h:port/0",
    f"redis://u:{PASSWORD}@h:1/database",
    f"http://u:{PASSWORD}@h:1/0",
    f"redis://u:{PASSWORD}@h:1/0?nothing_of_this_name=1",
    "redis://",
)

WORKER, ROUTER = redis_user("worker", "default"), redis_user("router", "default")


def options(url: str) -> UpOptions:
    return UpOptions(engine=EngineConfig(model="demo"), redis_url=url)


@pytest.mark.parametrize("url", MALFORMED)
@pytest.mark.parametrize("variable", ["BLOCKYARD_REDIS_URL", "BLOCKYARD_ROUTER_REDIS_URL"])
def test_a_malformed_url_is_a_wrong_command_line_before_anything_starts(
    url: str, variable: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, url)
    told = refusal("up --model demo")
    assert "no Redis URL" in told
    assert PASSWORD not in told
    assert not home.exists()


@pytest.mark.parametrize(
    "line", ["up --model demo --redis-url", "up --model demo --router-redis-url", "doctor --redis-url"]
)
def test_a_password_in_an_argument_is_refused_with_the_variable_to_set(line: str) -> None:
    told = refusal(line, f"redis://u:{PASSWORD}@127.0.0.1:1/0")
    assert f"BLOCKYARD_{'ROUTER_' if '--router' in line else ''}REDIS_URL" in told
    assert PASSWORD not in told


def test_a_redis_that_does_not_answer_is_a_loud_warning_and_holds_nothing_up() -> None:
    (warning,) = redis_given.check(options(f"redis://u:{PASSWORD}@127.0.0.1:{dead_port()}/0"))[:1]
    assert "it does not answer" in warning
    assert "serves without a prefix index" in warning
    assert PASSWORD not in warning
    with redis_given.claimed(options(f"redis://127.0.0.1:{dead_port()}/0")) as keep:
        keep()


@pytest.mark.parametrize(
    ("product", "version", "sound"),
    [
        ("redis", "6.2.19", "Redis 6.2.24"),
        ("redis", "7.0.15", "Redis 7.2.16"),
        ("redis", "7.4.5", "Redis 7.4.11"),
        ("redis", "8.0.6", "Redis 8.2.10"),
        ("redis", "8.2.1", "Redis 8.2.10"),
        ("redis", "8.4.6", "Redis 8.6.7"),
        ("valkey", "7.2.10", "Valkey 7.2.16"),
        ("valkey", "8.1.3", "Valkey 8.1.12"),
        ("valkey", "9.1.2", "Valkey 9.1.4"),
    ],
)
def test_a_version_with_known_holes_is_told_with_the_first_release_without(
    product: str, version: str, sound: str
) -> None:
    server = version_of_reply({b"server": product.encode(), b"version": version.encode()})
    assert server is not None
    assert server.warning.startswith(f"{server} has, by its version, known security holes")
    assert server.warning.endswith(f"the first release without them is {sound}")
    private = private_server_warning(server)
    if version in ("9.1.2", "8.4.6"):
        assert private == "", "its settings and its users' rights shut its holes off"
    else:
        assert private.startswith(f"the private Redis: {server.warning_if_private}. Install a newer")
        assert "of programs on this machine or of a worker that was taken over" in private


@pytest.mark.parametrize("product", sorted(SOUND))
def test_the_first_sound_release_and_all_later_ones_are_told_nothing(product: str) -> None:
    for major, minor, patch in SOUND[product]:
        for version in ((major, minor, patch), (major, minor, patch + 1), (99, 0, 0)):
            assert ServerVersion(product=product, version=version).warning == ""


def test_what_is_no_redis_says_no_version() -> None:
    for reply in (None, b"OK", [], {b"server": b"other", b"version": b"7.0.0"}, {b"server": b"redis"}):
        assert version_of_reply(reply) is None
    assert version_of_reply([b"server", b"valkey", b"version", b"9.1.2"]) == ServerVersion(
        product="Valkey", version=(9, 1, 2)
    )
    assert private_server_warning(None) == ""
