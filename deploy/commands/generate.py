"""`blockyard generate` and `chat`: send requests from the command line and stream the answers."""

import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from blockyard.deploy.commands.printing import connected, which_cluster
from blockyard.deploy.machine.deadline import ANSWER_SECONDS
from blockyard.deploy.requests import answer_output
from blockyard.deploy.requests.waiting_messages import with_waiting_notice
from blockyard.deploy.settings.options import cluster_option, output_option, router_option
from blockyard.deploy.settings.request_options import answer_options, sampling_options, text_or_file
from blockyard.deploy.settings.security import connection_options
from blockyard.deploy.settings.setting import wrong_values_are_usage
from blockyard.router.client import Delta
from blockyard.router.client.results import completion


@click.command()
@click.argument("prompt")
@cluster_option
@router_option
@connection_options
@output_option
@sampling_options
@answer_options
def generate(
    prompt: str,
    cluster: str,
    routers: tuple[str, ...],
    output: str,
    timeout_seconds: float,
    tenant: str | None,
    **sampling: Any,
) -> None:
    """Continue PROMPT and stream the text. `-` reads the prompt from stdin."""
    text = sys.stdin.read() if prompt == "-" else prompt
    with _asking(cluster, routers, timeout_seconds, tenant) as ask:
        deltas = ask(text, **sampling)
        if output == "json":
            answer_output.print_json(completion(list(deltas)))
        elif (sampling["n"] or 1) > 1:
            answer_output.print_outputs(deltas)
        else:
            answer_output.print_stream(deltas)


@click.command()
@click.option("--system", help="The system prompt.")
@click.option(
    "--chat-template-kwargs",
    callback=text_or_file,
    metavar="JSON|@FILE",
    help="Variables for the model's chat template, such as '{\"enable_thinking\": false}'.",
)
@cluster_option
@router_option
@connection_options
@sampling_options
def chat(
    system: str | None,
    cluster: str,
    routers: tuple[str, ...],
    timeout_seconds: float,
    tenant: str | None,
    **sampling: Any,
) -> None:
    """Chat with the model, one line at a time. An empty line or Ctrl-D ends the chat."""
    messages = [{"role": "system", "content": system}] if system else []
    sampling["session_id"] = sampling["session_id"] or f"chat-{secrets.token_hex(8)}"
    with _asking(cluster, routers, timeout_seconds, tenant) as ask:
        while question := _next_question():
            messages.append({"role": "user", "content": question})
            answer = answer_output.print_stream(ask(messages=messages, **sampling))
            messages.append({"role": "assistant", "content": answer})


@contextmanager
def _asking(
    cluster: str, routers: tuple[str, ...], timeout_seconds: float, tenant: str | None
) -> Iterator[Callable[..., Iterable[Delta]]]:
    """Yield a function like Client.stream that also prints a notice on stderr if the first delta takes long."""
    which = which_cluster(cluster, routers)
    with (
        connected(cluster, routers, timeout_seconds, tenant) as client,
        connected(cluster, routers, ANSWER_SECONDS) as onlooker,
    ):

        def ask(*prompt: str, **arguments: Any) -> Iterable[Delta]:
            with wrong_values_are_usage():
                deltas = client.stream(*prompt, **arguments)
            return with_waiting_notice(deltas, onlooker.list_workers, which)

        yield ask


def _next_question() -> str:
    try:
        return str(input("> " if sys.stdin.isatty() else "")).strip()
    except EOFError:
        return ""
