"""Real Ray heads with clusters, started as an operator starts them, and requests to their dashboards."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from blockyard.deploy.ray.head import RayHead

from tests.nightly.cluster.ray_nodes import operators_head as operators_head
from tests.system.harness import Command as Command
from tests.system.harness import eventually as eventually
from tests.system.harness import remembered_state as remembered_state

SIMULATED = ("--model", "demo", "--engine", "simulated", "--device", "cpu", "--kv-cache-memory", "18MiB")
SECONDS = 20.0
READ_STORE = """
import sys
from ray._raylet import GcsClient
store = GcsClient(address=sys.argv[1])
for namespace in (b"blockyard", b"blockyard-wish"):
    for key in store.internal_kv_keys(b"", namespace, timeout=20):
        print(key.hex(), store.internal_kv_get(key, namespace, timeout=20).hex())
"""


def dashboard_of(head: RayHead) -> str:
    """Where a head's dashboard serves, by the log of its start."""
    log = (head.token_path.parent / "ray-head.log").read_text(encoding="utf-8")
    found = re.search(r"RAY_API_SERVER_ADDRESS='([^']+)'", log)
    assert found is not None, log
    return found[1]


def fetched(
    url: str, token_path: Path | str, *, headers: dict[str, str] | None = None, seconds: float = SECONDS
) -> tuple[int, bytes]:
    """A status, and what came with it."""
    token = Path(token_path).read_text(encoding="ascii").strip()
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def fetched_json(url: str, token_path: Path | str) -> Any:
    status, body = fetched(url, token_path)
    assert status == 200, body
    return json.loads(body)


def stored(address: str, token_path: Path | str) -> dict[bytes, bytes]:
    """All that we keep in the store of a head's control service. In a process of its own: Ray reads a token once."""
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path)}
    command = [sys.executable, "-c", READ_STORE, address]
    lines = subprocess.run(
        command, env=environment, capture_output=True, check=True, timeout=120
    ).stdout.split()
    texts = [bytes.fromhex(line.decode()) for line in lines]
    return dict(zip(texts[::2], texts[1::2], strict=True))
