"""The command line without a cluster: what it computes, what it refuses, and what it must never show."""

import http.server
import json
import re
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.lifecycle import doctor
from blockyard.deploy.lifecycle.cluster_spec import spec_of
from blockyard.deploy.lifecycle.shape import Shape, cpus_per_rank
from blockyard.deploy.machine import state
from blockyard.deploy.machine.processes import ProcessIdentity, identify
from blockyard.deploy.settings import size
from blockyard.deploy.settings.config_options import engine_config
from blockyard.deploy.settings.options import model_path
from blockyard.deploy.settings.setting import GROUPS, TESTS, taken
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.proto.runtime.settings import parse_bytes, setting_fields
from blockyard.router.config import RouterConfig, RouterLimits
from blockyard.router.placement.config import PlacementConfig
from blockyard.worker.config import EngineConfig
from click.testing import CliRunner, Result

SECRET = "a-secret-that-nobody-may-see"
ONE_WORKER = Shape(num_workers=1, num_cpus=1.0, num_gpus=0.0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "home"
    monkeypatch.setenv(state.HOME_VARIABLE, str(directory))
    for variable in ("BLOCKYARD_REDIS_URL", "BLOCKYARD_ROUTER", "BLOCKYARD_CLUSTER"):
        monkeypatch.delenv(variable, raising=False)
    return directory


@pytest.fixture
def large_model(tmp_path: Path) -> Path:
    """The config of a model of 32 layers, 8 kv heads of 128, in fp16; `size` needs no weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float16",
    }
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def cluster_state(**changes: object) -> state.ClusterState:
    values: dict[str, object] = {
        "cluster": "trial",
        "model": "demo",
        "secret": SECRET,
        "redis_url": f"redis://:{SECRET}@127.0.0.1:1/0",
        "routers": ("127.0.0.1:1",),
        "head": state.HeadState(session=7, processes=(ProcessIdentity(pid=7, start_ticks=1),)),
        "redis": state.RedisState(
            process=ProcessIdentity(pid=8, start_ticks=2), port=1, log_path="redis.log"
        ),
    }
    return state.ClusterState(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "has_bfloat16", "dtype", "why", "blocks"),
    [
        ("cpu", False, "float32", "this CPU has no bfloat16 instructions", 384),
        ("cpu", True, "bfloat16", "the checkpoint's, and this CPU has instructions for it", 768),
        ("cuda", False, "bfloat16", "the checkpoint's", 768),
    ],
)
def test_size_counts_in_what_the_device_computes_in_and_says_why(
    device: str, has_bfloat16: bool, dtype: str, why: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size, "cpu_has_bfloat16", lambda: has_bfloat16)
    asked = ("size", "demo", "--memory", "18MiB", "--device", device)
    sized = json.loads(run(*asked, "--output", "json").stdout)
    assert (sized["dtype"], sized["dtype_why"], sized["blocks"]) == (dtype, why, blocks)
    assert f"{dtype}: {why}" in run(*asked).stdout


def test_doctor_says_what_auto_means_on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bfloat16, told in (
        (True, "bfloat16: the checkpoint's"),
        (False, "float32: this CPU has no bfloat16"),
    ):
        monkeypatch.setattr(doctor, "cpu_has_bfloat16", lambda has=has_bfloat16: has)
        (finding,) = (found for found in doctor.examine(None, None) if found.subject == "data type")
        assert told in finding.detail


def test_size_counts_two_mebibytes_a_block_for_a_large_model(large_model: Path) -> None:
    result = run("size", str(large_model), "--memory", "60GB", "--output", "json")
    assert result.exit_code == 0, result.output
    sized = json.loads(result.stdout)
    print(f"bytes a block: {sized['bytes_per_block']:,}; blocks in 60 GB: {sized['blocks']:,}")
    assert sized["bytes_per_block"] == 2_097_152
    assert sized["blocks"] == 60 * 10**9 // 2_097_152
    assert sized["tokens"] == 16 * sized["blocks"]
    assert sized["max_concurrency"] == round(sized["blocks"] / 512, 2)


def test_size_adds_up_what_a_worker_on_a_cpu_takes_and_says_what_this_machine_has_left() -> None:
    asked = ("size", "demo", "--memory", "18MiB", "--device", "cpu")
    sized = json.loads(run(*asked, "--output", "json").stdout)
    parts = sized["weights_bytes"], sized["kv_bytes"], sized["process_bytes"]
    assert (sum(parts), min(parts) > 0) == (sized["total_bytes"], True)
    assert sized["memory_bytes"] == 1024 * meminfo_kib("MemTotal")
    assert sized["left_bytes"] == sized["memory_bytes"] - sized["total_bytes"]
    told = run(*asked, "--total-memory", "1GiB", "--dtype", "float32").stdout
    assert re.search(r"^total +392\.2 MiB *$", told, re.MULTILINE)
    assert re.search(r"^left +631\.8 MiB of 1\.0 GiB *$", told, re.MULTILINE)


def test_size_of_several_models_says_what_a_worker_of_each_leaves_of_the_machine_together() -> None:
    asked = ("size", "demo", "--model", "demo", "--memory", "18MiB", "--device", "cpu", "--dtype", "float32")
    both = json.loads(run(*asked, "--total-memory", "1GiB", "--output", "json").stdout)
    first, second = both["models"]
    assert first == second
    assert both["total_bytes"] == 2 * first["total_bytes"]
    assert both["left_bytes"] == 2**30 - both["total_bytes"]
    told = run(*asked, "--total-memory", "1GiB").stdout
    assert "a worker of each takes 784.4 MiB, left: 239.6 MiB of 1.0 GiB" in told
    on_gpus = json.loads(run("size", "demo", "--model", "demo", "--output", "json").stdout)
    assert on_gpus["left_bytes"] is None, "each has a GPU of its own"


def test_size_counts_adapter_slots_of_each_model_and_the_floats_of_deterministic_mode() -> None:
    asked = ("size", "demo", "--memory", "18MiB", "--device", "cpu", "--output", "json")
    plain = json.loads(run(*asked, "--deterministic").stdout)
    assert plain["dtype"] == "float32"
    one, four = (
        json.loads(run(*asked, "--deterministic", "--max-loras", str(number)).stdout) for number in (1, 4)
    )
    assert four["slots_bytes"] == 4 * one["slots_bytes"] > 0
    assert four["total_bytes"] - plain["total_bytes"] == four["slots_bytes"]
    wide = json.loads(run(*asked, "--deterministic", "--max-loras", "1", "--max-lora-rank", "32").stdout)
    assert wide["slots_bytes"] == 2 * one["slots_bytes"]
    several = json.loads(run(*asked, "--max-loras", "4", "--model", "demo").stdout)
    first, second = (model["slots_bytes"] for model in several["models"])
    assert first == second > 0
    refused = run(*asked, "--deterministic", "--dtype", "bfloat16")
    assert (refused.exit_code, "float32 only" in refused.output) == (1, True)


def meminfo_kib(name: str) -> int:
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


def test_size_says_by_how_much_a_worker_is_too_large_for_the_memory() -> None:
    asked = ("size", "demo", "--memory", "2GiB", "--device", "cpu", "--total-memory", "1GiB")
    assert re.search(
        r"^left +none: 1\.\d GiB more than the 1\.0 GiB that there are *$", run(*asked).stdout, re.MULTILINE
    )
    assert json.loads(run(*asked, "--output", "json").stdout)["left_bytes"] < -(2**30)


def test_size_of_a_gpu_worker_counts_no_process_and_knows_what_is_left_where_it_is_told(
    large_model: Path,
) -> None:
    sized = json.loads(run("size", str(large_model), "--output", "json").stdout)
    assert (sized["process_bytes"], sized["memory_bytes"], sized["left_bytes"]) == (None, None, None)
    given = json.loads(run("size", str(large_model), "--total-memory", "80GB", "--output", "json").stdout)
    assert given["left_bytes"] == 80 * 10**9 - sized["weights_bytes"] - sized["kv_bytes"]
    assert "left" not in run("size", str(large_model)).stdout


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_size_counts_the_scales_of_a_cache_in_8_bits(large_model: Path, kv_dtype: str) -> None:
    options = ("--memory", "60GB", "--kv-cache-dtype", kv_dtype, "--output", "json")
    sized = json.loads(run("size", str(large_model), *options).stdout)
    assert sized["kv_dtype"] == kv_dtype
    assert sized["bytes_per_block"] == 2_097_152 * (128 + 4) // 256


def test_size_names_the_context_that_a_model_does_not_have(large_model: Path) -> None:
    result = run("size", str(large_model), "--max-model-len", "9000")
    assert result.exit_code == 1
    assert "9000" in result.output
    assert "8192" in result.output


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("17", 17), ("60GB", 60 * 10**9), ("1.5 GiB", 3 * 2**29), ("2mib", 2**21)]
)
def test_sizes_are_decimal_or_binary_as_their_unit_says(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 PB", "nan"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a size is a number"):
        parse_bytes(text)


def test_doctor_passes_this_machine_with_the_demo_model() -> None:
    result = run("doctor", "--model", "demo")
    assert result.exit_code == 0, result.output
    assert not any(line.startswith("fail") for line in result.stdout.splitlines())
    assert "LlamaForCausalLM" in result.stdout


def test_doctor_fails_on_a_model_folder_without_a_model(tmp_path: Path) -> None:
    result = run("doctor", "--model", str(tmp_path))
    assert result.exit_code == 1
    assert any(line.startswith("fail model") for line in result.stdout.splitlines())


def test_doctor_fails_on_a_redis_that_does_not_answer_and_keeps_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setenv("BLOCKYARD_REDIS_URL", f"redis://:{SECRET}@127.0.0.1:{port}/0")
    result = run("doctor")
    assert result.exit_code == 1
    assert any(line.startswith("fail redis") for line in result.stdout.splitlines())
    assert SECRET not in result.output


@pytest.mark.parametrize("command", ["down", "status", "workers", "blocks", "chat"])
def test_a_cluster_that_is_not_known_is_named(command: str) -> None:
    result = run(command, "--cluster", "nowhere")
    assert result.exit_code == 1
    assert result.output.startswith("Error: no cluster 'nowhere' is known here")


@pytest.mark.parametrize(
    ("command", "ways"),
    [
        (("down",), ""),
        (("open",), ": `blockyard up --model MODEL --cluster nowhere` starts it"),
        (("status",), ": `blockyard up --model MODEL --cluster nowhere` starts it"),
        (
            ("workers",),
            ": `blockyard up --model MODEL --cluster nowhere` starts it, or name a router with --router",
        ),
    ],
)
def test_who_names_no_known_cluster_is_told_those_that_are_and_what_this_command_takes(
    command: tuple[str, ...], ways: str
) -> None:
    told = "Error: no cluster 'nowhere' is known here"
    assert run(*command, "--cluster", "nowhere").output.strip() == f"{told}, and no other{ways}"
    for name in ("one", "two"):
        state.save(state.ClusterState(cluster=name, model="m", secret="s"))
    assert run(*command, "--cluster", "nowhere").output.strip() == f"{told}, only one, two (--cluster){ways}"


def test_the_default_cluster_needs_no_name() -> None:
    assert run("status").output.strip().endswith("`blockyard up --model MODEL` starts it")


def test_a_router_that_does_not_answer_is_an_error_and_no_traceback() -> None:
    result = run("generate", "def", "--router", "127.0.0.1:1", "--timeout", "0.5")
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")


@pytest.mark.parametrize(
    ("address", "code", "told"),
    [
        ("http://127.0.0.1:50051/", 2, "without http://: did you mean 127.0.0.1:50051?"),
        ("127.0.0.1", 2, "'127.0.0.1' has no port"),
        ("127.0.0.1:1", 1, "no router answers at 127.0.0.1:1: connection refused"),
        ("host.invalid:5", 1, "no router answers at host.invalid:5: no host of this name is known"),
    ],
)
def test_a_router_that_cannot_be_reached_is_told_with_the_cause(address: str, code: int, told: str) -> None:
    result = run("workers", "--router", address)
    assert result.exit_code == code
    assert told in result.output


def test_a_port_that_speaks_http_is_told_to_be_no_routers() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = run("workers", "--router", f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert result.exit_code == 1
    assert "speaks no gRPC: it is another service's port" in result.output


def test_up_gives_up_at_once_where_no_ray_answers_and_leaves_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "redis was started"
    server = tmp_path / "bin" / "redis-server"
    server.parent.mkdir()
    server.write_text(f"#!/bin/sh\necho > '{started}'\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(server.parent), prepend=":")
    result = run("up", "--model", "demo", "--address", "127.0.0.1:1")
    assert result.exit_code == 1
    assert result.output.splitlines() == ["Error: no Ray answers at 127.0.0.1:1: Connection refused"]
    assert not started.exists()
    assert not home.exists()


def test_down_says_that_a_joined_ray_is_gone_and_forgets_it_on_request() -> None:
    state.save(cluster_state(ray_address="127.0.0.1:1", head=None, redis=None))
    refused = run("down", "--cluster", "trial")
    assert refused.exit_code == 1
    assert "no Ray answers at 127.0.0.1:1" in refused.output
    assert run("down", "--cluster", "trial", "--forget").exit_code == 0
    assert state.known_clusters() == []


def test_the_options_of_up_are_the_engines_settings_with_their_defaults() -> None:
    parameters = {parameter.name: parameter for parameter in main.commands["up"].params}
    names = [name for name in EngineConfig.__dataclass_fields__ if name != "model"]
    values = {name: parameters[name].default for name in names}
    assert engine_config({"model": "demo", **values}) == EngineConfig(model=model_path("demo"))


def test_every_setting_of_the_engine_is_explained() -> None:
    parameters = {parameter.name: parameter for parameter in main.commands["up"].params}
    names = EngineConfig.__dataclass_fields__.keys()
    assert [member.name for member in setting_fields(EngineConfig)] == list(names)
    told = {name: getattr(parameters[name], "help", None) for name in names if name != "model"}
    assert told == {
        member.name: member.description.help
        for member in setting_fields(EngineConfig)
        if member.name != "model"
    }
    assert all(told.values())


@pytest.mark.parametrize("command", ["serve", "up"])
def test_help_lists_the_options_in_groups_within_80_columns_and_hides_those_of_tests(command: str) -> None:
    lines = CliRunner().invoke(main, [command, "--help"], terminal_width=80).stdout.splitlines()
    headings = [line.removesuffix(":") for line in lines if re.fullmatch(r"[A-Z][\w ]+:", line)]
    assert headings == [group for group in GROUPS if group != TESTS]
    assert max(map(len, lines)) <= 80
    told = "\n".join(lines)
    hidden = [option for option in main.commands[command].params if option.name not in ("given_model",)]
    assert [option.name for option in hidden if option.opts[-1] not in told] == [
        "simulated_prefill_tokens_per_second",
        "simulated_step_seconds",
        "simulated_fault",
    ]


def test_limits_of_a_request_reach_the_routers_and_are_by_default_their_own() -> None:
    engine = EngineConfig(model="demo")
    limited = UpOptions(engine=engine, limits=RouterLimits(max_outputs=3, max_beam_width=5))
    routers = [
        spec_of(cluster_state(), options, ONE_WORKER).router
        for options in (limited, UpOptions(engine=engine))
    ]
    own = RouterConfig(model="demo")
    assert [(router.max_outputs, router.max_beam_width) for router in routers] == [
        (3, 5),
        (own.max_outputs, own.max_beam_width),
    ]


def test_what_routers_admit_is_set_by_options_of_up_and_is_by_default_their_own() -> None:
    parameters = ("--max-requests", "5", "--max-tokens-admitted", "600", "--max-queue-seconds", "7.5")
    weights = ("--tenant-weight", "research=2", "--tenant-weight", "batch=0.5")
    own = RouterConfig(model="demo")
    for arguments, expected in (
        ((*parameters, *weights), (5, 600, 7.5, {"research": 2.0, "batch": 0.5})),
        ((), (own.max_requests, own.max_tokens_admitted, own.max_queue_seconds, own.tenant_weights)),
    ):
        values = main.commands["up"].make_context("up", ["--model", "demo", *arguments]).params
        options = UpOptions(engine=EngineConfig(model="demo"), limits=taken(RouterLimits, values))
        router = spec_of(cluster_state(), options, ONE_WORKER).router
        assert (
            router.max_requests,
            router.max_tokens_admitted,
            router.max_queue_seconds,
            router.tenant_weights,
        ) == expected


def test_policy_and_placement_settings_reach_the_routers() -> None:
    arguments = ["--model", "demo", "--policy", "dynamo", "--placement", "dynamo_temperature=0.5"]
    values = main.commands["up"].make_context("up", arguments).params
    chosen = {name: values[name] for name in ("policy", "placement")}
    options = UpOptions(engine=EngineConfig(model="demo"), **chosen)
    router = spec_of(cluster_state(), options, ONE_WORKER).router
    assert (router.policy, router.placement) == ("dynamo", PlacementConfig(dynamo_temperature=0.5))


def test_origins_of_web_pages_reach_the_routers_and_are_checked_before_anything_starts() -> None:
    origins = ("https://chat.example", "http://127.0.0.1:3000")
    arguments = ["--model", "demo", *(word for origin in origins for word in ("--cors-origin", origin))]
    values = main.commands["up"].make_context("up", arguments).params
    options = UpOptions(engine=EngineConfig(model="demo"), cors_origins=values["cors_origins"])
    assert spec_of(cluster_state(), options, ONE_WORKER).router.cors_origins == origins
    result = run("up", "--model", "demo", "--cors-origin", "*")
    assert result.exit_code == 2
    assert "an origin is like" in " ".join(result.output.split())


def test_a_placement_setting_that_does_not_exist_is_named_before_anything_starts() -> None:
    result = run("up", "--model", "demo", "--placement", "near_equal=1")
    assert result.exit_code == 2
    assert "'near_equal=1' sets none of" in result.output
    assert state.known_clusters() == []


def test_a_folder_for_pictures_is_refused_where_none_are_drawn(tmp_path: Path) -> None:
    result = run("figures", "--folder", str(tmp_path / "pictures"))
    assert result.exit_code == 2
    assert "--output png" in result.output
    assert not (tmp_path / "pictures").exists()


def test_a_state_file_is_its_owners_alone_and_reads_back_the_same(home: Path) -> None:
    state.save(cluster_state())
    path = state.state_path("trial")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert state.load("trial") == cluster_state()
    assert [entry.name for entry in home.iterdir()] == ["trial.json"]


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_explains_itself(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output
    assert "Error" not in result.output


def test_a_cluster_that_another_up_is_making_counts_as_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        making = cluster_state(starter=identify(other.pid), head=None, redis=None, ray_address=None)
        assert making.anything_alive()
        other.kill()
        other.wait(10)
        assert not making.anything_alive()


def test_a_state_shows_no_secret() -> None:
    assert SECRET not in repr(cluster_state())


def test_a_state_whose_processes_are_gone_is_not_alive_but_a_joined_cluster_is() -> None:
    assert not cluster_state(ray_address="10.0.0.1:6379").anything_alive()
    assert cluster_state(ray_address="10.0.0.1:6379", head=None).anything_alive()


@pytest.mark.parametrize(
    ("node_cpus", "num_workers", "share"),
    [([2], 1, 2), ([2], 2, 1), ([8], 3, 2), ([2], 8, 0.25), ([3, 3], 3, 1), ([2, 2], 1, 2), ([1, 1], 3, 0.5)],
)
def test_workers_get_the_most_cpus_with_which_all_fit_on_the_nodes(
    node_cpus: list[float], num_workers: int, share: float
) -> None:
    assert cpus_per_rank(node_cpus, num_workers) == share
    assert sum(int(cpus // share) for cpus in node_cpus) >= num_workers


@pytest.mark.parametrize("settings", [{"num_workers": 0}, {"num_routers": 0}, {"cluster": "a b"}])
def test_a_cluster_without_a_worker_a_router_or_a_name_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cluster"):
        UpOptions(engine=EngineConfig(model="demo"), **settings)  # type: ignore[arg-type]
