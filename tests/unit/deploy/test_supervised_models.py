"""Several models of one cluster, without Ray: workers, what routers are told, and what survives the supervisor."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from blockyard.deploy.lifecycle.models import models_of
from blockyard.deploy.supervision.desired_state import DesiredState, decoded, encoded
from blockyard.deploy.supervision.goal import Goal
from blockyard.deploy.supervision.model_plans import ModelPlan, ModelPlans
from blockyard.deploy.supervision.placing import bundles_of
from blockyard.deploy.supervision.replicas import (
    Replica,
    is_worker_name,
    model_of,
    number_of,
    replicas_of,
    worker_config,
    worker_name,
)
from blockyard.proto.naming.identifiers import is_id
from blockyard.router.config import ServedModel
from blockyard.worker.config import EngineConfig
from hypothesis import given
from hypothesis import strategies as st

from simulation.virtual_time import in_virtual_time

from .incarnations import SPEC, FakeIncarnations, Outlives, Remote, leads, supervised, until

OTHER = ServedModel(model="hub/Other-1.5B", names=("hub/Other-1.5B", "other"), index="hub/Other-1.5B")
FIRST = ServedModel(model="m", names=("m",))


def plan_of(model: ServedModel, **settings: object) -> ModelPlan:
    given = {"num_workers": 1, "num_cpus_per_worker": 1.0, "num_gpus_per_worker": 0.0, **settings}
    return ModelPlan(served=model, engine=EngineConfig(model=model.model), **given)  # type: ignore[arg-type]


@supervised
async def test_a_model_is_added_with_workers_of_its_own_and_removed_with_them(
    supervisor: FakeIncarnations,
) -> None:
    await supervisor.serve_too(OTHER, 2)
    report = await supervisor.report()
    assert [(model.id, model.workers) for model in models_of(report)] == [
        ("m", ("worker-0",)),
        ("hub/Other-1.5B", ("hub-other-1.5b-worker-0", "hub-other-1.5b-worker-1")),
    ]
    await until(lambda: supervisor.router.sent_models[-1] == ("m", "hub/Other-1.5B"))
    await supervisor.remove_model(OTHER.id, 7.5)
    assert [worker.stopped_with for worker in supervisor.incarnations] == [[], [7.5], [7.5]]
    assert [model.id for model in models_of(await supervisor.report())] == ["m"]
    assert supervisor.router.sent_models[-1] == ("m",)


@supervised
async def test_routers_refuse_a_model_before_its_workers_drain(supervisor: FakeIncarnations) -> None:
    await supervisor.serve_too(OTHER, 1)
    order: list[str] = []
    told, stopped = supervisor.router.set_models.remote, supervisor.incarnations[1].stop.remote

    async def tell(*arguments: object) -> object:
        order.append("routers")
        return await told(*arguments)

    async def stop(*arguments: object) -> object:
        order.append("workers")
        return await stopped(*arguments)

    supervisor.router.set_models, supervisor.incarnations[1].stop = Remote(tell), Remote(stop)  # type: ignore[attr-defined]
    await supervisor.remove_model(OTHER.id, 0.0)
    assert order == ["routers", "workers"]


async def served(supervisor: FakeIncarnations) -> list[tuple[str, int]]:
    """Return each model's id and its number of workers."""
    return [(model.id, len(model.workers)) for model in models_of(await supervisor.report())]


@supervised
async def test_each_model_scales_alone(supervisor: FakeIncarnations) -> None:
    await supervisor.serve_too(OTHER, 1)
    await supervisor.scale(2, 0.0, OTHER.id)
    await supervisor.scale(3, 0.0)
    assert await served(supervisor) == [("m", 3), (OTHER.id, 2)]
    await supervisor.scale(1, 0.0, "m")
    assert await served(supervisor) == [("m", 1), (OTHER.id, 2)]


