"""A wrong command line ends with exit code 2, as docs/cli.md says, before anything starts."""

from pathlib import Path

import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.machine import state
from click.testing import CliRunner, Result


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "home"
    monkeypatch.setenv(state.HOME_VARIABLE, str(directory))
    for variable in ("BLOCKYARD_REDIS_URL", "BLOCKYARD_ROUTER", "BLOCKYARD_CLUSTER", "BLOCKYARD_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    return directory


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, input="hello\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--block-size", "17"),
        ("--kv-cache-memory", "much"),
        ("--workers", "0"),
        ("--max-num-seqs", "0"),
        ("--max-outputs", "0"),
        ("--max-beam-width", "0"),
        ("--max-requests", "0"),
        ("--max-queue-seconds", "nan"),
        ("--tenant-weight", "research"),
        ("--tenant-weight", "research=0"),
        ("--tenant-weight", "a b=2"),
        ("--max-tokens-admitted", "0"),
        ("--gpu-memory-utilization", "1.5"),
        ("--cluster", "../../etc"),
        ("--model", "/no/such/folder"),
        ("--address", "nonsense"),
    ],
)
def test_up_refuses_bad_settings_before_it_starts_anything(arguments: tuple[str, ...], home: Path) -> None:
    result = run("up", "--model", "demo", *arguments)
    assert result.exit_code == 2, "what docs/cli.md says of a command line that is wrong"
    assert "Error" in result.output
    assert not home.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("down", "--cluster", "../../etc"),
        ("size", "/no/such/folder"),
        ("doctor", "--model", "/no/such/folder"),
        ("doctor", "--address", "nonsense"),
        ("scale", "0"),
        ("generate", "x", "--max-tokens", "-1", "--router", "127.0.0.1:1"),
        ("chat", "--seed", str(2**63), "--router", "127.0.0.1:1"),
        ("workers", "--router", ""),
    ],
)
def test_a_value_that_cannot_be_is_a_wrong_command_line(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--num-requests", "8"), "Put it after a workload that has it: `bench random`."),
        (("shared-prefix", "--num-requests", "8"), "by --groups times (1 + --followers)"),
        (("chat", "--num-requests", "8"), "`bench chat` by --sessions and --turns"),
        (
            ("chat", "--requests", "8"),
            "`bench random` has --num-requests. Other workloads set their number of requests",
        ),
        (("--num-prompts", "8", "random"), "`bench random` has --num-requests."),
        (("random", "--requests", "8"), "No such option '--requests'. Did you mean '--num-requests'?"),
        (("random", "--groups", "2"), "a workload that has it: `bench shared-prefix`."),
        (("--rounds", "2", "random"), "`bench chat`, `bench random`, `bench shared-prefix`, `bench trace`."),
    ],
)
def test_an_option_of_another_workload_says_where_it_belongs(arguments: tuple[str, ...], told: str) -> None:
    result = run("bench", *arguments)
    assert result.exit_code == 2
    assert told in result.output


def test_an_option_that_no_workload_has_gets_no_such_hint() -> None:
    assert "workload that has it" not in run("bench", "random", "--groop", "2").output


@pytest.mark.parametrize("command", [("workers",), ("generate", "x"), ("bench", "random")])
def test_a_cluster_that_is_still_starting_is_told_as_such(command: tuple[str, ...]) -> None:
    state.save(state.ClusterState(cluster="default", model="demo", secret="s"))
    result = run(*command)
    assert (result.exit_code, "is still starting" in result.output) == (1, True), result.output
