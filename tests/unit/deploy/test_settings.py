"""Settings by flag, environment and file: which one wins, what is refused by name, what is never shown, what reaches
routers and workers, and what `export` gives back."""

import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.settings.config_file import known_settings
from blockyard.deploy.settings.effective import SECTIONS
from blockyard.deploy.settings.exported import AddedAdapter, AddedModel, additions_of, as_config
from blockyard.deploy.settings.from_vllm import ALIASES, HOLD_ALWAYS, ONLY_ONE, REFUSED, VALUES, ours
from blockyard.deploy.settings.options import further_model
from blockyard.deploy.settings.setting import Setting, masked
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.deploy.supervision.desired_state import DesiredState, decoded, encoded
from blockyard.deploy.supervision.model_plans import ModelPlan
from blockyard.router.config import RouterConfig, ServedModel
from blockyard.router.placement.config import PlacementConfig
from blockyard.worker.config import EngineConfig, WorkerConfig
from hypothesis import given
from hypothesis import strategies as st

from tools import cli_reference

from .rig import ROOT, document, options_of, refusal, run, spec

PASSWORD = "nobody-may-read-this"
CLI_DOCUMENT = ROOT / "docs" / "cli.md"


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "cluster.toml").write_text(text, encoding="utf-8")
        return str(tmp_path / "cluster.toml")

    return write


def shown(*arguments: str) -> dict[str, dict[str, dict[str, Any]]]:
    settings: dict[str, dict[str, dict[str, Any]]] = document("config show", *arguments)["settings"]
    return settings


