"""A model that exists only on the hub: a loopback server implements the part of the hub's API that the client calls."""

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from blockyard.deploy.machine.processes import identify
from blockyard.deploy.machine.state import ClusterState, HeadState, save
from blockyard.deploy.settings.options import model_path

from .rig import python

REPOSITORY = "someone/small-llama"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PAUSE_SECONDS = 0.4
"""The server pauses so long between the halves of a large file."""
REPORTS = """
import json, sys
from blockyard.deploy.lifecycle.hub import download
try:
    download(sys.argv[1], lambda progress: print(json.dumps([progress.stage, progress.done, progress.total])))
except ValueError as error:
    sys.exit(str(error))
"""


@dataclass
class Hub:
    folder: Path
    address: str = ""
    fetched: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def environment(self, home: Path) -> dict[str, str]:
        own = {"HF_ENDPOINT": self.address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        return {**os.environ, **own, "BLOCKYARD_HOME": str(home)}


def as_in_tree(file: Path) -> dict[str, Any]:
    oid = hashlib.sha1(file.read_bytes()).hexdigest()
    return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": oid}


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    hub = Hub(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, *_: Any) -> None: ...

        def _refuse(self, status: int, why: str = "") -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", why)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(path)
            files = sorted(hub.folder.iterdir())
            headers: dict[str, str] = {}
            if path.endswith("/gone"):
                return self._refuse(404, "RevisionNotFound")
            if path.startswith(f"/api/models/{REPOSITORY}/tree/"):
                body = json.dumps([as_in_tree(file) for file in files]).encode()
            elif path.startswith(f"/api/models/{REPOSITORY}"):
                siblings = [{"rfilename": file.name} for file in files]
                body = json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}).encode()
            elif path.startswith(f"/{REPOSITORY}/resolve/"):
                name = path.rpartition("/")[2]
                body = (hub.folder / name).read_bytes()
                headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
                hub.fetched += [name] * with_body
            else:
                return self._refuse(503) if "/broken" in path else self._refuse(404, "RepoNotFound")
            self.send_response(200)
            for header, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(header, value)
            self.end_headers()
            if with_body:
                half = len(body) // 2
                self.wfile.write(body[:half])
                self.wfile.flush()
                time.sleep(PAUSE_SECONDS if len(body) > 2**20 else 0)
                self.wfile.write(body[half:])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Path(model_path("demo"))) as hub:
        yield hub


def run(hub: Hub, home: Path, code: str, *arguments: str, **environment: str) -> CompletedProcess[str]:
    return python(code, *arguments, env={**hub.environment(home), **environment})


def run_command(hub: Hub, home: Path, *arguments: str) -> CompletedProcess[str]:
    return run(hub, home, "from blockyard.deploy.cli import main; main()", *arguments)


def test_a_download_counts_its_bytes_and_is_made_once(hub: Hub, tmp_path: Path) -> None:
    first = run(hub, tmp_path, REPORTS, REPOSITORY)
    assert first.returncode == 0, first.stderr
    reports = [json.loads(line) for line in first.stdout.splitlines()]
    assert reports[0][0] == f"looking for {REPOSITORY} on the hub"
    counted = [(done, total) for stage, done, total in reports if stage.startswith("downloading ")]
    assert counted, reports
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert wanted <= set(hub.fetched)
    total_bytes = sum((hub.folder / name).stat().st_size for name in set(hub.fetched))
    assert {total for _, total in counted} == {total_bytes}
    assert [done for done, _ in counted] == sorted(done for done, _ in counted)
    assert 0 <= counted[-1][0] <= total_bytes
    hub.fetched.clear()
    again = run(hub, tmp_path, REPORTS, REPOSITORY)
    assert (again.returncode, hub.fetched) == (0, [])
    assert "downloading" not in again.stdout


@pytest.mark.parametrize(
    ("name", "environment", "told"),
    [
        ("nobody/nothing", {}, "the hub has no model of this name, unless it is private (HF_TOKEN)"),
        (f"{REPOSITORY}@gone", {}, "the hub does not have this revision of it"),
        ("a/broken", {}, "the hub refuses it with HTTP status 503"),
        ("a/b/c", {}, "no model on the hub can have this name"),
        (
            "nobody/nothing",
            {"HF_HUB_OFFLINE": "1"},
            "the hub's cache here does not have it, and HF_HUB_OFFLINE does not allow a download",
        ),
        (
            "nobody/nothing",
            {"HF_ENDPOINT": "http://127.0.0.1:1"},
            "the hub's cache here does not have it, and the hub cannot be reached",
        ),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_refused_by_a_sentence(
    hub: Hub, tmp_path: Path, name: str, environment: dict[str, str], told: str
) -> None:
    result = run(hub, tmp_path, REPORTS, name, **environment)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == f"model {name!r} is no folder here, and {told}"
    assert "Traceback" not in result.stderr


def test_doctor_and_size_read_the_config_alone(hub: Hub, tmp_path: Path) -> None:
    doctor = run_command(hub, tmp_path, "doctor", "--model", REPOSITORY, "--output", "json")
    weights = next(found for found in json.loads(doctor.stdout) if found["subject"] == "weights")
    assert "would be downloaded" in weights["detail"]
    size = run_command(hub, tmp_path, "size", REPOSITORY, "--memory", "1GiB", "--output", "json")
    assert size.returncode == 0, size.stderr
    assert set(hub.fetched) <= {"config.json", "generation_config.json"}


def test_a_revision_is_asked_for_and_a_folder_is_filled(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "downloads"
    script = f"from blockyard.deploy.lifecycle.hub import use_download_dir; use_download_dir({str(folder)!r}){REPORTS}"
    result = run(hub, tmp_path / "home", script, f"{REPOSITORY}@v1.5")
    assert result.returncode == 0, result.stderr
    assert any("v1.5" in path for path in hub.asked)
    assert not any("main" in path for path in hub.asked)
    assert list(folder.rglob("model.safetensors"))
    assert not list((tmp_path / "home").rglob("model.safetensors"))


def test_a_tokenizer_of_another_repository_comes_without_its_weights(hub: Hub, tmp_path: Path) -> None:
    script = (
        "import sys; from blockyard.deploy.lifecycle.hub import download_all; "
        f"download_all({str(hub.folder)!r}, {REPOSITORY!r}, lambda progress: None)"
    )
    result = run(hub, tmp_path, script)
    assert result.returncode == 0, result.stderr
    assert "tokenizer.json" in hub.fetched
    assert "model.safetensors" not in hub.fetched


def test_a_wrong_model_is_told_before_a_cluster_that_is_up_would_be_taken_down_for_it(
    hub: Hub, home: Path
) -> None:
    own = identify(os.getpid())
    assert own is not None
    head = HeadState(session=os.getsid(0), processes=(own,))
    save(ClusterState(cluster="default", model="demo", secret="s", head=head))
    models = ("nosuchmodel", str(hub.folder))
    wrong, sound = (run_command(hub, home, "serve", "--device", "cpu", model) for model in models)
    assert (wrong.returncode, sound.returncode) == (1, 1)
    assert "the hub has no model of this name" in wrong.stderr
    assert "cluster 'default' is up already" in sound.stderr
