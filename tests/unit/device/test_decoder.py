"""The decoder and its runner against transformers: same logits and greedy tokens for any make-up of a step.

Needs torch, transformers and safetensors only. With CUDA the same tests run on Triton.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from blockyard.kernels.attention.plan import plan_attention
from blockyard.kernels.interface import LinearsName
from blockyard.kernels.selection import choose_backend
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.model.config import load_config
from blockyard.worker.model.decoder import Decoder
from blockyard.worker.model.weights import load_weights
from blockyard.worker.sequences.block_table import BlockTable
from blockyard.worker.sequences.identifiers import BlockId, SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence, token_array
from blockyard.worker.sequences.step_plan import FAILED_TOKEN, NO_TOKEN, ScheduledRow, StepPlan

from tests.unit.worker.checkpoints import (
    ARCHITECTURES,
    assert_logits_equal_transformers,
    make_checkpoint,
    reference_greedy,
    reference_model,
    shared_checkpoint,
)
from tests.unit.worker.sampling import Draw, sample

BLOCK_SIZE = 16
NUM_BLOCKS = 96
NUM_TOKENS = 8
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Logits are off by 1e-4 at times in fp32. A GPU adds in another order, but as exactly: nothing here allows TF32.
MIN_GAP = 2.5e-4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
MODES = ["plain", "torch", "deterministic"] if DEVICE.type == "cpu" else ["plain"]

MakeRunner = Callable[[str], TorchRunner]


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 272, (length,), generator=generator).tolist()


UNEVEN_PROMPTS = [prompt(1 + 7 * index % 61, seed=index) for index in range(17)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On a busy machine the threads of so small products spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=MODES)
def make_runner(request: pytest.FixtureRequest) -> MakeRunner:
    def make(architecture: str) -> TorchRunner:
        return TorchRunner.create(
            shared_checkpoint(architecture),
            device=DEVICE,
            dtype="float32",
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            deterministic=request.param == "deterministic",
            backend="torch" if request.param == "torch" else "auto",
        )

    return make


def make_sequences(prompts: list[list[int]], sampling: SamplingParams = GREEDY) -> list[Sequence]:
    """Sequences whose blocks lie scattered over the pool."""
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(5)).tolist()
    free: Iterator[int] = iter(order)
    return [
        Sequence(
            sequence_id=SequenceId(index),
            tokens=token_array(tokens),
            prompt_length=len(tokens),
            sampling=sampling,
            names=[],
            block_table=BlockTable(
                BlockId(next(free)) for _ in range(-(-(len(tokens) + NUM_TOKENS) // BLOCK_SIZE))
            ),
        )
        for index, tokens in enumerate(prompts)
    ]


def plan_step(sequences: list[Sequence], chunk_tokens: int) -> StepPlan:
    rows = []
    for sequence in sequences:
        num_tokens = min(chunk_tokens, len(sequence.tokens) - sequence.num_computed)
        end = sequence.num_computed + num_tokens
        rows.append(
            ScheduledRow(
                sequence=sequence,
                start=sequence.num_computed,
                num_tokens=num_tokens,
                samples=end == len(sequence.tokens),
            )
        )
    return StepPlan(step=0, rows=tuple(sorted(rows, key=lambda row: row.num_tokens > 1)))


def drive(
    runner: TorchRunner,
    prompts: list[list[int]],
    *,
    chunk_tokens: int = 1000,
    sampling: SamplingParams = GREEDY,
) -> list[list[int]]:
    """Generate NUM_TOKENS for each prompt, all in the same steps."""
    sequences = make_sequences(prompts, sampling)
    while running := [sequence for sequence in sequences if sequence.num_generated < NUM_TOKENS]:
        plan = plan_step(running, chunk_tokens)
        for row, token in zip(plan.rows, runner.execute(plan).tokens, strict=True):
            row.sequence.num_computed = row.end
            if row.samples:
                row.sequence.tokens.append(token)
            else:
                assert token == NO_TOKEN
    return [list(sequence.tokens[sequence.prompt_length :]) for sequence in sequences]


def expected_tokens(architecture: str, prompts: list[list[int]]) -> list[list[int]]:
    results = [
        reference_greedy(shared_checkpoint(architecture), tuple(tokens), NUM_TOKENS) for tokens in prompts
    ]
    # Otherwise a difference in rounding could excuse a different token.
    assert min(result.min_gap for result in results) > MIN_GAP
    return [list(result.tokens) for result in results]


def forward(folder: Path, prompts: list[list[int]], mode: str = "plain") -> torch.Tensor:
    """Logits of every token of one step that prefills all prompts."""
    config = load_config(folder)
    weights = load_weights(folder, config, dtype=torch.float32, device=DEVICE)
    backend = choose_backend(
        DEVICE,
        requested="torch" if mode == "torch" else "auto",
        deterministic=mode == "deterministic",
    )
    decoder = Decoder(config, weights, backend)
    shape = (NUM_BLOCKS, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    pools = [torch.full(shape, float("nan"), device=DEVICE) for _ in range(config.num_layers)]
    lengths = [len(tokens) for tokens in prompts]
    plan = plan_attention(
        query_lens=lengths,
        context_lens=lengths,
        block_tables=[sequence.block_table for sequence in make_sequences(prompts)],
        block_size=BLOCK_SIZE,
        device=DEVICE,
        num_kv_heads=config.num_kv_heads,
    )
    tokens_T = torch.tensor([token for tokens in prompts for token in tokens], device=DEVICE)
    with torch.inference_mode():
        return decoder.forward(tokens_T, pools, plan, torch.arange(len(tokens_T), device=DEVICE))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_transformers_at_every_position(architecture: str, mode: str) -> None:
    folder = shared_checkpoint(architecture)
    tokens = prompt(53)
    assert_logits_equal_transformers(forward(folder, [tokens], mode), folder, tokens)


@pytest.mark.parametrize(
    "overrides",
    [
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"head_dim": 32},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    ],
    ids=str,
)
def test_variants_of_a_configuration_equal_transformers(overrides: dict[str, object], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "LlamaForCausalLM", **overrides)
    tokens = prompt(200)
    assert_logits_equal_transformers(forward(folder, [tokens]), folder, tokens)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_of_large_matrices_equals_transformers(mode: str, tmp_path: Path) -> None:
    """Large enough to be packed, or laid out for the CPU's own linears."""
    large = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 320, "head_dim": 64}
    folder = make_checkpoint(tmp_path, "LlamaForCausalLM", **large)
    tokens = prompt(200)
    assert_logits_equal_transformers(forward(folder, [tokens], mode), folder, tokens)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_transformers_alone(architecture: str, make_runner: MakeRunner) -> None:
    prompts = [prompt(29)]
    assert drive(make_runner(architecture), prompts) == expected_tokens(architecture, prompts)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_transformers_with_a_chunked_prompt(
    architecture: str, make_runner: MakeRunner
) -> None:
    prompts = [prompt(61)]
    assert drive(make_runner(architecture), prompts, chunk_tokens=7) == expected_tokens(architecture, prompts)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_transformers_batched_with_16_others(
    architecture: str, make_runner: MakeRunner
) -> None:
    """Chunks of 19 make most steps a mixture of decodes, whole prompts and pieces of prompts."""
    tokens = drive(make_runner(architecture), UNEVEN_PROMPTS, chunk_tokens=19)
    assert tokens == expected_tokens(architecture, UNEVEN_PROMPTS)