@in_virtual_time
async def test_a_restarted_supervisor_keeps_the_models_and_ends_workers_of_none() -> None:
    first = FakeIncarnations()
    await first.serve_too(OTHER, 1)
    await first.leave()
    second = FakeIncarnations(first.left)
    await until(lambda: second.router.sent_models != [])
    assert [model.id for model in models_of(await second.report())] == ["m", "hub/Other-1.5B"]
    assert (len(first.incarnations), second.incarnations) == (2, []), "running workers were adopted"
    await second.leave()


@pytest.mark.parametrize(("name", "words"), [("m", "m is the only model"), ("nothing", "'nothing'")])
@supervised
async def test_an_unknown_model_and_the_last_one_are_not_removed(
    supervisor: FakeIncarnations, name: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        await supervisor.remove_model(name, 0.0)
    assert [(model.id, model.serving) for model in models_of(await supervisor.report())] == [("m", 1)]


@supervised
async def test_the_model_that_the_cluster_began_with_is_removed_as_any_other_and_comes_back_as_a_further_one(
    supervisor: FakeIncarnations,
) -> None:
    await supervisor.serve_too(OTHER, 1)
    await supervisor.remove_model("m", 7.5)
    assert [worker.stopped_with for worker in supervisor.incarnations] == [[7.5], []]
    assert await served(supervisor) == [(OTHER.id, 1)]
    assert supervisor.router.sent_models[-1] == (OTHER.id,)
    # A scaling without a model means the first of those that are left.
    await supervisor.scale(2, 0.0)
    assert await served(supervisor) == [(OTHER.id, 2)]
    with pytest.raises(ValueError, match="only model"):
        await supervisor.remove_model(OTHER.id, 0.0)
    await supervisor.serve_too(replace(FIRST, index="m"), 2)
    last = models_of(await supervisor.report())[-1]
    assert (last.id, last.workers) == ("m", ("m-worker-0", "m-worker-1"))
    await supervisor.scale(1, 0.0, "m")
    assert await served(supervisor) == [(OTHER.id, 2), ("m", 1)]


@in_virtual_time
async def test_a_restarted_supervisor_does_not_bring_back_the_first_model() -> None:
    first = FakeIncarnations()
    await first.serve_too(OTHER, 1)
    await first.remove_model("m", 0.0)
    await first.leave()
    second = FakeIncarnations(first.left)
    await until(lambda: second.router.sent_models != [])
    assert [model.id for model in models_of(await second.report())] == [OTHER.id]
    assert second.incarnations == [], "the running worker was adopted, and no other started"
    await second.leave()


@in_virtual_time
async def test_a_restarted_supervisor_ends_the_workers_of_a_first_model_that_was_being_removed() -> None:
    first = FakeIncarnations()
    await first.serve_too(OTHER, 1)
    first.incarnations[0].may_stop.clear()
    removing = asyncio.create_task(first.remove_model("m", 5.0))
    await until(lambda: first.incarnations[0].stopped_with == [5.0])
    removing.cancel()
    await first.leave()
    first.incarnations[0].may_stop.set()
    second = FakeIncarnations(first.left)
    await until(lambda: first.incarnations[0].ended.is_set())
    assert [replica.name for replica in (await second.report()).replicas if replica.kind == "worker"] == [
        "hub-other-1.5b-worker-0"
    ]
    await second.leave()


@supervised
async def test_two_additions_of_a_model_are_told_apart(supervisor: FakeIncarnations) -> None:
    additions = set()
    for _ in range(2):
        await supervisor.serve_too(OTHER, 1)
        additions.add(supervisor.plan_update(OTHER.id, None, None).served.addition)
        await supervisor.remove_model(OTHER.id, 0.0)
    assert len(additions) == 2


@pytest.mark.parametrize(
    ("names", "why"),
    [(("m",), "'m'"), (("x", "m"), "'m'"), (("hub/other", "other"), "'other' is the name of an adapter")],
)
@supervised
async def test_a_name_that_a_model_or_an_adapter_has_is_refused(
    supervisor: FakeIncarnations, names: tuple[str, ...], why: str
) -> None:
    supervisor.router.adapters = frozenset({"poem", "other"})
    with pytest.raises(ValueError, match=why):
        await supervisor.serve_too(ServedModel(model="x", names=names, index=names[0]), 1)
    assert await served(supervisor) == [("m", 1)]


def test_models_with_the_same_names_of_workers_are_refused() -> None:
    twins = [ServedModel(model=name, names=(name,), index=name) for name in ("a/b", "a-b")]
    with pytest.raises(ValueError, match="same names"):
        ModelPlans(first=FIRST, further=tuple(map(plan_of, twins)))


@given(
    st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=80),
    st.integers(0, 99),
)
def test_the_name_of_a_worker_tells_its_model_and_number(model_id: str, number: int) -> None:
    plan = plan_of(ServedModel(model="x", names=(model_id,), index=model_id))
    name = worker_name(number, plan)
    assert is_worker_name(name)
    assert is_id(name)
    assert (number_of(name), model_of(name, [plan], first="m")) == (number, model_id)
    assert model_of(worker_name(number), [plan], first="m") == "m"
    assert not is_worker_name(f"{name} rank 1")


