"""Whole models in 4 and 8 bits on a CPU: our engine beside llama.cpp, in turns in one run.

    python -m bench.quantise.peers --llamacpp-python PY [--models FOLDER]

PY is a Python with `pip install llama-cpp-python==0.3.36 gguf==0.19.0`; pip builds llama.cpp for this CPU. --models
keeps the checkpoints, some 9 GB, and a further run needs not make them again.

All files are made from one checkpoint in bfloat16 with random weights. Ours are rounded to the nearest in groups of
128, and GGUF by llama.cpp's own function. First both engines compute the checkpoint in float32, and must return the
same tokens. Then all systems stand ready, and take turns in each round. The first round warms up and does not count. A
prompt's rate is its tokens over the time to the first token. A decode rate is that of all sequences, once each has its
first token. A W4A16 checkpoint has its head in full precision. llama.cpp takes Q6_K for it in Q4_0 and Q4_K_M, and
rounds inputs to 8 bits. So does W4A8, which is a W4A16 checkpoint with `--cpu-linears int8`. llama.cpp's KV cache is in
float16, ours in bfloat16.
"""

import argparse
import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from blockyard.worker.startup.openmp import PYTORCH_SPIN_COUNT

from bench.engine.figures import middle, ratio_of
from bench.engine.peers.protocol import Request, Settings
from bench.engine.shapes import SHAPES, model_folder
from bench.engine.systems import PEERS, Running, System, Trial, our_system, peer_system, running, with_env
from bench.proof import add_proof_options, end_if_unproven, proof_of
from bench.quantise.recipes import quantise_checkpoint, recipes
from bench.reporting import REPORTS, Floor, write_report

MODEL = "llama-1.1b"
FIRST_TOKEN = 10
MEMORY_BYTES = 8 << 30
EXACT = ("blockyard float32", "llama.cpp F32")
OURS = {
    # Name: checkpoint, backend. `cpu-int8` rounds all inputs to 8 bits, and weights that the checkpoint has in full.
    "blockyard bfloat16": ("full", "cpu"),
    "blockyard W4A16": ("w4a16", "cpu"),
    "blockyard W4A8, head in int8": ("w4a16", "cpu-int8"),
    "blockyard int8": ("full", "cpu-int8"),
}
TYPES = ("BF16", "Q4_0", "Q4_K_M", "Q8_0")
PAIRS = (
    ("blockyard bfloat16", "llama.cpp BF16"),
    ("blockyard W4A16", "llama.cpp Q4_0"),
    ("blockyard W4A16", "llama.cpp Q4_K_M"),
    ("blockyard W4A8, head in int8", "llama.cpp Q4_0"),
    ("blockyard W4A8, head in int8", "llama.cpp Q4_K_M"),
    ("blockyard int8", "llama.cpp Q8_0"),
)
JUDGED = "1 decode"
PROOF = ("tests/unit/kernels/test_cpu_linears.py", "tests/unit/bench/test_figures.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that arrive at once."""

    name: str
    sequences: int
    prompt_tokens: int
    output_tokens: int

    def requests(self, vocab_size: int, repeat: int) -> list[Request]:
        """Return requests of random tokens. Each repeat has others, so that no cache has them."""
        chance = Random(f"{self.name} {repeat}")
        return [
            Request(
                0.0,
                [chance.randrange(FIRST_TOKEN, vocab_size) for _ in range(self.prompt_tokens)],
                self.output_tokens,
            )
            for _ in range(self.sequences)
        ]

    def rate(self, trial: Trial) -> float:
        """Return tokens/s: of the prompt if there is one output token, and else of decodes."""
        first = max(course.first or 0.0 for course in trial.courses)
        if self.output_tokens == 1:
            return self.sequences * self.prompt_tokens / first
        return self.sequences * (self.output_tokens - 1) / (trial.seconds - first)


CHECK = Load(name="check", sequences=4, prompt_tokens=32, output_tokens=16)
LOADS = (
    Load(name=JUDGED, sequences=1, prompt_tokens=16, output_tokens=33),
    Load(name="16 decodes", sequences=16, prompt_tokens=16, output_tokens=9),
    Load(name="prompt of 512", sequences=1, prompt_tokens=512, output_tokens=1),
)
Rates = dict[str, dict[str, list[Trial]]]
"""Trials by load and system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The checkpoint in its formats."""

    full: Path
    w4a16: Path
    gguf: Path
    """Folder with F32.gguf and a file of each type."""

    def bytes_of(self, name: str) -> int:
        """Return the size of a system's file. Our int8 is made when it is loaded."""
        if name in OURS:
            return sum(file.stat().st_size for file in self.folder(OURS[name][0]).glob("*.safetensors"))
        return (self.gguf / f"{name.rpartition(' ')[2]}.gguf").stat().st_size

    def folder(self, checkpoint: str) -> Path:
        return {"full": self.full, "w4a16": self.w4a16}[checkpoint]


def prepare(model: str, models: Path, python: Path) -> Files:
    """Make the files that are missing."""
    full = model_folder(model, "bfloat16", models, with_weights=True).absolute()
    files = Files(
        full=full, w4a16=full.with_name(f"{full.name}-w4a16"), gguf=full.with_name(f"{full.name}-gguf")
    )
    if not (files.w4a16 / "model.safetensors").exists():
        quantise_checkpoint(full, recipes()["w4a16"], files.w4a16)
    command = [python, PEERS / "llamacpp_convert.py", full, files.gguf, *TYPES]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""}, stdout=subprocess.DEVNULL)
    return files


