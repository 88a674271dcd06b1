"""sync.py is generated from aio.py, and both clients have the same calls."""

import inspect
from pathlib import Path

import pytest
from blockyard.router.client import AsyncClient, Client

from tools import blocking_client
from tools.blocking_client import SOURCE, TARGET, blocking, main

ROOT = Path(__file__).parents[3]


def test_a_stale_file_fails_the_check_and_is_left_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(blocking_client, "_formatted", lambda text: text)
    monkeypatch.setattr("sys.argv", ["blocking_client", "--check"])
    monkeypatch.chdir(tmp_path)
    SOURCE.parent.mkdir(parents=True)
    source = (ROOT / SOURCE).read_text(encoding="utf-8")
    SOURCE.write_text(source)
    assert main() == 1
    TARGET.write_text(blocking(source))
    capsys.readouterr()
    assert main() == 0
    SOURCE.write_text(source + "\nEXTRA = 1\n")
    assert main() == 1
    assert capsys.readouterr().out == f"{TARGET} is out of date, run `python -m tools.blocking_client`\n"
    assert TARGET.read_text() == blocking(source)


def test_a_phrase_that_no_longer_stands_in_the_source_is_named() -> None:
    source = (ROOT / SOURCE).read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="must have this phrase once: 'Belongs to the event loop"):
        blocking(source.replace("Belongs to the event loop", "Lives on the event loop"))
    with pytest.raises(ValueError, match=r"asynchronous words left: .*'aio'"):
        blocking(source + "\n# Sent by grpc.aio.\n")


def test_both_clients_have_the_same_calls_with_the_same_arguments() -> None:
    assert calls(AsyncClient) == calls(Client)


def calls(client: type) -> dict[str, list[str]]:
    return {
        name: [str(parameter) for parameter in inspect.signature(method).parameters.values()]
        for name, method in vars(client).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
