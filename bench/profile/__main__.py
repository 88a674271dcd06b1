"""Profile of a step's time, and of the scheduler's cost.

    python -m bench.profile --model llama-166m --dtype float32

0. Whole decode steps for each context length, without measured parts, beside the roofline of weights, matmuls and KV.
1. Steady decodes of the first length, and prefills: plan, prepare, forward by operation, sample, deliver.
2. plan + prepare at 256 running sequences. Any model will do, because the forward pass is not included.
3. `mixed` at 0 % hits: the share of naming blocks and looking up names.
4. `mixed` again: pauses by Python's garbage collector, with objects frozen as in a worker, and not frozen.
   Also full collections while 256 sequences decode, on this model, and with 4,096 tokens each on a simulated model.
   These are more tokens than a GPU with 141 GB holds for Llama-3.1-8B in bfloat16.

Decodes that do not fit the memory are left out, and the report names them. SIGTERM cuts the run short: the report has
what was measured until then.

A part's time does not include the parts that it calls. On a GPU, each measured operation waits for the device, which
makes a step longer, so the report gives only shares for it.
"""

import argparse
import os
import signal
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from blockyard.proto.runtime.garbage_collection import kept_out_of_garbage_collection
from blockyard.worker.engine import Engine
from blockyard.worker.memory.kv_size import bytes_per_block
from blockyard.worker.model.config import ModelConfig, load_config
from blockyard.worker.model.shards import num_parameters

from bench.engine.build import BLOCK_SIZE, DTYPES, EngineSettings, build_engine
from bench.engine.shapes import model_folder
from bench.engine.workloads import requests_of
from bench.kernels.timing import Machine, measure_machine
from bench.profile.decoding import START_STEPS, decoding
from bench.profile.report import MANY, WALKED, Figures, floors_of, text_of
from bench.profile.roofline import DecodeStep, limit_seconds
from bench.profile.room import GIB, STEP_BYTES, Decode, Room, room_for
from bench.profile.scenarios import (
    PLAN,
    PREPARE,
    WARM_STEPS,
    Course,
    Profile,
    full_collections_ms,
    large_pool_collection_ms,
    medians,
    prefill_profile,
    profile_steps,
    watch_parts,
    watch_scheduler,
    whole_workload,
)
from bench.profile.stopwatch import Stopwatch
from bench.proof import add_proof_options, end_if_unproven, proof_of
from bench.reporting import REPORTS, percentile, write_report

PROOF = (
    "tests/unit/worker/test_scheduler.py",
    "tests/unit/worker/test_engine.py",
    "tests/unit/worker/test_step_inputs.py",
)
PLANNED_STEPS = 50
FULL_COLLECTIONS = 3
DECODES = {"cpu": (1, 32, MANY), "cuda": (1, 32, 64, 128, MANY)}
CONTEXTS = {"cpu": (256,), "cuda": (256, 2048)}
LONGEST_PREFILL = 2048
LARGE_CONTEXT = 4096


@dataclass(slots=True, kw_only=True)
class Measured:
    """Measurements of a profile. After SIGTERM the rest is missing."""

    plain: dict[Decode, Profile] = field(default_factory=dict)
    """Profiles of decodes without measured parts."""
    planned: dict[int, Profile] = field(default_factory=dict)
    """Profiles with planning and preparing measured, by number of sequences."""
    parts: dict[str, Profile] = field(default_factory=dict)
    """Profiles of decodes and prefills with all parts measured, by name."""
    full_collections_ms: tuple[float, float] | None = None
    """Longest full garbage collection with frozen objects, and without."""
    large_pool_ms: float = 0.0
    courses: list[Course] = field(default_factory=list)
    """Whole workload with frozen objects, and without."""
    is_cut_short: bool = False


def measure(engine: Engine, arguments: argparse.Namespace, room: Room, vocab_size: int) -> Measured:
    """Measure everything. On KeyboardInterrupt, return what was measured until then, if it is anything."""
    known = Measured()
    try:
        _measure_decodes(engine, arguments, room, known)
        _measure_others(engine, arguments, vocab_size, known)
    except KeyboardInterrupt:
        if not known.plain:
            raise
        known.is_cut_short = True
    return known


def _measure_decodes(engine: Engine, arguments: argparse.Namespace, room: Room, known: Measured) -> None:
    """Measure all three kinds of profiles for each number of sequences. Objects are frozen, as in a worker.

    Further context lengths have only plain profiles.
    """
    num_steps = decode_steps(arguments.steps)
    with kept_out_of_garbage_collection():
        for decode in room.fitting:
            running = decode.running
            with decoding(engine, running=running, context=decode.context, num_steps=num_steps):
                known.plain[decode] = profile_steps(engine, Stopwatch(), arguments.steps)
                if decode.context != arguments.contexts[0]:
                    continue
                with watch_scheduler(engine) as seen:
                    known.planned[running] = profile_steps(engine, seen, PLANNED_STEPS)
                with watch_parts(engine) as seen:
                    known.parts[f"decode, {decode}"] = profile_steps(engine, seen, arguments.steps)
                if running == MANY:
                    known.full_collections_ms = full_collections_ms(FULL_COLLECTIONS)


