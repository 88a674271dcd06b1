"""A draft model changes no output, and one that is the target itself guesses every greedy token."""

from pathlib import Path
from typing import Any

import pytest
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.sequences.step_plan import StepPlan, StepTokens
from blockyard.worker.speculation.draft_model import DraftModel
from blockyard.worker.speculation.model_drafts import ModelDrafts
from blockyard.worker.speculation.speculation import Speculation
from blockyard.worker.startup.loading import load_engine

from .checkpoints import make_embedding_checkpoint, shared_checkpoint
from .drafting import AlwaysDrafts
from .test_engine_tokens import BLOCK_SIZE, make_engine, prompt_of, submit
from .test_engine_tokens import run as run_greedy
from .test_speculation_tokens import KINDS, Whole, run

VOCAB_SIZE = 272


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return shared_checkpoint("Qwen2ForCausalLM")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Whole:
    return run(make_engine(checkpoint), KINDS)


class FailingRunner:
    """A runner that raises from some step on."""

    def __init__(self, runner: TorchRunner, steps_before: int) -> None:
        self._runner = runner
        self._left = steps_before

    def warm_up(self) -> None:
        self._runner.warm_up()

    def execute(self, plan: StepPlan) -> StepTokens:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the device has no memory")
        return self._runner.execute(plan)


def draft_model(folder: Path, engine: Engine, *, steps_before: int = 10**9, **sizes: Any) -> DraftModel:
    num_blocks, num_spare = engine.pool.num_blocks, engine.scheduler.config.max_num_seqs
    runner = TorchRunner.create(
        folder, device="cpu", num_blocks=num_blocks + num_spare, block_size=BLOCK_SIZE, deterministic=True
    )
    sizes = {"vocab_size": VOCAB_SIZE, "most_positions": 512, "most_tokens": 64} | sizes
    return DraftModel(
        FailingRunner(runner, steps_before),
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        num_spare=num_spare,
        **sizes,
    )


SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_blocks": 11, "preempt": "recompute", "max_model_len": 7 * BLOCK_SIZE},
    {"num_blocks": 11, "preempt": "swap", "swap_space_gib": 0.001, "max_model_len": 7 * BLOCK_SIZE},
    {"num_blocks": 40, "overlap_steps": "on", "max_num_batched_tokens": 24, "max_num_seqs": 12},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed", [0, 1], ids=["itself", "another"])
def test_no_draft_model_changes_what_a_request_gets(
    checkpoint: Path, expected: Whole, settings: dict[str, Any], seed: int
) -> None:
    engine = make_engine(checkpoint, **settings)
    drafts = draft_model(shared_checkpoint("Qwen2ForCausalLM", seed=seed), engine)
    engine.scheduler.speculation = speculation = AlwaysDrafts(drafts)
    assert run(engine, KINDS) == expected
    assert speculation.num_drafted > 50
    # Most of the requests draw their tokens, and no draw of random weights is probable.
    assert (speculation.num_right > 30) == (seed == 0)
    assert engine.pool.num_blocks != 11 or engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_target_itself_guesses_every_greedy_token(checkpoint: Path, settings: dict[str, Any]) -> None:
    """With keys and values of other tokens in its pool, it would not. Prompts share and repeat prefixes."""
    engine = make_engine(checkpoint, **settings)
    engine.scheduler.speculation = speculation = AlwaysDrafts(draft_model(checkpoint, engine))
    shared = prompt_of(40, seed=9)
    for turn in range(3):
        for number in range(4):
            submit(engine, shared + prompt_of(3 + 5 * number, seed=turn), 30)
        run_greedy(engine)
    assert speculation.num_drafted > 100
    assert speculation.num_right == speculation.num_drafted
    assert engine.pool.num_blocks != 11 or engine.scheduler.num_preemptions > 0


