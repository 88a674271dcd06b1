"""Helpers that the commands share: the client of their cluster, and printing.

Prints no secret.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from blockyard.deploy.machine import state
from blockyard.deploy.machine.deadline import Budget, answers_within
from blockyard.deploy.requests.openai_server import API_KEY_VARIABLE, OpenAIServer, ServerUrl, tls_context
from blockyard.deploy.settings.security import client_connection
from blockyard.deploy.settings.setting import wrong_values_are_usage
from blockyard.deploy.views.views import ANY_WIDTH
from blockyard.router.client import Client, NotFoundError
from blockyard.router.client.connection import TOKEN_VARIABLE
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console, RenderableType


def known_cluster(cluster: str, address: str | None) -> state.ClusterState:
    """Return a cluster's state: from this machine's file or, with Ray's address, from Ray. Keep the latter here.

    Raise NoSuchClusterError without a file, and what driver.find raises.
    """
    if address is None:
        return state.load(cluster)
    from blockyard.deploy.lifecycle.driver import find  # it needs a server's packages

    found, note = state.keep(find(cluster, address))
    if note:
        click.echo(note, err=True)
    return found


def connected(
    cluster: str, routers: tuple[str, ...], timeout_seconds: float, tenant: str | None = None
) -> Client:
    """Return a client of `routers`, or of the cluster's routers if none are given.

    Raise click's UsageError for an invalid address, tenant, token or certificate.
    """
    addresses = addresses_of(cluster, routers)
    with wrong_values_are_usage():
        return Client(addresses, timeout_seconds=timeout_seconds, tenant=tenant, **client_connection())


def addresses_of(cluster: str, routers: Sequence[str]) -> list[str]:
    """Return the addresses of the given routers, or else of the cluster's.

    Raise ValueError for a cluster that is still starting, and NoSuchClusterError for an unknown one.
    """
    try:
        addresses = list(routers or state.load(cluster).routers)
    except state.NoSuchClusterError as error:
        error.add_note("or name a router with --router")
        raise
    if not addresses:
        raise ValueError(f"cluster {cluster!r} is still starting: none of its routers serves yet")
    return addresses


@contextmanager
def asking(
    cluster: str, routers: tuple[str, ...], tenant: str | None = None, *, extra_seconds: float = 0.0
) -> Iterator[Client]:
    """Yield a client for a command that must answer soon. All calls share the command's time budget.

    Once the budget and `extra_seconds` (for the command's own sleep) are used up, the process ends with an error.
    """
    budget = Budget.of_this_process()
    sentence = "the routers did not answer in time; `blockyard status` shows whether they run"
    with (
        connected(cluster, routers, budget.step_seconds(), tenant) as client,
        answers_within(budget.left_seconds + extra_seconds, sentence),
    ):
        yield client


def server_at(url: str, timeout_seconds: float, *, is_ours: bool = False) -> OpenAIServer:
    """Return a client of the OpenAI server at a URL, with the token and the TLS files that the command was given.

    Without --token-file, the key is OPENAI_API_KEY, or BLOCKYARD_TOKEN if the server `is_ours`. Raise click's
    UsageError for an invalid URL, key or certificate.
    """
    with wrong_values_are_usage():
        parsed, given = ServerUrl.parse(url), client_connection()
        return OpenAIServer(
            parsed,
            key=given["token"] or os.environ.get(TOKEN_VARIABLE if is_ours else API_KEY_VARIABLE),
            tls=tls_context(given["tls"]) if parsed.scheme == "https" else None,
            timeout_seconds=timeout_seconds,
            allow_plaintext_key=given["allow_plaintext_token"],
        )


@contextmanager
def naming_workers(client: Client, worker: str | None) -> Iterator[None]:
    """Turn the error for an unknown worker into a ValueError with its name and the known names."""
    try:
        yield
    except NotFoundError as error:
        if worker is None:
            raise
        known = ", ".join(known.worker_id for known in client.list_workers()) or "none"
        raise ValueError(f"no worker is called {worker!r} (known: {known})") from error


def which_cluster(cluster: str, routers: tuple[str, ...]) -> str:
    """Return the options with which another command finds this cluster, each after a space, or "" without any."""
    named = "" if cluster == "default" else f" --cluster {cluster}"
    return "".join(f" --router {router}" for router in routers) or named


def show(output: str, document: Any, view: RenderableType) -> None:
    if output == "json":
        click.echo(json.dumps(document, indent=2))
    else:
        console().print(view)


def as_dict(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def console() -> Console:
    """Return a new console for stdout, which a test may have replaced.

    If stdout is not a terminal, nothing is cut or folded. With FORCE_COLOR, rich takes a pipe for a terminal, so this
    checks stdout itself.
    """
    console = Console(highlight=False)
    if not sys.stdout.isatty():
        console.width = ANY_WIDTH
    return console
