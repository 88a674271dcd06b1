"""Logs as JSON: each line is an object that names its process and request; a client's error names the request."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from blockyard.proto.runtime.logs import JsonFormatter, LogConfig, TextFormatter, about
from blockyard.router.client import BlockyardError, Client

from tests.system.processes import SIMULATED, Processes, processes

FAULT_TOKEN = 7
FAULTY = (*SIMULATED, "--simulated-fault", f"{FAULT_TOKEN}:raise")
MARK = "marke-5kzq"
REQUEST_ID = "req-of-the-operator.1"


def logged(formatter: logging.Formatter, *, request_id: str = "") -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    record = logging.LogRecord("blockyard.trial", logging.WARNING, "", 0, "%d of\n%d", (1, 2), None)
    with about(request_id):
        handler.emit(record)
    return stream.getvalue()


def test_a_line_of_json_is_one_object_with_who_speaks_and_of_which_request() -> None:
    line = logged(JsonFormatter({"worker_id": "w", "incarnation": "i"}), request_id="req-1")
    assert line.count("\n") == 1
    document = json.loads(line)
    assert document.pop("time").endswith("Z")
    assert document == {
        "level": "warning",
        "logger": "blockyard.trial",
        "message": "1 of\n2",
        "worker_id": "w",
        "incarnation": "i",
        "request_id": "req-1",
    }


def test_a_line_about_no_request_names_none() -> None:
    assert "request_id" not in json.loads(logged(JsonFormatter({})))
    assert logged(TextFormatter()).endswith("1 of\n2\n")


def test_a_line_of_text_ends_with_its_request() -> None:
    assert logged(TextFormatter(), request_id="req-1").endswith(" [req-1]\n")


def test_the_request_of_a_line_ends_with_the_work_on_it() -> None:
    with about("req-1"):
        pass
    assert "request_id" not in json.loads(logged(JsonFormatter({})))


@pytest.mark.parametrize(
    ("settings", "told"), [({"level": "loud"}, "LEVEL .* 'loud'"), ({"format": "xml"}, "'xml'")]
)
def test_a_level_or_format_that_there_is_not_is_named(settings: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LogConfig(**settings)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Yield a cluster with one worker, which fails on a token."""
    with processes(tmp_path_factory.mktemp("logs")) as running:
        worker = running.add_worker("worker-0", *FAULTY, "--log-format", "json", "--log-level", "debug")
        running.start(worker)
        options = ("--log-format", "json", "--log-level", "debug", "--router-id", "router-7")
        router = running.add_router("router-0", *options, workers=[worker.address])
        running.start(router)
        with Client(router.address, timeout_seconds=60) as client:
            client.generate(MARK, max_tokens=4)
        yield running


def lines(cluster: Processes, name: str) -> list[dict[str, Any]]:
    process = (cluster.workers | cluster.routers)[name]
    return [json.loads(line) for line in process.log_text().splitlines() if line.startswith("{")]


def failure(cluster: Processes, **arguments: Any) -> BlockyardError:
    with (
        Client(cluster.routers["router-0"].address, timeout_seconds=30, retries=0) as client,
        pytest.raises(BlockyardError) as caught,
    ):
        client.generate(max_tokens=4, **arguments)
    return caught.value


@pytest.mark.ci
@pytest.mark.cluster
def test_every_line_of_a_router_and_a_worker_is_json_and_says_who_writes_it(cluster: Processes) -> None:
    for name, identity in (("worker-0", {"worker_id": "worker-0"}), ("router-0", {"router_id": "router-7"})):
        text = (cluster.workers | cluster.routers)[name].log_text()
        ours = [line for line in text.splitlines() if "blockyard." in line]
        assert ours
        assert all(line.startswith("{") for line in ours)
        for line in lines(cluster, name):
            assert line.items() >= identity.items()
    assert {len(line["incarnation"]) for line in lines(cluster, "worker-0")} == {16}


@pytest.mark.ci
@pytest.mark.cluster
def test_a_failed_request_is_found_by_its_id_in_the_logs_of_router_and_worker(cluster: Processes) -> None:
    error = failure(cluster, prompt_token_ids=[1, FAULT_TOKEN, 3], request_id=REQUEST_ID)
    assert (error.reason, error.request_id) == ("ENGINE_FAILED", REQUEST_ID)
    for name, told in (("router-0", "ENGINE_FAILED"), ("worker-0", "its step failed")):
        found = [line for line in lines(cluster, name) if line.get("request_id") == REQUEST_ID]
        assert any(told in line["message"] for line in found), name


@pytest.mark.ci
@pytest.mark.cluster
def test_a_request_that_got_its_id_from_the_router_is_found_by_that(cluster: Processes) -> None:
    error = failure(cluster, prompt_token_ids=[1, FAULT_TOKEN, 4])
    assert error.request_id.startswith("req-")
    assert error.request_id in {line.get("request_id") for line in lines(cluster, "router-0")}


@pytest.mark.ci
@pytest.mark.cluster
def test_a_request_that_was_never_taken_in_has_no_id(cluster: Processes) -> None:
    assert failure(cluster, prompt="x", model="another").request_id == ""


@pytest.mark.ci
@pytest.mark.cluster
def test_no_line_holds_a_prompt(cluster: Processes) -> None:
    assert not any(
        MARK in process.log_text() for process in (*cluster.workers.values(), *cluster.routers.values())
    )
