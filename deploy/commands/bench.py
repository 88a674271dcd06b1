"""`blockyard bench`: sends a load to a running cluster, or to a server of OpenAI's API, and prints the measurements.

Owns one command for each workload. deploy/bench/ owns sending and measuring.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click
from blockyard.deploy.bench.options import (
    DEFAULT_CONCURRENCY,
    BenchOptions,
    bench_options,
    lengths_option,
    range_option,
    taken,
)
from blockyard.deploy.bench.progress import RequestProgress
from blockyard.deploy.bench.report import Result, result, result_view
from blockyard.deploy.bench.targets import BlockyardTarget, OpenAITarget, Target
from blockyard.deploy.bench.traffic import Manner
from blockyard.deploy.bench.trials import Course, Plan, run_course
from blockyard.deploy.bench.workloads import plans
from blockyard.deploy.bench.workloads.conversations import Conversation
from blockyard.deploy.bench.workloads.lengths import Lengths
from blockyard.deploy.bench.workloads.mooncake import TRACE_BLOCK_TOKENS, read_trace
from blockyard.deploy.commands.printing import addresses_of, server_at, show
from blockyard.deploy.settings.security import client_connection
from blockyard.router.client import AsyncClient, AuthenticationError

output_tokens = lengths_option("--output-tokens", "64", "Tokens in each answer")


class _Workloads(click.Group):
    """Group of the workloads. Adds to the error for an unknown option which workloads have it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise self._hinted(error) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise self._hinted(error) from None

    def _hinted(self, error: click.NoSuchOption) -> click.NoSuchOption:
        owners = [
            f"`bench {name}`"
            for name, command in sorted(self.commands.items())
            if any(error.option_name in parameter.opts for parameter in command.params)
        ]
        sentences = [error.message]
        if owners:
            sentences.append(f"Put it after a workload that has it: {', '.join(owners)}.")
        # For `bench random`, click already suggests the right option.
        is_other_name = error.option_name in _OTHER_NAMES and "--num-requests" not in (
            error.possibilities or ()
        )
        if is_other_name:
            sentences.append("`bench random` has --num-requests.")
        if is_other_name or error.option_name == "--num-requests":
            sentences.append(_COUNTS)
        return click.NoSuchOption(error.option_name, " ".join(sentences), error.possibilities, error.ctx)


_OTHER_NAMES = ("--requests", "--num-prompts")
"""Other names that people try: a short form, and the name in vLLM's `bench serve`."""
_COUNTS = (
    "Other workloads set their number of requests as follows: `bench shared-prefix` by --groups times "
    "(1 + --followers), `bench chat` by --sessions and --turns, `bench trace` by its file and --seconds."
)


@click.group(cls=_Workloads)
def bench() -> None:
    """Measure a running cluster, or any server of OpenAI's API.

    Sends a load and prints latencies, throughput and hit rates. The definitions are those of vLLM's `bench serve`. Each
    answer has exactly the planned length (ignore_eos). Nothing is retried: failures are counted by reason."""


@bench.command(name="random")
@click.option(
    "--num-requests", type=click.IntRange(1), default=64, show_default=True, help="Requests in each run."
)
@lengths_option("--input-tokens", "128-512", "Tokens in each prompt")
@output_tokens
@bench_options
def random_command(num_requests: int, input_tokens: Lengths, output_tokens: Lengths, **values: Any) -> None:
    """Send prompts that share no prefix."""
    options = taken(values)
    plan = partial(plans.random_prompts, num_requests=num_requests, prompt=input_tokens, output=output_tokens)
    _run(options, lambda seed: plan(_arrivals(options, seed), seed), _concurrency(options))


@bench.command(name="shared-prefix")
@click.option("--groups", type=click.IntRange(1), default=4, show_default=True, help="Different prefixes.")
@click.option(
    "--followers",
    type=click.IntRange(0),
    default=7,
    show_default=True,
    help="Requests in each group besides its leader.",
)
@lengths_option("--prefix-tokens", "512", "Tokens that a group shares")
@lengths_option("--question-tokens", "16-64", "Tokens that only one request has")
@output_tokens
@bench_options
def shared_prefix_command(
    groups: int,
    followers: int,
    prefix_tokens: Lengths,
    question_tokens: Lengths,
    output_tokens: Lengths,
    **values: Any,
) -> None:
    """Send groups of requests. The requests of a group share one system prompt."""
    options = taken(values)
    plan = partial(
        plans.shared_prefix,
        num_groups=groups,
        num_followers=followers,
        prefix=prefix_tokens,
        question=question_tokens,
        output=output_tokens,
    )
    _run(options, lambda seed: plan(_arrivals(options, seed), seed), _concurrency(options))