def test_a_flag_is_heard_before_the_environment_that_before_the_file_and_that_before_the_default(
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
    path = written("[engine]\ndeterministic = true\nverify_host_memory = true\n")
    monkeypatch.setenv("BLOCKYARD_CONFIG", path)
    monkeypatch.setenv("BLOCKYARD_UP_DETERMINISTIC", "0")
    engine = shown()["engine"]
    assert (engine["deterministic"]["value"], engine["verify_host_memory"]["value"]) == (False, True)
    monkeypatch.setenv("BLOCKYARD_UP_MAX_REQUEST", "1")
    told = "BLOCKYARD_UP_MAX_REQUEST, which sets nothing: did you mean BLOCKYARD_UP_MAX_REQUESTS?"
    assert told in refusal("config show")


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
        (f'[redis]\nredis_url = "redis://u:{PASSWORD}@h:1/0"', "redis_url in [redis] holds a password"),
    ],
)
def test_what_a_file_gets_wrong_is_refused_by_name(written: Any, text: str, told: str) -> None:
    path = written(text)
    refused = refusal("up --model demo --config", path)
    assert told in refused
    assert path in refused
    assert PASSWORD not in refused
    assert PASSWORD not in text or "BLOCKYARD_REDIS_URL" in refused


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_password_from_elsewhere_is_masked(monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    monkeypatch.setenv("BLOCKYARD_REDIS_URL", f"redis://worker:{PASSWORD}@redis:6379/0?password={PASSWORD}")
    result = run(f"config show --output {output}")
    assert (result.exit_code, "redis://worker:***@redis:6379/0" in result.output) == (0, True)
    assert PASSWORD not in result.output


@pytest.mark.parametrize(
    ("url", "is_shown"),
    [
        ("redis://h:1/0", True),
        ("unix:///run/redis.sock", True),
        ("rediss://worker@h:6380/0?ssl_ca_certs=ca.pem&ssl_certfile=worker.pem&ssl_keyfile=worker.key", True),
        (None, True),
        (f"redis://h:1/0?password={PASSWORD}", False),
        (f"rediss://h:1/0?ssl_ca_certs=ca.pem&ssl_password={PASSWORD}", False),
        (f"rediss://h:1/0?{PASSWORD}", False),
        (f"redis://:{PASSWORD}@[::1", False),
        (f"u:{PASSWORD}@h", False),
    ],
)
def test_whatever_shape_a_url_has_its_password_is_not_shown_and_all_else_is(
    url: str | None, is_shown: bool
) -> None:
    assert masked(url) == url if is_shown else PASSWORD not in str(masked(url))


def test_what_holds_is_shown_in_lines_that_a_terminal_has_room_for() -> None:
    lines = run("config show --placement near_equal_ms=2").stdout.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    rows = [line.split() for line in lines]
    assert ["placement.prices.near_equal_ms", "2.0", "flag"] in rows
    assert ["placement.prices.loaded_ms", "250.0", "default"] in rows, "a price that nobody has set"


def test_files_are_named_from_the_files_own_folder_and_a_url_without_a_password_may_stand_there(
    written: Any, tmp_path: Path
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "chat.jinja").write_text("{{ messages }}", encoding="utf-8")
    url = "rediss://h:6380/0?ssl_ca_certs=/etc/ca.pem"
    path = written(
        '[engine]\nmodel = "models/mine"\n[security]\nauth_file = "tokens.json"\n'
        f'[redis]\nredis_url = "{url}"\n'
        '[cluster]\nchat_template = "chat.jinja"\ndownload_dir = "models"\n'
    )
    settings = shown("--config", path)
    assert settings["engine"]["model"]["value"] == str(tmp_path / "models" / "mine")
    assert settings["security"]["auth_file"]["value"] == str(tmp_path / "tokens.json")
    assert settings["redis"]["redis_url"]["value"] == url
    options = options_of(f"up --config {path}")
    assert (options.chat_template, options.download_dir) == ("{{ messages }}", str(tmp_path / "models"))


def test_a_command_that_calls_a_router_finds_it_in_the_file(written: Any) -> None:
    path = written('[client]\nrouter = ["127.0.0.1:1"]\n')
    assert "no router answers at 127.0.0.1:1" in refusal(f"workers --config {path}", code=1)


def test_every_option_of_up_is_a_setting_of_its_own_that_file_and_environment_may_give() -> None:
    options = [option for option in main.commands["up"].params if isinstance(option, click.Option)]
    settings = [option for option in options if isinstance(option, Setting)]
    others = {max(option.opts, key=len) for option in options if not isinstance(option, Setting)}
    assert others == {"--config", "--dry-run", "--output"}, "make it by `setting(...)`"
    assert all(setting.variables for setting in settings)
    assert len({setting.place for setting in settings}) == len(settings)
    variables = [variable for setting in settings for variable in setting.variables]
    assert len(set(variables)) == len(variables)
    assert {section for section, _ in known_settings(main)} == set(SECTIONS)
    assert [place for place, setting in known_settings(main).items() if not setting.help] == []


def test_the_example_with_every_comment_sign_taken_off_is_a_file_of_the_defaults(written: Any) -> None:
    lines = run("config example").stdout.splitlines()
    is_setting = [line.startswith("#") and not line.startswith("# ") for line in lines]
    text = "\n".join(line[is_one:] for line, is_one in zip(lines, is_setting, strict=True))
    assert set(tomllib.loads(text)) == set(SECTIONS)
    from_file, by_default = shown("--config", written(text)), shown()
    for section, settings in by_default.items():
        for key, setting in settings.items():
            assert from_file[section][key]["value"] == setting["value"], (section, key)
    without_default = [line for line in lines if "not set by default" in line]
    assert {len(tomllib.loads(line.removeprefix("# "))) for line in without_default} == {1}
    assert len(without_default) > 5


def test_what_a_file_or_a_flag_sets_reaches_routers_and_workers(written: Any) -> None:
    path = written(
        '[cluster]\nmetrics_names = "vllm"\nmodel_name = ["chat", "alias"]\n'
        '[engine]\nmodel = "demo"\npriority_ageing_seconds = 4\n'
        "[worker]\nlease_seconds = 7\nmax_waiting = 9\n"
        "[limits]\ndefault_timeout_seconds = 11\nno_worker_seconds = 0\nslow_reader_seconds = 13\nstall_seconds = 99\n"
        '[logs]\nlog_format = "json"\nlog_level = "debug"\n'
    )
    made = spec(
        options_of(
            f"up --config {path} --max-requests 5 --max-tokens-admitted 600 --max-queue-seconds 7.5 "
            "--tenant-weight research=2 --tenant-weight batch=0.5 --max-outputs 3 --max-beam-width 5 "
            "--policy dynamo --placement dynamo_temperature=0.5 "
            "--cors-origin https://chat.example --cors-origin http://127.0.0.1:3000"
        )
    )
    worker, router = made.worker, made.router
    assert router == replace(
        router,
        max_requests=5,
        max_tokens_admitted=600,
        max_queue_seconds=7.5,
        tenant_weights={"research": 2.0, "batch": 0.5},
        max_outputs=3,
        max_beam_width=5,
        cors_origins=("https://chat.example", "http://127.0.0.1:3000"),
        policy="dynamo",
        placement=PlacementConfig(dynamo_temperature=0.5),
        default_timeout_seconds=11.0,
        no_worker_seconds=0.0,
        slow_reader_seconds=13.0,
        priority_ageing_seconds=4.0,
        metrics_names="vllm",
        log=worker.log,
    )
    assert (worker.lease_seconds, worker.max_waiting, worker.stall_seconds) == (7.0, 9, 99.0)
    assert worker.engine.priority_ageing_seconds == 4.0
    assert (worker.metrics_names, worker.model_name) == ("vllm", "chat")
    assert (worker.log.level, worker.log.format) == ("debug", "json")


def test_without_settings_routers_and_workers_have_their_own_defaults() -> None:
    made = spec(options_of("up --model demo"))
    model, secret = made.worker.engine.model, made.worker.cluster_secret
    # The supervisor names the workers, so that no record in Redis does.
    assert made.router == RouterConfig(
        model=model, model_names=("demo",), cluster_secret=secret, discovers_workers=False
    )
    assert made.worker == WorkerConfig(
        engine=EngineConfig(model=model), cluster_secret=secret, model_name="demo"
    )


def test_the_reference_in_the_documents_is_what_the_commands_say() -> None:
    text = CLI_DOCUMENT.read_text(encoding="utf-8")
    assert text == cli_reference.rewritten(text), "python -m tools.cli_reference docs/cli.md"


KNOWN = {*ALIASES, *ONLY_ONE, *REFUSED, *HOLD_ALWAYS, *(option for option, _ in VALUES)}
"""Options of `vllm serve`."""


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
    assert options_of(f"serve {vllms}") == options_of(f"serve {in_our_words}")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        *((form.format(option), why) for option, why in ONLY_ONE.items() for form in ("{} 2", "{}=2", "{}")),
        *((option, f"{option} is not taken: {why}") for option, why in REFUSED.items()),
        ("--api-key=by-a-secret", "--api-key"),
    ],
)
def test_an_option_that_would_mean_something_else_is_refused_with_the_reason_and_not_shown(
    arguments: str, why: str
) -> None:
    refused = refusal(f"serve demo {arguments}")
    assert why in refused
    assert "by-a-secret" not in refused


