"""Model groups: the models that one router serves now, which of them a request means, and how each comes and goes.

A name that no model has means the default group, whose checks refuse it. So an unknown name is counted and answered
like any other wrong field. A group that is removed takes no new call, and lives on until its calls have ended.

Each model has an equal part of the router's limits on admitted requests and tokens. So a burst of calls for one model
leaves the others their parts. Does not own how a group is built (composition.py) or what it does (model_group.py).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Self

from blockyard.proto.runtime.tasks import BackgroundTasks
from blockyard.proto.v1 import cluster_pb2, inference_pb2
from blockyard.router.cluster.link import EngineLink
from blockyard.router.cluster.worker_view import WorkerView
from blockyard.router.config import ServedModel, check_models
from blockyard.router.errors import NameTaken, UnknownWorker
from blockyard.router.generation.generation import RouterParts
from blockyard.router.generation.registry import RequestRegistry
from blockyard.router.model_group import ModelGroup
from blockyard.router.request.validation import check_model_name

logger = logging.getLogger(__name__)

Build = Callable[[ServedModel, AsyncExitStack], Awaitable[ModelGroup]]
ModelMessage = (
    inference_pb2.GenerateRequest
    | inference_pb2.EmbedRequest
    | inference_pb2.TokenizeRequest
    | inference_pb2.DetokenizeRequest
    | cluster_pb2.LookupPrefixRequest
    | cluster_pb2.ExplainPlacementRequest
    | cluster_pb2.GetIndexInfoRequest
)
"""A request that may name a model."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Life:
    """One group, and the events that end it."""

    group: ModelGroup
    stops: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to end the connections to its workers."""
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once they have ended."""


