"""`blockyard export`: `up --config` of what it prints starts the same cluster."""

import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import pytest
from blockyard.deploy.lifecycle.cluster_spec import spec_of
from blockyard.deploy.lifecycle.shape import Shape
from blockyard.deploy.machine.state import ClusterState
from blockyard.deploy.settings.exported import AddedAdapter, AddedModel, additions_of, as_config
from blockyard.deploy.settings.options import further_model
from blockyard.deploy.settings.up_options import up_options, up_settings
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.deploy.supervision.desired_state import DesiredState, decoded, encoded
from blockyard.deploy.supervision.model_plans import ModelPlan
from blockyard.router.config import ServedModel
from click.testing import CliRunner

GIVEN = (
    *("--model", "demo", "--device", "cpu", "--engine", "simulated", "--kv-cache-memory", "18MiB"),
    *("--max-requests", "77", "--placement", "near_equal_ms=2", "--tenant-weight", "alice=3"),
    *("--cluster", "mine", "--routers", "2", "--log-format", "json", "--address", "10.0.0.7:6379"),
)
TEMPLATE = '{% for m in messages %}"{{ m }}"\n{% endfor %}\x7f \N{GRINNING FACE}'


def parsed(*arguments: str) -> UpOptions:
    found: list[UpOptions] = []

    @click.command()
    @up_settings
    def up(**values: Any) -> None:
        found.append(up_options(values))

    result = CliRunner().invoke(up, arguments)
    assert result.exit_code == 0, result.output
    return found[0]


def running(options: UpOptions, **changes: Any) -> DesiredState:
    """Return the desired state of a cluster of these options, as Ray's store has it."""
    state = ClusterState(cluster=options.cluster, model="demo", secret="CANARY", cpus_per_worker=0.5)
    spec = spec_of(state, options, Shape(num_workers=1, num_cpus=0.5, num_gpus=0.0))
    addresses = (("router-0", "10.0.0.7:50051", "10.0.0.7:8000"), ("router-1", "10.0.0.7:50051", ""))
    desired = DesiredState(num_workers=3, addresses=addresses, handle=spec.handle)
    return decoded(encoded(replace(desired, **changes)))


def plan_of(options: UpOptions, served: ServedModel, **own: Any) -> ModelPlan:
    engine = replace(options.engine, model=served.model, tokenizer=served.tokenizer, draft_model=None, **own)
    return ModelPlan(
        served=served, engine=engine, num_workers=2, num_cpus_per_worker=0.25, num_gpus_per_worker=0.0
    )


@pytest.fixture
def again(tmp_path: Path) -> Callable[[str], UpOptions]:
    def read(exported: str) -> UpOptions:
        path = tmp_path / "cluster.toml"
        path.write_text(exported)
        return parsed("--config", str(path))

    return read


def without_additions(options: UpOptions) -> UpOptions:
    return replace(options, written={}, additions=type(options.additions)(), movable_ports=frozenset())


def test_settings_numbers_and_ports_come_back(again: Callable[[str], UpOptions]) -> None:
    options = parsed(*GIVEN)
    told = again(as_config(running(options), []))
    ports = {"router_port": 50051, "http_port": 8000}
    same = replace(options, num_workers=3, cpus_per_worker=0.5, **ports)
    assert without_additions(told) == without_additions(same)


def test_models_and_adapters_of_now_come_back(again: Callable[[str], UpOptions]) -> None:
    options = parsed(*GIVEN, "--further-model", "hub/second")
    served = further_model("hub/other", names=("other", "alias"), tokenizer="hub/tok", chat_template=TEMPLATE)
    plans = (plan_of(options, options.served_models[1]), plan_of(options, served, max_num_seqs=7))
    adapters = [
        AddedAdapter(name="a", path="b/c"),
        AddedAdapter(name="d", path="e", model="other", tenant="t"),
    ]
    told = again(as_config(running(options, further_models=plans), adapters)).additions
    assert told.adapters == tuple(adapters)
    assert told.models == (
        AddedModel(model="hub/second", names=("hub/second", "second"), workers=2, cpus_per_worker=0.25),
        AddedModel(
            model="hub/other",
            names=("other", "alias"),
            tokenizer="hub/tok",
            chat_template=TEMPLATE,
            workers=2,
            cpus_per_worker=0.25,
            settings={"max_num_seqs": 7},
        ),
    )


def test_a_cluster_whose_first_model_was_removed_begins_with_the_next_one(
    again: Callable[[str], UpOptions],
) -> None:
    options = parsed(*GIVEN)
    served = further_model("hub/other", names=("other",), tokenizer="hub/tok", chat_template=TEMPLATE)
    plans = (plan_of(options, served, max_num_seqs=7),)
    told = again(as_config(running(options, further_models=plans, serves_first=False), None))
    assert told.served_models == (replace(served, index=""),)
    assert told.engine == replace(options.engine, model="hub/other", tokenizer="hub/tok", max_num_seqs=7)
    assert (told.num_workers, told.cpus_per_worker, told.additions.models) == (2, 0.25, ())


def test_a_password_is_left_out_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKYARD_REDIS_URL", "redis://user:CANARY@10.0.0.7:6379/0")
    exported = as_config(running(parsed(*GIVEN)), None)
    assert "CANARY" not in exported
    assert "# redis_url is left out, because it holds a password" in exported
    assert "adapters are missing" in exported
    assert "redis" not in tomllib.loads(exported) or not tomllib.loads(exported)["redis"]


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


def test_every_field_of_an_addition_is_read_back() -> None:
    model = AddedModel(
        model="m", names=("n",), tokenizer="t", chat_template="{{", workers=2, cpus_per_worker=1, settings={}
    )
    document = {"models": [asdict(model) | {"names": ["n"]}]}
    assert additions_of(document).models == (model,)


def test_up_joins_the_ray_of_its_environment_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    assert parsed("--model", "demo").address == "10.0.0.9:6379"
    assert parsed("--model", "demo", "--address", "auto").address == "10.0.0.9:6379"
    assert parsed("--model", "demo", "--address", "local").address is None
    assert parsed(*GIVEN).address == "10.0.0.7:6379"
