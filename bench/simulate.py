"""A cluster in virtual time: one workload under some policies, with the real engine, `place()` and index twin.

    python -m bench.simulate --workload shared-prefix --rate 10 --policy prefix --policy round_robin
    python -m bench.simulate --trace conversation.jsonl --seconds 600 --workers 16
    python -m bench.simulate --workload agents --set others_fraction=0.1 --output json

Time jumps from event to event: a minute of eight GPUs takes seconds. What a step takes is a roofline
(simulation/profile.py); `--profile FILE` gives another GPU or model. The whole study is bench/placement.py.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

from blockyard.router.placement_config import PolicyName, parse_placement

from bench.simulation.mooncake import TRACE_BLOCK_TOKENS, read_trace, write_trace
from bench.simulation.profile import HardwareProfile
from bench.simulation.simulator import Result, Setup, simulate
from bench.simulation.workloads import GENERATORS, Workload

COLUMNS = {
    "reuse": "{:.3f}",
    "ideal_reuse": "{:.3f}",
    "ttft_mean": "{:.3f}",
    "ttft_p99": "{:.3f}",
    "token_gap_mean": "{:.4f}",
    "latency_p50": "{:.2f}",
    "largest_share": "{:.3f}",
    "busy_min": "{:.2f}",
    "busy_max": "{:.2f}",
    "idle_beside_crowded": "{:.3f}",
}


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        workload = _workload(options)
        setup = _setup(options)
        if options.export is not None:
            write_trace(workload, options.export, block_tokens=options.trace_block_tokens)
            print(f"{len(workload.requests)} requests to {options.export}")
            return
        _compare(workload, setup, options.policy or ["prefix"], options.output)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


def _compare(workload: Workload, setup: Setup, policies: list[PolicyName], output: str) -> None:
    if output == "text":
        print(
            f"{workload.about}; {setup.num_workers} workers, {setup.num_routers} routers, {setup.profile.name}"
        )
        print("  ".join(["policy".ljust(12), *COLUMNS]))
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
    cells = [form.format(values[name]).rjust(len(name)) for name, form in COLUMNS.items()]
    return "  ".join([policy.ljust(12), *cells])


def _workload(options: argparse.Namespace) -> Workload:
    if options.trace is not None:
        return read_trace(
            options.trace,
            block_tokens=options.trace_block_tokens,
            seconds=options.seconds,
            speed=options.speed,
        )
    if options.seconds is not None and not 0 < options.seconds < 1e6:
        raise ValueError(f"--seconds must be above 0, not {options.seconds}")
    if not 0 < options.rate < 1e5:
        raise ValueError(f"--rate must be above 0, not {options.rate}")
    return GENERATORS[options.workload](options.rate, options.seconds or 60.0, options.seed)


def _setup(options: argparse.Namespace) -> Setup:
    if options.workers < 1 or options.routers < 1:
        raise ValueError("--workers and --routers must be at least 1")
    profile = HardwareProfile.from_file(options.profile) if options.profile else HardwareProfile()
    if options.block_size is not None:
        profile = replace(profile, block_size=options.block_size)
    return Setup(
        num_workers=options.workers,
        num_routers=options.routers,
        seed=options.seed,
        profile=profile,
        placement=parse_placement(options.set),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--workload", choices=GENERATORS, default="shared-prefix")
    source.add_argument("--trace", type=Path, help="a file of Mooncake's format instead")
    parser.add_argument("--trace-block-tokens", type=int, default=TRACE_BLOCK_TOKENS)
    parser.add_argument("--speed", type=float, default=1.0, help="play a trace so many times as fast")
    parser.add_argument("--rate", type=float, default=10.0, help="requests (or conversations) a second")
    parser.add_argument("--seconds", type=float, help="of arrivals; default 60, or the whole trace")
    parser.add_argument("--policy", action="append", choices=get_args(PolicyName), help="may be repeated")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block-size", type=int, choices=(16, 32, 64, 128), help="instead of the profile's")
    parser.add_argument("--profile", type=Path, help="a JSON object of fields of HardwareProfile")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of PlacementConfig")
    parser.add_argument("--export", type=Path, help="write the workload as a trace and end")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    return parser


if __name__ == "__main__":
    main()