def test_a_worker_of_a_further_model_has_its_index_and_engine() -> None:
    spec = replace(SPEC, num_prefill_workers=1)
    config = worker_config(spec.of_model(plan_of(OTHER)), Replica(name="x-worker-0", kind="worker"))
    told = (config.engine.model, config.index_model, config.model_name, config.role)
    assert told == (OTHER.model, OTHER.index, OTHER.id, "both")


@pytest.mark.parametrize("num_workers", [2, 5])
def test_the_first_workers_compute_prompts_whatever_the_scale(num_workers: int) -> None:
    spec = replace(SPEC, num_prefill_workers=2, worker=replace(SPEC.worker, role="decode"))
    workers = [one for one in replicas_of(spec, num_workers) if one.kind == "worker"]
    roles = [worker_config(spec, one).role for one in workers]
    assert roles == ["prefill"] * 2 + ["decode"] * (num_workers - 2)
    assert worker_config(SPEC, workers[0]).role == "both"


def goal_of(**engine: Any) -> Goal:
    """Return the goal of a cluster whose first model has this engine."""
    worker = replace(SPEC.worker, engine=replace(SPEC.worker.engine, **engine))
    spec = replace(SPEC, worker=worker, num_cpus_per_worker=1.5, num_gpus_per_worker=1.0)
    return Goal(spec, Outlives(), leads)


@pytest.mark.parametrize(
    ("settings", "slots"),
    [({}, (4, 16)), ({"max_loras": 2, "max_lora_rank": 8}, (2, 8)), ({"max_loras": 0}, (0, 16))],
)
async def test_an_added_model_has_the_slots_of_the_cluster_or_its_own_and_not_the_first_ones_draft_model(
    settings: dict[str, int], slots: tuple[int, int]
) -> None:
    goal = goal_of(max_loras=4, adapter_dir="/adapters", draft_model="small")
    await goal.add(goal.plan(OTHER, 1, settings))
    added = next(replica for replica in goal.replicas() if replica.model == OTHER.id)
    found = worker_config(goal.spec_of(added), added).engine
    assert ((found.max_loras, found.max_lora_rank), found.model) == (slots, OTHER.model)
    assert found.draft_model is None
    (first, *_) = goal.replicas()
    assert worker_config(goal.spec_of(first), first).engine.max_loras == 4
    without_slots = goal_of()
    with pytest.raises(ValueError, match="--adapter-dir"):
        without_slots.plan(OTHER, 1, {"max_loras": 2})
    assert [model.id for model in without_slots.models.served] == [FIRST.id]


