"""Delay of first tokens while two other clients keep sending prompts of 10 MB.

    python -m bench.tokenising            # about four minutes, writes bench/reports/<today>-tokenising.{md,json}
    python -m bench.tokenising --quick    # a smoke test: prints the report, keeps nothing

One router process serves scripted workers with a context of 131,072 tokens. Four clients request one token each, one
request after another. Two kinds of turns alternate: these clients alone, and beside two clients that send long prompts
from another process. The floor limits the difference of the medians of such a pair of turns.
"""

import argparse
import asyncio
import json
import os
import random
import secrets
import shutil
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from blockyard.proto.naming.fingerprint import tokenizer_fingerprint
from blockyard.router.client import AsyncClient, BlockyardError

from bench.proof import prove
from bench.reporting import REPORTS, Floor, percentile, write_report
from bench.router.processes import ROOT, cpu_clock, foreign_cores, running_workers
from bench.router.systems import our_router

MODEL = ROOT / "deploy" / "demo_model" / "checkpoint"
CONTEXT_TOKENS = 131_072
PROMPT_BYTES = 10_000_000
NUM_SENDERS = 2
NUM_OTHERS = 4
PAUSE_SECONDS = 0.02
"""Pause between two requests of one short client."""
STEP_SECONDS = 0.002
SETTLE_SECONDS = 2.0
"""Time after the first long prompt, or after the last one, before the measurement starts."""
CALL_SECONDS = 60.0
SENDERS_NICENESS = 15
MOST_LATER_MS = 100.0
PROOF = ("tests/unit/router/test_tokenizing.py", "tests/nightly/router/test_tokenizer_service.py")
SHORT = "def read_lines(path):\n    with open(path) as file:\n        return file."


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Times to first token of the short clients, in ms, and cores used by other programs."""

    first_ms: tuple[float, ...]
    foreign_cores: float


def long_prompt(seed: int) -> str:
    """Return text like program code, with many different names."""
    chance = random.Random(seed)
    words = [f"name_{chance.randrange(10**6)} = value" for _ in range(1000)]
    lines = "\n".join(words)
    return (lines * (PROMPT_BYTES // len(lines) + 1))[:PROMPT_BYTES]


async def send(address: str, number: int) -> None:
    """Send long prompts until the process is killed. Print the result of each call."""
    prompt = long_prompt(number)
    async with AsyncClient(
        address, retries=0, timeout_seconds=CALL_SECONDS, tenant=f"long-{number}"
    ) as client:
        while True:
            try:
                await client.generate(prompt, max_tokens=1)
                print("OK", flush=True)
            except BlockyardError as error:
                print(error.reason or error.code.name, flush=True)


async def senders(address: str) -> None:
    # The senders stand for other machines, so they must not take the router's cores. They get a low priority.
    os.nice(SENDERS_NICENESS)
    async with asyncio.TaskGroup() as tasks:
        for number in range(NUM_SENDERS):
            tasks.create_task(send(address, number))


@asynccontextmanager
async def sending(address: str, outcomes: Counter[str]) -> AsyncIterator[None]:
    """Run the senders inside the context, which starts once one of their calls has ended."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.tokenising", "--send-to", address),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    output = process.stdout

    has_ended = asyncio.Event()

    async def count() -> None:
        async for line in output:
            outcomes[line.decode().strip()] += 1
            has_ended.set()

    counting = asyncio.ensure_future(count())
    try:
        async with asyncio.timeout(CALL_SECONDS):
            await has_ended.wait()
        yield
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await counting


async def other(address: str, number: int, until: float) -> list[float]:
    """Send short requests, one after another, until the time `until`. Return the ms to each first token."""
    waited = []
    async with AsyncClient(
        address, retries=0, timeout_seconds=CALL_SECONDS, tenant=f"other-{number}"
    ) as client:
        while time.monotonic() < until:
            sent = time.monotonic()
            async for _ in client.stream(SHORT, max_tokens=1, ignore_eos=True):
                break
            waited.append(1000 * (time.monotonic() - sent))
            await asyncio.sleep(PAUSE_SECONDS)
    return waited


async def turn(address: str, seconds: float) -> Turn:
    await asyncio.sleep(SETTLE_SECONDS)
    before, until = cpu_clock(()), time.monotonic() + seconds
    waited = await asyncio.gather(*(other(address, number, until) for number in range(NUM_OTHERS)))
    return Turn(
        first_ms=tuple(ms for one in waited for ms in one),
        foreign_cores=foreign_cores(before, cpu_clock(())),
    )


