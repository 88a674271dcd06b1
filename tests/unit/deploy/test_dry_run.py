"""`up --dry-run` shows the plan, starts nothing, and refuses what `up` itself refuses at once."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.lifecycle import preflight
from blockyard.deploy.lifecycle.preflight import (
    check_reachable,
    check_tokenizer,
    check_weights,
    crowding,
    dtype_here,
    pool_of,
)
from blockyard.deploy.lifecycle.serving import ClusterStartError
from blockyard.deploy.lifecycle.shape import room_on, shape_of, whole_workers
from blockyard.deploy.machine import state
from blockyard.deploy.machine.processes import identify
from blockyard.deploy.settings import size
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.router.config import ServedModel
from blockyard.worker.config import EngineConfig
from blockyard.worker.model.config import load_config
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

CHECKPOINT = Path(__file__).parents[3] / "deploy" / "demo_model" / "checkpoint"
UP = ("up", "--model", "demo", "--device", "cpu", "--kv-cache-memory", "18MiB")
CPUS = len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "home"
    monkeypatch.setenv(state.HOME_VARIABLE, str(directory))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for variable in ("BLOCKYARD_REDIS_URL", "BLOCKYARD_CLUSTER", "BLOCKYARD_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    return directory


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*UP, *arguments])


def plan(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = run("--dry-run", "--output", "json", *arguments)
    return result.exit_code, json.loads(result.stdout)


def failures(document: dict[str, Any]) -> dict[str, str]:
    return {found["subject"]: found["detail"] for found in document["findings"] if found["verdict"] == "fail"}


def test_it_says_what_would_be_placed_and_starts_nothing(home: Path) -> None:
    code, document = plan("--workers", "2", "--router-port", "0", "--dtype", "float32")
    assert code == 0, failures(document)
    assert document["would_work"]
    assert document["nodes"] == [{"cpus": float(CPUS), "workers": 2}]
    assert (document["blocks_of_worker"], document["tokens_of_worker"]) == (384, 6144)
    assert document["dtype"] == "float32: as --dtype says"
    assert document["configuration"]["settings"]["engine"]["model"] == {"value": "demo", "source": "flag"}
    assert not home.exists()


def test_it_says_where_routers_and_their_gateways_would_serve() -> None:
    assert plan()[1]["routers"] == ["127.0.0.1, a free port"]
    assert plan("--http-port", "0")[1]["routers"] == ["127.0.0.1, a free port, HTTP on a free port"]
    first, second = plan(
        "--routers", "2", "--separate-ports", "--router-port", "50051", "--http-port", "8000"
    )[1]["routers"]
    assert first == "127.0.0.1, port 50051, HTTP on port 8000"
    assert second == "127.0.0.1, port 50052, HTTP on port 8001"


def test_for_people_it_shows_settings_checks_and_a_verdict() -> None:
    result = run("--dry-run", "--workers", "2", "--placement", "near_equal_ms=2", "--dtype", "float32")
    assert result.exit_code == 0
    assert "placement.prices.near_equal_ms" in result.stdout
    assert "placement.prices.loaded_ms" not in result.stdout, "which is what it is by default"
    for told in (
        "384 blocks of 16",
        "data type  float32: as --dtype says",
        "cluster.workers",
        "ok   python",
        "it would start",
    ):
        assert told in result.stdout


def test_blocks_of_a_draft_model_come_out_of_the_same_memory() -> None:
    config = load_config(CHECKPOINT)
    engine = EngineConfig(model=str(CHECKPOINT), device="cpu", dtype="float32", max_num_seqs=16)
    alone = pool_of(UpOptions(engine=engine), config, has_gpu=False)
    beside = pool_of(UpOptions(engine=replace(engine, draft_model=str(CHECKPOINT))), config, has_gpu=False)
    assert alone is not None
    assert beside is not None
    # A spare block for each sequence.
    assert beside.num_blocks == (alone.num_blocks - 16) // 2


def test_what_the_cpu_of_another_machine_decides_is_not_said() -> None:
    engine = EngineConfig(model=str(CHECKPOINT), device="cpu")
    config = load_config(CHECKPOINT)
    elsewhere = UpOptions(engine=engine, address="10.0.0.1:6379", redis_url="redis://10.0.0.1:6379")
    assert dtype_here(elsewhere, config, has_gpu=False) is None
    assert pool_of(elsewhere, config, has_gpu=False) is None
    named = replace(elsewhere, engine=replace(engine, dtype="bfloat16"))
    assert str(dtype_here(named, config, has_gpu=False)) == "bfloat16: as --dtype says"
    assert str(dtype_here(elsewhere, config, has_gpu=True)) == "bfloat16: the checkpoint's"
    assert dtype_here(replace(elsewhere, address=None), config, has_gpu=False) is not None


@pytest.mark.parametrize(
    ("arguments", "subject", "told"),
    [
        (("--cpus-per-worker", "999"), "workers", "no room for 1 worker of 999 CPUs each: the nodes have"),
        (("--device", "cuda"), "workers", "--device cuda, but the Ray cluster has no GPU"),
        (("--kv-cache-memory", "1MiB"), "model", "fewer than max_model_len"),
        (("--max-model-len", "999999"), "model", "max_model_len 999999 is beyond the model's"),
        (("--auth-file", "/nowhere/tokens.json"), "security", "/nowhere/tokens.json"),
        (
            ("--max-loras", "1", "--adapter-dir", "/nowhere"),
            "adapters",
            "adapter_dir '/nowhere' is no folder",
        ),
    ],
)
def test_what_could_not_work_is_found_dry_and_refused_at_once_by_up(
    arguments: tuple[str, ...], subject: str, told: str, home: Path
) -> None:
    code, document = plan(*arguments)
    assert code == 1
    assert told in failures(document)[subject]
    refused = run(*arguments)
    assert refused.exit_code == 1
    assert told in refused.output
    assert not home.exists()


def test_it_warns_in_the_words_of_up_where_workers_share_cpus() -> None:
    def warnings(num_workers: int) -> list[str]:
        code, document = plan("--workers", str(num_workers))
        assert code == 0, failures(document)
        found = document["findings"]
        return [each["detail"] for each in found if (each["verdict"], each["subject"]) == ("warn", "workers")]

    engine = EngineConfig(model=str(CHECKPOINT), device="cpu")
    assert warnings(CPUS + 1) == [crowding(UpOptions(engine=engine, num_workers=CPUS + 1))]
    assert warnings(CPUS) == []


def test_gpus_that_are_not_there_are_not_told_of_as_cpus() -> None:
    _, document = plan("--device", "cuda")
    assert document["blocks_of_worker"] == 768, "named by its memory, in the checkpoint's bfloat16"
    without_memory = CliRunner().invoke(main, ["up", "--model", "demo", "--device", "cuda", "--dry-run"])
    assert "pool       what its GPU's memory leaves" in without_memory.stdout
    assert "workers    none: see the checks" in without_memory.stdout
    assert "0 workers" not in without_memory.stdout


def test_a_model_that_is_nowhere_is_refused_before_anything_starts(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, document = plan("--model", "no-such/model")
    assert code == 1
    assert "'no-such/model'" in failures(document)["model"]
    assert "'no-such/model'" in run("--model", "no-such/model").output
    assert not home.exists()


def test_a_router_port_that_is_taken_is_refused_before_anything_starts(home: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        code, document = plan("--router-port", port)
        refused = run("--router-port", port)
    assert code == 1
    assert failures(document)["router port"] == f"--router-port: port {port} is taken"
    assert f"port {port} is taken" in refused.output
    assert not home.exists()


def test_a_cluster_that_is_up_is_found() -> None:
    starter = identify(os.getppid())
    state.save(state.ClusterState(cluster="default", model="demo", secret="s", starter=starter))
    code, document = plan()
    assert code == 1
    assert "is up already" in failures(document)["cluster"]


def test_what_a_crashed_cluster_has_left_stays_for_whoever_looks_into_it(tmp_path: Path) -> None:
    log = tmp_path / "crashed" / "worker.log"
    log.parent.mkdir()
    log.write_text("why it crashed")
    crashed = state.ClusterState(cluster="default", model="demo", secret="s", directory=str(log.parent))
    state.save(crashed)
    code, _ = plan()
    assert code == 0
    assert run("--max-model-len", "999999").exit_code == 1, "an up that is refused at once"
    assert state.load("default") == crashed
    assert log.exists()


def test_a_ray_that_does_not_answer_is_found() -> None:
    code, document = plan("--address", "127.0.0.1:1")
    assert code == 1
    assert "127.0.0.1:1" in failures(document)["ray"]


def test_a_private_redis_is_refused_where_workers_would_be_on_other_machines() -> None:
    with pytest.raises(ClusterStartError, match=r"2 other machines, which cannot reach .* --redis-url"):
        check_reachable(2, has_private_redis=True)
    check_reachable(2, has_private_redis=False)
    check_reachable(0, has_private_redis=True)


@pytest.mark.parametrize(
    ("options", "node_cpus", "num_gpus", "told"),
    [
        ({"num_workers": 3, "cpus_per_worker": 2.0}, (4.0, 1.0), 0.0, "the nodes have 4, 1 CPUs, room for 2"),
        ({"num_workers": 3}, (8.0,), 2.0, "--workers 3 take a GPU each, and the Ray cluster has 2"),
        (
            {"engine": EngineConfig(model="demo", tensor_parallel_size=4)},
            (8.0,),
            2.0,
            r"--workers 1 take 4 GPUs \(--tensor-parallel-size\) each, and the Ray cluster has 2",
        ),
        (
            {"engine": EngineConfig(model="demo", tensor_parallel_size=2), "cpus_per_worker": 8.0},
            (4.0, 3.0),
            0.0,
            "no room for 1 worker of 8 CPUs for 2 ranks each: the nodes have 4, 3 CPUs, room for 0",
        ),
    ],
)
def test_workers_that_no_node_has_room_for_are_refused_with_the_numbers(
    options: dict[str, Any], node_cpus: tuple[float, ...], num_gpus: float, told: str
) -> None:
    with pytest.raises(ClusterStartError, match=told):
        shape_of(UpOptions(**{"engine": EngineConfig(model="demo")} | options), node_cpus, num_gpus)


@pytest.mark.parametrize("num_workers", range(1, 40))
def test_by_default_any_number_of_workers_fits_on_cpus(num_workers: int) -> None:
    for node_cpus in ((2.0,), (3.0, 3.0), (1.0, 1.0, 1.0)):
        shape = shape_of(
            UpOptions(engine=EngineConfig(model="demo"), num_workers=num_workers), node_cpus, 0.0
        )
        assert shape.num_workers == num_workers


@given(
    node_cpus=st.lists(st.integers(1, 64), min_size=1, max_size=5),
    num_ranks=st.integers(1, 8),
    num_workers=st.integers(1, 8),
    gpus_of_node=st.sampled_from([0, 8]),
)
def test_the_ranks_of_all_workers_fit_on_the_nodes(
    node_cpus: list[int], num_ranks: int, num_workers: int, gpus_of_node: int
) -> None:
    engine = EngineConfig(model="demo", tensor_parallel_size=num_ranks)
    wanted = UpOptions(engine=engine, num_workers=num_workers)
    try:
        shape = shape_of(wanted, [float(cpus) for cpus in node_cpus], float(gpus_of_node * len(node_cpus)))
    except ClusterStartError:
        assert 0 < gpus_of_node * len(node_cpus) < num_workers * num_ranks
        return
    rooms = [room_on(cpus, shape) for cpus in node_cpus]
    assert (shape.num_workers, shape.num_ranks) == (num_workers, num_ranks)
    assert shape.num_gpus == (num_ranks if gpus_of_node else 0)
    assert sum(rooms) >= num_workers * num_ranks
    whole = whole_workers(rooms, shape)
    assert sum(whole) <= num_workers
    assert all(workers * num_ranks <= room for workers, room in zip(whole, rooms, strict=True))
    free = [room - workers * num_ranks for workers, room in zip(whole, rooms, strict=True)]
    assert sum(whole) == num_workers or all(room < num_ranks for room in free), "none is split without need"


def test_by_default_all_gpus_are_shared_out_among_workers_of_several() -> None:
    shape = shape_of(UpOptions(engine=EngineConfig(model="demo", tensor_parallel_size=2)), (16.0, 16.0), 5.0)
    assert (shape.num_workers, shape.num_gpus, shape.num_cpus, shape.num_ranks) == (2, 2.0, 8.0, 2)


def test_a_worker_of_two_ranks_is_planned_with_half_the_cache_and_refused_where_heads_do_not_divide() -> None:
    code, document = plan("--tensor-parallel-size", "2", "--workers", "1", "--dtype", "float32")
    assert code == 0, failures(document)
    assert document["blocks_of_worker"] == 2 * 384
    code, document = plan("-tp", "3", "--workers", "1")
    assert code == 1
    assert "query heads do not divide among 3 ranks" in failures(document)["model"]


def test_two_ranks_hold_half_of_the_model_each() -> None:
    def sized(num_ranks: int) -> size.ModelSize:
        return size.size_model(
            str(CHECKPOINT),
            budget_bytes=18 * 2**20,
            block_size=16,
            dtype="float32",
            kv_cache_dtype="auto",
            on_cpu=True,
            max_model_len=None,
            memory_bytes=2**30,
            tensor_parallel_size=num_ranks,
        )

    one, two = sized(1), sized(2)
    assert two.kv.num_tokens == 2 * one.kv.num_tokens
    assert 0.5 < two.weights_bytes / one.weights_bytes < 0.51, "each has the norms whole"
    assert two.left_bytes == 2**30 - 2 * two.total_bytes


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


def pickle_instead(file: Path) -> None:
    file.rename(file.with_name("pytorch_model.bin"))


def gguf_instead(file: Path) -> None:
    file.rename(file.with_name("model.Q4_K_M.gguf"))


def gguf_alone(file: Path) -> None:
    gguf_instead(file)
    file.with_name("config.json").unlink()


def other_shapes(file: Path) -> None:
    config = file.with_name("config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 24}))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (shorten, "is not a readable safetensors file"),
        (Path.unlink, "holds no model.safetensors"),
        (pickle_instead, "holds pickled weights only"),
        (pickle_instead, "or convert them (save_pretrained of transformers writes safetensors)"),
        (
            gguf_instead,
            "holds GGUF weights only, a format that is not read: name a folder, or a repository on",
        ),
        (gguf_alone, "such as the model that they were made from; the first is model.Q4_K_M.gguf"),
        (other_shapes, "config.json asks for"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_refused_before_anything_starts(
    spoil: Callable[[Path], object], why: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))
    spoil(folder / "model.safetensors")
    refused = CliRunner().invoke(main, ["up", "--model", str(folder), "--device", "cpu"])
    assert (refused.exit_code, why in " ".join(refused.output.split())) == (1, True), refused.output


def test_a_gguf_file_in_place_of_a_folder_is_refused_with_what_works(tmp_path: Path) -> None:
    file = tmp_path / "model.Q4_K_M.gguf"
    file.touch()
    refused = CliRunner().invoke(main, ["up", "--model", str(file)])
    assert refused.exit_code == 2
    told = " ".join(refused.output.split())
    assert f"{file} is a file, and a model is a folder: it holds GGUF weights only" in told
    assert "with config.json and safetensors files" in told


def test_weights_in_safetensors_are_served_whatever_lies_beside_them(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))
    for name in ("model.gguf", "pytorch_model.bin"):
        (folder / name).touch()
    check_weights(EngineConfig(model=str(folder)))


@pytest.mark.ci
def test_a_model_that_is_added_must_have_a_tokenizer_that_can_be_loaded(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))
    model = ServedModel(model=str(folder), names=("model",))
    check_tokenizer(model)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="the tokenizer cannot be loaded"):
        check_tokenizer(model)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match="has no tokenizer: name a folder or a model that has one"):
        check_tokenizer(model)
    check_tokenizer(replace(model, tokenizer=str(CHECKPOINT)))


def test_workers_that_the_machine_has_no_memory_for_are_refused() -> None:
    refused = CliRunner().invoke(
        main, ["up", "--model", "demo", "--device", "cpu", "--kv-cache-memory", "90TiB"]
    )
    assert refused.exit_code == 1
    assert "1 worker would need 90.0 TiB, and this machine has" in " ".join(refused.output.split())


def test_adapter_slots_of_workers_on_cpus_count_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineConfig(model=str(CHECKPOINT), device="cpu", kv_cache_memory=36 * 2**20, deterministic=True)
    with_slots = replace(engine, max_loras=8, adapter_dir="/adapters")
    monkeypatch.setattr(preflight, "machine_memory_bytes", lambda: 2**29)
    preflight.check_model(UpOptions(engine=engine, num_workers=1))
    preflight.check_model(UpOptions(engine=with_slots, num_workers=1))
    with pytest.raises(ValueError, match=r"of adapter slots, 36\.0 MiB of KV cache"):
        preflight.check_model(UpOptions(engine=replace(with_slots, max_lora_rank=512), num_workers=1))


def test_what_a_process_takes_beside_weights_and_cache_counts_for_each_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = EngineConfig(model=str(CHECKPOINT), device="cpu", dtype="float32", kv_cache_memory=18 * 2**20)
    wanted = UpOptions(engine=engine, num_workers=CPUS)
    needed_bytes = (
        CPUS
        * size.size_model(
            str(CHECKPOINT),
            budget_bytes=18 * 2**20,
            block_size=engine.block_size,
            dtype="float32",
            kv_cache_dtype="auto",
            on_cpu=True,
            max_model_len=None,
        ).total_bytes
    )
    monkeypatch.setattr(preflight, "machine_memory_bytes", lambda: needed_bytes)
    preflight.check_model(wanted)
    monkeypatch.setattr(preflight, "machine_memory_bytes", lambda: needed_bytes - 1)
    with pytest.raises(ValueError, match=r"18\.0 MiB of KV cache and 360\.0 MiB of its own"):
        preflight.check_model(wanted)


def test_who_asks_for_more_workers_than_cpus_is_told_how_many_would_have_one() -> None:
    engine = EngineConfig(model=str(CHECKPOINT), device="cpu")
    crowded = UpOptions(engine=engine, num_workers=4 * CPUS)
    told = crowding(crowded)
    assert told is not None
    assert (
        f"{4 * CPUS} workers share {CPUS} CPUs, 0.25 of one each: {CPUS} workers would have one each" in told
    )
    assert crowding(replace(crowded, num_workers=CPUS)) is None
    of_ranks = replace(crowded, engine=replace(engine, tensor_parallel_size=2), num_workers=CPUS)
    assert f"{2 * CPUS} ranks share {CPUS} CPUs, and each waits for the others" in str(crowding(of_ranks))
    one = replace(of_ranks, engine=replace(engine, tensor_parallel_size=CPUS), num_workers=1)
    assert crowding(one) is None
    assert crowding(replace(crowded, cpus_per_worker=0.25)) is None
