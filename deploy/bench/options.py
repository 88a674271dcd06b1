"""Options that all workloads of `blockyard bench` share: how a plan is sent, and to which server.

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
    """The shared options, as given on the command line."""

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
        """Whether prompts are text, with about as many tokens as planned."""
        return self.url is not None and self.vocab_size is None


def bench_options(command: Command) -> Command:
    """Add the shared options to a command. `taken` reads them from its arguments."""
    for add in reversed(_OPTIONS):
        command = add(command)
    return command


def taken(values: dict[str, Any]) -> BenchOptions:
    """Remove the shared options from a command's arguments, and return them.

    Raise UsageError for options that exclude each other, or need another one.
    """
    objectives = Objectives(ttft_ms=values.pop("slo_ttft_ms"), tpot_ms=values.pop("slo_tpot_ms"))
    names = BenchOptions.__dataclass_fields__.keys() - {"objectives"}
    options = BenchOptions(objectives=objectives, **{name: values.pop(name) for name in names})
    if options.concurrency is not None and options.rate is not None:
        raise click.UsageError("--concurrency means a closed loop and --rate an open loop: give only one")
    if options.url is not None and (options.policies or options.flush or options.connections > 1):
        raise click.UsageError(
            "--compare, --flush and --connections need a cluster's routers: leave out --url"
        )
    if options.url is None and (options.model or options.vocab_size or options.endpoint != "completions"):
        raise click.UsageError("--model, --endpoint and --vocab-size need --url")
    if options.vocab_size is not None and options.endpoint == "chat":
        raise click.UsageError("--vocab-size sends token ids, which --endpoint chat does not accept")
    return options


def lengths_option(flag: str, default: str, help_text: str) -> Callable[[Command], Command]:
    """Return a decorator that adds an option whose value is Lengths."""
    return _parsed_option(flag, default, "TOKENS", f"{help_text}: {FORMS}.", parse_lengths)


def range_option(flag: str, default: str, help_text: str) -> Callable[[Command], Command]:
    """Return a decorator that adds an option whose value is a pair: the lowest and the highest number."""
    return _parsed_option(flag, default, "LEAST-MOST", help_text, parse_range)


def _parsed_option(
    flag: str, default: str, metavar: str, help_text: str, parse: Callable[[str], Any]
) -> Callable[[Command], Command]:
    return click.option(
        flag, default=default, show_default=True, callback=checked_by(parse), metavar=metavar, help=help_text
    )


def _policies(context: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...]:
    names = () if text is None else tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in get_args(PolicyName)]
    if unknown or len(set(names)) != len(names) or len(names) == 1:
        raise click.BadParameter(f"give two or more different policies of {', '.join(get_args(PolicyName))}")
    return names


_OPTIONS: tuple[Callable[[Command], Command], ...] = (
    click.option(
        "--concurrency",
        type=click.IntRange(1, 10_000),
        help="Closed loop: requests in flight at once. The next one is sent when one ends. "
        f"Default: {DEFAULT_CONCURRENCY}.",
    ),
    click.option(
        "--rate",
        type=_positive,
        help="Open loop: mean number of requests (or chats) per second. They arrive as a Poisson process, however slow "
        "the answers are.",
    ),
    click.option(
        "--seed", type=int, default=0, show_default=True, help="Seed of lengths, tokens and arrivals."
    ),
    click.option(
        "--warm-up",
        type=click.IntRange(0),
        default=4,
        show_default=True,
        help="Requests sent before the measurement. They share no prefix with measured requests.",
    ),
    click.option(
        "--compare",
        "policies",
        callback=_policies,
        metavar="POLICY,POLICY",
        help="Compare placement policies, in turns, each with flushed caches. Only admins may do this.",
    ),
    click.option(
        "--rounds",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Number of runs, or of runs of each policy. Each round has its own seed, counted up from --seed.",
    ),
    click.option("--flush", is_flag=True, help="Empty all caches before each run. Only admins may do this."),
    click.option(
        "--cache-salt",
        help="Share prefixes with other runs of the same salt. Default: a new salt for each run.",
    ),
    click.option("--slo-ttft-ms", type=_positive, help="Goodput: maximum time to first token."),
    click.option("--slo-tpot-ms", type=_positive, help="Goodput: maximum time per output token."),
    click.option(
        "--temperature",
        type=click.FloatRange(0),
        default=0.0,
        show_default=True,
        help="Temperature of every request.",
    ),
    click.option(
        "--connections",
        type=click.IntRange(1, 256),
        default=1,
        show_default=True,
        help="Number of client connections, used in turns. Routers that share a port need several, so that each gets "
        "requests.",
    ),
    click.option(
        "--timeout",
        "timeout_seconds",
        type=_positive,
        default=120.0,
        show_default=True,
        help="Time limit of each request, in seconds.",
    ),
    click.option(
        "--url",
        metavar="URL",
        help="Measure any server of OpenAI's API, at http://HOST:PORT, instead of a cluster's routers. Its key comes "
        "from OPENAI_API_KEY or --token-file.",
    ),
    click.option(
        "--model", metavar="NAME", help="With --url: model to call. Default: the first that the server lists."
    ),
    click.option(
        "--endpoint",
        type=click.Choice(get_args(Endpoint)),
        default="completions",
        show_default=True,
        help="With --url: endpoint to call below /v1.",
    ),
    click.option(
        "--vocab-size",
        type=click.IntRange(2),
        help="With --url: send prompts as token ids below this number, exactly as many as planned. Default: prompts "
        "are words of about one token each, and the server's usage gives the exact count.",
    ),
    click.option(
        "--ignore-eos/--no-ignore-eos",
        default=True,
        show_default=True,
        help="With --url: force answers to exactly the planned length, by the field ignore_eos of vLLM. Switch it off "
        "for a server that does not know this field.",
    ),
    click.option(
        "--save",
        type=click.Path(dir_okay=False, writable=True, path_type=Path),
        help="Write the result to this file, as JSON.",
    ),
    cluster_option,
    router_option,
    connection_options,
    output_option,
)