def _measure_others(engine: Engine, arguments: argparse.Namespace, vocab_size: int, known: Measured) -> None:
    with watch_parts(engine) as seen:
        for tokens in (128, 512, LONGEST_PREFILL):
            if tokens < engine.scheduler.config.max_model_len:
                known.parts[f"prefill of {tokens} tokens"] = prefill_profile(
                    engine, seen, tokens=tokens, num_steps=max(3, arguments.steps // 4)
                )
        known.courses.append(_course(engine, seen, vocab_size, 0))
        known.courses.append(_course(engine, seen, vocab_size, 1, is_frozen=False))
    known.large_pool_ms = large_pool_collection_ms(
        running=MANY, context=LARGE_CONTEXT, count=FULL_COLLECTIONS
    )


def decode_steps(steps: int) -> int:
    """Return the steps of all three profiles together, warm-up included. Two of them take `steps` steps."""
    return 2 * steps + PLANNED_STEPS + 3 * WARM_STEPS


def figures_of(known: Measured, runner: Any, machine: Machine) -> Figures:
    """Return the figures of what was measured. Parts that are missing have no key."""
    figures: Figures = {
        "cut_short": known.is_cut_short,
        "of_roofline": _rooflines(known.plain, runner, machine),
        "steps": {name: medians(profile) for name, profile in known.parts.items()},
    }
    if MANY in known.planned:
        figures["plan_and_prepare_ms"] = _plan_and_prepare(known.planned[MANY])
    if len(known.courses) == 2:
        frozen, walked = known.courses
        figures["names"] = {
            "share": round(frozen.share_of_names, 5),
            "naming_ms": round(1000 * frozen.naming_seconds, 2),
            "look_up_ms": round(1000 * frozen.look_up_seconds, 2),
            "whole_ms": round(1000 * frozen.seconds, 1),
        }
        figures["collections"] = {"spared": _collections(frozen), WALKED: _collections(walked)}
    if known.full_collections_ms and known.large_pool_ms:
        frozen_ms, walked_ms = known.full_collections_ms
        figures["full_collections"] = {
            "count": FULL_COLLECTIONS,
            "spared_ms": round(frozen_ms, 2),
            "unspared_ms": round(walked_ms, 2),
            "large_pool_tokens": MANY * LARGE_CONTEXT,
            "large_pool_ms": round(known.large_pool_ms, 2),
        }
    return figures


def _rooflines(profiles: dict[Decode, Profile], runner: Any, machine: Machine) -> list[Figures]:
    """Return the time of each decode step beside its roofline."""
    rows = []
    for decode, profile in profiles.items():
        step = DecodeStep(sequences=decode.running, context_tokens=decode.context)
        limit_ms = 1000 * limit_seconds(step, runner.config, runner.dtype.itemsize, machine)
        taken_ms = median(profile["step"])
        rows.append(
            {
                "sequences": decode.running,
                "context": decode.context,
                "limit_ms": round(limit_ms, 3),
                "step_ms": round(taken_ms, 3),
                "share": round(limit_ms / taken_ms, 4),
            }
        )
    return rows


def _plan_and_prepare(profile: Profile) -> Figures:
    sums = [plan + prepare for plan, prepare in zip(profile[PLAN], profile[PREPARE], strict=True)]
    shares = {f"p{share}": round(percentile(sums, share / 100), 3) for share in (0, 50, 99, 100)}
    return {"steps": len(sums), **shares}


def _course(
    engine: Engine, seen: Stopwatch, vocab_size: int, repeat: int, *, is_frozen: bool = True
) -> Course:
    requests = requests_of("mixed", vocab_size=vocab_size, rate=1.0, repeat=repeat)
    with kept_out_of_garbage_collection() if is_frozen else nullcontext():
        return whole_workload(engine, seen, requests)


def _collections(course: Course) -> Figures:
    times = course.collections_ms or [0.0]
    return {
        "count": len(course.collections_ms),
        "longest_ms": round(max(times), 2),
        "whole_ms": round(sum(times), 2),
    }


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def room_of(arguments: argparse.Namespace, config: ModelConfig) -> Room:
    """Choose the pool by the memory that is free, and print which decodes do not fit. Raise SystemExit if none fits."""
    item_bytes = DTYPES[arguments.dtype].itemsize
    block_bytes = bytes_per_block(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        kv_dtype=arguments.dtype,
    )
    weights_bytes = num_parameters(config) * item_bytes
    memory_bytes = _memory_bytes(arguments)
    decodes = [
        Decode(context, running) for context, running in product(arguments.contexts, arguments.decodes)
    ]
    room = room_for(
        decodes,
        num_steps=decode_steps(arguments.steps),
        wanted_blocks=int(arguments.kv_gib * GIB) // block_bytes,
        max_blocks=None if memory_bytes is None else max(0, memory_bytes - weights_bytes) // block_bytes,
    )
    for decode in room.left_out:
        needed = decode.num_blocks(decode_steps(arguments.steps)) * block_bytes
        print(
            f"left out for lack of memory: {decode}, which need a pool of {needed / GIB:.1f} GiB", flush=True
        )
    if not room.fitting:
        raise SystemExit(
            f"no decodes fit the memory: weights take {weights_bytes / GIB:.1f} GiB, and the pool gets "
            f"{room.num_blocks * block_bytes / GIB:.1f}. Give smaller --contexts"
        )
    print(f"KV pool of {room.num_blocks * block_bytes / GIB:.1f} GiB", flush=True)
    return room


def _memory_bytes(arguments: argparse.Namespace) -> int | None:
    """Return the memory for weights and pool. None on a CPU, where the operating system decides."""
    if arguments.memory_gib is not None:
        return int(arguments.memory_gib * GIB)
    if arguments.device == "cpu":
        return None
    torch.cuda.empty_cache()
    return max(0, torch.cuda.mem_get_info()[0] - STEP_BYTES)


def _longest(arguments: argparse.Namespace, room: Room) -> int:
    """Return the tokens of the longest measured sequence."""
    context = max(decode.context for decode in room.fitting)
    return max(LONGEST_PREFILL + 64, context + START_STEPS + decode_steps(arguments.steps))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.profile", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="llama-166m", help="a shape, demo, or a checkpoint folder")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--backend", default="auto")
    parser.add_argument(
        "--contexts", type=_numbers, help="tokens of a decoding sequence; default: 256, on a GPU 256,2048"
    )
    parser.add_argument(
        "--decodes",
        type=_numbers,
        help=f"numbers of decoding sequences, with {MANY}; default: 1,32,{MANY}, on a GPU 1,32,64,128,{MANY}",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--kv-gib", type=float, default=4.0, help=f"size of the KV pool; larger if {MANY} decodes need more"
    )
    parser.add_argument(
        "--memory-gib", type=float, help="for weights and KV pool; default: what a GPU has free, less 4 GiB"
    )
    add_proof_options(parser, default=PROOF, about="tests that must pass first")
    parser.add_argument("--name", default="profile", help="name of the report")
    parser.add_argument("--output", type=Path, default=REPORTS, help="folder of the report")
    arguments = parser.parse_args()
    arguments.contexts = arguments.contexts or CONTEXTS[arguments.device]
    arguments.decodes = arguments.decodes or DECODES[arguments.device]
    if MANY not in arguments.decodes:
        parser.error(f"--decodes must include {MANY}, for which there are floors")
    return arguments


