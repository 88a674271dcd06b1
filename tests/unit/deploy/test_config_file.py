"""Settings by flag, environment and file: which one wins, what is refused by name, and what is never shown."""

import json
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.lifecycle.cluster_spec import spec_of
from blockyard.deploy.lifecycle.shape import Shape
from blockyard.deploy.machine import state
from blockyard.deploy.settings.config_file import known_settings
from blockyard.deploy.settings.effective import SECTIONS
from blockyard.deploy.settings.setting import Setting, masked
from blockyard.deploy.settings.up_options import up_options
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.router.config import RouterConfig
from blockyard.worker.config import EngineConfig, WorkerConfig
from click.testing import CliRunner, Result

from tools import cli_reference

PASSWORD = "nobody-may-read-this"
NOT_SETTINGS = {"--config", "--dry-run", "--output"}


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(state.HOME_VARIABLE, str(tmp_path / "home"))
    for variable in ("BLOCKYARD_REDIS_URL", "BLOCKYARD_ROUTER", "BLOCKYARD_CLUSTER", "BLOCKYARD_CONFIG"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "cluster.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def shown(*arguments: str) -> dict[str, dict[str, dict[str, Any]]]:
    result = run("config", "show", "--output", "json", *arguments)
    assert result.exit_code == 0, result.output
    settings: dict[str, dict[str, dict[str, Any]]] = json.loads(result.stdout)["settings"]
    return settings


def parsed(*arguments: str) -> UpOptions:
    command = main.commands["up"]
    values = dict(command.make_context("up", list(arguments), parent=click.Context(main)).params)
    for name in ("is_dry", "output"):
        del values[name]
    return up_options(values)


def test_a_flag_is_heard_before_the_environment_the_environment_before_the_file_and_that_before_the_default(
    written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written("[limits]\nmax_requests = 3\nmax_queue_seconds = 3\nmax_migrations = 3\n")
    monkeypatch.setenv("BLOCKYARD_UP_MAX_REQUESTS", "2")
    monkeypatch.setenv("BLOCKYARD_UP_MAX_QUEUE_SECONDS", "2")
    limits = shown("--config", path, "--max-requests", "1")["limits"]
    assert limits["max_requests"] == {"value": 1, "source": "flag"}
    assert limits["max_queue_seconds"] == {"value": 2.0, "source": "BLOCKYARD_UP_MAX_QUEUE_SECONDS"}
    assert limits["max_migrations"] == {"value": 3, "source": "file"}
    assert limits["lost_seconds"] == {"value": 2.5, "source": "default"}


def test_the_environment_can_name_the_file_and_turn_off_what_the_file_turns_on(
    written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "BLOCKYARD_CONFIG", written("[engine]\ndeterministic = true\nverify_host_memory = true\n")
    )
    monkeypatch.setenv("BLOCKYARD_UP_DETERMINISTIC", "0")
    engine = shown()["engine"]
    assert (engine["deterministic"]["value"], engine["verify_host_memory"]["value"]) == (False, True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[limits]\nmax_request = 1",
            "max_request in [limits], which is no setting there: did you mean max_requests?",
        ),
        ("[limits]\nmax-requests = 1", "did you mean max_requests?"),
        ("[limit]\nmax_requests = 1", "[limit], which is not a section: did you mean limits?"),
        ("max_requests = 1", "[max_requests], which is not a section"),
        ("[limits]\nmax_requests = 1.5", "max_requests in [limits] must be a whole number, not 1.5"),
        ("[limits]\nmax_requests = true", "must be a whole number, not True"),
        ('[limits]\nmax_queue_seconds = "long"', "must be a number, not 'long'"),
        ('[engine]\ndeterministic = "yes"', "must be true or false, not 'yes'"),
        ('[engine]\ndevice = "gpu"', "device in [engine]: 'gpu' is not one of"),
        ('[engine]\nkv_cache_memory = "much"', "kv_cache_memory in [engine]: a size is a number"),
        ("[cluster]\nrouter_port = 70000", "router_port in [cluster]: 70000 is not in the range"),
        (
            "[placement]\nprices = {near_equal = 1}",
            "has near_equal, which is no setting: did you mean near_equal_ms?",
        ),
        ('[placement]\nprices = {near_equal_ms = "1"}', "near_equal_ms must be a number, not '1'"),
        ('[limits]\ntenant_weight = "research=2"', "tenant_weight in [limits] must be a table of numbers"),
        ("[limits]\ntenant_weight = {research = 0}", "tenant_weight in [limits]:"),
        ('[client]\nrouter = "127.0.0.1:1"', "router in [client] must be a list"),
        ("[limits", "cannot be read"),
    ],
)
def test_what_a_file_gets_wrong_is_refused_by_name(written: Any, text: str, told: str) -> None:
    path = written(text)
    result = run("up", "--model", "demo", "--config", path)
    assert result.exit_code == 2
    assert told in result.output
    assert path in result.output


