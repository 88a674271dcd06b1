"""Files that change at a model's path while a router serves it: no model is lost, and no answer mixes two models."""

import asyncio
import shutil
from pathlib import Path

import aiohttp
import pytest
from blockyard.proto.naming.fingerprint import tokenizer_fingerprint
from blockyard.proto.v1 import session_pb2
from blockyard.proto.v1.cluster_pb2 import ListWorkersRequest
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.config import ServedModel
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .fake_worker import FakeWorker, Script
from .prompt import Clock
from .rig import FOREVER, MODEL, Router, reason_of, refused, request, running_router, until

FAST = {"suspect_seconds": 1.5, "lost_seconds": 2.0, "no_worker_seconds": 60.0}
RESPONSE = health_pb2.HealthCheckResponse


def worker(name: str, weights: str, folder: Path = MODEL, **settings: object) -> FakeWorker:
    """A worker of the files in `folder`, whose weights are called so."""
    return FakeWorker(
        name, model_fingerprint=weights, tokenizer_fingerprint=tokenizer_fingerprint(folder), **settings
    )


async def states(router: Router) -> dict[str, str]:
    """State and reason of each worker that the router knows, by its id."""
    listed = await router.cluster.ListWorkers(ListWorkersRequest())
    return {each.worker_id: f"{each.state} {each.state_reason}" for each in listed.workers}


async def is_health(router: Router, service: str, status: int) -> bool:
    stub = health_pb2_grpc.HealthStub(router.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return bool(answer.status == status)


def test_other_files_count_only_once_no_worker_has_served_for_a_while() -> None:
    clock = Clock()
    fleet = Fleet(tokenizer_fingerprint="tokens", suspect_seconds=1.0, lost_seconds=2.0, clock=clock)
    for address in ("old", "new"):
        fleet._link(address)
    kind = {"tokenizer_fingerprint": "tokens", "block_size": 16, "max_model_len": 64, "vocab_size": 9}
    hellos = {
        name: session_pb2.Hello(worker_id=name, model_fingerprint=name, **kind) for name in ("old", "new")
    }
    assert fleet.accept("old", hellos["old"]) is None
    assert fleet.accept("new", hellos["new"]) is not None
    clock.now += 100.0
    assert not fleet.is_outdated(), "a worker of the old files is still connected"
    fleet.disconnected("old", "it ended")
    clock.now += 1.9
    assert not fleet.is_outdated()
    clock.now += 0.2
    assert fleet.is_outdated()
    fleet.view.forget("new")
    assert not fleet.is_outdated(), "without any worker there is nothing to serve"
    hellos["new"].model = "another"
    fleet.accept("new", hellos["new"])
    assert not fleet.is_outdated(), "a worker of another model brings no files of this one"


@pytest.mark.parametrize("model", ["demo", "other"])
async def test_a_model_whose_workers_all_have_new_weights_is_served_again(model: str) -> None:
    other = ServedModel(model=str(MODEL), names=("other",), index="other")
    index = {"demo": "", "other": "other"}
    rest = next(name for name in index if name != model)
    endless = Script(step_seconds=0.02)
    async with (
        running_router(further_models=(other,), http_port=0, **FAST) as router,
        worker("rest", "rest", model=index[rest]) as steady,
    ):
        server = router.server
        server.set_workers([steady.address], rest)
        async with worker("a", "old", model=index[model], script=lambda _: endless) as old:
            server.set_workers([old.address], model)
            await until(lambda: server.num_ready_workers == 2)
            call = router.inference.GenerateStream(request(model=model, sampling=FOREVER))
            stream = asyncio.create_task(refused(call))
            await until(lambda: has_tokens(router))
        async with worker("a", "new", model=index[model], incarnation="a-life-2") as new:
            server.set_workers([new.address], model)
            await until(lambda: has_refused(router, "a"))
            assert await http_health(router) == (
                200,
                {"status": "serving", "models_without_workers": [model]},
            )
            await until(lambda: is_health(router, model, RESPONSE.NOT_SERVING))
            await until(lambda: is_health(router, rest, RESPONSE.SERVING))
            assert await is_health(router, "", RESPONSE.SERVING)
            await until(lambda: server.num_ready_workers == 2, seconds=20.0)
            assert reason_of(await stream) in ("NO_WORKERS", "WORKER_LOST")
            assert not new.submits, "the rest of an answer of the old weights never runs on the new ones"
            await router.inference.Generate(request(model=model))
            assert len(new.submits) == 1
            await until(lambda: is_health(router, model, RESPONSE.SERVING))
            assert await http_health(router) == (200, {"status": "serving"})


async def has_refused(router: Router, name: str) -> bool:
    return "other model files" in (await states(router)).get(name, "")


async def has_tokens(router: Router) -> bool:
    return any(record.generated_tokens for record in await router.requests())


async def http_health(router: Router) -> tuple[int, object]:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://{router.server.http_address}/health") as answer,
    ):
        return answer.status, await answer.json()


async def test_a_router_reads_a_changed_tokenizer_once_its_files_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("blockyard.router.supervision.FIRST_PAUSE_SECONDS", 0.5)
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    whole = (folder / "tokenizer.json").read_bytes()
    async with running_router(model=str(folder), **FAST) as router:
        async with worker("a", "old", folder) as old, router.workers(old):
            pass
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
        async with worker("a", "new", folder, incarnation="a-life-2") as new:
            (folder / "tokenizer.json").write_bytes(whole[:1000])
            router.server.set_workers([new.address])
            await until(lambda: has_tried(router), seconds=20.0)
            assert router.server.num_ready_workers == 0
            (folder / "tokenizer.json").write_bytes(whole)
            await until(lambda: router.server.num_ready_workers == 1, seconds=20.0)
            await router.inference.Generate(request())
            assert len(new.submits) == 1


async def has_tried(router: Router) -> bool:
    return "another tokenizer" in (await states(router)).get("a", "") and bool(router.server.outdated)
