"""Speculation beside none, on one engine with real weights and outputs that are written down beforehand.

    python -m bench.engine.speculation --model llama-166m --dtype bfloat16

- **grid**: batches of 1 to 64 decodes, with guesses that are right with a probability of 0 to 0.9. Each cell is the
  rate of tokens over that without speculation, which must be at least 0.98.
- **code edits**: one request at a time. Its prompt is a source file of this project, its output the same file with
  changes. Guesses are those of `--speculation ngram`.

The model computes every step in full. Then the tokens that it draws are replaced by those of the written outputs, since
no small model edits code. `--clock cpu` counts CPU time, on a machine that other programs disturb. The runs of a batch
take turns, in reversed order in every other turn. Before all of them, each number of decodes runs once, because it is
recorded at its first use. The first two turns are not counted, because speculation learns in them.

Each turn runs without speculation twice. The second such run is the control: its ratio to the first would be 1 without
noise. A batch's spread is what the control misses 1 by, or the standard error of its median, whichever is larger. A
cell must reach 0.98 less the spread, and the spread must be at most 0.02. So noise excuses no cell unseen.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from blockyard.proto.naming.block_hash import chain, root_name
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.execution.runner import Runner
from blockyard.worker.sequences.identifiers import BlockName, SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.sequences.step_plan import StepPlan, StepTokens
from blockyard.worker.speculation.speculation import Speculation
from blockyard.worker.startup.loading import LoadedEngine, load_engine
from tokenizers import Tokenizer

from bench.engine.shapes import SHAPES, model_folder
from bench.proof import Proof, add_proof_options, end_if_unproven, proof_of
from bench.reporting import REPORTS, Floor, write_report

PROOF = tuple(f"tests/unit/worker/test_speculation{name}.py" for name in ("", "_costs", "_tokens"))
LEAST_RATIO = 0.98
MOST_SPREAD = 0.02
LEAST_ON_EDITS = 1.8
PROMPT_TOKENS = 48
UNCOUNTED_TURNS = 2
CHANGED_SHARE = 0.06
"""Share of a file's lines that an edit changes, inserts or deletes."""
MATCH = 8
"""Length of the match that forced guesses claim."""
ROOT = root_name(cluster_secret="", model_fingerprint="bench", block_size=16, kv_dtype="bench")
FIRST_TOKEN = 10
NONE, CONTROL = "none", "none again"
MEDIAN_ERROR = 1.86
"""Standard error of a median in a normal distribution, times the root of the count, over the median deviation."""
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request whose output is known."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


