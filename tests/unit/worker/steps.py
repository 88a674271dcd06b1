"""Decoders and runners without an engine: sequences on scattered blocks, and the steps that compute them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from blockyard.kernels.attention.plan import plan_attention
from blockyard.kernels.interface import BackendName
from blockyard.kernels.selection import choose_backend
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.model.config import load_config
from blockyard.worker.model.decoder import Decoder
from blockyard.worker.model.weights import load_weights
from blockyard.worker.sequences import sequence as sequences
from blockyard.worker.sequences.block_table import BlockTable
from blockyard.worker.sequences.identifiers import BlockId, SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.step_plan import NO_TOKEN, ScheduledRow, StepPlan, StepTokens

BLOCK_SIZE = 16
NUM_BLOCKS = 96
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEAR_GAP = 2.5e-4
"""Logits are off by 1e-4 at times in fp32. A GPU adds in another order, but as exactly: nothing here allows TF32."""
Rows = list[tuple[Sequence[int], int, list[int]]]
"""Each row's context so far, how much of it is computed, and its blocks."""


def scattered(count: int, num_blocks: int = NUM_BLOCKS) -> list[list[int]]:
    """Return the blocks of `count` sequences, which lie scattered over the pool."""
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(5)).tolist()
    return [blocks[index::count] for index in range(count)]


def spoil(pools: Iterable[torch.Tensor]) -> None:
    """Write NaN to every block: whatever reads one before it is written shows."""
    for pool in pools:
        pool.fill_(float("nan"))


class Model:
    """One checkpoint's decoder and pool, driven without a runner."""

    def __init__(
        self,
        folder: Path,
        *,
        name: BackendName = "auto",
        deterministic: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = load_config(folder)
        weights = load_weights(folder, self.config, dtype=dtype, device=DEVICE)
        self.backend = choose_backend(DEVICE, requested=name, deterministic=deterministic)
        self.decoder = Decoder(self.config, weights, self.backend)
        shape = (NUM_BLOCKS, 2, self.config.num_kv_heads, BLOCK_SIZE, self.config.head_dim)
        self.pools = [torch.empty(shape, dtype=dtype, device=DEVICE) for _ in range(self.config.num_layers)]
        spoil(self.pools)

    def step(self, rows: Rows) -> list[torch.Tensor]:
        """Return the logits of each row at every position that it computes."""
        query_lens = [len(context) - computed for context, computed, _ in rows]
        plan = plan_attention(
            query_lens=query_lens,
            context_lens=[len(context) for context, _, _ in rows],
            block_tables=[table for _, _, table in rows],
            block_size=BLOCK_SIZE,
            device=DEVICE,
            num_kv_heads=self.config.num_kv_heads,
        )
        tokens = [token for context, computed, _ in rows for token in context[computed:]]
        wanted_T = torch.arange(len(tokens), device=DEVICE)
        with torch.inference_mode():
            logits_TV = self.decoder.forward(torch.tensor(tokens, device=DEVICE), self.pools, plan, wanted_T)
        return list(logits_TV.cpu().split(query_lens))

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits of every position of one prompt."""
        [found] = self.step([(tokens, 0, scattered(1)[0])])
        return found

    def generate(self, prompts: Sequence[Sequence[int]], count: int, chunk_tokens: int) -> list[list[int]]:
        """Generate `count` tokens greedily for each prompt, in the same steps, decodes first."""
        contexts, tables = [list(tokens) for tokens in prompts], scattered(len(prompts))
        computed = [0] * len(prompts)
        while running := [i for i, tokens in enumerate(prompts) if len(contexts[i]) < len(tokens) + count]:
            ends = {i: min(computed[i] + chunk_tokens, len(contexts[i])) for i in running}
            order = sorted(running, key=lambda i: ends[i] - computed[i] > 1)
            results = self.step([(contexts[i][: ends[i]], computed[i], tables[i]) for i in order])
            for i, logits_TV in zip(order, results, strict=True):
                computed[i] = ends[i]
                if ends[i] == len(contexts[i]):
                    contexts[i].append(int(logits_TV[-1].argmax()))
        return [context[len(tokens) :] for context, tokens in zip(contexts, prompts, strict=True)]


def make_runner(folder: Path, **settings: Any) -> TorchRunner:
    """Return a runner with NaN in every unwritten block."""
    defaults = {"device": DEVICE, "dtype": "float32", "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    runner = TorchRunner.create(folder, **(defaults | settings))
    spoil(runner.kv_pools)
    return runner


def make_sequence(
    tokens: Sequence[int], blocks: Iterable[int], number: int = 0, **sampling: Any
) -> sequences.Sequence:
    """Return a sequence, which is greedy unless `sampling` says otherwise."""
    return sequences.Sequence(
        sequence_id=SequenceId(number),
        tokens=sequences.token_array(list(tokens)),
        prompt_length=len(tokens),
        sampling=SamplingParams(**({"temperature": 0.0} | sampling)),
        names=[],
        block_table=BlockTable(map(BlockId, blocks)),
    )


def make_sequences(prompts: Sequence[Sequence[int]], **sampling: Any) -> list[sequences.Sequence]:
    tables = scattered(len(prompts))
    return [
        make_sequence(tokens, tables[number], number, **sampling) for number, tokens in enumerate(prompts)
    ]


def row_of(sequence: sequences.Sequence, start: int = 0, end: int | None = None) -> ScheduledRow:
    """Return a row that samples once it has computed the tokens up to `end`, or all."""
    end = len(sequence.tokens) if end is None else end
    return ScheduledRow(sequence=sequence, start=start, num_tokens=end - start, samples=True)


def execute(runner: TorchRunner, *rows: ScheduledRow) -> StepTokens:
    return runner.execute(StepPlan(step=0, rows=rows))


def generate(
    runner: TorchRunner, running: list[sequences.Sequence], count: int, chunk: int
) -> list[list[int]]:
    """Generate `count` tokens for each sequence, all in the same steps, with prompts in chunks."""
    while left := [sequence for sequence in running if sequence.num_generated < count]:
        rows = [row_of(one, one.num_computed, min(one.num_computed + chunk, len(one.tokens))) for one in left]
        rows = [row._replace(samples=row.end == len(row.sequence.tokens)) for row in rows]
        rows.sort(key=lambda row: row.num_tokens > 1)
        for row, token in zip(rows, execute(runner, *rows).tokens, strict=True):
            row.sequence.num_computed = row.end
            if row.samples:
                row.sequence.tokens.append(token)
            else:
                assert token == NO_TOKEN
    return [list(sequence.tokens[sequence.prompt_length :]) for sequence in running]
