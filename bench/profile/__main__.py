"""Profile of a step's time, and of the scheduler's cost.

    python -m bench.profile --model llama-166m --dtype float32

0. Whole decode steps for each context length, without measured parts, beside the roofline of weights, matmuls and KV.
1. Steady decodes of the first length, and prefills: plan, prepare, forward by operation, sample, deliver.
2. plan + prepare at 256 running sequences. Any model will do, because the forward pass is not included.
3. `mixed` at 0 % hits: the share of naming blocks and looking up names.
4. `mixed` again: pauses by Python's garbage collector, with objects frozen as in a worker, and not frozen.
   Also full collections while 256 sequences decode, on this model, and with 4,096 tokens each on a simulated model.
   These are more tokens than a GPU with 141 GB holds for Llama-3.1-8B in bfloat16.

A part's time does not include the parts that it calls. On a GPU, each measured operation waits for the device, which
makes a step longer, so the report gives only shares for it.
"""

import argparse
import os
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

from bench.engine.build import BLOCK_SIZE, EngineSettings, build_engine
from bench.engine.shapes import model_folder
from bench.engine.workloads import requests_of
from bench.kernels.timing import measure_machine
from bench.profile.decoding import START_STEPS, blocks_of_decodes, decoding
from bench.profile.report import MANY, WALKED, Figures, floors_of, text_of
from bench.profile.roofline import DecodeStep, limit_seconds
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
from bench.proof import prove
from bench.reporting import REPORTS, percentile, write_report

PROOF = ("tests/worker/test_scheduler.py", "tests/worker/test_engine.py", "tests/worker/test_step_inputs.py")
PLANNED_STEPS = 50
FULL_COLLECTIONS = 3
DECODES = {"cpu": (1, 32, MANY), "cuda": (1, 32, 64, 128, MANY)}
CONTEXTS = {"cpu": (256,), "cuda": (256, 2048)}
LONGEST_PREFILL = 2048
LARGE_CONTEXT = 4096
GIB = 2**30


@dataclass(slots=True, kw_only=True)
class Decodes:
    """Profiles of steady decodes."""

    plain: dict[tuple[int, int], Profile] = field(default_factory=dict)
    """Profiles without measured parts, by context length and number of sequences."""
    planned: dict[int, Profile] = field(default_factory=dict)
    """Profiles with planning and preparing measured, by number of sequences."""
    parts: dict[int, Profile] = field(default_factory=dict)
    """Profiles with all parts measured, by number of sequences."""
    full_collections_ms: tuple[float, float] = (0.0, 0.0)
    """Longest full garbage collection with frozen objects, and without."""


def decodes(engine: Engine, arguments: argparse.Namespace) -> Decodes:
    """Measure all three kinds of profiles for each number of sequences. Objects are frozen, as in a worker.

    Further context lengths have only plain profiles.
    """
    known = Decodes()
    num_steps = decode_steps(arguments.steps)
    first, *further = arguments.contexts
    with kept_out_of_garbage_collection():
        for running in arguments.decodes:
            with decoding(engine, running=running, context=first, num_steps=num_steps):
                known.plain[first, running] = profile_steps(engine, Stopwatch(), arguments.steps)
                with watch_scheduler(engine) as seen:
                    known.planned[running] = profile_steps(engine, seen, PLANNED_STEPS)
                with watch_parts(engine) as seen:
                    known.parts[running] = profile_steps(engine, seen, arguments.steps)
                if running == MANY:
                    known.full_collections_ms = full_collections_ms(FULL_COLLECTIONS)
        for context, running in product(further, arguments.decodes):
            with decoding(engine, running=running, context=context, num_steps=num_steps):
                known.plain[context, running] = profile_steps(engine, Stopwatch(), arguments.steps)
    return known


def decode_steps(steps: int) -> int:
    """Return the steps of all three profiles together, warm-up included. Two of them take `steps` steps."""
    return 2 * steps + PLANNED_STEPS + 3 * WARM_STEPS