@bench.command(name="chat")
@click.option("--sessions", type=click.IntRange(1), default=16, show_default=True, help="Conversations.")
@range_option("--turns", "2-5", "Turns in each conversation.")
@click.option(
    "--systems", type=click.IntRange(1), default=4, show_default=True, help="Different system prompts."
)
@click.option(
    "--system-tokens",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Tokens in each system prompt.",
)
@range_option("--turn-tokens", "16-64", "Tokens in each message of the user.")
@range_option("--answer-tokens", "16-64", "Tokens in each answer of the model.")
@click.option(
    "--pause-seconds",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Mean seconds between an answer and the next turn.",
)
@bench_options
def chat_command(
    sessions: int,
    turns: tuple[int, int],
    systems: int,
    system_tokens: int,
    turn_tokens: tuple[int, int],
    answer_tokens: tuple[int, int],
    pause_seconds: float,
    **values: Any,
) -> None:
    """Send conversations of several turns. Each prompt contains all earlier turns."""
    kind = Conversation(
        num_systems=systems,
        system_tokens=system_tokens,
        num_turns=turns,
        first_tokens=turn_tokens,
        turn_tokens=turn_tokens,
        output_tokens=answer_tokens,
        pause_seconds=pause_seconds,
    )
    options = taken(values)
    plan = partial(plans.chats, num_sessions=sessions, kind=kind)
    _run(options, lambda seed: plan(_arrivals(options, seed), seed), _concurrency(options))


@bench.command(name="trace")
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--speed",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Factor of the trace's own pace: 2 replays it in half the time.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    help="Replay only this many seconds from the start, counted after --speed.",
)
@click.option(
    "--trace-block-tokens",
    type=click.IntRange(1),
    default=TRACE_BLOCK_TOKENS,
    show_default=True,
    help="Tokens per entry of hash_ids.",
)
@bench_options
def trace_command(
    path: Path, speed: float, seconds: float | None, trace_block_tokens: int, **values: Any
) -> None:
    """Replay a trace in Mooncake's format.

    Each line is a JSON object with timestamp (ms), input_length, output_length and hash_ids. Requests are sent in an
    open loop at the times of the trace, unless --concurrency is given."""
    options = taken(values)
    if options.rate is not None:
        raise click.UsageError("a trace sets its own arrival times: use --speed instead of --rate")
    workload = read_trace(path, block_tokens=trace_block_tokens, seconds=seconds, speed=speed)
    _run(options, lambda seed: workload, options.concurrency)


def _arrivals(options: BenchOptions, seed: int) -> Iterator[float]:
    return plans.at_once() if options.rate is None else plans.at_rate(options.rate, seed)


def _concurrency(options: BenchOptions) -> int | None:
    """Return how many requests or chats run at once, or None for an open loop."""
    return options.concurrency or DEFAULT_CONCURRENCY if options.rate is None else None


def _run(options: BenchOptions, plan: Plan, concurrency: int | None) -> None:
    found = asyncio.run(_measure(options, plan, concurrency))
    if options.save is not None:
        options.save.write_text(json.dumps(found.as_dict(), indent=2) + "\n", encoding="utf-8")
    show(options.output, found.as_dict(), result_view(found))


async def _measure(options: BenchOptions, plan: Plan, concurrency: int | None) -> Result:
    workload = plan(options.seed)
    total = sum(len(plan(options.seed + number).requests) for number in range(options.rounds))
    async with AsyncExitStack() as stack:
        target, about_target = await (
            _routers(options, stack) if options.url is None else _server(options, stack)
        )
        progress = stack.enter_context(RequestProgress(total * max(len(options.policies), 1)))
        course = Course(
            plan=plan,
            seed=options.seed,
            manner=Manner(concurrency=concurrency, on_end=progress.ended),
            temperature=options.temperature,
            policies=options.policies,
            rounds=options.rounds,
            warm_up_requests=options.warm_up,
            flush=options.flush,
            cache_salt=options.cache_salt,
        )
        trials = await run_course(target, course)
    setting = {
        "cluster": about_target,
        "workload": workload.name,
        "about": workload.about + (", a word for each planned token" if options.spells_words else ""),
        "seed": options.seed,
        "rounds": options.rounds,
        "concurrency": concurrency,
        "rate": options.rate,
        "connections": options.connections,
        "warm_up_requests": options.warm_up,
    }
    return result(trials, options.objectives, setting, own_policy=about_target["policy"])


async def _routers(options: BenchOptions, stack: AsyncExitStack) -> tuple[Target, dict[str, Any]]:
    """Return the cluster as a target, and its description for the report."""
    addresses = addresses_of(options.cluster, options.routers)
    clients = [
        await stack.enter_async_context(
            AsyncClient(addresses, timeout_seconds=options.timeout_seconds, retries=0, **client_connection())
        )
        for _ in range(options.connections)
    ]
    return BlockyardTarget(clients), await _about_cluster(clients[0])


async def _server(options: BenchOptions, stack: AsyncExitStack) -> tuple[Target, dict[str, Any]]:
    assert options.url is not None
    server = await stack.enter_async_context(server_at(options.url, options.timeout_seconds))
    model = options.model or str((await server.models())[0].get("id"))
    target = OpenAITarget(
        server=server,
        model=model,
        endpoint=options.endpoint,
        vocab_size=options.vocab_size,
        ignore_eos=options.ignore_eos,
    )
    about_target = {"url": str(server.url), "endpoint": options.endpoint, "model": model}
    return target, {**about_target, "version": None, "workers": None, "policy": "of the server"}


async def _about_cluster(client: AsyncClient) -> dict[str, Any]:
    """Return the cluster's model, version, number of ready workers and policy.

    With a token that may not see the cluster, only the model is known.
    """
    try:
        info = await client.cluster_info()
    except AuthenticationError:
        model = (await client.list_models())[0].id
        return {"model": model, "version": None, "workers": None, "policy": "of the router"}
    workers, policy = info.workers_ready, info.policy
    return {"model": info.model.id, "version": info.version, "workers": workers, "policy": policy}