class Written:
    """Outputs by prompt. Prompts differ."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._outputs = {job.prompt: job.output for job in jobs}

    def output(self, sequence: Sequence) -> tuple[int, ...]:
        return self._outputs[tuple(sequence.tokens[: sequence.prompt_length])]


class WritingRunner:
    """Runs steps on another runner, and replaces the tokens that they draw by those of the written outputs."""

    def __init__(self, runner: Runner, written: Written) -> None:
        self._runner = runner
        self._written = written
        self._by_id: dict[SequenceId, tuple[int, ...]] = {}

    def warm_up(self) -> None:
        """Do nothing: the other runner is warm."""

    def execute(self, plan: StepPlan) -> StepTokens:
        step = self._runner.execute(plan)
        tokens = [
            self._output(row.sequence)[row.end - row.sequence.prompt_length] if row.samples else token
            for row, token in zip(plan.rows, step.tokens, strict=True)
        ]
        return replace(step, tokens=tokens)

    def _output(self, sequence: Sequence) -> tuple[int, ...]:
        output = self._by_id.get(sequence.sequence_id)
        if output is None:
            output = self._by_id[sequence.sequence_id] = self._written.output(sequence)
        return output


class ForcedGuesses:
    """Guesses tokens of the written outputs, each right with a given probability."""

    def __init__(self, written: Written, share_right: float, seed: int) -> None:
        self._written = written
        self._by_id: dict[SequenceId, tuple[int, ...]] = {}
        self._share_right = share_right
        self._chance = random.Random(seed)

    def draft(self, sequence: Sequence, most: int) -> tuple[list[int], int]:
        output = self._by_id.get(sequence.sequence_id)
        if output is None:
            output = self._by_id[sequence.sequence_id] = self._written.output(sequence)
        following = output[sequence.num_generated : sequence.num_generated + most]
        is_right = [self._chance.random() < self._share_right for _ in following]
        return [
            token if right else token ^ 1 for token, right in zip(following, is_right, strict=True)
        ], MATCH

    def forget(self, ended: Iterable[SequenceId]) -> None:
        for sequence_id in ended:
            self._by_id.pop(sequence_id, None)


def tokens_per_second(
    loaded: LoadedEngine, jobs: Items[Job], speculation: Speculation | None, clock: Clock
) -> float:
    """Run all jobs together, and return their rate of tokens from the moment when all prompts are computed."""
    engine = Engine(
        loaded.engine.scheduler.config,
        WritingRunner(loaded.runner, Written(jobs)),
        num_blocks=loaded.kv_size.num_blocks,
        speculation=speculation,
        clock=clock,
    )
    for job in jobs:
        names = [BlockName(name) for name in (ROOT, *chain(ROOT, job.prompt, 16))]
        sampling = SamplingParams(temperature=0.0, max_tokens=len(job.output))
        engine.submit(
            EngineRequest(
                token_ids=list(job.prompt), prompt_length=len(job.prompt), names=names, sampling=sampling
            )
        )
    while engine.scheduler.waiting or any(not one.num_generated for one in engine.scheduler.running):
        engine.step()
    num_before = engine.load().generated_tokens
    began = clock()
    while engine.has_work:
        engine.step()
    rate = (engine.load().generated_tokens - num_before) / (clock() - began)
    if speculation is not None:
        # The next engine numbers its sequences from 0 again.
        speculation.forget(map(SequenceId, range(len(jobs))))
    return rate


def grid_jobs(
    batch: int, num_tokens: int, vocab_size: int, seed: int | str, *, prompt_tokens: int = PROMPT_TOKENS
) -> list[Job]:
    chance = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(FIRST_TOKEN, vocab_size - 1) for _ in range(count))

    return [Job(prompt=tokens(prompt_tokens), output=tokens(num_tokens)) for _ in range(batch)]


def edited(lines: Items[str], chance: random.Random) -> list[str]:
    """Return the lines of a file with some of them changed, deleted, or followed by a new one."""
    result = []
    for line in lines:
        kind = chance.random() / CHANGED_SHARE
        if kind < 0.6:
            words = line.split(" ")
            words[chance.randrange(len(words))] += f"_{chance.randrange(100)}"
            result.append(" ".join(words))
        elif kind < 0.8:
            result += [line, f"    note = {chance.randrange(1000)}"]
        elif kind >= 1.0:
            result.append(line)
    return result


def edit_jobs(model: Path, num_files: int, most_tokens: int) -> list[Job]:
    """Return edits of this project's files. The prompt is the file and an instruction."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    folder, chance = Path(__file__).parents[2] / "worker" / "scheduling", random.Random(0)
    jobs = []
    for path in sorted(folder.glob("*.py"), key=lambda path: path.stat().st_size)[-num_files:]:
        lines = path.read_text(encoding="utf-8").splitlines()[:60]
        ask = "\nRename what the review names, and return the whole file.\n"
        prompt = tokenizer.encode("\n".join(lines) + ask).ids
        output = tokenizer.encode("\n".join(edited(lines, chance))).ids[:most_tokens]
        jobs.append(Job(prompt=tuple(prompt), output=tuple(output)))
    return jobs


