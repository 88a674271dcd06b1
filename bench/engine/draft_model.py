"""A draft model beside none, on one engine with random weights and outputs that are written down beforehand.

    python -m bench.engine.draft_model --model llama-166m --draft-model llama-thin --dtype bfloat16

Both models compute every step in full. Then the tokens that the served model draws are replaced by those of the written
outputs. Each draft is replaced too: by the same token with a given probability, otherwise by a wrong one. So the ratios
say what a pair of these shapes costs and gains at an acceptance. They do not say which one trained models reach.

Each turn has other prompts, so the draft model computes them anew. Rates count from the moment when the served model
has computed all prompts. Turns, control and floors are those of `bench.engine.speculation`.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from blockyard.worker.config import EngineConfig
from blockyard.worker.execution.part_runner import LoadFormat
from blockyard.worker.execution.runner import Runner
from blockyard.worker.sequences.step_plan import ScheduledRow, StepPlan, StepTokens
from blockyard.worker.speculation.draft_model import DraftModel
from blockyard.worker.speculation.speculation import Speculation
from blockyard.worker.startup.draft_model import load_draft_model
from blockyard.worker.startup.loading import LoadedEngine, load_engine

from bench.engine.shapes import SHAPES, model_folder
from bench.engine.speculation import (
    UNCOUNTED_TURNS,
    Cells,
    Clock,
    Job,
    Written,
    clock_of,
    compared,
    config_of,
    floors_of,
    grid_jobs,
    lines_of,
    parser_of,
    proof_by,
    run_each_size,
)
from bench.proof import end_if_unproven
from bench.reporting import write_report

PROOF = ("tests/unit/worker/test_draft_model.py", "tests/unit/worker/test_speculation.py")


class GuessingRunner:
    """Runs a draft model's steps, and replaces its tokens by those of the written outputs or by wrong ones."""

    def __init__(self, runner: Runner, share_right: float, seed: int) -> None:
        self._runner = runner
        self._share_right = share_right
        self._chance = random.Random(seed)
        self.written: Written | None = None
        """The outputs. None while the model is measured."""

    def execute(self, plan: StepPlan) -> StepTokens:
        step = self._runner.execute(plan)
        tokens = [
            self._guess(row) if row.samples and self.written is not None else token
            for row, token in zip(plan.rows, step.tokens, strict=True)
        ]
        return replace(step, tokens=tokens)

    def _guess(self, row: ScheduledRow) -> int:
        sequence = row.sequence
        assert self.written is not None
        token = self.written.output(sequence)[row.end - sequence.prompt_length]
        return token if self._chance.random() < self._share_right else token ^ 1


def grid(
    loaded: LoadedEngine, draft: Runner, config: EngineConfig, options: argparse.Namespace, clock: Clock
) -> dict[str, Cells]:
    """Return the ratios of each batch. Prompts differ in each turn, so the draft model has none of their keys."""
    found: dict[str, Cells] = {}
    for batch in options.batches:
        runners = {f"{share:g}": GuessingRunner(draft, share, seed=batch) for share in options.acceptances}
        models = {
            name: DraftModel(
                runner.execute,
                num_blocks=loaded.kv_size.num_blocks,
                block_size=config.block_size,
                max_tokens=loaded.max_model_len,
                max_step_tokens=config.max_num_batched_tokens,
                clock=clock,
            )
            for name, runner in runners.items()
        }
        for model in models.values():
            model.measure(config.max_num_seqs)

        def turns(batch: int = batch, runners: dict[str, GuessingRunner] = runners) -> Iterator[list[Job]]:
            for turn in range(UNCOUNTED_TURNS + options.repeats):
                jobs = grid_jobs(
                    batch,
                    options.tokens,
                    loaded.model.vocab_size,
                    seed=f"{batch} {turn}",
                    prompt_tokens=options.prompt_tokens,
                )
                for runner in runners.values():
                    runner.written = Written(jobs)
                yield jobs

        arms = {name: Speculation(model=model) for name, model in models.items()}
        found[str(batch)] = compared(loaded, arms, turns(), clock)
    return found


def about(options: argparse.Namespace) -> list[str]:
    return [
        f"{options.model} with {options.draft_model} as its draft model, prompts of {options.prompt_tokens} tokens and",
        f"outputs of {options.tokens}.",
    ]


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, PROOF, batches="1,4,16", acceptances="0,0.5,0.8")
    parser.add_argument(
        "--draft-model", default="llama-thin", help="as --model, with the same number of tokens"
    )
    parser.add_argument("--prompt-tokens", type=int, default=256)
    return parser.parse_args()


def main() -> None:
    options = parse()
    proof, clock = proof_by(options), clock_of(options)
    with TemporaryDirectory() as scratch:
        config = config_of(options, Path(scratch))
        folder = model_folder(options.draft_model, "float32", Path(scratch), with_weights=False)
        loaded = load_engine(config)
        load_format: LoadFormat = "random" if options.draft_model in SHAPES else "auto"
        draft = load_draft_model(
            replace(config, draft_model=str(folder), load_format=load_format),
            loaded.model,
            loaded.tokenizer_path,
            torch.device("cuda:0" if options.device == "cuda" else "cpu"),
        )
        assert draft is not None
        draft.allocate(loaded.kv_size.num_blocks, loaded.max_model_len)
        run_each_size(loaded, 64)
        found = grid(loaded, draft.runner, config, options, clock)
    path = write_report(
        "draft-model",
        title="A draft model beside none",
        text=lines_of(found, about(options)),
        figures={
            "grid": {batch: asdict(cells) for batch, cells in found.items()},
            "clock": options.clock,
            "model": options.model,
            "draft model": options.draft_model,
        },
        floors=floors_of(found),
        versions={},
        folder=options.output,
        unproven=proof.unproven,
    )
    print(path)
    end_if_unproven(proof, is_skipped=options.skip_proof)


if __name__ == "__main__":
    main()
