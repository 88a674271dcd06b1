"""Each Redis and Valkey that is on this machine, for tests that run once on each.

BLOCKYARD_REDIS_SERVERS names others, paths with a colon between them.
"""

import os
from pathlib import Path

import pytest
from blockyard.deploy.machine.redis_server import find_redis_servers
from blockyard.deploy.machine.redis_versions import version_of_program

SERVERS_VARIABLE = "BLOCKYARD_REDIS_SERVERS"
LEAST = 2
"""A test for each server is meant to find what differs."""


def servers() -> list[Path]:
    """Of several of one version the first."""
    named = os.environ.get(SERVERS_VARIABLE)
    found = [Path(path) for path in named.split(":")] if named else find_redis_servers()
    return list({str(version_of_program(path)): path for path in reversed(found)}.values())[::-1]


def each_server(*, are_all_quick: bool = True) -> list[object]:
    """Parameters of a fixture: the servers, and a skipped one that says so where there is only one. Unless all are
    quick, `make test-all` alone has those that are neither the one that `up` would take, nor the oldest or newest."""
    versions = {path: version_of_program(path) for path in servers()}
    by_age = sorted(versions, key=lambda path: ((known := versions[path]) and known.version) or ())
    quick = {*by_age[:1], *by_age[-1:], *[*versions][:1]}
    found: list[object] = []
    for path, version in versions.items():
        marks = () if are_all_quick or path in quick else pytest.mark.slow
        found.append(pytest.param(path, id=str(version), marks=marks))
    if len(found) < LEAST:
        reason = f"no other Redis or Valkey here: install one, or name it by {SERVERS_VARIABLE}"
        found.append(pytest.param(None, id="another", marks=pytest.mark.skip(reason=reason)))
    return found