def test_sampled_tokens_are_drawn_by_position_from_transformers_logits(make_runner: MakeRunner) -> None:
    folder = shared_checkpoint("LlamaForCausalLM")
    likely = frozenset(reference_greedy(folder, tuple(prompt(23)), 1).tokens)
    sampling = SamplingParams(
        temperature=3.0, top_p=0.95, seed=-7, max_tokens=NUM_TOKENS, min_tokens=4, stop_token_ids=likely
    )
    tokens = prompt(23)
    for num_generated in range(NUM_TOKENS):
        with torch.inference_mode():
            logits_1V = reference_model(folder)(torch.tensor([tokens])).logits[:, -1]
        tokens += sample(logits_1V, [Draw(sampling, len(tokens), num_generated)])
    others = [prompt(9), prompt(40)]
    drawn = drive(make_runner("LlamaForCausalLM"), [prompt(23), *others], chunk_tokens=10, sampling=sampling)
    assert drawn[0] == tokens[23:]
    assert drawn[0] != reference_greedy(folder, tuple(prompt(23)), NUM_TOKENS).tokens


def test_equal_prompts_of_one_step_may_share_blocks(make_runner: MakeRunner) -> None:
    """The second sequence computes its last token only, and reads blocks that the first writes meanwhile."""
    runner = make_runner("LlamaForCausalLM")
    tokens = prompt(33)
    first, second = make_sequences([tokens, tokens])
    second.block_table.assign([*first.block_table[:2], *second.block_table[2:]])
    rows = (
        ScheduledRow(sequence=second, start=32, num_tokens=1, samples=True),
        ScheduledRow(sequence=first, start=0, num_tokens=33, samples=True),
    )
    [expected] = expected_tokens("LlamaForCausalLM", [tokens])
    assert runner.execute(StepPlan(step=0, rows=rows)).tokens == [expected[0]] * 2