def systems_of(files: Files, python: Path, threads: int) -> tuple[list[System], list[System]]:
    """Return both systems in float32, and all that are measured."""
    settings: Settings = {"max_num_seqs": 16, "max_model_len": 1024, "threads": threads}
    env = {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": str(PYTORCH_SPIN_COUNT)}

    def ours(name: str, checkpoint: str, backend: str, dtype: str) -> System:
        own = {"model": str(files.folder(checkpoint)), "backend": backend, "dtype": dtype, "device": "cpu"}
        own |= {"kv_bytes": 1 << 30, "shares": False}
        return with_env(our_system(name, "ours_run", {**settings, **own}), env)

    def theirs(kind: str, kv_type: str) -> System:
        own = {"gguf": str(files.gguf / f"{kind}.gguf"), "kv_type": kv_type}
        return with_env(peer_system(f"llama.cpp {kind}", "llamacpp", python, {**settings, **own}), env)

    exact = [ours(EXACT[0], "full", "cpu", "float32"), theirs("F32", "F32")]
    measured = [ours(name, *made, "bfloat16") for name, made in OURS.items()]
    return exact, [*measured, *(theirs(kind, "F16") for kind in TYPES)]


async def started(stack: AsyncExitStack, system: System, folder: Path) -> Running:
    """Start a system. Raise SystemExit if it is absent: the run compares all of them."""
    ready = await stack.enter_async_context(running(system, folder, MEMORY_BYTES))
    if isinstance(ready, str):
        raise SystemExit(f"{system.name} is absent: {ready}")
    print(f"{system.name} is ready after {ready.load_seconds:.1f} s", flush=True)
    return ready


async def same_tokens(systems: Sequence[System], vocab_size: int, folder: Path) -> float:
    """Return the share of requests whose first tokens are the same in all systems. They run one after the other."""
    heads = []
    for system in systems:
        async with AsyncExitStack() as stack:
            ready = await started(stack, system, folder)
            trial = await ready.run(CHECK.requests(vocab_size, 0))
            heads.append([course.head for course in trial.courses])
    return (
        sum(len({tuple(head) for head in request}) == 1 for request in zip(*heads, strict=True))
        / CHECK.sequences
    )


async def measure(
    systems: Sequence[System], vocab_size: int, rounds: int, folder: Path
) -> tuple[Rates, dict[str, Running]]:
    """Run all loads on all systems in turns. The order rotates from round to round."""
    async with AsyncExitStack() as stack:
        ready = {system.name: await started(stack, system, folder) for system in systems}
        rates: Rates = {load.name: {name: [] for name in ready} for load in LOADS}
        names = list(ready)
        for repeat in range(rounds + 1):
            for load in LOADS:
                for name in names[repeat:] + names[:repeat]:
                    trial = await ready[name].run(load.requests(vocab_size, repeat))
                    if repeat:
                        rates[load.name][name].append(trial)
            print(f"round {repeat} of {rounds}", flush=True)
    return rates, ready


def figures_of(rates: Rates) -> dict[str, Any]:
    return {
        load.name: {
            "tokens_per_second": {
                name: middle(map(load.rate, some)) for name, some in rates[load.name].items()
            },
            "foreign_cores": {
                name: round(median(trial.foreign_cores for trial in some), 3)
                for name, some in rates[load.name].items()
            },
            "ratios": {
                f"{ours} / {theirs}": ratio_of(rates[load.name][ours], rates[load.name][theirs], load.rate)
                for ours, theirs in PAIRS
            },
        }
        for load in LOADS
    }


def floors_of(figures: Mapping[str, Any], same: float) -> list[Floor]:
    return [
        Floor(name="requests with the same first tokens in float32", value=same, floor=1.0, better="higher"),
        *(
            Floor(name=f"{JUDGED}: {pair}", value=ratio["median"], floor=1.0, better="higher")
            for pair, ratio in figures[JUDGED]["ratios"].items()
        ),
    ]


def text_of(figures: Mapping[str, Any], files: Files, setting: str) -> str:
    meaning = (__doc__ or "").rpartition("\n\n")[2].strip()
    loads = [load.name for load in LOADS]
    foreign = max(cores for load in loads for cores in figures[load]["foreign_cores"].values())
    lines = [
        f"{meaning} {setting} Other programs took up to {foreign:.2f} cores.",
        "",
        f"| tokens/s | {' | '.join(loads)} | file, MB |",
        "|---" * (len(loads) + 2) + "|",
    ]
    for name in figures[JUDGED]["tokens_per_second"]:
        cells = [f"{figures[load]['tokens_per_second'][name]['median']:,.1f}" for load in loads]
        lines.append(f"| {name} | {' | '.join(cells)} | {files.bytes_of(name) / 1e6:,.0f} |")
    lines += ["", f"| ratio of pairs, median (lowest-highest; undisturbed) | {' | '.join(loads)} |"]
    lines.append("|---" * (len(loads) + 1) + "|")
    for ours, theirs in PAIRS:
        ratios = [figures[load]["ratios"][f"{ours} / {theirs}"] for load in loads]
        cells = [
            f"**{one['median']:.2f}** ({one['lowest']:.2f}-{one['highest']:.2f}; {one['undisturbed']})"
            for one in ratios
        ]
        lines.append(f"| {ours} / {theirs} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--llamacpp-python", type=Path, required=True, help="a Python with llama-cpp-python and gguf"
    )
    parser.add_argument("--model", choices=list(SHAPES), default=MODEL, help="a Llama shape")
    parser.add_argument(
        "--models", type=Path, help="folder that keeps the checkpoints; default: a temporary one"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=REPORTS, help="folder of the report")
    add_proof_options(parser, default=PROOF, about="tests that must pass, or the report is unproven")
    arguments = parser.parse_args()
    proof = proof_of(
        [arguments.prove], device="cpu", is_skipped=arguments.skip_proof, seconds=arguments.proof_seconds
    )
    python, vocab_size = arguments.llamacpp_python.absolute(), SHAPES[arguments.model].vocab
    with TemporaryDirectory(prefix="blockyard-bench-") as scratch:
        files = prepare(arguments.model, arguments.models or Path(scratch), python)
        exact, systems = systems_of(files, python, arguments.threads)
        same = asyncio.run(same_tokens(exact, vocab_size, Path(scratch)))
        print(f"{same:.0%} of the requests have the same tokens in float32", flush=True)
        rates, ready = asyncio.run(measure(systems, vocab_size, arguments.rounds, Path(scratch)))
        figures = figures_of(rates)
        theirs = next(one for name, one in ready.items() if name not in OURS)
        setting = (
            f"The model is {arguments.model}, with {arguments.threads} threads and {arguments.rounds} rounds. "
            f"In float32 {same:.0%} of {CHECK.sequences} requests have the same {CHECK.output_tokens} tokens. "
            f"llama.cpp has {theirs.notes}. {proof.proven}."
        )
        text = text_of(figures, files, setting)
    path = write_report(
        "quantised-peers",
        title="Models in 4 and 8 bits on a CPU, beside llama.cpp",
        text=text,
        figures={"model": arguments.model, "same_first_tokens": same, **figures},
        floors=floors_of(figures, same),
        versions={"torch": torch.__version__, **theirs.versions},
        folder=arguments.output,
        unproven=proof.unproven,
    )
    print(path.read_text(encoding="utf-8"))
    end_if_unproven(proof, is_skipped=arguments.skip_proof)


if __name__ == "__main__":
    main()
