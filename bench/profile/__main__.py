"""Where a step's time goes, and what the scheduler costs.

    python -m bench.profile --model llama-166m --dtype float32

0. whole decode steps of each length of context, unwatched, beside the roofline of weights, matmuls and KV cache;
1. steady decodes of the first length, and prefills: plan, prepare, forward by operation, sample, deliver;
2. plan + prepare at 256 running sequences (on any model: its forward pass is not in it);
3. `mixed` at 0 % hits: what naming blocks and looking names up takes of it;
4. the same: how long Python's garbage collector holds a step up, spared as a worker's process is, and not spared; and
   how long a full collection takes while 256 sequences decode, on this model, and of 4,096 tokens each without one:
   more than a GPU of 141 GB holds of Llama-3.1-8B in bfloat16.

Times of a part are without those it calls. On a GPU each operation waits for the device, so that a step here is longer
than one that is not watched: only shares are told of it.
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
from blockyard.proto.runtime.garbage_collection import spared_by_garbage_collection
from blockyard.worker.engine import Engine

from bench.engine.build import BLOCK_SIZE, EngineSettings, build_engine
from bench.engine.shapes import model_folder
from bench.engine.workloads import requests_of
from bench.kernels.timing import measure_machine
from bench.profile.decoding import START_STEPS, blocks_of_decodes, decoding
from bench.profile.report import MANY, UNSPARED, Figures, floors_of, text_of
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
    """Of steady decodes, by how many sequences: with planning watched, and with all parts."""

    plain: dict[tuple[int, int], Profile] = field(default_factory=dict)
    """Unwatched; by how many tokens, and by how many sequences."""
    planned: dict[int, Profile] = field(default_factory=dict)
    parts: dict[int, Profile] = field(default_factory=dict)
    full_collections_ms: tuple[float, float] = (0.0, 0.0)
    """Spared, and not."""


def decodes(engine: Engine, arguments: argparse.Namespace) -> Decodes:
    """One prefill serves all three looks. Spared by the garbage collector, as in a worker."""
    known = Decodes()
    num_steps = decode_steps(arguments.steps)
    first, *further = arguments.contexts
    with spared_by_garbage_collection():
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
    """Of all three looks, of which two take so many steps, those included that warm up."""
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
        spared = _course(engine, seen, vocab_size, 0)
        unspared = _course(engine, seen, vocab_size, 1, is_spared=False)
    return {
        "of_roofline": _rooflines(engine, known.plain),
        "steps": {name: medians(profile) for name, profile in profiles.items()},
        "plan_and_prepare_ms": _plan_and_prepare(known.planned[MANY]),
        "names": {
            "share": round(spared.share_of_names, 5),
            "naming_ms": round(1000 * spared.naming_seconds, 2),
            "look_up_ms": round(1000 * spared.look_up_seconds, 2),
            "whole_ms": round(1000 * spared.seconds, 1),
        },
        "collections": {"spared": _collections(spared), UNSPARED: _collections(unspared)},
        "full_collections": _full_collections(known),
    }


def _full_collections(known: Decodes) -> Figures:
    spared_ms, unspared_ms = known.full_collections_ms
    large_ms = large_pool_collection_ms(running=MANY, context=LARGE_CONTEXT, count=FULL_COLLECTIONS)
    return {
        "count": FULL_COLLECTIONS,
        "spared_ms": round(spared_ms, 2),
        "unspared_ms": round(unspared_ms, 2),
        "large_pool_tokens": MANY * LARGE_CONTEXT,
        "large_pool_ms": round(large_ms, 2),
    }


def _rooflines(engine: Engine, profiles: dict[tuple[int, int], Profile]) -> list[Figures]:
    """Of decode steps that nobody watched."""
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
    engine: Engine, seen: Stopwatch, vocab_size: int, repeat: int, *, is_spared: bool = True
) -> Course:
    requests = requests_of("mixed", vocab_size=vocab_size, rate=1.0, repeat=repeat)
    with spared_by_garbage_collection() if is_spared else nullcontext():
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
    """In tokens, of what is measured."""
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
        help=f"sequences that decode, {MANY} among them; default: 1,32,{MANY}, on a GPU 1,32,64,128,{MANY}",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--kv-gib", type=float, default=4.0, help=f"of the KV pool; more where {MANY} decodes need more"
    )
    parser.add_argument("--prove", nargs="*", default=PROOF, help="tests that must pass first")
    parser.add_argument("--name", default="profile", help="of the report")
    parser.add_argument("--skip-proof", action="store_true", help="measure without tests, and keep no report")
    parser.add_argument("--output", type=Path, default=REPORTS, help="folder of the report")
    arguments = parser.parse_args()
    arguments.contexts = arguments.contexts or CONTEXTS[arguments.device]
    arguments.decodes = arguments.decodes or DECODES[arguments.device]
    if MANY not in arguments.decodes:
        parser.error(f"--decodes must have {MANY} among them: floors are of so many")
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
        title="Where a step's time goes, and what the scheduler costs",
        text=text_of(figures, about),
        figures=figures,
        floors=floors_of(figures),
        versions={"torch": version("torch")},
        folder=arguments.output,
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