class ModelGroups:
    """Groups of one router. The end of the context ends all of them."""

    def __init__(self, build: Build, *, max_requests: int, max_tokens: int) -> None:
        """`max_requests` and `max_tokens` are the router's limits, which the models share."""
        self._build = build
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._lives: dict[str, _Life] = {}
        """Groups by their model's id. The first is the default."""
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = BackgroundTasks(on_failure=self._fail)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._tasks.aclose()

    def __iter__(self) -> Iterator[ModelGroup]:
        return iter([life.group for life in self._lives.values()])

    def __len__(self) -> int:
        return len(self._lives)

    @property
    def default(self) -> ModelGroup:
        """Return the group of a request that names no model: the first one."""
        return next(iter(self))

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names that requests may use, the default model's first."""
        return tuple(name for group in self for name in group.parts.facts.names)

    @property
    def adapter_names(self) -> frozenset[str]:
        """Return the names of all models' adapters, of every tenant."""
        return frozenset(adapter.name for group in self for adapter in group.parts.adapters.registry.listed())

    @property
    def num_ready_workers(self) -> int:
        return sum(group.num_ready_workers for group in self)

    @property
    def registry(self) -> RequestRegistry:
        return self.default.parts.registry

    @property
    def max_model_len(self) -> int:
        """Return the longest context that a model's workers serve."""
        return max(group.parts.max_model_len for group in self)

    @property
    def longest_context(self) -> int:
        """Return the longest context that a model has by its own files."""
        return max(group.parts.facts.max_position_embeddings for group in self)

    @property
    def max_text_bytes(self) -> int:
        """Return an upper bound of the bytes of a text that fills a model's context."""
        facts = [group.parts.facts for group in self]
        return max(one.max_text_bytes(one.max_position_embeddings) for one in facts)

    def of(self, name: object) -> ModelGroup:
        """Return the group that serves a model or an adapter of this name, or the default one if none does."""
        for group in self:
            if name in group.parts.facts.names:
                return group
        return self._having_adapter(str(name))

    def _having_adapter(self, name: str) -> ModelGroup:
        having = (group for group in self if group.parts.adapters.registry.find(name) is not None)
        return next(having, self.default)

    def named(self, name: str | None) -> ModelGroup:
        """Return the group of the model of this name. None means the default one. Raises UnknownModel."""
        if name is None:
            return self.default
        check_model_name(name, self.names)
        return self.of(name)

    async def check_adapter_name(self, name: str, group: ModelGroup) -> None:
        """Raise NameTaken if a model has the name, or an adapter of another model than this group's."""
        if name in self.names:
            raise NameTaken.of("name", "is a name of a model")
        await asyncio.gather(*(each.parts.adapters.refresh() for each in self))
        others = (other.parts.adapters.registry for other in self if other is not group)
        if any(registry.find(name) is not None for registry in others):
            raise NameTaken.of("name", "is the name of an adapter of another model")

    @contextmanager
    def in_use(self, message: ModelMessage) -> Iterator[RouterParts]:
        """Yield the parts of the model that a request means. They live as long as the context.

        A request that names an adapter and no model means the adapter's. The caller must then `check` the name.
        """
        adapter = "" if message.HasField("model") else getattr(message, "lora_name", "")
        group = self._having_adapter(adapter) if adapter else self.of(message.model)
        with group.in_use():
            yield group.parts

    def check(self, message: ModelMessage, tenant: str) -> None:
        """Raise UnknownModel if the request names neither a model that is served nor an adapter of the tenant."""
        name = message.model
        if message.HasField("model") and self.of(name).parts.adapters.registry.find(name, tenant) is None:
            check_model_name(name, self.names)

    def _models(self) -> Iterator[ServedModel]:
        return (group.model for group in self)

    def find_worker(self, worker_id: str) -> tuple[ModelGroup, WorkerView] | None:
        """Return the worker with this id, and its group. Ids are unique in a cluster."""
        for group in self:
            if (worker := group.parts.fleet.view.find(worker_id)) is not None:
                return group, worker
        return None

    def link(self, worker_id: str, field: str = "worker_id") -> EngineLink:
        """Return the link to a worker. Raises UnknownWorker."""
        found = self.find_worker(worker_id)
        link = found[0].parts.fleet.links.get(found[1].address) if found is not None else None
        if link is None:
            raise UnknownWorker.of(field, "no worker of this id is known")
        return link

    async def add(self, model: ServedModel, grace_seconds: float = 0.0) -> None:
        """Serve one more model, or this one in place of that of the same id, whose calls have the grace period.

        Raises ValueError for a name that another model has, and what building raises.
        """
        check_models((*(each for each in self._models() if each.id != model.id), model))
        replaced = self._lives.get(model.id)
        built: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        keeping = self._tasks.start(self._keep(model, built), name=f"model {model.id}")
        try:
            await built
        except asyncio.CancelledError:
            keeping.cancel()
            raise
        if replaced is not None:
            self._tasks.start(self._end(replaced, grace_seconds), name=f"end of model {model.id}")

    async def remove(self, model_id: str, grace_seconds: float) -> None:
        """Take no new call for a model. Return once those that run have ended, or the grace period is over."""
        life = self._lives.pop(model_id)
        self._share_limits()
        logger.info("model %s is not served any more", model_id)
        await self._end(life, grace_seconds)

    def put_in_order(self, ids: Iterable[str]) -> None:
        """Put the models in this order, as far as they are served, and all others behind them."""
        first = {model: self._lives[model] for model in ids if model in self._lives}
        self._lives = first | self._lives

    async def _end(self, life: _Life, grace_seconds: float) -> None:
        try:
            async with asyncio.timeout(grace_seconds):
                await life.group.is_idle.wait()
        except TimeoutError:
            model_id = life.group.model.id
            logger.warning("model %s: calls still run after %g s, and get an error", model_id, grace_seconds)
        life.group.parts.placer.give_up()
        life.stops.set()
        await life.has_ended.wait()
        ended = life.group.model
        if all((model.index, model.addition) != (ended.index, ended.addition) for model in self._models()):
            await life.group.parts.adapters.erase()

    def stop(self) -> None:
        """End the connections to all workers. Calls that still run get an error."""
        for life in self._lives.values():
            life.stops.set()

    async def raise_failure(self) -> None:
        """Raise the failure of a group that ended by a defect. Runs until cancelled."""
        await self._failure

    async def _keep(self, model: ServedModel, built: "asyncio.Future[None]") -> None:
        async with AsyncExitStack() as stack:
            try:
                group = await self._build(model, stack)
            except Exception as error:
                if not built.cancelled():
                    built.set_exception(error)
                return
            if built.cancelled():
                return
            life = self._lives[model.id] = _Life(group=group)
            self._share_limits()
            built.set_result(None)
            try:
                async with asyncio.TaskGroup() as tasks:
                    running = tasks.create_task(group.run())
                    await life.stops.wait()
                    running.cancel()
            finally:
                life.has_ended.set()
            # Calls that get their error now may still need the tokeniser.
            await group.is_idle.wait()

    def _share_limits(self) -> None:
        for group in self:
            group.parts.ledger.limit(
                max_requests=max(1, self._max_requests // len(self)),
                max_tokens=max(1, self._max_tokens // len(self)),
            )

    def _fail(self, name: str, error: BaseException) -> None:
        logger.critical("%s fails", name, exc_info=error)
        if not self._failure.done():
            self._failure.set_exception(error)
