"""Deterministic mode: a token's result is equal bit by bit, whatever else the step holds."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from blockyard.kernels.torch.deterministic import CHUNK_TOKENS, LINEAR_TILE_ROWS, DeterministicTorchBackend

from .rig import CPU, EPS, NAN, assert_near, make_step, normal, rotary_table, small_plan

BLOCK_SIZE = 16
POOL_BLOCKS = 400
HEAD_DIM = 32
HIDDEN = 96


class Layer:
    """One decoder layer over a paged pool: what a model does with the backend."""

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        generator = torch.Generator().manual_seed(num_heads)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5)

        self.backend = DeterministicTorchBackend()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.norm_H = weight(HIDDEN) + 1
        self.qkv_OI = weight((num_heads + 2 * num_kv_heads) * HEAD_DIM, HIDDEN)
        self.bias_O = weight(len(self.qkv_OI))
        self.out_OI = weight(HIDDEN, num_heads * HEAD_DIM)
        self.gate_up_OI = weight(2 * 352, HIDDEN)
        self.down_OI = weight(HIDDEN, 352)
        self.cos_sin_SD = rotary_table(2048, HEAD_DIM).cpu()
        self.pool = torch.full((POOL_BLOCKS, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM), NAN)

    def step(self, rows: list[tuple[torch.Tensor, int, list[int]]]) -> list[torch.Tensor]:
        """Compute rows of (hidden states of the new tokens, context length with them, block table)."""
        hidden, context_lens, tables = zip(*rows, strict=True)
        query_lens = [len(states) for states in hidden]
        plan = small_plan(query_lens, context_lens, tables, num_kv_heads=self.num_kv_heads)
        residual_TH = torch.cat(hidden)
        normed_TH = torch.empty_like(residual_TH)
        self.backend.rms_norm(residual_TH, self.norm_H, EPS, out_TH=normed_TH)
        qkv = self.backend.linear(normed_TH, self.qkv_OI, self.bias_O).view(len(normed_TH), -1, HEAD_DIM)
        q_TND, k_TKD, v_TKD = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        self.backend.rotary(q_TND, k_TKD, self.cos_sin_SD, plan.positions_T)
        self.backend.write_kv(k_TKD, v_TKD, self.pool, plan)
        attended = torch.full(q_TND.shape, NAN)
        self.backend.attention(q_TND, self.pool, plan, scale=HEAD_DIM**-0.5, out_TND=attended)
        projected = self.backend.linear(attended.flatten(1), self.out_OI)
        self.backend.add_rms_norm(projected, residual_TH, self.norm_H, EPS, out_TH=normed_TH)
        gate_up = self.backend.linear(normed_TH, self.gate_up_OI)
        activated = torch.empty(len(gate_up), 352)
        self.backend.silu_mul(gate_up, out_TI=activated)
        residual_TH += self.backend.linear(activated, self.down_OI)
        assert residual_TH.isfinite().all()
        return list(residual_TH.split(query_lens))


@pytest.fixture(params=[(4, 4), (6, 2), (8, 1)], ids=lambda heads: f"{heads[0]}q{heads[1]}kv")
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(*request.param)


def hidden_states(num_tokens: int, seed: int = 1) -> torch.Tensor:
    return normal(num_tokens, HIDDEN, seed=seed, on=CPU)


def tables_of(seed: int) -> Iterator[int]:
    return iter(torch.randperm(POOL_BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist())


def take(blocks: Iterator[int], num_tokens: int) -> list[int]:
    return list(itertools.islice(blocks, -(-num_tokens // BLOCK_SIZE)))


def in_chunks(layer: Layer, hidden: torch.Tensor, chunk: int, table: list[int]) -> torch.Tensor:
    parts, position = [], 0
    for part in hidden.split(chunk):
        position += len(part)
        parts += layer.step([(part, position, table)])
    return torch.cat(parts)


@pytest.mark.parametrize("num_tokens", [1, 17, CHUNK_TOKENS + 20])
def test_chunking_and_block_placement_change_no_bit(layer: Layer, num_tokens: int) -> None:
    hidden = hidden_states(num_tokens)
    whole = in_chunks(layer, hidden, num_tokens, list(range(30)))
    for chunk, seed in ((1 if num_tokens <= 17 else 13, 3), (7, 4), (64, 5)):
        layer.pool.fill_(NAN)
        again = in_chunks(layer, hidden, chunk, take(tables_of(seed), num_tokens))
        assert torch.equal(again, whole), f"chunks of {chunk}"


def test_seventeen_others_in_the_step_change_no_bit(layer: Layer) -> None:
    context_len = CHUNK_TOKENS + 33
    hidden = hidden_states(context_len)
    alone = in_chunks(layer, hidden, 100, list(range(30)))
    layer.pool.fill_(NAN)
    blocks = tables_of(9)
    others = [
        (hidden_states(length, seed=length), length, take(blocks, length)) for length in range(3, 88, 5)
    ]
    assert len(others) == 17
    table = take(blocks, context_len)
    crowded = []
    for begin in range(0, context_len - 9, 70):
        end = min(begin + 70, context_len - 9)
        neighbours = others[: 1 + begin // 17]
        results = layer.step([*neighbours, (hidden[begin:end], end, table)])
        crowded.append(results[-1])
    for end in range(context_len - 8, context_len + 1):
        decodes = [(states[-1:], length, other) for states, length, other in others[: end % 5]]
        prefills = others[end % 5 :]
        results = layer.step([*decodes, (hidden[end - 1 : end], end, table), *prefills])
        crowded.append(results[len(decodes)])
    assert torch.equal(torch.cat(crowded), alone)


@pytest.mark.parametrize("width", [16, 100, 1000])
@pytest.mark.parametrize("op", ["linear", "silu_mul", "gelu_mul", "rms_norm"])
def test_one_row_is_the_same_in_any_batch(op: str, width: int) -> None:
    backend = DeterministicTorchBackend()
    generator = torch.Generator().manual_seed(width)
    weight_OI = torch.randn(120, 2 * width, generator=generator)

    def run(x: torch.Tensor) -> torch.Tensor:
        if op == "linear":
            return backend.linear(x, weight_OI)
        out = torch.empty(len(x), width if op.endswith("_mul") else 2 * width)
        if op.endswith("_mul"):
            getattr(backend, op)(x, out_TI=out)
        else:
            backend.rms_norm(x, weight_OI[0], EPS, out_TH=out)
        return out

    row = torch.randn(1, 2 * width, generator=generator)
    alone = run(row)
    for size, place in ((2, 1), (LINEAR_TILE_ROWS, 15), (17, 16), (50, 13), (211, 100)):
        batch = torch.randn(size, 2 * width, generator=generator)
        batch[place] = row[0]
        assert torch.equal(run(batch)[place], alone[0]), (size, place)


def test_it_computes_attention_and_not_merely_the_same_thing_twice() -> None:
    step = make_step([1, 1, 19, 40], [300, 5, 600, 40], num_heads=8, head_dim=HEAD_DIM, on=CPU)
    assert_near(step.attend(DeterministicTorchBackend()), step.expected(), 1e-5)


def test_other_types_than_fp32_are_refused() -> None:
    backend = DeterministicTorchBackend()
    half = torch.zeros(2, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="float32 only"):
        backend.linear(half, half)