async def measure(folder: Path, repeats: int, seconds: float) -> tuple[dict[str, list[Turn]], Counter[str]]:
    """Run all turns. Return them by setting, and counts of the results of calls with long prompts."""
    turns: dict[str, list[Turn]] = {"alone": [], "beside long prompts": []}
    outcomes: Counter[str] = Counter()
    model, secret = model_of_long_context(folder), secrets.token_hex(16)
    words = (str(STEP_SECONDS), tokenizer_fingerprint(model), str(CONTEXT_TOKENS))
    async with (
        running_workers("bench.router.workers", *words, secret=secret) as workers,
        our_router(str(model), workers, lambda number: SHORT, folder, None) as system,
    ):
        assert system.address
        await turn(system.address, min(seconds, 2.0))  # Warm up.
        for _ in range(repeats):
            turns["alone"].append(await turn(system.address, seconds))
            async with sending(system.address, outcomes):
                turns["beside long prompts"].append(await turn(system.address, seconds))
    return turns, outcomes


def model_of_long_context(folder: Path) -> Path:
    """Copy the demo model's config and tokenizer, which is all that a router reads, with a longer context."""
    model = folder / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text("utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_TOKENS}))
    return model


def figures_of(turns: dict[str, list[Turn]], outcomes: Counter[str]) -> dict[str, Any]:
    return {
        "first_token_ms": {
            setting: {
                "p50": percentile(pooled := [ms for one in of_setting for ms in one.first_ms], 0.5),
                "p99": percentile(pooled, 0.99),
                "requests": len(pooled),
                "medians": [median(one.first_ms) for one in of_setting],
                "foreign_cores": [one.foreign_cores for one in of_setting],
            }
            for setting, of_setting in turns.items()
        },
        "later_ms": later_ms(turns),
        "long_prompts": dict(outcomes),
    }


def later_ms(turns: dict[str, list[Turn]]) -> list[float]:
    """Return by how many ms the median is later beside long prompts, for each pair of turns."""
    alone, beside = turns.values()
    return [
        median(after.first_ms) - median(before.first_ms) for before, after in zip(alone, beside, strict=True)
    ]


def text_of(figures: dict[str, Any]) -> str:
    rows = [
        f"| {setting} | {row['p50']:.1f} | {min(row['medians']):.1f}-{max(row['medians']):.1f} | {row['p99']:.1f} "
        f"| {row['requests']} | {median(row['foreign_cores']):.2f} |"
        for setting, row in figures["first_token_ms"].items()
    ]
    ends = ", ".join(f"{count} {reason}" for reason, count in sorted(figures["long_prompts"].items()))
    about = (
        f"{NUM_OTHERS} clients request one token each, {PAUSE_SECONDS * 1000:.0f} ms after the last one. Beside them, "
        f"{NUM_SENDERS} clients send prompts of {PROMPT_BYTES / 1e6:.0f} MB one after another, from a process of low "
        f"priority on the same machine. One router process, a context of {CONTEXT_TOKENS:,} tokens, scripted workers "
        f"that compute nothing (a step every {STEP_SECONDS * 1000:.0f} ms). Results of the calls with long prompts: "
        f"{ends}. Foreign cores are those that other programs used."
    )
    head = "| | first token p50 ms | p50 of the turns | p99 | requests | foreign cores |\n|---|---|---|---|---|---|"
    differences = ", ".join(f"{value:.1f}" for value in figures["later_ms"])
    return "\n".join(
        [about, "", head, *rows, "", f"Delay of the median, for each pair of turns: {differences} ms."]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tokenising", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of each turn")
    parser.add_argument(
        "--quick", action="store_true", help="one short pair of turns, without tests and without a report"
    )
    parser.add_argument("--output", type=Path, default=REPORTS)
    parser.add_argument(
        "--send-to", metavar="ADDRESS", help="run the senders; this program starts itself with this option"
    )
    arguments = parser.parse_args()
    if arguments.send_to:
        asyncio.run(senders(arguments.send_to))
        return
    proven = "nothing" if arguments.quick else prove(PROOF)
    repeats, seconds = (1, 2.0) if arguments.quick else (arguments.repeats, arguments.seconds)
    with TemporaryDirectory(prefix="blockyard-bench-") as scratch:
        turns, outcomes = asyncio.run(measure(Path(scratch), repeats, seconds))
    figures = figures_of(turns, outcomes)
    if arguments.quick:
        print(text_of(figures))
        return
    path = write_report(
        "tokenising",
        title="First tokens beside prompts of 10 MB",
        text=f"{text_of(figures)}\n\nProven before: {proven}.",
        figures=figures,
        floors=[
            Floor(
                name="first token beside long prompts, ms later at the median",
                value=median(figures["later_ms"]),
                floor=MOST_LATER_MS,
                better="lower",
            )
        ],
        versions={},
        folder=arguments.output,
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