async def test_an_added_model_has_settings_and_a_share_of_its_own() -> None:
    goal = goal_of()
    plan = goal.plan(OTHER, 1, {"max_model_len": 99, "draft_model": "small"})
    assert (plan.engine.max_model_len, plan.engine.draft_model) == (99, "small")
    assert (plan.num_cpus_per_worker, plan.num_gpus_per_worker) == (1.5, 1.0)
    two_ranks = goal.plan(OTHER, 1, {"tensor_parallel_size": 2})
    assert (two_ranks.num_cpus_per_worker, two_ranks.num_gpus_per_worker) == (3.0, 2.0)
    await goal.add(goal.plan(OTHER, 1, {"tensor_parallel_size": 2}, 4.0))
    added = next(replica for replica in goal.replicas() if replica.model == OTHER.id)
    assert bundles_of(goal.spec_of(added)) == [{"CPU": 2.0, "GPU": 1.0}] * 2
    (first, *_) = goal.replicas()
    assert (goal.spec_of(first).num_ranks, goal.spec_of(first).num_cpus_per_worker) == (1, 1.5)


@supervised
async def test_a_plan_changes_nothing_and_a_report_tells_the_share_of_each_model(
    supervisor: FakeIncarnations,
) -> None:
    plan = await supervisor.plan_model(OTHER, 1, {"max_num_seqs": 3}, 0.25)
    assert (await supervisor.report()).models == ("m",)
    await supervisor.add_model(plan)
    report = await supervisor.report()
    assert (report.share(OTHER.id), report.share("m")) == ((0.25, 0.0), (1.0, 0.0))


@supervised
async def test_an_addition_fails_where_a_router_goes_on_refusing_the_model_and_the_model_stays(
    supervisor: FakeIncarnations,
) -> None:
    supervisor.known = ()
    supervisor.router.refused = {OTHER.id: "no such folder"}
    with pytest.raises(RuntimeError, match=r"router-0 cannot serve hub/Other-1.5B.*no such folder"):
        await supervisor.serve_too(OTHER, 1)
    assert OTHER.id in (await supervisor.report()).models


@supervised
async def test_an_addition_goes_on_where_a_router_refuses_the_model_once(
    supervisor: FakeIncarnations,
) -> None:
    supervisor.known = ()
    supervisor.router.refused = {OTHER.id: "out of time"}
    adding = asyncio.create_task(supervisor.serve_too(OTHER, 1))
    await until(lambda: supervisor.router.num_refusals_told >= 2)
    supervisor.router.refused, supervisor.known = {}, None
    await adding
    assert OTHER.id in (await supervisor.report()).models


def test_models_survive_the_store() -> None:
    plans = (plan_of(replace(OTHER, addition="a1"), num_workers=3),)
    desired = DesiredState(num_workers=2, serves_first=False, further_models=plans)
    assert decoded(encoded(desired)) == desired


@supervised
async def test_a_push_while_a_model_goes_does_not_bring_it_back(supervisor: FakeIncarnations) -> None:
    await supervisor.serve_too(OTHER, 1)
    supervisor.incarnations[1].may_stop.clear()
    removing = asyncio.create_task(supervisor.remove_model(OTHER.id, 5.0))
    await until(lambda: supervisor.incarnations[1].stopped_with == [5.0])
    sent = len(supervisor.router.sent_models)
    await until(lambda: len(supervisor.router.sent_models) > sent)
    assert supervisor.router.sent_models[-1] == ("m",)
    supervisor.incarnations[1].may_stop.set()
    await removing


