"""The options that all workloads of `blockyard bench` share, and what they come to: how a plan is sent, and where to.

Does not own the workloads' own options (commands/bench.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click
from blockyard.deploy.bench.measures import Objectives
from blockyard.deploy.bench.targets import Endpoint
from blockyard.deploy.bench.workloads.lengths import FORMS, parse_lengths, parse_range
from blockyard.deploy.settings.options import Command, cluster_option, output_option, router_option
from blockyard.deploy.settings.security import connection_options
from blockyard.deploy.settings.setting import checked_by
from blockyard.router.placement.config import PolicyName

DEFAULT_CONCURRENCY = 8
_positive = click.FloatRange(0, min_open=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """As given on the command line."""

    cluster: str
    routers: tuple[str, ...]
    concurrency: int | None
    rate: float | None
    seed: int
    warm_up: int
    rounds: int
    policies: tuple[str, ...]
    flush: bool
    cache_salt: str | None
    temperature: float
    connections: int
    url: str | None
    model: str | None
    endpoint: Endpoint
    vocab_size: int | None
    ignore_eos: bool
    timeout_seconds: float
    objectives: Objectives
    output: str
    save: Path | None

    @property
    def spells_words(self) -> bool:
        """Prompts are text, of about as many tokens as planned."""
        return self.url is not None and self.vocab_size is None


def bench_options(command: Command) -> Command:
    """Adds them; `taken` takes them back."""
    for add in reversed(_OPTIONS):
        command = add(command)
    return command


def taken(values: dict[str, Any]) -> BenchOptions:
    """Takes the shared options out of a command's arguments. Raises UsageError."""
    objectives = Objectives(ttft_ms=values.pop("slo_ttft_ms"), tpot_ms=values.pop("slo_tpot_ms"))
    names = BenchOptions.__dataclass_fields__.keys() - {"objectives"}
    options = BenchOptions(objectives=objectives, **{name: values.pop(name) for name in names})
    if options.concurrency is not None and options.rate is not None:
        raise click.UsageError("--concurrency is a closed loop and --rate an open one: give one of them")
    if options.url is not None and (options.policies or options.flush or options.connections > 1):
        raise click.UsageError("--compare, --flush and --connections are for routers, not for --url")
    if options.url is None and (options.model or options.vocab_size or options.endpoint != "completions"):
        raise click.UsageError("--model, --endpoint and --vocab-size are for the server of --url")
    if options.vocab_size is not None and options.endpoint == "chat":
        raise click.UsageError("--vocab-size makes prompts of token ids, which a chat does not take")
    return options


def lengths_option(flag: str, default: str, told: str) -> Callable[[Command], Command]:
    """Its argument is Lengths."""
    return _parsed_option(flag, default, "TOKENS", f"{told}: {FORMS}.", parse_lengths)


def range_option(flag: str, default: str, told: str) -> Callable[[Command], Command]:
    """Its argument is the least and the most."""
    return _parsed_option(flag, default, "LEAST-MOST", told, parse_range)


def _parsed_option(
    flag: str, default: str, metavar: str, told: str, parse: Callable[[str], Any]
) -> Callable[[Command], Command]:
    return click.option(
        flag, default=default, show_default=True, callback=checked_by(parse), metavar=metavar, help=told
    )


def _policies(context: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...]:
    names = () if text is None else tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in get_args(PolicyName)]
    if unknown or len(set(names)) != len(names) or len(names) == 1:
        raise click.BadParameter(f"two or more different ones of {', '.join(get_args(PolicyName))}")
    return names


_OPTIONS: tuple[Callable[[Command], Command], ...] = (
    click.option(
        "--concurrency",
        type=click.IntRange(1, 10_000),
        help=f"Closed loop: so many requests at once, the next when one ends. Default: {DEFAULT_CONCURRENCY}.",
    ),
    click.option(
        "--rate",
        type=_positive,
        help="Open loop: so many requests (or chats) a second by chance, however slow the answers are.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Of lengths, tokens and arrivals."),
    click.option(
        "--warm-up",
        type=click.IntRange(0),
        default=4,
        show_default=True,
        help="Requests before anything is measured; they share no prefix with what is.",
    ),
    click.option(
        "--compare",
        "policies",
        callback=_policies,
        metavar="POLICY,POLICY",
        help="One placement policy against another, in turns, each with flushed caches. For admins.",
    ),
    click.option(
        "--rounds",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Runs, or turns of each policy; each has a seed of its own, from --seed on.",
    ),
    click.option("--flush", is_flag=True, help="Empty all caches before each run. For admins."),
    click.option(
        "--cache-salt",
        help="Share prefixes with other runs of the same salt. Default: a new one for each run.",
    ),
    click.option("--slo-ttft-ms", type=_positive, help="Goodput: the longest time to the first token."),
    click.option("--slo-tpot-ms", type=_positive, help="Goodput: the longest time per output token."),
    click.option(
        "--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="Of every request."
    ),
    click.option(
        "--connections",
        type=click.IntRange(1, 256),
        default=1,
        show_default=True,
        help="Clients that the requests are dealt out to; routers that share a port need several to all have work.",
    ),
    click.option(
        "--timeout",
        "timeout_seconds",
        type=_positive,
        default=120.0,
        show_default=True,
        help="Seconds for each request.",
    ),
    click.option(
        "--url",
        metavar="URL",
        help="Measure the server of OpenAI's API at http://HOST:PORT, whosever it is, instead of a cluster's routers. "
        "Its key comes by OPENAI_API_KEY or --token-file.",
    ),
    click.option("--model", metavar="NAME", help="With --url. Default: the first that the server lists."),
    click.option(
        "--endpoint",
        type=click.Choice(get_args(Endpoint)),
        default="completions",
        show_default=True,
        help="With --url: what is called below /v1.",
    ),
    click.option(
        "--vocab-size",
        type=click.IntRange(2),
        help="With --url: prompts are token ids below this, exactly as many as planned. Default: they are words, each "
        "about a token; the server's usage says how many.",
    ),
    click.option(
        "--ignore-eos/--no-ignore-eos",
        default=True,
        show_default=True,
        help="With --url: whether answers have exactly the length that is planned, by a field of vLLM's. Switch it off "
        "for a server that does not know it.",
    ),
    click.option(
        "--save",
        type=click.Path(dir_okay=False, writable=True, path_type=Path),
        help="Keep the result as JSON in this file.",
    ),
    cluster_option,
    router_option,
    connection_options,
    output_option,
)
