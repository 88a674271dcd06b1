"""Each Redis and Valkey on this machine, for tests that run once on each.

BLOCKYARD_REDIS_SERVERS names others, paths with a colon between them.
"""

import os
from pathlib import Path

import pytest
from blockyard.deploy.machine.redis_server import find_redis_servers
from blockyard.deploy.machine.redis_versions import version_of_program

SERVERS_VARIABLE = "BLOCKYARD_REDIS_SERVERS"
LEAST = 2
"""Least number of servers: a test for each is meant to find what differs."""


def servers() -> list[Path]:
    """Return one server per version, the first found."""
    named = os.environ.get(SERVERS_VARIABLE)
    found = [Path(path) for path in named.split(":")] if named else find_redis_servers()
    return list({str(version_of_program(path)): path for path in reversed(found)}.values())[::-1]


def each_server(*, are_all_quick: bool = True) -> list[object]:
    """Return the parameters of a fixture: the servers. If there is only one, add a skipped one that says so. Unless all
    are quick, `--every-case` alone has those that are neither the default of `up`, nor the oldest or newest."""
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