def test_a_variable_that_sets_nothing_is_refused_with_the_nearest_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BLOCKYARD_UP_MAX_REQUEST", "1")
    result = run("config", "show")
    assert result.exit_code == 2
    assert (
        "BLOCKYARD_UP_MAX_REQUEST, which sets nothing: did you mean BLOCKYARD_UP_MAX_REQUESTS?"
        in result.output
    )


def test_a_password_in_the_file_is_refused_and_not_repeated(written: Any) -> None:
    result = run("config", "show", "--config", written(f'[redis]\nredis_url = "redis://u:{PASSWORD}@h:1/0"'))
    assert result.exit_code == 2
    assert "redis_url in [redis] holds a password" in result.output
    assert "BLOCKYARD_REDIS_URL" in result.output
    assert PASSWORD not in result.output


def test_a_url_with_the_files_of_tls_and_no_password_may_stand_in_the_file(written: Any) -> None:
    url = "rediss://h:6380/0?ssl_ca_certs=/etc/ca.pem"
    assert shown("--config", written(f'[redis]\nredis_url = "{url}"'))["redis"]["redis_url"]["value"] == url


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_password_from_elsewhere_is_masked(monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    monkeypatch.setenv("BLOCKYARD_REDIS_URL", f"redis://worker:{PASSWORD}@redis:6379/0?password={PASSWORD}")
    result = run("config", "show", "--output", output)
    assert result.exit_code == 0
    assert "redis://worker:***@redis:6379/0" in result.output
    assert PASSWORD not in result.output


def test_what_holds_is_shown_in_lines_that_a_terminal_has_room_for() -> None:
    lines = run("config", "show", "--placement", "near_equal_ms=2").stdout.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    rows = [line.split() for line in lines]
    assert ["placement.prices.near_equal_ms", "2.0", "flag"] in rows
    assert ["placement.prices.loaded_ms", "250.0", "default"] in rows, "a price that nobody has set"


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:1/0",
        "unix:///run/redis.sock",
        "rediss://worker@h:6380/0?ssl_ca_certs=ca.pem&ssl_certfile=worker.pem&ssl_keyfile=worker.key",
        None,
    ],
)
def test_a_url_without_a_password_is_shown_as_it_is(url: str | None) -> None:
    assert masked(url) == url


@pytest.mark.parametrize(
    "url",
    [
        f"redis://h:1/0?password={PASSWORD}",
        f"rediss://h:1/0?ssl_ca_certs=ca.pem&ssl_password={PASSWORD}",
        f"rediss://h:1/0?{PASSWORD}",
        f"redis://:{PASSWORD}@[::1",
        f"u:{PASSWORD}@h",
    ],
)
def test_whatever_shape_a_url_has_its_password_is_not_shown(url: str) -> None:
    assert PASSWORD not in str(masked(url))


def test_files_and_folders_are_named_from_the_files_own_folder(written: Any, tmp_path: Path) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    path = written('[engine]\nmodel = "models/mine"\n[security]\nauth_file = "tokens.json"\n')
    settings = shown("--config", path)
    assert settings["engine"]["model"]["value"] == str(tmp_path / "models" / "mine")
    assert settings["security"]["auth_file"]["value"] == str(tmp_path / "tokens.json")


def test_a_command_that_calls_a_router_finds_it_in_the_file(written: Any) -> None:
    result = run("workers", "--config", written('[client]\nrouter = ["127.0.0.1:1"]\n'))
    assert result.exit_code == 1
    assert "no router answers at 127.0.0.1:1" in result.output


def test_every_option_of_up_is_a_setting_that_file_and_environment_may_give() -> None:
    options = [option for option in main.commands["up"].params if isinstance(option, click.Option)]
    others = {max(option.opts, key=len) for option in options if not isinstance(option, Setting)}
    assert others == NOT_SETTINGS, "make it by `setting(...)`"
    assert all(option.variables for option in options if isinstance(option, Setting))