def measure(engine: Engine, arguments: argparse.Namespace, vocab_size: int) -> Figures:
    known = decodes(engine, arguments)
    profiles = {
        f"decode, {running} sequences of {arguments.contexts[0]} tokens": profile
        for running, profile in known.parts.items()
    }
    with watch_parts(engine) as seen:
        profiles |= {
            f"prefill of {tokens} tokens": prefill_profile(
                engine, seen, tokens=tokens, num_steps=max(3, arguments.steps // 4)
            )
            for tokens in (128, 512, LONGEST_PREFILL)
            if tokens < engine.scheduler.config.max_model_len
        }
        frozen = _course(engine, seen, vocab_size, 0)
        walked = _course(engine, seen, vocab_size, 1, is_frozen=False)
    return {
        "of_roofline": _rooflines(engine, known.plain),
        "steps": {name: medians(profile) for name, profile in profiles.items()},
        "plan_and_prepare_ms": _plan_and_prepare(known.planned[MANY]),
        "names": {
            "share": round(frozen.share_of_names, 5),
            "naming_ms": round(1000 * frozen.naming_seconds, 2),
            "look_up_ms": round(1000 * frozen.look_up_seconds, 2),
            "whole_ms": round(1000 * frozen.seconds, 1),
        },
        "collections": {"spared": _collections(frozen), WALKED: _collections(walked)},
        "full_collections": _full_collections(known),
    }


def _full_collections(known: Decodes) -> Figures:
    frozen_ms, walked_ms = known.full_collections_ms
    large_ms = large_pool_collection_ms(running=MANY, context=LARGE_CONTEXT, count=FULL_COLLECTIONS)
    return {
        "count": FULL_COLLECTIONS,
        "spared_ms": round(frozen_ms, 2),
        "unspared_ms": round(walked_ms, 2),
        "large_pool_tokens": MANY * LARGE_CONTEXT,
        "large_pool_ms": round(large_ms, 2),
    }


def _rooflines(engine: Engine, profiles: dict[tuple[int, int], Profile]) -> list[Figures]:
    """Measure the machine's rates, and return the time of each decode step beside its roofline."""
    runner: Any = engine.runner
    with torch.inference_mode():
        machine = measure_machine(runner.device, runner.dtype)
    rows = []
    for (context, running), profile in profiles.items():
        step = DecodeStep(sequences=running, context_tokens=context)
        limit_ms = 1000 * limit_seconds(step, runner.config, runner.dtype.itemsize, machine)
        taken_ms = median(profile["step"])
        rows.append(
            {
                "sequences": running,
                "context": context,
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


def _longest(arguments: argparse.Namespace) -> int:
    """Return the tokens of the longest measured sequence."""
    return max(LONGEST_PREFILL + 64, max(arguments.contexts) + START_STEPS + decode_steps(arguments.steps))


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
    parser.add_argument("--prove", nargs="*", default=PROOF, help="tests that must pass first")
    parser.add_argument("--name", default="profile", help="name of the report")
    parser.add_argument("--skip-proof", action="store_true", help="measure without tests, and keep no report")
    parser.add_argument("--output", type=Path, default=REPORTS, help="folder of the report")
    arguments = parser.parse_args()
    arguments.contexts = arguments.contexts or CONTEXTS[arguments.device]
    arguments.decodes = arguments.decodes or DECODES[arguments.device]
    if MANY not in arguments.decodes:
        parser.error(f"--decodes must include {MANY}, for which there are floors")
    return arguments


def main() -> None:
    arguments = parse()
    proven = "nothing" if arguments.skip_proof else prove(arguments.prove)
    with TemporaryDirectory(prefix="blockyard-bench-") as scratch:
        model = model_folder(arguments.model, arguments.dtype, Path(scratch), with_weights=False)
        engine = build_engine(
            EngineSettings(
                model=str(model),
                dtype=arguments.dtype,
                device=arguments.device,
                backend=arguments.backend,
                kv_bytes=int(arguments.kv_gib * GIB),
                least_blocks=blocks_of_decodes(
                    running=MANY,
                    context=max(arguments.contexts),
                    num_steps=decode_steps(arguments.steps),
                    block_size=BLOCK_SIZE,
                ),
                max_model_len=_longest(arguments) if arguments.model != "demo" else 2048,
                threads=arguments.threads,
            )
        )
    runner: Any = engine.runner
    figures: Figures = {
        "model": Path(arguments.model).name,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "backend": runner.backend.name,
        "threads": arguments.threads,
        "proven": proven,
        **measure(engine, arguments, runner.config.vocab_size),
    }
    assert __doc__ is not None
    about = __doc__
    if arguments.skip_proof:
        print(text_of(figures, about))
        return
    path = write_report(
        arguments.name,
        title="Profile of a step's time, and of the scheduler's cost",
        text=text_of(figures, about),
        figures=figures,
        floors=floors_of(figures),
        versions={"torch": version("torch")},
        folder=arguments.output,
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
