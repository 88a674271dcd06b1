"""Drafters and a speculation that tests force: right and wrong guesses in any mixture, whatever they cost.

Also a pool of a draft model that knows what each of its slots holds.
"""

import json
import random
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import SequenceOutput
from blockyard.worker.sequences.identifiers import BlockId, RequestId, SequenceId
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.sequences.step_plan import NO_TOKEN, StepPlan, StepTokens
from blockyard.worker.speculation.draft_model import UNGUESSED, DraftModel
from blockyard.worker.speculation.drafter import Drafter
from blockyard.worker.speculation.speculation import MAX_DRAFTS, Speculation

from .token_engines import BLOCK_SIZE, BYTES_PER_BLOCK, engine_of, outputs_of, prompt_of, submit, tokens_of

Output = tuple[tuple[int, ...], int]
"""A prompt, and the index of one of its outputs."""


class ForcedDrafter:
    """Drafts the tokens that an output is known to get, each with a given probability, and other tokens instead."""

    def __init__(
        self, known: Mapping[Output, Items[int]], *, share_right: float, seed: int = 0, vocab_size: int = 270
    ) -> None:
        self._known = known
        self._share_right = share_right
        self._chance = random.Random(seed)
        self._vocab_size = vocab_size

    def draft(self, sequence: Sequence, most: int) -> tuple[list[int], int]:
        output = self._known.get((tuple(sequence.tokens[: sequence.prompt_length]), sequence.index), ())
        following = [*output[sequence.num_generated :][:most]]
        following += [0] * (most - len(following))
        return [self._maybe(token) for token in following], 8

    def _maybe(self, token: int) -> int:
        if self._chance.random() < self._share_right:
            return token
        return (token + self._chance.randrange(1, self._vocab_size)) % self._vocab_size

    def forget(self, ended: Iterable[SequenceId]) -> None:
        pass


class AlwaysDrafts(Speculation):
    """Verifies drafts in every step, of any number up to the most that is possible."""

    def __init__(
        self, drafter: Drafter | None = None, seed: int = 0, *, model: DraftModel | None = None
    ) -> None:
        """Without a `drafter` the draft `model` makes all drafts."""
        super().__init__(drafter, model)
        self._forced = drafter
        self._chance = random.Random(seed)

    def may_draft(self, num_rows: int) -> bool:
        return True

    def propose(
        self, candidates: Items[tuple[Sequence, int]], *, num_rows: int, most: int
    ) -> list[tuple[Sequence, list[int]]]:
        chosen = []
        if self._chance.random() < 0.2:
            return []
        for sequence, useful in candidates:
            count = min(useful, most, self._chance.randint(0, MAX_DRAFTS))
            if count > 0:
                tokens = self._drafts(sequence, count)
                most -= len(tokens)
                chosen.append((sequence, tokens))
        return chosen if self._model is None else self._model.complete(chosen)

    def _drafts(self, sequence: Sequence, count: int) -> list[int]:
        if self._forced is not None:
            return self._forced.draft(sequence, count)[0]
        assert self._model is not None
        return [UNGUESSED] * self._model.most(sequence, count)

    def is_worth_waiting(self, candidates: Items[tuple[Sequence, int]], *, num_rows: int, most: int) -> bool:
        return self._chance.random() < 0.7


class CheckedKeys:
    """The pool of a draft model, by slot: the tokens up to each position. Checks that no step reads another's keys."""

    def __init__(self, block_size: int, execute: Callable[[StepPlan], StepTokens] | None = None) -> None:
        """Without `execute`, which runs a step, the tokens are made up."""
        self._block_size = block_size
        self._run = execute or _made_up
        self._held: dict[tuple[BlockId, int], int] = {}
        self.num_computed = 0
        """Positions that were computed since the start."""

    def execute(self, plan: StepPlan) -> StepTokens:
        written: dict[tuple[BlockId, int], int] = {}
        for row in plan.rows:
            prefix = 0
            for position in range(row.end):
                prefix = hash((prefix, row.sequence.tokens[position]))
                block, offset = divmod(position, self._block_size)
                slot = row.sequence.block_table[block], offset
                if position < row.start:
                    assert self._held[slot] == prefix, f"position {position} has other keys in {slot}"
                else:
                    assert written.setdefault(slot, prefix) == prefix, "two sequences write one slot"
            self.num_computed += row.num_tokens
        self._held |= written
        return self._run(plan)