def main() -> None:
    arguments = parse()
    proof = proof_of(
        [arguments.prove],
        device=arguments.device,
        is_skipped=arguments.skip_proof,
        seconds=arguments.proof_seconds,
    )
    # `timeout` sends SIGTERM. Then the report contains what was measured until then.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():  # Before the pool takes the memory.
        machine = measure_machine(torch.device(arguments.device), DTYPES[arguments.dtype])
    with TemporaryDirectory(prefix="blockyard-bench-") as scratch:
        model = model_folder(arguments.model, arguments.dtype, Path(scratch), with_weights=False)
        room = room_of(arguments, load_config(model))
        engine = build_engine(
            EngineSettings(
                model=str(model),
                dtype=arguments.dtype,
                device=arguments.device,
                backend=arguments.backend,
                kv_bytes=0,
                least_blocks=room.num_blocks,
                max_model_len=_longest(arguments, room) if arguments.model != "demo" else 2048,
                threads=arguments.threads,
            )
        )
    runner: Any = engine.runner
    known = measure(engine, arguments, room, runner.config.vocab_size)
    figures: Figures = {
        "model": Path(arguments.model).name,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "backend": runner.backend.name,
        "threads": arguments.threads,
        "proven": proof.proven,
        "left_out": [str(decode) for decode in room.left_out],
        **figures_of(known, runner, machine),
    }
    assert __doc__ is not None
    path = write_report(
        arguments.name,
        title="Profile of a step's time, and of the scheduler's cost",
        text=text_of(figures, __doc__),
        figures=figures,
        floors=floors_of(figures),
        versions={"torch": version("torch")},
        folder=arguments.output,
        unproven=proof.unproven,
        is_cut_short=known.is_cut_short,
    )
    print(path.read_text(encoding="utf-8"))
    if known.is_cut_short:
        raise SystemExit("cut short: later measurements are missing")
    end_if_unproven(proof, is_skipped=arguments.skip_proof)


if __name__ == "__main__":
    main()