def test_each_name_of_vllms_stands_for_an_option_that_there_is_and_the_document_has_it() -> None:
    for command in ("serve", "up"):
        taken = {option for parameter in main.commands[command].params for option in parameter.opts}
        assert set(ALIASES.values()) | {option for option, _ in VALUES} <= taken
        assert not {*ALIASES, *ONLY_ONE, *REFUSED, *HOLD_ALWAYS} & taken
    assert options_of("up --model demo --served-model-name a b").served_names == ("a", "b")
    table = CLI_DOCUMENT.read_text(encoding="utf-8").partition("## Coming from vLLM")[2].partition("\n## ")[0]
    assert not {name for name in KNOWN if f"`{name}" not in table}


@given(st.lists(st.text().filter(lambda text: text.partition("=")[0].replace("_", "-") not in KNOWN)))
def test_what_vllm_has_no_name_for_is_passed_on(arguments: list[str]) -> None:
    for before, after in zip(arguments, ours(arguments), strict=True):
        is_same_option = before.startswith("--") and before.replace("_", "-") == after.replace("_", "-")
        assert before == after or is_same_option
    assert ours(["--", "--port", "-tp"]) == ["--", "--port", "-tp"], "what follows two dashes is no option"


GIVEN = (
    "up --model demo --device cpu --engine simulated --kv-cache-memory 18MiB --max-requests 77 --cluster mine "
    "--routers 2 --placement near_equal_ms=2 --tenant-weight alice=3 --log-format json --address 10.0.0.7:6379"
)
TEMPLATE = '{% for m in messages %}"{{ m }}"\n{% endfor %}\x7f \N{GRINNING FACE}'


def running(options: UpOptions, **changes: Any) -> DesiredState:
    """Return the desired state of a cluster of these options, as Ray's store has it."""
    addresses = (("router-0", "10.0.0.7:50051", "10.0.0.7:8000"), ("router-1", "10.0.0.7:50051", ""))
    handle = {**spec(options).handle, "cpus_per_worker": 0.5}
    desired = DesiredState(num_workers=3, addresses=addresses, handle=handle)
    return decoded(encoded(replace(desired, **changes)))


def plan_of(options: UpOptions, served: ServedModel, **own: Any) -> ModelPlan:
    engine = replace(options.engine, model=served.model, tokenizer=served.tokenizer, draft_model=None, **own)
    shares = {"num_cpus_per_worker": 0.25, "num_gpus_per_worker": 0.0}
    return ModelPlan(served=served, engine=engine, num_workers=2, **shares)


