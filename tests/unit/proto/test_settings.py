"""A setting is declared once: argparse, click, the configuration file and the checks all follow from its field."""

import argparse
import math
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

import click
import pytest
from blockyard.deploy.settings import setting as options
from blockyard.deploy.settings.config_file import ConfigError, read_config
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.proto.runtime.settings import (
    add_arguments,
    check_settings,
    described,
    given,
    parse_bytes,
    setting,
    setting_fields,
)
from blockyard.router.config import RouterConfig, RouterLimits
from blockyard.router.placement.config import PlacementConfig
from blockyard.worker.config import EngineConfig, WorkerConfig, WorkerLimits
from click.testing import CliRunner

from tools.prose import long_sentences

OWNERS = (EngineConfig, WorkerConfig, WorkerLimits, RouterConfig, RouterLimits, PlacementConfig, UpOptions)


def parse_pairs(pairs: list[str]) -> dict[str, float]:
    try:
        return {name: float(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    except ValueError:
        raise ValueError("a pair is NAME=NUMBER") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(EngineConfig):
    """The engine's settings and one edit for each new one."""

    name: str = field(metadata=described("Who it is."))
    speed: float = setting(
        2.5, help="Steps a second: 5 % more or less.", above=0, below=math.inf, group="For tests"
    )
    room: int | None = setting(None, help="Memory.", parse=parse_bytes, metavar="SIZE", minimum=1)
    colour: Literal["red", "blue"] = setting("red", help="Of what.")
    is_new: bool = setting(False, help="Whether it is new.", flag="--new")
    shares: dict[str, float] = field(
        default_factory=dict,
        metadata=described(
            "Shares.", flag="--share", metavar="NAME=SHARE", parse=parse_pairs, is_repeated=True
        ),
    )
    untold: int = 7

    def __post_init__(self) -> None:
        check_settings(self)


GIVEN = (
    "--model m --name n --speed 4 --room 2KiB --colour blue --new --share a=1 --share b=2 --max-num-seqs 3"
)
EXPECTED = Config(
    model="m",
    name="n",
    speed=4.0,
    room=2048,
    colour="blue",
    is_new=True,
    shares={"a": 1.0, "b": 2.0},
    max_num_seqs=3,
)


def by_argparse(*arguments: str) -> Config:
    parser = argparse.ArgumentParser()
    add_arguments(parser, Config)
    return Config(**given(Config, parser.parse_args(arguments)))


def command(found: list[Config]) -> click.Command:
    @click.command(cls=options.GroupedCommand)
    @options.field_settings(Config, "engine")
    def run(**values: Any) -> None:
        with options.wrong_values_are_usage():
            found.append(options.taken(Config, values))

    return run


def by_click(*arguments: str) -> Config:
    found: list[Config] = []
    result = CliRunner().invoke(command(found), arguments)
    assert result.exit_code == 0, result.output
    return found[0]


@pytest.mark.parametrize("parse", [by_argparse, by_click])
def test_a_new_field_is_an_option_with_its_default_type_and_meaning(parse: Any) -> None:
    assert parse(*GIVEN.split()) == EXPECTED
    assert parse("--model", "m", "--name", "n") == Config(model="m", name="n")


def test_help_of_both_has_the_text_of_the_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        by_argparse("--help")
    told = " ".join(capsys.readouterr().out.split())
    assert "--speed SPEED Steps a second: 5 % more or less. Default: 2.5." in told
    assert "--room SIZE Memory." in told
    assert "untold" not in told
    told = " ".join(CliRunner().invoke(command([]), ["--help"]).output.split())
    assert "--colour [red|blue] Of what. [default: red]" in told
    assert "--new Whether it is new." in told
    assert "--speed" not in told, "help hides the options of tests"


def test_a_new_field_is_a_key_of_the_file_and_a_variable(tmp_path: Any, monkeypatch: Any) -> None:
    known = {found.place: found for found in options.settings_of(command([]))}
    path = tmp_path / "settings.toml"
    path.write_text('[engine]\nspeed = 4\nroom = "2KiB"\nshare = {a = 1}\nnew = true\n')
    values = read_config(path, known, click.Context(command([])))
    assert values["engine", "speed"] == 4
    path.write_text("[engine]\ncolour = 1\n")
    with pytest.raises(ConfigError, match=r"colour in \[engine\] must be one of red, blue, not 1"):
        read_config(path, known, click.Context(command([])))
    monkeypatch.setenv("BLOCKYARD_UP_SPEED", "8")
    assert by_click("--model", "m", "--name", "n").speed == 8.0


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("speed", 0, "speed must be finite and above 0, not 0"),
        ("speed", math.inf, "speed must be finite and above 0, not inf"),
        ("speed", math.nan, "speed must be finite and above 0, not nan"),
        ("room", 0, "room must be at least 1, not 0"),
        ("colour", "green", "colour must be one of red, blue, not green"),
        ("max_num_seqs", 0, "max_num_seqs must be at least 1, not 0"),
        ("gpu_memory_utilization", 1.5, "gpu_memory_utilization must be above 0 and at most 1, not 1.5"),
        ("protected_cache_share", 1.0, "protected_cache_share must be at least 0 and below 1, not 1"),
        ("host_cache_gib", -1.0, "host_cache_gib must be finite and not negative, not -1"),
        ("max_preemptions", -1, "max_preemptions must not be negative, not -1"),
        ("block_size", 17, "block_size must be one of 16, 32, 64, 128, not 17"),
    ],
)
def test_a_value_out_of_bounds_is_named_with_the_bound(name: str, value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}$"):
        Config(model="m", name="n", **{name: value})


def test_a_process_names_the_flag_of_a_value_out_of_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^--speed must be finite and above 0, not -1$"):
        by_argparse("--model", "m", "--name", "n", "--speed", "-1")
    with pytest.raises(ValueError, match=r"^a pair is NAME=NUMBER$"):
        by_argparse("--model", "m", "--name", "n", "--share", "a=b")
    with pytest.raises(SystemExit):
        by_argparse("--model", "m", "--name", "n", "--room", "much")
    assert "argument --room: a size is a number with B" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        by_argparse("--model", "m")
    assert "required: --name" in capsys.readouterr().err


def test_a_description_with_an_unknown_detail_is_refused() -> None:
    with pytest.raises(TypeError, match="minimun"):
        setting(1, help="A number.", minimun=1)


@pytest.mark.parametrize("owner", OWNERS)
def test_every_setting_is_described_in_sentences_and_its_default_is_in_bounds(owner: Any) -> None:
    assert setting_fields(owner)
    for member in setting_fields(owner):
        help = member.description.help
        assert help[0] == help[0].upper(), member.name
        assert help.endswith("."), member.name
        assert not list(long_sentences(help)), member.name
        if member.default is not MISSING:
            member.check(member.default, member.name)
