"""Options of `vllm serve` have the same meaning here, or are refused with the reason."""

from pathlib import Path
from typing import Any

import click
import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.machine import state
from blockyard.deploy.settings.from_vllm import ALIASES, HOLD_ALWAYS, ONLY_ONE, REFUSED, VALUES, ours
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

DOCUMENT = Path(__file__).parents[3] / "docs" / "cli.md"
COMMANDS = ("serve", "up")
KNOWN = {*ALIASES, *ONLY_ONE, *REFUSED, *HOLD_ALWAYS, *(option for option, _ in VALUES)}


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(state.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.delenv("BLOCKYARD_CONFIG", raising=False)


def parameters(command: str, *arguments: str) -> dict[str, Any]:
    context = main.commands[command].make_context(command, list(arguments), parent=click.Context(main))
    return context.params


@pytest.mark.parametrize(
    ("vllms", "in_our_words"),
    [
        ("demo --port 8001 --host 0.0.0.0", "demo --http-port 8001 --host 0.0.0.0"),
        ("demo --port=8001", "demo --http-port=8001"),
        ("demo --max_model_len 512 --max_num_seqs=8", "demo --max-model-len 512 --max-num-seqs 8"),
        ("demo --served-model-name a b --seed 7", "demo --model-name a --model-name b --seed 7"),
        ("--served-model-name=a demo", "--model-name a demo"),
        ("demo --dtype half -dp 2", "demo --dtype float16 --workers 2"),
        ("demo --dtype=float", "demo --dtype float32"),
        ("demo --kv-cache-dtype fp8_e4m3", "demo --kv-cache-dtype fp8"),
        ("demo --generation-config vllm", "demo --generation-config none"),
        ("demo --kv-cache-memory-bytes 2GiB", "demo --kv-cache-memory 2GiB"),
        ("demo -tp 2", "demo --tensor-parallel-size 2"),
        ("demo --tensor_parallel_size=2", "demo --tensor-parallel-size 2"),
        ("demo -pp 1 --enable-prefix-caching", "demo"),
        ("demo --ssl-certfile c.pem --ssl-keyfile c.key", "demo --tls-cert c.pem --tls-key c.key"),
    ],
)
def test_vllms_options_are_ours_by_other_names(vllms: str, in_our_words: str) -> None:
    assert parameters("serve", *vllms.split()) == parameters("serve", *in_our_words.split())


def test_up_takes_them_too() -> None:
    assert parameters("up", "--model", "demo", "--served-model-name", "a", "b")["model_names"] == ("a", "b")


@pytest.mark.parametrize("option", sorted(ONLY_ONE))
@pytest.mark.parametrize("form", ["{} 2", "{}=2", "{}"])
def test_layers_over_several_gpus_are_refused_with_the_reason(option: str, form: str) -> None:
    refused = CliRunner().invoke(main, ["serve", "demo", *form.format(option).split()])
    assert refused.exit_code == 2
    assert ONLY_ONE[option] in " ".join(refused.output.split())


@pytest.mark.parametrize("option", sorted(REFUSED))
def test_what_would_mean_something_else_is_refused_with_the_reason(option: str) -> None:
    refused = CliRunner().invoke(main, ["serve", "demo", option])
    assert refused.exit_code == 2
    assert f"{option} is not taken: {REFUSED[option]}" in " ".join(refused.output.split())


def test_a_key_that_is_refused_is_not_shown() -> None:
    refused = CliRunner().invoke(main, ["serve", "demo", "--api-key=by-a-secret"])
    assert (refused.exit_code, "secret" in refused.output) == (2, False)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_name_stands_for_an_option_that_there_is_and_is_none_itself(command: str) -> None:
    taken = {option for parameter in main.commands[command].params for option in parameter.opts}
    assert set(ALIASES.values()) | {option for option, _ in VALUES} <= taken
    assert not {*ALIASES, *ONLY_ONE, *REFUSED, *HOLD_ALWAYS} & taken


@given(st.lists(st.text().filter(lambda text: text.partition("=")[0].replace("_", "-") not in KNOWN)))
def test_what_vllm_has_no_name_for_is_passed_on(arguments: list[str]) -> None:
    passed = ours(arguments)
    assert len(passed) == len(arguments)
    for before, after in zip(arguments, passed, strict=True):
        assert before == after or (
            before.startswith("--") and before.replace("_", "-") == after.replace("_", "-")
        )


def test_what_follows_two_dashes_is_no_option() -> None:
    assert ours(["--", "--port", "-tp"]) == ["--", "--port", "-tp"]


def test_the_document_names_each() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text.partition("## Coming from vLLM")[2].partition("\n## ")[0]
    assert not {name for name in KNOWN if f"`{name}" not in table}
