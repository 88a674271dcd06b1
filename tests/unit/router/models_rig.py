"""A router of several models, each with a scripted worker."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from blockyard.proto.v1 import inference_pb2
from blockyard.router.config import ServedModel
from blockyard.router.model_groups import ModelGroups

from .fake_worker import FakeWorker
from .rig import MODEL, Router, running_router, until, worker_of_model

OTHER = ServedModel(model=str(MODEL), names=("other", "alias"), index="other")
LIST = inference_pb2.ListModelsRequest()
DEMO = ServedModel(model=str(MODEL), names=("demo",))


@asynccontextmanager
async def served(
    *models: ServedModel, **settings: Any
) -> AsyncIterator[tuple[Router, dict[str, FakeWorker]]]:
    """A router of model `demo` and these, with one worker for each."""
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(
            running_router(further_models=models, http_port=0, **settings)
        )
        workers = {}
        for model in (DEMO, *models):
            workers[model.id] = await stack.enter_async_context(worker_of(model))
            router.server.set_workers([workers[model.id].address], model.id)
        await until(lambda: router.server.num_ready_workers == len(workers))
        yield router, workers


def worker_of(model: ServedModel, **settings: Any) -> FakeWorker:
    return worker_of_model(f"{model.id}-worker", model=model.index, model_fingerprint=model.id, **settings)


def groups(router: Router) -> ModelGroups:
    assert router.server._groups is not None
    return router.server._groups
