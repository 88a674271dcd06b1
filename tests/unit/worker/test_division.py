"""The parts of a divided model are the whole model, whatever its sizes."""

from dataclasses import replace
from pathlib import Path

from blockyard.worker.model.config import ModelConfig, load_config
from blockyard.worker.model.division import PADDED_TO, divide
from blockyard.worker.model.traits.mixture import Mixture
from blockyard.worker.model.weights import _read_shard
from hypothesis import assume, given
from hypothesis import strategies as st

from .checkpoints import shared_checkpoint

DEMO = Path(__file__).parents[3] / "deploy/demo_model/checkpoint"
SIZES = st.integers(1, 8)
COUNTS = st.integers(1, 300)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kv_heads, head_dim = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([2, 16]))
    return replace(
        load_config(DEMO),
        num_heads=kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=draw(COUNTS),
        vocab_size=draw(COUNTS),
        attention_out_bias=True,
        mixture=Mixture(
            num_experts=2,
            experts_per_token=1,
            intermediate_size=draw(COUNTS),
            normalizes=True,
            sparse_layers=frozenset({0}),
        ),
    )


def refuses(config: ModelConfig, size: int) -> bool:
    try:
        divide(config, 0, size)
    except ValueError:
        return True
    return False


@given(configs(), SIZES)
def test_heads_divide_where_each_rank_has_as_many(config: ModelConfig, size: int) -> None:
    kv_heads = config.num_kv_heads
    possible = not config.num_heads % size and (not kv_heads % size or not size % kv_heads)
    assert refuses(config, size) != possible


@given(configs(), SIZES)
def test_the_parts_lie_side_by_side_and_leave_nothing_out(config: ModelConfig, size: int) -> None:
    assume(not refuses(config, size))
    parts = [divide(config, rank, size) for rank in range(size)]
    width = config.num_heads * config.head_dim
    assert config.mixture is not None
    assert parts[0].config.mixture is not None
    expert_rows, most_rows = config.mixture.intermediate_size, parts[0].config.mixture.intermediate_size
    divided = {
        "lm_head.weight": (config.vocab_size, 0, parts[0].config.vocab_size),
        "self_attn.q_proj.bias": (width, 0, width // size),
        "self_attn.o_proj.weight": (width, 1, width // size),
        "mlp.up_proj.weight": (config.intermediate_size, 0, parts[0].config.intermediate_size),
        "mlp.down_proj.weight": (config.intermediate_size, 1, parts[0].config.intermediate_size),
        "mlp.experts.1.gate_proj.weight": (expert_rows, 0, most_rows),
        "mlp.experts.1.down_proj.weight": (expert_rows, 1, most_rows),
    }
    for name, (total, dimension, most) in divided.items():
        places = [part.place(f"model.layers.0.{name}") for part in parts]
        indices = [list(range(total)[place[dimension]]) for place in places if place is not None]
        assert [index for run in indices for index in run] == list(range(total))
        assert max(map(len, indices)) <= most
    gate = [part.place("model.layers.0.mlp.gate.weight") for part in parts]
    assert gate == [(slice(None),)] * size
    assert sum(part.num_tokens for part in parts) == config.vocab_size
    assert [part.place("model.layers.0.self_attn.o_proj.bias") is None for part in parts] == [
        rank > 0 for rank in range(size)
    ]
    if size > 1:
        assert parts[0].config.vocab_size % PADDED_TO == parts[0].config.intermediate_size % PADDED_TO == 0


@given(configs(), SIZES)
def test_each_query_head_finds_its_own_kv_head(config: ModelConfig, size: int) -> None:
    assume(not refuses(config, size))
    group = config.num_heads // config.num_kv_heads
    for rank in range(size):
        part = divide(config, rank, size)
        place = part.place("model.layers.0.self_attn.k_proj.weight")
        assert place is not None
        kv_heads = list(range(config.num_kv_heads * config.head_dim)[place[0]])[:: config.head_dim]
        own_group = part.config.num_heads // part.config.num_kv_heads
        for own_head in range(part.config.num_heads):
            head = rank * part.config.num_heads + own_head
            assert kv_heads[own_head // own_group] == head // group * config.head_dim


def test_a_rank_reads_only_its_part_of_a_checkpoint() -> None:
    folder = shared_checkpoint("LlamaForCausalLM")
    config, file = load_config(folder), folder / "model.safetensors"

    def num_read(rank: int, size: int) -> int:
        return sum(tensor.numel() for _, tensor in _read_shard(file, divide(config, rank, size)))

    norms = (2 * config.num_layers + 1) * config.hidden_size
    whole = num_read(0, 1)
    assert [num_read(rank, 2) for rank in range(2)] == [(whole - norms) // 2 + norms] * 2