def test_no_two_settings_have_one_place_or_variable_and_each_section_is_told() -> None:
    settings = [option for option in main.commands["up"].params if isinstance(option, Setting)]
    assert len({setting.place for setting in settings}) == len(settings)
    variables = [variable for setting in settings for variable in setting.variables]
    assert len(set(variables)) == len(variables)
    assert {section for section, _ in known_settings(main)} == set(SECTIONS)


def test_every_setting_explains_itself() -> None:
    assert [place for place, setting in known_settings(main).items() if not setting.help] == []


def test_the_example_with_every_comment_sign_taken_off_is_a_file_of_the_defaults(written: Any) -> None:
    example = run("config", "example").stdout
    text = "\n".join(
        line[1:] if line.startswith("#") and not line.startswith("# ") else line
        for line in example.splitlines()
    )
    assert set(tomllib.loads(text)) == set(SECTIONS)
    from_file, by_default = shown("--config", written(text)), shown()
    for section, settings in by_default.items():
        for key, setting in settings.items():
            assert from_file[section][key]["value"] == setting["value"], (section, key)


def test_a_setting_without_a_default_is_one_comment_sign_away_from_a_value() -> None:
    lines = [line for line in run("config", "example").stdout.splitlines() if "not set by default" in line]
    assert {len(tomllib.loads(line.removeprefix("# "))) for line in lines} == {1}
    assert len(lines) > 5


def test_what_a_file_sets_reaches_routers_and_workers(written: Any) -> None:
    path = written(
        '[cluster]\nmetrics_names = "vllm"\nmodel_name = ["chat", "alias"]\n'
        '[engine]\nmodel = "demo"\npriority_ageing_seconds = 4\n'
        "[worker]\nlease_seconds = 7\nmax_waiting = 9\n"
        "[limits]\ndefault_timeout_seconds = 11\nno_worker_seconds = 0\nslow_reader_seconds = 13\nstall_seconds = 99\n"
        '[logs]\nlog_format = "json"\nlog_level = "debug"\n'
    )
    cluster = state.ClusterState(cluster="trial", model="demo", secret="s")
    spec = spec_of(cluster, parsed("--config", path), Shape(num_workers=1, num_cpus=1.0, num_gpus=0.0))
    worker, router = spec.worker, spec.router
    assert (worker.lease_seconds, worker.max_waiting, worker.stall_seconds) == (7.0, 9, 99.0)
    assert (router.default_timeout_seconds, router.no_worker_seconds, router.slow_reader_seconds) == (
        11.0,
        0.0,
        13.0,
    )
    assert (router.priority_ageing_seconds, worker.engine.priority_ageing_seconds) == (4.0, 4.0)
    assert (worker.metrics_names, router.metrics_names, worker.model_name) == ("vllm", "vllm", "chat")
    assert worker.log == router.log
    assert (worker.log.level, worker.log.format) == ("debug", "json")


def test_without_settings_routers_and_workers_have_their_own_defaults() -> None:
    cluster = state.ClusterState(cluster="default", model="demo", secret="s")
    spec = spec_of(cluster, parsed("--model", "demo"), Shape(num_workers=1, num_cpus=1.0, num_gpus=0.0))
    model = spec.worker.engine.model
    # The supervisor names the workers, so that no record in Redis does.
    assert spec.router == RouterConfig(
        model=model, model_names=("demo",), cluster_secret="s", discovers_workers=False
    )
    assert spec.worker == WorkerConfig(
        engine=EngineConfig(model=model), cluster_secret="s", model_name="demo"
    )


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--default-timeout-seconds", "0", "default_timeout_seconds must be above 0, not 0"),
        ("--slow-reader-seconds", "nan", "slow_reader_seconds must be above 0, not nan"),
        ("--no-worker-seconds", "-1", "no_worker_seconds must not be negative, not -1"),
        ("--lease-seconds", "inf", "lease_seconds must be finite and above 0, not inf"),
        ("--max-waiting", "0", "max_waiting must be at least 1, not 0"),
    ],
)
def test_a_bad_value_is_named_before_anything_starts(flag: str, value: str, told: str) -> None:
    result = run("up", "--model", "demo", flag, value)
    assert result.exit_code == 2
    assert told in result.output
    assert state.known_clusters() == []


def test_the_reference_in_the_documents_is_what_the_commands_say() -> None:
    path = Path(__file__).parents[3] / "docs" / "cli.md"
    document = path.read_text(encoding="utf-8")
    assert document == cli_reference.rewritten(document), "python -m tools.cli_reference docs/cli.md"