def run_each_size(loaded: LoadedEngine, most: int) -> None:
    """Run a step with each number of decodes up to `most`."""
    jobs = grid_jobs(most, most + 1, loaded.model.vocab_size, seed=-1)
    jobs = [replace(job, output=job.output[: 2 + number]) for number, job in enumerate(jobs)]
    tokens_per_second(loaded, jobs, None, time.perf_counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """One batch: ratios of rates to those without speculation in the same turn."""

    control: float
    spread: float
    """Error that the noise of this run may cause in a ratio."""
    shares: dict[str, float]
    """Ratios by the share of right guesses."""


def grid(loaded: LoadedEngine, options: argparse.Namespace, clock: Clock) -> dict[str, Cells]:
    """Return the ratios of each batch."""
    found: dict[str, Cells] = {}
    for batch in options.batches:
        jobs = grid_jobs(batch, options.tokens, loaded.model.vocab_size, seed=batch)
        arms = {
            f"{share:g}": Speculation(ForcedGuesses(Written(jobs), share, seed=batch))
            for share in options.acceptances
        }
        found[str(batch)] = compared(loaded, arms, [jobs] * (UNCOUNTED_TURNS + options.repeats), clock)
    return found


def compared(
    loaded: LoadedEngine, arms: Mapping[str, Speculation], turns: Iterable[list[Job]], clock: Clock
) -> Cells:
    """Run the jobs of each turn by each arm, and twice without speculation. The first turns are not counted."""
    rates: dict[str, list[float]] = {name: [] for name in (NONE, *arms, CONTROL)}
    for turn, jobs in enumerate(turns):
        for name in reversed(rates) if turn % 2 else rates:
            rate = tokens_per_second(loaded, jobs, arms.get(name), clock)
            if turn >= UNCOUNTED_TURNS:
                rates[name].append(rate)
    cells, drafted = cells_of(rates), {name: arm.num_drafted for name, arm in arms.items()}
    print(f"batch of {len(jobs)}: {cells} of {drafted} drafts", file=sys.stderr, flush=True)
    return cells


def cells_of(rates: Mapping[str, Items[float]]) -> Cells:
    """Compare the rates of one batch, by arm and turn. A share's rate is compared with the mean of both runs without
    speculation in its turn, which lie on both sides of it."""
    pairs = list(zip(rates[NONE], rates[CONTROL], strict=True))
    controls = [again / none for none, again in pairs]
    control = median(controls)
    deviation = median(abs(ratio - control) for ratio in controls)
    return Cells(
        control=control,
        spread=max(abs(control - 1), MEDIAN_ERROR * deviation / sqrt(len(controls))),
        shares={
            name: median(rate / mean(pair) for rate, pair in zip(own, pairs, strict=True))
            for name, own in rates.items()
            if name not in (NONE, CONTROL)
        },
    )


def floors_of(found: Mapping[str, Cells]) -> list[Floor]:
    """Return the floors of a report: of each batch its spread and its cells."""
    floors = []
    for batch, cells in found.items():
        floors.append(
            Floor(name=f"batch {batch}, spread", value=cells.spread, floor=MOST_SPREAD, better="lower")
        )
        floors += [
            Floor(
                name=f"batch {batch}, {share} right",
                value=ratio,
                floor=round(LEAST_RATIO - cells.spread, 4),
                better="higher",
            )
            for share, ratio in cells.shares.items()
        ]
    return floors


def edits(loaded: LoadedEngine, options: argparse.Namespace, clock: Clock) -> tuple[float, dict[str, float]]:
    """Return the ratio over all files and counted turns, and of each file over them, with the share of guesses that
    were right in all turns."""
    jobs = edit_jobs(loaded.tokenizer_path, options.files, options.edit_tokens)
    speculation = Speculation()
    none_seconds, ngram_seconds = [0.0] * len(jobs), [0.0] * len(jobs)
    for turn in range(UNCOUNTED_TURNS + options.repeats):
        for number, job in enumerate(jobs):
            none = tokens_per_second(loaded, [job], None, clock)
            ngram = tokens_per_second(loaded, [job], speculation, clock)
            if turn >= UNCOUNTED_TURNS:
                none_seconds[number] += len(job.output) / none
                ngram_seconds[number] += len(job.output) / ngram
    by_file = {
        str(number): none / ngram
        for number, (none, ngram) in enumerate(zip(none_seconds, ngram_seconds, strict=True))
    }
    by_file["accepted share"] = speculation.num_right / max(speculation.num_drafted, 1)
    print(f"edits: {none_seconds} {ngram_seconds} {by_file}", file=sys.stderr, flush=True)
    return sum(none_seconds) / sum(ngram_seconds), by_file


def lines_of(found: Mapping[str, Cells], about: Items[str]) -> str:
    """Return the table of a grid below lines that say what it is about."""
    shares = list(next(iter(found.values())).shares) if found else []
    lines = [
        *about,
        "Rate of tokens over that without speculation, by batch and by the probability that a guess is right. The",
        "control is a second run without speculation. The spread is what the control misses 1 by, or the standard",
        "error of its median if that is larger. A cell must reach 0.98 less the spread.",
        "",
        f"| batch | {' | '.join(shares)} | control | spread |",
        "|---" * (3 + len(shares)) + "|",
    ]
    for batch, cells in found.items():
        ratios = [*(cells.shares[share] for share in shares), cells.control]
        lines.append(f"| {batch} | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} | {cells.spread:.3f} |")
    return "\n".join(lines)


def parser_of(
    about: str | None, proof: tuple[str, ...], *, batches: str, acceptances: str
) -> argparse.ArgumentParser:
    """Return a parser with the options of a grid, whose default batches and acceptances are given as text."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default="llama-166m", help="a shape, `demo`, or a checkpoint folder")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--cpu-linears", default="full")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kv-gib", type=float, default=1.0)
    parser.add_argument("--batches", type=_numbers(int), default=batches)
    parser.add_argument("--acceptances", type=_numbers(float), default=acceptances)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each output of the grid")
    parser.add_argument("--repeats", type=int, default=8, help="turns that count")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--output", type=Path, default=REPORTS, help="folder of the report")
    add_proof_options(parser, default=proof, about="tests that run before")
    return parser


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, PROOF, batches="1,2,4,8,16,32,64", acceptances="0,0.3,0.6,0.9")
    parser.add_argument("--files", type=int, default=4, help="files to edit")
    parser.add_argument("--edit-tokens", type=int, default=400, help="most tokens of an edited file")
    return parser.parse_args()


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def config_of(options: argparse.Namespace, scratch: Path) -> EngineConfig:
    """Return the settings of the engine that is measured. A shape's config is written into the folder `scratch`."""
    folder = model_folder(options.model, "float32", scratch, with_weights=False)
    return EngineConfig(
        model=str(folder),
        device=options.device,
        dtype=options.dtype,
        load_format="random" if options.model in SHAPES else "auto",
        cpu_linears=options.cpu_linears,
        kv_cache_memory=int(options.kv_gib * 2**30),
        max_num_seqs=256,
        max_model_len=2048,
        overlap_steps="off",
    )


def proof_by(options: argparse.Namespace) -> Proof:
    """Run the tests that prove what is measured."""
    return proof_of(
        [options.prove], device=options.device, is_skipped=options.skip_proof, seconds=options.proof_seconds
    )


def clock_of(options: argparse.Namespace) -> Clock:
    return time.process_time if options.clock == "cpu" else time.perf_counter


def main() -> None:
    options = parse()
    proof, clock = proof_by(options), clock_of(options)
    with TemporaryDirectory() as scratch:
        loaded = load_engine(config_of(options, Path(scratch)))
        run_each_size(loaded, 64)
        found = grid(loaded, options, clock)
        on_edits, by_file = edits(loaded, options, clock)
    path = write_report(
        "speculation",
        title="Speculation beside none",
        text=f"{lines_of(found, ())}\n\nCode edits, one at a time, with `--speculation ngram`: {on_edits:.2f}",
        figures={
            "grid": {batch: asdict(cells) for batch, cells in found.items()},
            "edits": on_edits,
            "edits by file": by_file,
            "clock": options.clock,
        },
        floors=[
            *floors_of(found),
            Floor(name="code edits", value=on_edits, floor=LEAST_ON_EDITS, better="higher"),
        ],
        versions={},
        folder=options.output,
        unproven=proof.unproven,
    )
    print(path)
    end_if_unproven(proof, is_skipped=options.skip_proof)


if __name__ == "__main__":
    main()