def test_a_step_may_start_from_a_token_that_is_not_committed_yet(make_runner: MakeRunner) -> None:
    runner = make_runner("Qwen3ForCausalLM")
    tokens = prompt(18)
    [sequence] = make_sequences([tokens])
    start, num_tokens, results = 0, len(tokens), []
    for _ in range(NUM_TOKENS):
        row = ScheduledRow(sequence=sequence, start=start, num_tokens=num_tokens, samples=True)
        results += runner.execute(StepPlan(step=0, rows=(row,))).tokens
        # Committed one step late, as an engine with a step in flight does.
        sequence.tokens.extend(results[-2:-1])
        start, num_tokens = row.end, 1
    assert [results] == expected_tokens("Qwen3ForCausalLM", [tokens])


def test_what_a_recycled_block_held_does_not_matter(make_runner: MakeRunner) -> None:
    runner = make_runner("MistralForCausalLM")
    for pool in runner.kv_pools:
        pool.fill_(float("nan"))
    prompts = [prompt(21), prompt(5)]
    assert drive(runner, prompts) == expected_tokens("MistralForCausalLM", prompts)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="deterministic mode is the CPU's")
def test_deterministic_logits_are_the_same_bits_alone_and_in_a_batch() -> None:
    folder = shared_checkpoint("Qwen3ForCausalLM")
    prompts = sorted(UNEVEN_PROMPTS, key=lambda tokens: len(tokens) > 1)
    together = forward(folder, prompts, "deterministic").split([len(tokens) for tokens in prompts])
    for tokens, logits in zip(prompts, together, strict=True):
        assert torch.equal(logits, forward(folder, [tokens], "deterministic"))


def test_bfloat16_stays_near_float32() -> None:
    folder = shared_checkpoint("LlamaForCausalLM")
    runners = [
        TorchRunner.create(folder, device=DEVICE, dtype=dtype, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        for dtype in ("float32", "bfloat16")
    ]
    assert [runner.dtype for runner in runners] == [torch.float32, torch.bfloat16]
    prompts = [prompt(length) for length in range(5, 37)]
    exact, rounded = ([tokens[0] for tokens in drive(runner, prompts)] for runner in runners)
    agreeing = sum(a == b for a, b in zip(exact, rounded, strict=True))
    print(f"{agreeing} of {len(prompts)} first tokens agree")
    assert agreeing >= 0.8 * len(prompts)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="linears in int8 are the CPU's")
def test_linears_in_int8_stay_near_float32_and_a_request_does_not_show_its_company() -> None:
    try:
        runners = [make_int8_runner("int8"), make_int8_runner("full")]
    except ValueError as error:
        pytest.skip(str(error))
    prompts = [prompt(length) for length in range(5, 37)]
    rounded, exact = ([tokens[0] for tokens in drive(runner, prompts)] for runner in runners)
    agreeing = sum(a == b for a, b in zip(exact, rounded, strict=True))
    print(f"{agreeing} of {len(prompts)} first tokens agree")
    assert agreeing >= 0.8 * len(prompts)
    together = drive(runners[0], prompts[:6])
    assert together == [drive(runners[0], [tokens])[0] for tokens in prompts[:6]]


def make_int8_runner(linears: LinearsName) -> TorchRunner:
    return TorchRunner.create(
        shared_checkpoint("LlamaForCausalLM"),
        device=DEVICE,
        dtype="float32",
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        linears=linears,
    )


def test_warm_up_changes_no_result(make_runner: MakeRunner) -> None:
    runner = make_runner("LlamaForCausalLM")
    runner.warm_up()
    prompts = [prompt(17)]
    assert drive(runner, prompts) == expected_tokens("LlamaForCausalLM", prompts)


def test_a_model_that_yields_nan_is_refused_at_warm_up(make_runner: MakeRunner) -> None:
    runner = make_runner("LlamaForCausalLM")
    runner._decoder._weights.final_norm_H.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite in"):
        runner.warm_up()


def test_a_step_after_logits_that_are_not_finite_fails_alone(make_runner: MakeRunner) -> None:
    """The failed sequence may already stand in the next step, beside healthy ones."""
    runner = make_runner("LlamaForCausalLM")
    tokens = prompt(18)
    failing, healthy = make_sequences([tokens, tokens])
    block = failing.block_table[0]
    for pool in runner.kv_pools:
        pool[block, 1].fill_(float("nan"))
    rows = [ScheduledRow(sequence=failing, start=17, num_tokens=1, samples=True)]
    assert runner.execute(StepPlan(step=0, rows=tuple(rows))).tokens == [FAILED_TOKEN]
    rows = [
        ScheduledRow(sequence=failing, start=18, num_tokens=1, samples=True),
        ScheduledRow(sequence=healthy, start=0, num_tokens=18, samples=True),
    ]
    [expected] = expected_tokens("LlamaForCausalLM", [tokens])
    assert runner.execute(StepPlan(step=1, rows=tuple(rows))).tokens == [FAILED_TOKEN, expected[0]]