def test_sequences_beyond_the_draft_models_context_or_vocabulary_have_no_drafts(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    drafts = draft_model(checkpoint, engine, most_positions=64)
    engine.scheduler.speculation = speculation = AlwaysDrafts(drafts)
    submit(engine, prompt_of(40), 60)
    [(tokens, _)] = run_greedy(engine).values()
    assert len(tokens) == 60
    # Up to a length of 48, from which on the drafts of a block might not fit.
    assert 0 < speculation.num_drafted <= 8 * 15
    drafts = draft_model(checkpoint, engine, vocab_size=3)
    engine.scheduler.speculation = speculation = AlwaysDrafts(drafts)
    submit(engine, prompt_of(41), 20)
    run_greedy(engine)
    assert speculation.num_drafted == 0


def test_a_draft_model_that_raises_fails_no_request(
    checkpoint: Path, expected: Whole, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(checkpoint)
    drafts = ModelDrafts(draft_model(checkpoint, engine, steps_before=5))

    class Drafts(AlwaysDrafts):
        def propose(self, candidates: Any, *, num_rows: int, most: int) -> Any:
            wanted = [(sequence, min(useful, 3)) for sequence, useful in candidates if useful > 0]
            wanted = [one for one in wanted if drafts.is_ready(one[0])][: most // 3]
            found = drafts.draft(wanted) if wanted else []
            return [(one[0], tokens) for one, tokens in zip(wanted, found, strict=True) if tokens]

    engine.scheduler.speculation = speculation = Drafts(draft_model(checkpoint, engine))
    assert run(engine, KINDS) == expected
    assert drafts.has_failed
    assert speculation.num_drafted > 0
    assert caplog.text.count("the draft model has failed") == 1


def config_of(checkpoint: Path, **settings: Any) -> EngineConfig:
    fields: dict[str, Any] = {"model": str(checkpoint), "device": "cpu", "kv_cache_memory": 1 << 22}
    fields |= {"speculation": "model", "draft_model": str(checkpoint), "deterministic": True}
    return EngineConfig(**(fields | settings))


def test_an_engine_loads_its_draft_model(checkpoint: Path) -> None:
    plain = load_engine(config_of(checkpoint, speculation="off", draft_model=None)).engine
    loaded = load_engine(config_of(checkpoint))
    engine = loaded.engine
    # A block of both models takes twice the memory, and each sequence may need a block more.
    spare = engine.scheduler.config.max_num_seqs
    assert engine.pool.num_blocks == (plain.pool.num_blocks - spare) // 2
    assert engine.bytes_per_block == plain.bytes_per_block
    speculation = engine.scheduler.speculation
    assert isinstance(speculation, Speculation)
    answers = []
    for one in (plain, engine):
        for number in range(2):
            submit(one, prompt_of(30, seed=number), 200)
        answers.append(run_greedy(one))
    assert answers[0] == answers[1]
    assert engine.load().drafted_tokens == speculation.num_drafted
    assert speculation.num_right == speculation.num_drafted


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"draft_model": None}, "set both speculation to model and draft_model"),
        ({"speculation": "ngram"}, "set both speculation to model and draft_model"),
        ({"tensor_parallel_size": 2}, "a worker of one rank"),
        ({"engine": "simulated", "deterministic": False}, "one that is not simulated"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    checkpoint: Path, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        config_of(checkpoint, **settings)


def test_a_draft_model_that_cannot_serve_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = shared_checkpoint("Qwen2ForCausalLM", vocab_size=288)
    with pytest.raises(ValueError, match="has another tokenizer than the model"):
        load_engine(config_of(checkpoint, draft_model=str(other)))
    embeds = make_embedding_checkpoint(tmp_path / "embeds", "Qwen3ForCausalLM")
    with pytest.raises(ValueError, match="an embedding model drafts nothing"):
        load_engine(config_of(checkpoint, draft_model=str(embeds)))
    with pytest.raises(ValueError, match="is no folder here"):
        load_engine(config_of(checkpoint, draft_model=str(tmp_path / "none")))


def test_a_further_model_of_a_cluster_does_not_inherit_the_draft_model(checkpoint: Path) -> None:
    further = config_of(checkpoint).of_further_model("another")
    assert (further.model, further.draft_model, further.speculation) == ("another", None, "off")
    ngram = config_of(checkpoint, speculation="ngram", draft_model=None).of_further_model("another")
    assert ngram.speculation == "ngram"