@pytest.fixture
def again(written: Any) -> Callable[[str], UpOptions]:
    """Read an exported file as `up --config` does."""
    return lambda exported: options_of(f"up --config {written(exported)}")


def test_exported_settings_numbers_and_ports_come_back(again: Callable[[str], UpOptions]) -> None:
    options = options_of(GIVEN)
    told = again(as_config(running(options), []))
    same = replace(options, num_workers=3, cpus_per_worker=0.5, router_port=50051, http_port=8000)
    apart = {"written": {}, "additions": type(options.additions)(), "movable_ports": frozenset()}
    assert replace(told, **apart) == replace(same, **apart)


def test_exported_models_and_adapters_of_now_come_back(again: Callable[[str], UpOptions]) -> None:
    options = options_of(f"{GIVEN} --further-model hub/second")
    other = {"names": ("other", "alias"), "tokenizer": "hub/tok", "chat_template": TEMPLATE}
    served = further_model("hub/other", **other)
    plans = (plan_of(options, options.served_models[1]), plan_of(options, served, max_num_seqs=7))
    adapters = [
        AddedAdapter(name="a", path="b/c"),
        AddedAdapter(name="d", path="e", model="other", tenant="t"),
    ]
    told = again(as_config(running(options, further_models=plans), adapters)).additions
    assert told.adapters == tuple(adapters)
    shares = {"workers": 2, "cpus_per_worker": 0.25}
    assert told.models == (
        AddedModel(model="hub/second", names=("hub/second", "second"), **shares),
        AddedModel(model="hub/other", **other, **shares, settings={"max_num_seqs": 7}),
    )
    document = {"models": [asdict(told.models[1]) | {"names": ["n"]}]}
    assert additions_of(document).models == (replace(told.models[1], names=("n",)),)


def test_an_exported_cluster_whose_first_model_was_removed_begins_with_the_next_one(
    again: Callable[[str], UpOptions],
) -> None:
    options = options_of(GIVEN)
    served = further_model("hub/other", names=("other",), tokenizer="hub/tok", chat_template=TEMPLATE)
    plans = (plan_of(options, served, max_num_seqs=7),)
    told = again(as_config(running(options, further_models=plans, serves_first=False), None))
    assert told.served_models == (replace(served, index=""),)
    assert told.engine == replace(options.engine, model="hub/other", tokenizer="hub/tok", max_num_seqs=7)
    assert (told.num_workers, told.cpus_per_worker, told.additions.models) == (2, 0.25, ())


def test_an_export_leaves_a_password_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKYARD_REDIS_URL", f"redis://user:{PASSWORD}@10.0.0.7:6379/0")
    exported = as_config(running(options_of(GIVEN)), None)
    assert PASSWORD not in exported
    assert "# redis_url is left out, because it holds a password" in exported
    assert "adapters are missing" in exported
    assert not tomllib.loads(exported).get("redis")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("models = 5", r"models must be tables, \[\[models\]\]"),
        ("[[models]]\nmodel = 'm'\nworker = 2", "has worker, which is no key there"),
        ("[[models]]\nworkers = 2", "lacks model"),
        ("[[models]]\nmodel = 'm'\nworkers = 0", "workers of .* cannot be 0"),
        ("[[models]]\nmodel = 'm'\nworkers = true", "workers of .* cannot be True"),
        ("[[models]]\nmodel = 'm'\nnames = 'x'", "must be a list of texts"),
        ("[[models]]\nmodel = 'm'\nsettings = {block_size = 16}", "block_size is no setting"),
        ("[[models]]\nmodel = 'm'\nsettings = {max_num_seqs = 'many'}", "must be int, not 'many'"),
        ("[[models]]\nmodel = 'm'\nsettings = {max_num_seqs = 0}", "max_num_seqs of"),
        ("[[adapters]]\nname = 'a'", "lacks path"),
        ("[[adapters]]\nname = 5\npath = 'p'", "name of .* cannot be 5"),
    ],
)
def test_a_wrong_model_or_adapter_in_the_file_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        additions_of(tomllib.loads(text))


def test_up_joins_the_ray_of_its_environment_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    for option, address in (("", "10.0.0.9:6379"), ("auto", "10.0.0.9:6379"), ("local", None)):
        line = f"up --model demo --address {option}" if option else "up --model demo"
        assert options_of(line).address == address
    assert options_of(GIVEN).address == "10.0.0.7:6379"
