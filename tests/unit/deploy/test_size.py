"""`size` and `doctor` without a cluster: what a worker takes, and what this machine has."""

import json
import re
import socket
from pathlib import Path

import pytest
from blockyard.deploy.lifecycle import doctor
from blockyard.deploy.settings import size

from .test_cli import SECRET, run
from .test_cli import home as home


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
