"""`up --dry-run` shows the plan, starts nothing, and refuses what `up` itself refuses at once."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
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
from blockyard.deploy.lifecycle.shape import cpus_per_rank, room_on, shape_of, whole_workers
from blockyard.deploy.machine import state
from blockyard.deploy.machine.processes import identify
from blockyard.deploy.settings import size
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.router.config import ServedModel
from blockyard.worker.config import EngineConfig
from blockyard.worker.model.config import load_config
from hypothesis import given
from hypothesis import strategies as st

from .rig import CHECKPOINT, listening, refusal, run

UP = "up --model demo --device cpu --kv-cache-memory 18MiB"
CPUS = len(os.sched_getaffinity(0))
DEMO = EngineConfig(model="demo")
ENGINE = EngineConfig(model=str(CHECKPOINT), device="cpu", dtype="float32", max_num_seqs=16)


def plan(arguments: str = "") -> tuple[int, dict[str, Any]]:
    result = run(f"{UP} --dry-run --output json {arguments}")
    return result.exit_code, json.loads(result.stdout)


def planned(arguments: str = "") -> dict[str, Any]:
    code, document = plan(arguments)
    assert (code, failures(document)) == (0, {})
    return document


def failures(document: dict[str, Any]) -> dict[str, str]:
    return {found["subject"]: found["detail"] for found in document["findings"] if found["verdict"] == "fail"}


def failing(arguments: str = "") -> dict[str, str]:
    """Return what `up` would fail by, by subject."""
    code, document = plan(arguments)
    assert code == 1
    return failures(document)


def sized(**changes: Any) -> size.ModelSize:
    settings = {"budget_bytes": 18 * 2**20, "block_size": 16, "dtype": "float32", "kv_cache_dtype": "auto"}
    return size.size_model(
        str(CHECKPOINT),
        **{**settings, "on_cpu": True, "max_model_len": None, **changes},  # type: ignore[arg-type]
    )


def test_it_says_what_would_be_placed_where_and_starts_nothing(home: Path) -> None:
    document = planned("--workers 2 --router-port 0 --dtype float32")
    assert document["would_work"]
    assert document["nodes"] == [{"cpus": float(CPUS), "workers": 2}]
    assert (document["blocks_of_worker"], document["tokens_of_worker"]) == (384, 6144)
    assert document["dtype"] == "float32: as --dtype says"
    assert document["configuration"]["settings"]["engine"]["model"] == {"value": "demo", "source": "flag"}
    assert document["routers"] == ["127.0.0.1, a free port"]
    assert planned("--http-port 0")["routers"] == ["127.0.0.1, a free port, HTTP on a free port"]
    two = "--routers 2 --separate-ports --router-port 50051 --http-port 8000"
    assert planned(two)["routers"] == [
        *("127.0.0.1, port 50051, HTTP on port 8000", "127.0.0.1, port 50052, HTTP on port 8001")
    ]
    assert not home.exists()


def test_for_people_it_shows_settings_checks_and_a_verdict() -> None:
    told = run(f"{UP} --dry-run --workers 2 --placement near_equal_ms=2 --dtype float32")
    assert told.exit_code == 0
    for words in (
        "384 blocks of 16",
        "data type  float32: as --dtype says",
        "cluster.workers",
        "ok   python",
    ):
        assert words in told.stdout
    assert "it would start" in told.stdout
    assert "placement.prices.near_equal_ms" in told.stdout
    assert "placement.prices.loaded_ms" not in told.stdout, "which is what it is by default"


def test_blocks_of_a_draft_model_come_out_of_the_same_memory() -> None:
    config = load_config(CHECKPOINT)
    alone = pool_of(UpOptions(engine=ENGINE), config, has_gpu=False)
    beside = pool_of(UpOptions(engine=replace(ENGINE, draft_model=ENGINE.model)), config, has_gpu=False)
    assert alone is not None
    assert beside is not None
    # A spare block for each sequence.
    assert beside.num_blocks == (alone.num_blocks - 16) // 2


def test_what_the_cpu_of_another_machine_decides_is_not_said() -> None:
    engine, config = replace(ENGINE, dtype="auto"), load_config(CHECKPOINT)
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
        ("--cpus-per-worker 999", "workers", "no room for 1 worker of 999 CPUs each: the nodes have"),
        ("--device cuda", "workers", "--device cuda, but the Ray cluster has no GPU"),
        ("--kv-cache-memory 1MiB", "model", "fewer than max_model_len"),
        ("--kv-cache-memory 90TiB", "model", "1 worker would need 90.0 TiB, and this machine has"),
        ("--max-model-len 999999", "model", "max_model_len 999999 is beyond the model's"),
        ("-tp 3 --workers 1", "model", "query heads do not divide among 3 ranks"),
        ("--model no-such/model", "model", "'no-such/model'"),
        ("--auth-file /nowhere/tokens.json", "security", "/nowhere/tokens.json"),
        ("--max-loras 1 --adapter-dir /nowhere", "adapters", "adapter_dir '/nowhere' is no folder"),
        ("--router-port {taken}", "router port", "--router-port: port {taken} is taken"),
        ("--host 192.0.2.1", "router port", "--host 192.0.2.1 is no address of this machine"),
    ],
)
def test_what_could_not_work_is_found_dry_and_refused_at_once_by_up(
    arguments: str, subject: str, told: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with listening() as taken:
        arguments, told = arguments.format(taken=taken), told.format(taken=taken)
        assert told in failing(arguments)[subject]
        assert told in refusal(f"{UP} {arguments}", code=1)
    assert not home.exists()


def test_a_ray_that_does_not_answer_and_a_cluster_that_is_up_are_found() -> None:
    assert "127.0.0.1:1" in failing("--address 127.0.0.1:1")["ray"]
    starter = identify(os.getppid())
    state.save(state.ClusterState(cluster="default", model="demo", secret="s", starter=starter))
    assert "is up already" in failing()["cluster"]


def test_what_a_crashed_cluster_has_left_stays_for_whoever_looks_into_it(tmp_path: Path) -> None:
    (tmp_path / "worker.log").write_text("why it crashed")
    crashed = state.ClusterState(cluster="default", model="demo", secret="s", directory=str(tmp_path))
    state.save(crashed)
    planned()
    refusal(f"{UP} --max-model-len 999999", code=1)
    assert state.load("default") == crashed
    assert (tmp_path / "worker.log").exists()


def test_workers_that_share_cpus_are_warned_about_with_how_many_would_have_one() -> None:
    crowded = UpOptions(engine=ENGINE, num_workers=4 * CPUS)
    told = f"{4 * CPUS} workers share {CPUS} CPUs, 0.25 of one each: {CPUS} workers would have one each"
    assert told in str(crowding(crowded))
    of_ranks = replace(crowded, engine=replace(ENGINE, tensor_parallel_size=2), num_workers=CPUS)
    assert f"{2 * CPUS} ranks share {CPUS} CPUs, and each waits for the others" in str(crowding(of_ranks))
    one = replace(of_ranks, engine=replace(ENGINE, tensor_parallel_size=CPUS), num_workers=1)
    for enough in (replace(crowded, num_workers=CPUS), one, replace(crowded, cpus_per_worker=0.25)):
        assert crowding(enough) is None
    for num_workers, warnings in ((4 * CPUS, [crowding(crowded)]), (CPUS, [])):
        found = planned(f"--workers {num_workers}")["findings"]
        warned = [one["detail"] for one in found if (one["verdict"], one["subject"]) == ("warn", "workers")]
        assert warned == warnings


def test_gpus_that_are_not_there_are_not_told_of_as_cpus() -> None:
    blocks = plan("--device cuda")[1]["blocks_of_worker"]
    assert blocks == 768, "named by its memory, in the checkpoint's bfloat16"
    without_memory = run("up --model demo --device cuda --dry-run").stdout
    assert "pool       what its GPU's memory leaves" in without_memory
    assert "workers    none: see the checks" in without_memory
    assert "0 workers" not in without_memory


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
            {"engine": replace(DEMO, tensor_parallel_size=4)},
            (8.0,),
            2.0,
            r"--workers 1 take 4 GPUs \(--tensor-parallel-size\) each, and the Ray cluster has 2",
        ),
        (
            {"engine": replace(DEMO, tensor_parallel_size=2), "cpus_per_worker": 8.0},
            (4.0, 3.0),
            0.0,
            "no room for 1 worker of 8 CPUs for 2 ranks each: the nodes have 4, 3 CPUs, room for 0",
        ),
        (
            {"engine": replace(DEMO, host_cache_gib=1.0), "num_workers": 2, "num_prefill_workers": 2},
            (4.0,),
            0.0,
            "--prefill-workers 2 leave none of 2 workers to decode",
        ),
    ],
)
def test_workers_that_no_node_has_room_for_are_refused_with_the_numbers(
    options: dict[str, Any], node_cpus: tuple[float, ...], num_gpus: float, told: str
) -> None:
    with pytest.raises(ClusterStartError, match=told):
        shape_of(UpOptions(**{"engine": DEMO} | options), node_cpus, num_gpus)


@given(
    node_cpus=st.lists(st.integers(1, 64), min_size=1, max_size=5),
    num_ranks=st.integers(1, 8),
    num_workers=st.integers(1, 40),
    gpus_of_node=st.sampled_from([0, 8]),
)
def test_the_ranks_of_all_workers_fit_on_the_nodes(
    node_cpus: list[int], num_ranks: int, num_workers: int, gpus_of_node: int
) -> None:
    engine = replace(DEMO, tensor_parallel_size=num_ranks)
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
    free = [room - workers * num_ranks for workers, room in zip(whole, rooms, strict=True)]
    assert min(free) >= 0
    assert sum(whole) == num_workers or all(room < num_ranks for room in free), "none is split without need"


@pytest.mark.parametrize(
    ("node_cpus", "num_workers", "share"),
    [([2], 1, 2), ([2], 2, 1), ([8], 3, 2), ([2], 8, 0.25), ([3, 3], 3, 1), ([2, 2], 1, 2), ([1, 1], 3, 0.5)],
)
def test_workers_get_the_most_cpus_with_which_all_fit_on_the_nodes(
    node_cpus: list[float], num_workers: int, share: float
) -> None:
    assert cpus_per_rank(node_cpus, num_workers) == share
    assert sum(int(cpus // share) for cpus in node_cpus) >= num_workers


def test_by_default_all_gpus_are_shared_out_among_workers_of_several() -> None:
    shape = shape_of(UpOptions(engine=replace(DEMO, tensor_parallel_size=2)), (16.0, 16.0), 5.0)
    assert (shape.num_workers, shape.num_gpus, shape.num_cpus, shape.num_ranks) == (2, 2.0, 8.0, 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_workers": 0}, "cluster"),
        ({"num_routers": 0}, "cluster"),
        ({"cluster": "a b"}, "cluster"),
        ({"num_prefill_workers": 1}, "--host-cache-gib"),
        (
            {"engine": replace(DEMO, host_cache_gib=1.0), "num_prefill_workers": 1, "no_pull": True},
            "--no-pull",
        ),
        (
            {"num_routers": 3, "separate_ports": True, "router_port": 65534},
            r"3 routers .* from 65534 on would need ports up to 65536: 65535 is the",
        ),
        (
            {"redis_url": "redis://one,redis://two", "router_redis_url": "redis://one"},
            "must name the same servers, in the same order",
        ),
    ],
)
def test_a_cluster_that_cannot_be_wanted_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        UpOptions(**{"engine": DEMO, **settings})
    for most in ({"num_routers": 2, "separate_ports": True, "router_port": 65534}, {"router_port": 65535}):
        UpOptions(engine=DEMO, **{"num_routers": 3, **most})  # type: ignore[arg-type]


def test_two_ranks_hold_half_of_the_model_each_and_have_twice_the_cache() -> None:
    one, two = (sized(memory_bytes=2**30, tensor_parallel_size=number) for number in (1, 2))
    assert two.kv.num_tokens == 2 * one.kv.num_tokens
    assert 0.5 < two.weights_bytes / one.weights_bytes < 0.51, "each has the norms whole"
    assert two.left_bytes == 2**30 - 2 * two.total_bytes
    document = planned("--tensor-parallel-size 2 --workers 1 --dtype float32")
    assert document["blocks_of_worker"] == 2 * 384


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


def lose_a_shard(file: Path) -> None:
    index = {"weight_map": {"a": file.name, "b": "model-00002-of-00002.safetensors"}}
    file.with_name("model.safetensors.index.json").write_text(json.dumps(index))


def change_tokens(file: Path) -> None:
    tokenizer = file.with_name("tokenizer.json")
    content = json.loads(tokenizer.read_text())
    vocab = content["model"]["vocab"]
    first, second, *_ = vocab
    vocab[first], vocab[second] = vocab[second], vocab[first]
    tokenizer.write_text(json.dumps(content))


UNREADABLE = "is not a readable safetensors file"


@pytest.mark.parametrize(
    ("line", "spoil", "why"),
    [
        ("up --device cpu --model {}", shorten, UNREADABLE),
        ("up --device cpu --model {}", Path.unlink, "holds no model.safetensors"),
        ("up --device cpu --model {}", pickle_instead, "holds pickled weights only"),
        (
            "up --device cpu --model {}",
            pickle_instead,
            "or convert them (save_pretrained of transformers writes safetensors)",
        ),
        (
            "up --device cpu --model {}",
            gguf_instead,
            "holds GGUF weights only, a format that is not read: name a folder, or a repository on",
        ),
        (
            "up --device cpu --model {}",
            gguf_alone,
            "such as the model that they were made from; the first is model.Q4_K_M.gguf",
        ),
        ("up --device cpu --model {}", other_shapes, "config.json asks for"),
        (f"{UP} --draft-model {{}}", shorten, "--draft-model: "),
        (f"{UP} --draft-model {{}}", shorten, UNREADABLE),
        (
            f"{UP} --draft-model {{}}",
            lose_a_shard,
            "names the shard 'model-00002-of-00002.safetensors', which is",
        ),
        (f"{UP} --draft-model {{}}", change_tokens, "has another tokenizer than the served model"),
        (
            f"{UP} --draft-model {{}}",
            lambda file: file.with_name("config.json").unlink(),
            "small is no model folder: it has no config.json",
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_refused_before_anything_starts(
    line: str, spoil: Callable[[Path], object], why: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "small"))
    for name in ("model.gguf", "pytorch_model.bin"):
        (folder / name).touch()
    check_weights(EngineConfig(model=str(folder)))  # Safetensors are served, whatever lies beside them.
    for name in ("model.gguf", "pytorch_model.bin"):
        (folder / name).unlink()
    spoil(folder / "model.safetensors")
    assert why in refusal(line.format(folder), code=1)


def test_a_draft_model_that_is_sound_and_a_gguf_file_in_place_of_a_folder_are_told_apart(
    tmp_path: Path,
) -> None:
    planned(f"--draft-model {CHECKPOINT}")
    (tmp_path / "model.Q4_K_M.gguf").touch()
    told = refusal(f"up --model {tmp_path}/model.Q4_K_M.gguf")
    assert "model.Q4_K_M.gguf is a file, and a model is a folder: it holds GGUF weights only" in told
    assert "with config.json and safetensors files" in told


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


@pytest.mark.parametrize(
    ("settings", "num_workers", "told"),
    [
        ({}, CPUS, r"18\.0 MiB of KV cache and 360\.0 MiB of its own"),
        ({"draft_model": str(CHECKPOINT)}, 1, "1 worker would need"),
        (
            {"max_loras": 8, "adapter_dir": "/adapters", "max_lora_rank": 512},
            1,
            r"of adapter slots, 18\.0 MiB of KV cache",
        ),
    ],
)
def test_what_workers_take_in_all_must_fit_into_the_machine(
    settings: dict[str, Any], num_workers: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = replace(ENGINE, kv_cache_memory=18 * 2**20, **settings)
    wanted = UpOptions(engine=engine, num_workers=num_workers)
    counted = {name: value for name, value in settings.items() if name != "adapter_dir"}
    needed_bytes = num_workers * sized(max_num_seqs=16, **counted).total_bytes
    monkeypatch.setattr(preflight, "machine_memory_bytes", lambda: needed_bytes)
    preflight.check_model(wanted)
    monkeypatch.setattr(preflight, "machine_memory_bytes", lambda: needed_bytes - 1)
    if settings:
        preflight.check_model(replace(wanted, engine=replace(ENGINE, kv_cache_memory=18 * 2**20)))
    with pytest.raises(ValueError, match=told):
        preflight.check_model(wanted)
