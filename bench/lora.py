"""Speed of one batch whose sequences use eight adapters, beside the same batch on the bare model.

    python -m bench.lora --model llama-166m --dtypes float32,bfloat16
    python -m bench.lora --device cuda --model qwen3-0.6b --dtypes bfloat16 --prove tests/unit/kernels/test_lora.py

Two engines take turns in one process: one without slots, and one with eight. The second also runs the batch without
adapters, which shows what slots alone cost. The adapters are random, of one rank, and change all linear layers. A
decode rate is tokens a second of all sequences, once each has its first token. A prefill rate is prompt tokens a
second. The ratios are medians over rounds of two runs that follow one another. The order in which the engines are
loaded changes a ratio by up to 4 %, so both are measured. A ratio is the geometric mean of both.
"""

import argparse
import gc
import random
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from blockyard.proto.naming.block_hash import root_name
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.lora.layout import LinearWeights, linear_shapes
from blockyard.worker.sequences.adapter import Adapter
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.startup.loading import LoadedEngine, load_engine
from blockyard.worker.startup.openmp import bound_spinning

from bench.engine.shapes import model_folder
from bench.proof import add_proof_options, end_if_unproven, proof_of
from bench.reporting import REPORTS, Floor, write_report

NUM_ADAPTERS = 8
GOAL = 0.9
GOAL_OF_SLOTS = 0.97
"""Least rate of an engine with slots that no request uses."""
PROOF = (
    "tests/unit/kernels/test_lora.py",
    "tests/unit/worker/test_lora_tokens.py",
    "tests/unit/bench/test_figures.py",
)
ARMS = {"none": False, "slots": False, "adapters": True}
"""Whether the sequences of an arm use adapters. The first arm's engine has no slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    sequences: int
    prompt_tokens: int
    output_tokens: int

    @property
    def name(self) -> str:
        return f"{self.sequences} sequences, {self.prompt_tokens} + {self.output_tokens} tokens"


BATCHES = (
    Batch(sequences=8, prompt_tokens=128, output_tokens=64),
    Batch(sequences=32, prompt_tokens=128, output_tokens=64),
)


@dataclass(slots=True)
class Rates:
    """Rates of one arm, one for each round."""

    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)


def random_adapters(loaded: LoadedEngine, rank: int) -> list[Adapter]:
    """Return adapters that are served by the engine from now on."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, loaded.dtype.name)
    adapters = []
    for number in range(NUM_ADAPTERS):
        weights = {}
        for name, shape in linear_shapes(loaded.model).items():
            a_shape = loaded.model.num_layers, len(shape.parts), rank, shape.num_inputs
            b_shape = loaded.model.num_layers, rank, sum(shape.widths)
            weights[name] = LinearWeights(
                a_LPRI=(torch.randn(a_shape, generator=generator) / shape.num_inputs**0.5).to(dtype),
                b_LRO=(torch.randn(b_shape, generator=generator) * 0.01).to(dtype),
            )
        adapters.append(Adapter(fingerprint=f"{number:032x}", rank=rank, num_bytes=0, weights=weights))
        loaded.engine.adapters.add(adapters[-1])
    return adapters


def run(engine: Engine, batch: Batch, adapters: list[Adapter], seed: int) -> tuple[float, float]:
    """Run a batch of prompts that nothing shares. Return its decode rate and its prefill rate."""
    chance = random.Random(seed)
    for number in range(batch.sequences):
        fingerprint = adapters[number % len(adapters)].fingerprint if adapters else ""
        root = root_name(
            cluster_secret="", model_fingerprint=str(seed), block_size=16, kv_dtype="", adapter=fingerprint
        )
        prompt = [chance.randrange(3, 1000) for _ in range(batch.prompt_tokens)]
        engine.submit(
            EngineRequest(
                token_ids=prompt,
                prompt_length=len(prompt),
                names=[BlockName(root)],
                sampling=SamplingParams(temperature=0.0, max_tokens=batch.output_tokens),
                adapter=fingerprint,
            )
        )
    began, begun, num_decoded, all_began = time.perf_counter(), set[int](), 0, 0.0
    while engine.has_work:
        outputs = engine.step().outputs
        if all_began:
            num_decoded += len(outputs)
        begun.update(output.request_id for output in outputs)
        if not all_began and len(begun) == batch.sequences:
            all_began = time.perf_counter()
    ended = time.perf_counter()
    engine.flush()
    return num_decoded / (ended - all_began), batch.sequences * batch.prompt_tokens / (all_began - began)


