"""A draft model beside none, on one engine with random weights and outputs that are written down beforehand.

    python -m bench.engine.draft_model --model llama-166m --draft-model llama-thin --dtype bfloat16

Both models compute every step in full. Then the tokens that the served model draws are replaced by those of the written
outputs. Each draft is replaced too: by the same token with a given probability, otherwise by a wrong one. So the ratios
say what a pair of these shapes costs and gains at an acceptance. They do not say which one trained models reach.

Each turn has other prompts, so the draft model computes them anew. Rates count from the moment when the served model
has computed all prompts. The runs of a batch take turns, and the first two turns are not counted, because speculation
learns in them.
"""

import argparse
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from blockyard.worker.config import EngineConfig
from blockyard.worker.execution.runner import Runner
from blockyard.worker.sequences.step_plan import ScheduledRow, StepPlan, StepTokens
from blockyard.worker.speculation.draft_model import DraftModel
from blockyard.worker.speculation.speculation import Speculation
from blockyard.worker.startup.draft_model import load_draft_model
from blockyard.worker.startup.loading import LoadedEngine, load_engine

from bench.engine.shapes import SHAPES, model_folder
from bench.engine.speculation import FIRST_TOKEN, Clock, Job, Written, run_each_size, tokens_per_second
from bench.proof import add_proof_options, end_if_unproven, proof_of
from bench.reporting import REPORTS, Floor, write_report

PROOF = ("tests/worker/test_draft_model.py", "tests/worker/test_speculation.py")
LEAST_RATIO = 0.98
UNCOUNTED_TURNS = 2


class GuessingRunner:
    """Runs a draft model's steps, and replaces its tokens by those of the written outputs or by wrong ones."""

    def __init__(self, runner: Runner, share_right: float, seed: int) -> None:
        self._runner = runner
        self._share_right = share_right
        self._chance = random.Random(seed)
        self.written = Written(())

    def execute(self, plan: StepPlan) -> StepTokens:
        step = self._runner.execute(plan)
        tokens = [
            self._guess(row) if row.samples else token
            for row, token in zip(plan.rows, step.tokens, strict=True)
        ]
        return replace(step, tokens=tokens)

    def _guess(self, row: ScheduledRow) -> int:
        sequence = row.sequence
        token = self.written.output(sequence)[row.end - sequence.prompt_length]
        return token if self._chance.random() < self._share_right else token ^ 1


def jobs_of(batch: int, options: argparse.Namespace, vocab_size: int, turn: int) -> list[Job]:
    chance = random.Random(f"{batch} {turn}")

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(FIRST_TOKEN, vocab_size - 1) for _ in range(count))

    return [Job(prompt=tokens(options.prompt_tokens), output=tokens(options.tokens)) for _ in range(batch)]


def grid(
    loaded: LoadedEngine, draft: Runner, config: EngineConfig, options: argparse.Namespace, clock: Clock
) -> dict[str, dict[str, float]]:
    """Return the ratio of each cell, by batch and share of right guesses."""
    ratios: dict[str, dict[str, float]] = {}
    for batch in options.batches:
        runners = {f"{share:g}": GuessingRunner(draft, share, seed=batch) for share in options.acceptances}
        speculations = {
            name: Speculation(
                model=DraftModel(
                    runner.execute,
                    num_blocks=loaded.kv_size.num_blocks,
                    block_size=config.block_size,
                    max_tokens=loaded.max_model_len,
                    max_step_tokens=config.max_num_batched_tokens,
                    clock=clock,
                )
            )
            for name, runner in runners.items()
        }
        rates: dict[str, list[float]] = {name: [] for name in ("none", *runners)}
        for turn in range(UNCOUNTED_TURNS + options.repeats):
            jobs = jobs_of(batch, options, loaded.model.vocab_size, turn)
            for name, of_name in rates.items():
                if name in runners:
                    runners[name].written = Written(jobs)
                rate = tokens_per_second(loaded, jobs, speculations.get(name), clock)
                if turn >= UNCOUNTED_TURNS:
                    of_name.append(rate)
        ratios[str(batch)] = {
            name: median(rate / none for rate, none in zip(rates[name], rates["none"], strict=True))
            for name in runners
        }
        drafted = {name: one.num_drafted for name, one in speculations.items()}
        print(f"batch {batch}: {ratios[str(batch)]} of {drafted} drafts", file=sys.stderr, flush=True)
    return ratios


def lines_of(ratios: dict[str, dict[str, float]], options: argparse.Namespace) -> str:
    shares = list(next(iter(ratios.values())))
    lines = [
        f"{options.model} with {options.draft_model} as its draft model, prompts of {options.prompt_tokens} tokens and "
        f"outputs of {options.tokens}. Rate of tokens over that without speculation, by batch and by the probability "
        "that a draft is right, which is set:",
        "",
        f"| batch | {' | '.join(shares)} |",
        "|---" * (1 + len(shares)) + "|",
    ]
    for batch, cells in ratios.items():
        lines.append(f"| {batch} | {' | '.join(f'{cells[share]:.2f}' for share in shares)} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default="llama-166m", help="a shape, `demo`, or a checkpoint folder")
    parser.add_argument("--draft-model", default="llama-thin", help="the same, with the same tokens")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kv-gib", type=float, default=1.0)
    parser.add_argument("--batches", type=_numbers, default=[1, 4, 16])
    parser.add_argument("--acceptances", type=_shares, default=[0.0, 0.5, 0.8])
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each output")
    parser.add_argument("--repeats", type=int, default=3, help="turns that count")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--output", type=Path, default=REPORTS, help="folder of the report")
    add_proof_options(parser, default=PROOF, about="tests that run before")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _shares(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    options = parse()
    proof = proof_of(
        [options.prove], device=options.device, is_skipped=options.skip_proof, seconds=options.proof_seconds
    )
    clock: Clock = time.process_time if options.clock == "cpu" else time.perf_counter
    with TemporaryDirectory() as scratch:
        folders = [
            model_folder(name, "float32", Path(scratch), with_weights=False)
            for name in (options.model, options.draft_model)
        ]
        config = EngineConfig(
            model=str(folders[0]),
            device=options.device,
            dtype=options.dtype,
            load_format="random" if {options.model, options.draft_model} <= SHAPES.keys() else "auto",
            kv_cache_memory=int(options.kv_gib * 2**30),
            max_num_seqs=256,
            max_model_len=2048,
            overlap_steps="off",
        )
        loaded = load_engine(config)
        place = torch.device("cuda:0" if options.device == "cuda" else "cpu")
        draft = load_draft_model(
            replace(config, draft_model=str(folders[1])), loaded.model, loaded.tokenizer_path, place
        )
        assert draft is not None
        draft.allocate(loaded.kv_size.num_blocks, loaded.max_model_len)
        run_each_size(loaded, 64)
        ratios = grid(loaded, draft.runner, config, options, clock)
    path = write_report(
        "draft-model",
        title="A draft model beside none",
        text=lines_of(ratios, options),
        figures={
            "grid": ratios,
            "clock": options.clock,
            "model": options.model,
            "draft model": options.draft_model,
        },
        floors=[
            Floor(name=f"batch {batch}, {share} right", value=ratio, floor=LEAST_RATIO, better="higher")
            for batch, cells in ratios.items()
            for share, ratio in cells.items()
        ],
        versions={},
        folder=options.output,
        unproven=proof.unproven,
    )
    print(path)
    end_if_unproven(proof, is_skipped=options.skip_proof)


if __name__ == "__main__":
    main()
