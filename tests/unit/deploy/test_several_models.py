"""`up` and `serve` with several models: what the command line means, what is refused, and what would run."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from blockyard.deploy.lifecycle import models, preflight
from blockyard.deploy.lifecycle.cluster_spec import spec_of
from blockyard.deploy.lifecycle.models import with_slots
from blockyard.deploy.lifecycle.shape import shape_of
from blockyard.deploy.machine.state import ClusterState, HeadState
from blockyard.deploy.settings.config_options import own_engine_options, own_engine_settings
from blockyard.deploy.settings.from_vllm import with_further_models
from blockyard.deploy.settings.options import further_model, model_path
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.deploy.supervision.model_plans import ModelPlan
from blockyard.worker.config import EngineConfig
from blockyard.worker.model.config import load_config
from click.testing import CliRunner

from tests.unit.worker.checkpoints import make_checkpoint

DEMO = model_path("demo")


def options(*further: str, **settings: Any) -> UpOptions:
    engine = EngineConfig(model="hub/first", **settings.pop("engine", {}))
    return UpOptions(engine=engine, further_models=further, **settings)


@pytest.mark.parametrize(
    ("typed", "means"),
    [
        (["--model", "a"], ["--model", "a"]),
        (["--model", "a", "--model", "b"], ["--model", "a", "--further-model", "b"]),
        (["--model=a", "--model=b", "--model=c"], ["--model=a", "--further-model=b", "--further-model=c"]),
        (["--model-name", "a", "--model", "b"], ["--model-name", "a", "--model", "b"]),
    ],
)
def test_each_further_model_option_adds_a_model(typed: list[str], means: list[str]) -> None:
    assert with_further_models(typed) == means


def test_one_model_is_served_as_ever_and_further_ones_have_names_and_indexes_of_their_own() -> None:
    (only,) = options().served_models
    assert (only.id, only.names, only.index) == ("hub/first", ("hub/first", "first"), "")
    assert options().each_model() == [options(model_names=("hub/first", "first"))]
    first, demo, other = options("demo", "hub/other@v1").served_models
    assert (first.index, demo.index, other.index) == ("", "demo", "hub/other")
    assert (demo.model, demo.names) == (DEMO, ("demo",))
    assert (other.model, other.names) == ("hub/other@v1", ("hub/other", "other"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"chat_template": "{{ x }}"}, "--chat-template"),
        ({"engine": {"tokenizer": "hub/other"}}, "--tokenizer"),
        ({"engine": {"draft_model": "hub/small"}}, "--draft-model"),
        ({"engine": {"host_cache_gib": 1.0}, "num_prefill_workers": 1}, "--prefill-workers"),
    ],
)
def test_settings_of_one_model_are_refused_with_several(settings: dict[str, Any], words: str) -> None:
    assert options(**settings).num_models == 1
    with pytest.raises(ValueError, match=words):
        options("demo", **settings)


@pytest.mark.parametrize("further", [("hub/first",), ("demo", "demo"), ("other/first",), ("no name!",)])
def test_bad_names_are_refused(further: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"first|demo|no name"):
        options(*further)


def test_the_workers_of_all_models_share_the_cpus_and_the_supervisor_starts_those_of_each() -> None:
    shape = shape_of(options("demo"), (8.0,), 0.0)
    assert (shape.num_workers, shape.num_cpus, shape.all_workers) == (1, 4.0, 2)
    with pytest.raises(RuntimeError, match="2 workers of 6 CPUs each"):
        shape_of(options("demo", cpus_per_worker=6.0), (8.0,), 0.0)
    with_gpus = shape_of(options("demo"), (64.0,), 8.0)
    assert (with_gpus.num_workers, with_gpus.num_gpus) == (4, 1.0)
    wanted = options("demo", num_workers=2)
    cluster = ClusterState(cluster="c", model="", secret="s", directory="/tmp")
    spec = spec_of(cluster, wanted, shape_of(wanted, (8.0,), 0.0))
    (plan,) = spec.further_models
    assert (plan.id, plan.engine.model, plan.num_workers) == ("demo", DEMO, 2)
    assert (plan.num_cpus_per_worker, spec.num_cpus_per_worker) == (2.0, 2.0)
    assert spec.router.with_models((*spec.router.models, plan.served)).models[1].index == "demo"


def test_each_model_has_slots_for_adapters_and_one_that_serves_none_is_refused_by_its_name(
    tmp_path: Path,
) -> None:
    engine = EngineConfig(model=DEMO, device="cpu", max_loras=2, adapter_dir=str(tmp_path))
    wanted = UpOptions(
        engine=engine, model_names=("demo",), further_models=(str(shutil.copytree(DEMO, tmp_path / "b")),)
    )
    assert [one.engine.max_loras for one in wanted.each_model()] == [2, 2]
    preflight._check_adapters(wanted)
    experts = make_checkpoint(tmp_path / "experts", "Qwen3MoeForCausalLM", vocab_size=4096)
    with pytest.raises(ValueError, match=r"experts: a mixture of experts .*: add this one later"):
        preflight._check_adapters(replace(wanted, further_models=(str(experts),)))


def test_an_added_model_that_serves_no_adapters_gets_no_slots_unless_it_was_to_have_some(
    tmp_path: Path,
) -> None:
    demo = load_config(Path(DEMO))
    experts = load_config(make_checkpoint(tmp_path / "experts", "Qwen3MoeForCausalLM", vocab_size=4096))
    assert with_slots(demo, {"max_loras": 2}) == {"max_loras": 2}
    assert with_slots(demo, {}) == {}
    assert with_slots(experts, {}) == with_slots(experts, {"max_loras": 0}) == {"max_loras": 0}
    with pytest.raises(ValueError, match="serves no adapters"):
        with_slots(experts, {"max_loras": 1})


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"max_model_len": 10**6}, "beyond the model's"),
        ({"kv_cache_memory": 2**12}, "give it more memory"),
        ({"tensor_parallel_size": 64}, "heads"),
        ({"draft_model": "/no/such/folder"}, "--draft-model"),
    ],
)
def test_own_settings_with_which_an_added_model_cannot_be_served_are_refused(
    own: dict[str, Any], words: str
) -> None:
    cluster = ClusterState(cluster="c", model="demo", secret="s", head=HeadState(session=1, processes=()))
    engine = EngineConfig(model=DEMO, device="cpu")
    shares = {"num_workers": 1, "num_cpus_per_worker": 1.0, "num_gpus_per_worker": 0.0}
    plan = ModelPlan(served=further_model("demo"), engine=engine, **shares)  # type: ignore[arg-type]
    models._check(plan, cluster, lambda progress: None)
    with pytest.raises(ValueError, match=words):
        models._check(replace(plan, engine=replace(engine, **own)), cluster, lambda progress: None)


def test_own_settings_are_those_that_were_given_and_no_variable_of_up_gives_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BLOCKYARD_UP_MAX_NUM_SEQS", "7")
    found: dict[str, Any] = {}

    @click.command()
    @own_engine_options
    def command(**values: Any) -> None:
        found.update(own_engine_settings(values), left=values)

    given = "--max-model-len 64 --kv-cache-memory 2GiB --max-loras 0 --draft-model demo"
    assert CliRunner().invoke(command, given.split()).exit_code == 0
    own = {"max_model_len": 64, "kv_cache_memory": 2**31, "max_loras": 0, "draft_model": DEMO}
    assert found == {**own, "left": {}}
    refused = CliRunner().invoke(command, ["--gpu-memory-utilization", "1.5"])
    assert (refused.exit_code, "--gpu-memory-utilization" in refused.output) == (2, True)
