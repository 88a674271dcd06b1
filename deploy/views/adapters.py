"""Views of `blockyard lora`: the adapters, and where each is in the memory of a device."""

from collections.abc import Iterable, Sequence

from blockyard.deploy.views import views
from blockyard.deploy.views.quantities import format_bytes
from blockyard.proto.v1 import admin_pb2, cluster_pb2
from rich.console import RenderableType
from rich.text import Text

SHOWN_DIGITS = 8
"""Digits of a fingerprint that a table shows."""


def adapter_line(adapter: admin_pb2.Adapter) -> str:
    owner = f", for tenant {adapter.tenant} alone" if adapter.tenant else ""
    size = format_bytes(adapter.num_bytes)
    return f"{adapter.name}: rank {adapter.rank}, {size}, content {adapter.fingerprint[:SHOWN_DIGITS]}{owner}"


def workers_with(adapter: admin_pb2.Adapter, workers: Iterable[cluster_pb2.Worker]) -> list[str]:
    """Return the ids of the workers whose device holds the adapter now."""
    return [
        worker.worker_id
        for worker in workers
        if any(resident.fingerprint == adapter.fingerprint for resident in worker.load.adapters)
    ]


def adapters_table(
    adapters: Sequence[admin_pb2.Adapter], workers: Sequence[cluster_pb2.Worker]
) -> RenderableType:
    if not adapters:
        return Text("no adapters: `blockyard lora add NAME PATH` adds one")
    rows = [
        (
            adapter.name,
            adapter.model or "-",
            adapter.tenant or "everybody",
            str(adapter.rank),
            format_bytes(adapter.num_bytes),
            adapter.fingerprint[:SHOWN_DIGITS],
            adapter.path,
            ", ".join(workers_with(adapter, workers)) or "-",
        )
        for adapter in adapters
    ]
    return views.plain_table(
        ("adapter", "model", "tenant", "rank", "size", "content", "folder", "on devices of"), rows
    )