@pytest.mark.parametrize("model", ["m", "hub/Other-1.5B"])
@supervised
async def test_an_update_serves_a_model_from_other_workers_before_its_own_end(
    supervisor: FakeIncarnations, model: str
) -> None:
    await supervisor.serve_too(OTHER, 2)
    await supervisor.scale(2, 0.0, "m")
    before = dict(supervisor.left.workers)
    old = {worker.name for worker in (await supervisor.report()).replicas if worker.model == model}
    served = [one.id for one in models_of(await supervisor.report())]
    plan = supervisor.plan_update(model, "/models/new", None)
    await supervisor.update_model(plan, 7.5)
    stopped = {name for name, worker in before.items() if worker.stopped_with == [7.5]}
    assert stopped == old, "its own workers drain, and no others"
    assert [one.id for one in models_of(await supervisor.report())] == served, (
        "it keeps its place in the order"
    )
    updated = next(one for one in models_of(await supervisor.report()) if one.id == model)
    assert updated.workers == tuple(f"{plan.workers_prefix}worker-{number}" for number in range(2))
    assert not old & set(updated.workers)
    await until(lambda: len(supervisor.router.sent_addresses[-1]) == 4)
    assert {f"{name}:1" for name in updated.workers} <= set(supervisor.router.sent_addresses[-1])
    goal = Goal(SPEC, supervisor.left, leads)
    worker = next(each for each in goal.replicas() if each.name == updated.workers[0])
    assert goal.spec_of(worker).worker.engine.model == goal.models.known(model).model == "/models/new"
    assert goal.router().models == goal.models.served
    again = supervisor.plan_update(model, None, 1)
    assert (again.served.model, again.num_workers, again.generation) == ("/models/new", 1, 3)
    await supervisor.update_model(again, 0.0)
    assert [one.serving for one in models_of(await supervisor.report()) if one.id == model] == [1]


@pytest.mark.parametrize("fault", ["does not start", "cannot serve"])
@supervised
async def test_an_update_that_fails_leaves_the_model_as_it_was(
    supervisor: FakeIncarnations, fault: str
) -> None:
    await supervisor.serve_too(OTHER, 1)
    before = models_of(await supervisor.report())
    desired = decoded(supervisor.left.desired or b"")
    if fault == "does not start":
        supervisor.fails_to_start = True
    else:
        supervisor.router.refused, supervisor.known = {"m": "no tokenizer there"}, ("life-0", "life-1")
    with pytest.raises(RuntimeError, match=fault):
        await supervisor.update_model(supervisor.plan_update("m", "/models/new", None), 0.0)
    assert models_of(await supervisor.report()) == before
    assert [worker.stopped_with for worker in supervisor.incarnations[:2]] == [[], []]
    assert decoded(supervisor.left.desired or b"") == desired
    supervisor.fails_to_start, supervisor.router.refused, supervisor.known = False, {}, None
    await supervisor.scale(2, 0.0, "m")
    assert [model.serving for model in models_of(await supervisor.report())] == [2, 1]


@in_virtual_time
async def test_a_supervisor_that_died_during_an_update_ends_its_workers() -> None:
    first = FakeIncarnations()
    await until(lambda: len(first.incarnations) == 1)
    first.loads_for_seconds = 60.0
    updating = asyncio.create_task(first.update_model(first.plan_update("m", "/models/new", None), 0.0))
    await until(lambda: len(first.incarnations) == 2)
    await first.leave()
    second = FakeIncarnations(first.left)
    await until(lambda: first.incarnations[1].ended.is_set())
    assert not first.incarnations[0].ended.is_set()
    await second.leave()
    updating.cancel()
    await asyncio.gather(updating, return_exceptions=True)


@supervised
async def test_of_two_updates_of_one_model_at_once_the_second_is_refused(
    supervisor: FakeIncarnations,
) -> None:
    plans = [supervisor.plan_update("m", path, None) for path in ("/models/new", "/models/newer")]
    done = await asyncio.gather(
        *(supervisor.update_model(plan, 0.0) for plan in plans), return_exceptions=True
    )
    assert [str(each) for each in done] == ["None", "m was updated meanwhile: try again"]
    assert Goal(SPEC, supervisor.left, leads).models.known("m").model == "/models/new"
