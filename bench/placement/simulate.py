"""Simulates a cluster in virtual time: one workload under some policies, with real routers and workers.

    python -m bench.placement.simulate --workload shared-prefix --rate 10 --policy prefix --policy round_robin
    python -m bench.placement.simulate --workload agents --set others_fraction=0.1 --output json

With a trace in Mooncake's format:

    python -m bench.placement.simulate --trace conversation.jsonl --seconds 600 --workers 16

The index is its in-memory twin. Time jumps from event to event, so a minute of eight GPUs takes seconds. A roofline
gives the time of a step (simulation/profile.py); `--profile FILE` gives another GPU or model.
bench/placement/__main__.py runs the whole study.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

from blockyard.deploy.bench.workloads.mooncake import TRACE_BLOCK_TOKENS, read_trace, write_trace
from blockyard.deploy.bench.workloads.requests import Workload
from blockyard.router.placement.config import PolicyName, parse_placement

from bench.placement.simulation.profile import BLOCK_SIZES, HardwareProfile
from bench.placement.simulation.simulator import Result, Setup, simulate
from bench.placement.simulation.workloads import GENERATORS

COLUMNS = {
    "reuse": ("", "{:.3f}"),
    "ideal_reuse": ("", "{:.3f}"),
    "pulled": ("", "{:.3f}"),
    "ttft_mean": ("s", "{:.3f}"),
    "ttft_p99": ("s", "{:.3f}"),
    "token_gap_mean": ("s", "{:.4f}"),
    "latency_p50": ("s", "{:.2f}"),
    "largest_share": ("", "{:.3f}"),
    "busy_min": ("", "{:.2f}"),
    "busy_max": ("", "{:.2f}"),
    "idle_beside_crowded": ("", "{:.3f}"),
}
"""Columns of the text: figures of a Result, with units and formats. Shares, from 0 to 1, have no unit."""
DEFAULT_SECONDS = 60.0


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        _check_options(options)
        setup = _setup(options)
        workload = _workload(options, setup.profile)
        if options.export is not None:
            write_trace(workload, options.export, block_tokens=options.trace_block_tokens)
            print(f"{len(workload.requests)} requests to {options.export}")
            return
        _compare(workload, setup, options.policy or ["prefix"], options.output)
    except OSError as error:
        raise SystemExit(f"error: {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


def _compare(workload: Workload, setup: Setup, policies: list[PolicyName], output: str) -> None:
    if output == "text":
        cluster = f"{_count(setup.num_workers, 'worker')}, {_count(setup.num_routers, 'router')}"
        if setup.index_lag_seconds:
            cluster += f", index {setup.index_lag_seconds:g} s late"
        print(f"{workload.about}; {cluster}, {setup.profile.name}")
        print("  ".join(["policy".ljust(12), *map(_heading, COLUMNS)]))
    results = {}
    for policy in policies:
        started = time.monotonic()
        result = simulate(workload, replace(setup, policy=policy))
        results[policy] = result.as_dict()
        if output == "text":
            print(f"{_row(policy, result)}   ({time.monotonic() - started:.0f} s)", flush=True)
    if output == "json":
        print(json.dumps({"workload": workload.about, "results": results}, indent=2))


def _row(policy: str, result: Result) -> str:
    values = result.as_dict()
    cells = [form.format(values[name]).rjust(len(_heading(name))) for name, (_, form) in COLUMNS.items()]
    return "  ".join([policy.ljust(12), *cells])


def _heading(name: str) -> str:
    unit = COLUMNS[name][0]
    return f"{name} [{unit}]" if unit else name


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _workload(options: argparse.Namespace, profile: HardwareProfile) -> Workload:
    if options.trace is not None:
        return read_trace(
            options.trace,
            block_tokens=options.trace_block_tokens,
            seconds=options.seconds,
            speed=options.speed,
            max_request_tokens=profile.max_model_len,
        )
    return GENERATORS[options.workload](options.rate, options.seconds or DEFAULT_SECONDS, options.seed)


def _check_options(options: argparse.Namespace) -> None:
    """Check all options, even those that this run does not use. Raise ValueError."""
    for name, most in (("seconds", 1e6), ("rate", 1e5), ("speed", 1e6)):
        value = getattr(options, name)
        if value is not None and not 0 < value <= most:
            raise ValueError(f"--{name} must be above 0 and at most {most:g}, not {value:g}")
    if not 0 <= options.index_lag <= 1e6:
        raise ValueError(f"--index-lag must be from 0 to 1e+06, not {options.index_lag:g}")
    for name in ("workers", "routers", "trace_block_tokens"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")


def _setup(options: argparse.Namespace) -> Setup:
    profile = HardwareProfile.from_file(options.profile) if options.profile else HardwareProfile()
    if options.block_size is not None:
        profile = replace(profile, block_size=options.block_size)
    if options.host_cache_gib is not None:
        profile = replace(profile, host_cache_bytes=options.host_cache_gib * 2**30)
    return Setup(
        num_workers=options.workers,
        num_routers=options.routers,
        index_lag_seconds=options.index_lag,
        seed=options.seed,
        profile=profile,
        placement=parse_placement(options.set),
        slowness=tuple(options.slowness),
        num_joiners=options.joiners,
        join_seconds=options.join_seconds,
        has_uniform_speeds=options.uniform_speeds,
        pulls=options.pulls,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.placement.simulate", description=__doc__.splitlines()[0]
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--workload",
        choices=GENERATORS,
        default="shared-prefix",
        help="generated requests; default %(default)s",
    )
    source.add_argument("--trace", type=Path, help="a file in Mooncake's format instead")
    add = parser.add_argument
    add(
        "--trace-block-tokens",
        type=int,
        default=TRACE_BLOCK_TOKENS,
        help="tokens per hash in a trace; default %(default)s",
    )
    add("--speed", type=float, default=1.0, help="factor of a trace's own pace; default %(default)g")
    add(
        "--rate", type=float, default=10.0, help="requests (or conversations) per second; default %(default)g"
    )
    add(
        "--seconds", type=float, help=f"duration of arrivals; default {DEFAULT_SECONDS:g}, or the whole trace"
    )
    add("--policy", action="append", choices=get_args(PolicyName), help="may be repeated; default prefix")
    add("--workers", type=int, default=8, help="default %(default)s")
    add("--slowness", type=float, nargs="+", default=[], help="factor of step times, of the first workers")
    add("--joiners", type=int, default=0, help="workers among these that join later; default %(default)s")
    add("--join-seconds", type=float, default=10.0, help="when they join; default %(default)g")
    add("--uniform-speeds", action="store_true", help="take all workers to be equally fast")
    add("--pulls", action="store_true", help="let workers fetch blocks from one another; needs host memory")
    add("--host-cache-gib", type=float, help="host memory of each worker for blocks; default: the profile's")
    add("--routers", type=int, default=1, help="default %(default)s")
    add(
        "--index-lag",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="time until look-ups see what a worker has published; default %(default)g",
    )
    add("--seed", type=int, default=0, help="seed of all randomness; default %(default)s")
    add("--block-size", type=int, choices=BLOCK_SIZES, help="in tokens; default: the profile's")
    add("--profile", type=Path, help="a JSON file with fields of HardwareProfile; default: H200, Qwen3-8B")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of PlacementConfig; may be repeated",
    )
    add("--export", type=Path, help="write the workload as a trace and exit")
    add("--output", choices=("text", "json"), default="text", help="default %(default)s")
    return parser


if __name__ == "__main__":
    main()
