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


def each_server() -> list[object]:
    """Return the parameters of a fixture: one server for each version. If there is only one, add a skipped one that
    says so."""
    named = os.environ.get(SERVERS_VARIABLE)
    paths = [Path(path) for path in named.split(":")] if named else find_redis_servers()
    by_version = {str(version_of_program(path)): path for path in reversed(paths)}
    found: list[object] = [pytest.param(path, id=version) for version, path in reversed(by_version.items())]
    if len(found) < LEAST:
        reason = f"no other Redis or Valkey here: install one, or name it by {SERVERS_VARIABLE}"
        found.append(pytest.param(None, id="another", marks=pytest.mark.skip(reason=reason)))
    return found