def measure(
    engines: dict[str, Engine], adapters: list[Adapter], batch: Batch, rounds: int
) -> dict[str, Rates]:
    """Run all arms in turns. The first round warms up and does not count."""
    rates = {arm: Rates() for arm in ARMS}
    for number in range(rounds + 1):
        for arm, uses_adapters in ARMS.items():
            decode, prefill = run(engines[arm], batch, adapters if uses_adapters else [], number)
            if number:
                rates[arm].decode.append(decode)
                rates[arm].prefill.append(prefill)
    return rates


def ratio(orders: list[dict[str, Rates]], arm: str, kind: str) -> float:
    """Return the rate of an arm beside none, from the rates of both orders of loading."""
    return statistics.geometric_mean(
        statistics.median(
            one / other
            for one, other in zip(getattr(rates[arm], kind), getattr(rates["none"], kind), strict=True)
        )
        for rates in orders
    )


def floors_of(title: str, orders: list[dict[str, Rates]]) -> list[Floor]:
    return [
        Floor(name=f"{title}: {kind}, {what}", value=ratio(orders, arm, kind), floor=floor, better="higher")
        for kind in ("decode", "prefill")
        for what, arm, floor in (
            (f"{NUM_ADAPTERS} adapters / none", "adapters", GOAL),
            ("unused slots / none", "slots", GOAL_OF_SLOTS),
        )
    ]


def rows_of(title: str, orders: list[dict[str, Rates]]) -> list[str]:
    rows = []
    for arm in ARMS:
        decode, prefill = (
            statistics.median(rate for rates in orders for rate in getattr(rates[arm], kind))
            for kind in ("decode", "prefill")
        )
        rows.append(f"| {title} | {arm} | {decode:,.0f} | {prefill:,.0f} |")
    return rows


def engines_of(
    folder: Path, dtype: str, rank: int, device: str, *, slots_first: bool
) -> tuple[dict[str, Engine], list[Adapter]]:
    settings: dict[str, Any] = {"model": str(folder), "device": device, "dtype": dtype}
    settings |= {"kv_cache_memory": 1 << 30, "max_model_len": 2048, "max_num_seqs": 32}
    slots = {"max_loras": NUM_ADAPTERS, "max_lora_rank": rank, "adapter_dir": str(folder)}
    loaded = {
        has_slots: load_engine(EngineConfig(**settings, **(slots if has_slots else {})))
        for has_slots in (slots_first, not slots_first)
    }
    none, with_slots = loaded[False], loaded[True]
    adapters = random_adapters(with_slots, rank)
    engines = {"none": none.engine, "slots": with_slots.engine, "adapters": with_slots.engine}
    return engines, adapters


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.lora", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="llama-166m", help="a shape, demo, or a checkpoint folder")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=REPORTS, help="folder of the report")
    add_proof_options(parser, default=PROOF, about="tests that must pass, or the report is unproven")
    arguments = parser.parse_args()
    proof = proof_of(
        [arguments.prove],
        device=arguments.device,
        is_skipped=arguments.skip_proof,
        seconds=arguments.proof_seconds,
    )
    bound_spinning()
    floors: list[Floor] = []
    rows: list[str] = []
    figures: dict[str, Any] = {}
    with TemporaryDirectory(prefix="blockyard-bench-") as scratch:
        for dtype in arguments.dtypes.split(","):
            folder = model_folder(arguments.model, dtype, Path(scratch), with_weights=True).absolute()
            orders: dict[Batch, list[dict[str, Rates]]] = {batch: [] for batch in BATCHES}
            for slots_first in (False, True):
                engines, adapters = engines_of(
                    folder, dtype, arguments.rank, arguments.device, slots_first=slots_first
                )
                for batch, found in orders.items():
                    found.append(measure(engines, adapters, batch, arguments.rounds))
                del engines, adapters
                gc.collect()
            for batch, found in orders.items():
                title = f"{dtype}, {batch.name}"
                floors += floors_of(title, found)
                rows += rows_of(title, found)
                figures[title] = [{arm: asdict(one) for arm, one in rates.items()} for rates in found]
    assert __doc__ is not None
    text = "\n".join(
        [
            f"{__doc__.rpartition(chr(10) * 2)[2].strip()} Model {arguments.model}, rank {arguments.rank}, "
            f"{arguments.rounds} rounds in each order. {proof.proven}.",
            "",
            "| batch | engine | decoded tokens a second | prompt tokens a second |",
            "|---|---|---|---|",
            *rows,
        ]
    )
    path = write_report(
        "lora",
        title="Eight adapters in one batch",
        text=text,
        figures=figures,
        floors=floors,
        versions={"torch": torch.__version__},
        folder=arguments.output,
        unproven=proof.unproven,
    )
    print(path.read_text(encoding="utf-8"))
    end_if_unproven(proof, is_skipped=arguments.skip_proof)


if __name__ == "__main__":
    main()