def _made_up(plan: StepPlan) -> StepTokens:
    return StepTokens(tokens=[1000 + row.end if row.samples else NO_TOKEN for row in plan.rows])


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.1, "top_k": 60, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "seed": -3, "logprobs": 2},
    {"temperature": 0.0, "logprobs": 0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {
        "temperature": 1.0,
        "seed": 9,
        "repetition_penalty": 1.3,
        "logit_bias": ((17, 3.0),),
        "min_tokens": 11,
        "eos_token_ids": frozenset(range(60, 160)),
        "logprobs": 3,
    },
    {"temperature": 1.2, "seed": 2, "stop_token_ids": frozenset(range(0, 270, 9))},
    {"temperature": 0.9, "seed": 4, "n": 3, "logprobs": 1, "presence_penalty": 0.5},
    {"temperature": 0.9, "seed": 1, "bad_token_ids": frozenset(range(50)), "prompt_logprobs": 1},
    {"temperature": 0.7, "seed": 8, "allowed_token_ids": frozenset(range(0, 270, 3))},
    {"beam_width": 2, "n": 2},
]
"""Requests of every kind. The prompt of each is `prompt_of(5 + 7 * number, number)`."""
Whole = dict[tuple[RequestId, int], tuple[Any, ...]]
"""The results of each output of each request, however it was cut into steps: first its tokens, then its logprobs."""
MAX_SEQS = 24


def run_kinds(engine: Engine) -> Whole:
    for number, kind in enumerate(KINDS):
        submit(engine, prompt_of(5 + 7 * number, number), 36 - number, **({"temperature": 1.0} | kind))
    return {key: _whole(outputs) for key, outputs in outputs_of(engine).items()}


def _whole(outputs: list[SequenceOutput]) -> tuple[Any, ...]:
    last = outputs[-1]
    return (
        tokens_of(outputs),
        [logprob for output in outputs for logprob in output.logprobs],
        [logprob for output in outputs for logprob in output.prompt_logprobs],
        last.finish_reason,
        last.stop_token,
        last.state,
        last.cumulative_logprob,
    )


def known_of(results: Whole) -> dict[Output, list[int]]:
    return {(prompt_of(5 + 7 * key, key), index): found[0] for (key, index), found in results.items()}


def drafted_engine(
    folder: Path, draft_model: Path | None = None, *, num_blocks: int = 256, **settings: Any
) -> Engine:
    """Return an engine whose pool has exactly these blocks, beside that of a draft model."""
    block_bytes = BYTES_PER_BLOCK
    if draft_model is not None:
        num_layers = json.loads((draft_model / "config.json").read_text())["num_hidden_layers"]
        draft_bytes = BYTES_PER_BLOCK * num_layers // 3
        block_bytes += draft_bytes + -(-MAX_SEQS * draft_bytes // num_blocks)
        settings["draft_model"] = str(draft_model)
    settings = {"max_num_seqs": MAX_SEQS, "overlap_steps": "off", "deterministic": True} | settings
    engine = engine_of(folder, kv_cache_memory=num_blocks * block_bytes, **settings)
    assert engine.pool.num_blocks == num_blocks
    return engine


def model_of(engine: Engine) -> DraftModel:
    assert engine.scheduler.speculation is not None
    model = engine.scheduler.speculation._model
    assert model is not None
    return model


def always(engine: Engine) -> tuple[AlwaysDrafts, CheckedKeys]:
    """Let the draft model of an engine guess in nearly every step, and check its pool."""
    model = model_of(engine)
    keys = CheckedKeys(BLOCK_SIZE, model._execute)
    model._execute = keys.execute
    model._allowance_seconds = float("inf")
    engine.scheduler.speculation = speculation = AlwaysDrafts(model=model)
    return speculation, keys
