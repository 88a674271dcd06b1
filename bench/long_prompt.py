"""Gaps between tokens of 16 decodes while a prompt of 8,192 tokens is prefilled beside them, on the CPU.

    python -m bench.long_prompt

The engine runs alone, with random weights of the demo model's shape and a longer context. Three cases take turns. The
first has no long prompt. In the second, `mixed_step_seconds` limits the prompt's share of a step. In the third, only
the token budget limits it.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from blockyard.deploy.settings.options import model_path
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.startup.loading import load_engine

from bench.reporting import Floor, write_report

DECODES = 16
LONG_PROMPT = 8192
CONTEXT = 10_240
MIXED_STEP_SECONDS = 0.1
CALM_STEPS = 60
CASES = ("no long prompt", "limited", "not limited")
ROOT = BlockName(bytes(16))


@dataclass(slots=True)
class Gaps:
    seconds: list[float] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    """Times to the first token of the long prompt."""

    def percentile(self, share: float) -> float:
        known = sorted(self.seconds)
        return known[min(len(known) - 1, int(share * len(known)))]


def write_model(folder: Path) -> None:
    """Write the demo model's configuration, with a longer context, and its tokenizer. Weights are then random."""
    config = json.loads(Path(model_path("demo"), "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}), "utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(Path(model_path("demo"), name).read_bytes())


def make_engine(folder: Path, mixed_step_seconds: float) -> Engine:
    write_model(folder)
    settings = EngineConfig(
        model=str(folder),
        device="cpu",
        load_format="random",
        max_num_batched_tokens=2048,
        mixed_step_seconds=mixed_step_seconds,
    )
    return load_engine(settings).engine


def submit(engine: Engine, chance: random.Random, num_tokens: int, max_tokens: int) -> int:
    return engine.submit(
        EngineRequest(
            token_ids=[chance.randrange(4096) for _ in range(num_tokens)],
            prompt_length=num_tokens,
            names=[ROOT],
            sampling=SamplingParams(max_tokens=max_tokens),
        )
    )


def measure(engine: Engine, seed: int, *, long_prompt: bool, gaps: Gaps) -> None:
    """Run the decodes, and add the gaps between their tokens to `gaps`.

    The run ends with the long prompt's first token, or without a long prompt after about CALM_STEPS steps.
    """
    chance = random.Random(seed)
    decodes = {submit(engine, chance, 64, 1500) for _ in range(DECODES)}
    for _ in range(10):
        engine.step()
    started = time.perf_counter()
    last = defaultdict[int, float](lambda: started)
    other = submit(engine, chance, LONG_PROMPT, 1) if long_prompt else None
    for step in range(100_000):
        outputs = engine.step().outputs
        now = time.perf_counter()
        for output in outputs:
            if output.request_id in decodes:
                gaps.seconds.append(now - last[output.request_id])
                last[output.request_id] = now
        if any(output.request_id == other for output in outputs):
            gaps.first_token_seconds.append(now - started)
            break
        if other is None and step == CALM_STEPS:
            break
    for request_id in decodes:
        engine.cancel(request_id)  # type: ignore[arg-type]
    while engine.has_work:
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    gaps = {case: Gaps() for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        limited, unlimited = (make_engine(Path(folder), seconds) for seconds in (MIXED_STEP_SECONDS, 0.0))
        for engine in (limited, unlimited):
            measure(engine, 0, long_prompt=True, gaps=Gaps())  # Warm up, and let the engine measure prefill.
        for seed in range(1, repeats + 1):
            measure(limited, 3 * seed, long_prompt=False, gaps=gaps["no long prompt"])
            measure(limited, 3 * seed + 1, long_prompt=True, gaps=gaps["limited"])
            measure(unlimited, 3 * seed + 2, long_prompt=True, gaps=gaps["not limited"])
    report(gaps, repeats)


def report(gaps: dict[str, Gaps], repeats: int) -> None:
    figures: dict[str, dict[str, float]] = {}
    rows = []
    for case, known in gaps.items():
        numbers = {
            "p50_ms": 1000 * known.percentile(0.5),
            "p99_ms": 1000 * known.percentile(0.99),
            "max_ms": 1000 * max(known.seconds),
            "long_prompt_first_token_s": statistics.median(known.first_token_seconds or [0.0]),
        }
        figures[case.replace(" ", "_")] = {name: round(value, 2) for name, value in numbers.items()}
        rows.append(f"| {case} | " + " | ".join(f"{value:.1f}" for value in numbers.values()) + " |")
    ratio = gaps["not limited"].percentile(0.99) / gaps["limited"].percentile(0.99)
    assert __doc__ is not None
    text = (
        f"{__doc__.rpartition(chr(10) * 2)[2]}\n{DECODES} decodes of 64 tokens, limit {MIXED_STEP_SECONDS} s, "
        f"budget 2,048 tokens, {repeats} turns. Gaps between two tokens:\n\n"
        "| case | p50 ms | p99 ms | max ms | first token of the long prompt s |\n|---|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\np99 without the limit / with it: {ratio:.2f}."
    )
    floors = [
        Floor(name="p99 gap without the limit / with it", value=round(ratio, 3), floor=1.5, better="higher"),
        Floor(
            name="p50 gap beside a long prompt, seconds",
            value=round(gaps["limited"].percentile(0.5), 4),
            floor=2 * MIXED_STEP_SECONDS,
            better="lower",
        ),
    ]
    path = write_report(
        "long-prompt",
        title="Decodes beside a long prompt",
        text=text,
        figures=figures | {"p99_ratio": {"value": round(ratio, 3)}},
        floors=floors,
        versions={"torch": torch.__version__},
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
