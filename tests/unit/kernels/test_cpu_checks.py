"""The C++ kernels read and write raw addresses, so arguments that do not fit are refused before the call."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.kernels.cpu.checks import check_pool
from blockyard.kernels.interface import Backend, HeadNorms

from .rig import small_plan

HEAD_DIM = 32


def plan() -> AttentionPlan:
    return small_plan([1, 3], [5, 20], [[0], [1, 2]])


def placed(backend: Backend, **changes: Any) -> None:
    """A sound call of `qk_norm_rope_write`, but for the changes."""
    arguments: dict[str, Any] = {
        "heads_TXD": torch.randn(4, 4, HEAD_DIM),
        "norms": HeadNorms(q_weight_D=torch.ones(HEAD_DIM), k_weight_D=torch.ones(HEAD_DIM), eps=1e-6),
        "cos_sin_SD": torch.ones(20, HEAD_DIM),
        "kv_pool_B2KPD": torch.zeros(3, 2, 1, 16, HEAD_DIM),
        "plan": plan(),
    }
    backend.qk_norm_rope_write(**arguments | changes)


def norms_of(weight_D: torch.Tensor) -> HeadNorms:
    return HeadNorms(q_weight_D=weight_D, k_weight_D=torch.ones(HEAD_DIM), eps=1e-6)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"norms": norms_of(torch.ones(HEAD_DIM, dtype=torch.bfloat16))}, "a norm of"),
        ({"norms": norms_of(torch.ones(HEAD_DIM - 1))}, "a norm of"),
        ({"norms": norms_of(torch.ones(2 * HEAD_DIM)[::2])}, "a norm of"),
        ({"cos_sin_SD": torch.ones(20, HEAD_DIM, dtype=torch.bfloat16)}, "a rotary table"),
        ({"cos_sin_SD": torch.ones(20, HEAD_DIM + 1)[:, :HEAD_DIM]}, "a rotary table"),
        ({"cos_sin_SD": torch.ones(19, HEAD_DIM)}, "20 positions, and a rotary table .*19"),
        ({"kv_pool_B2KPD": torch.zeros(2, 2, 1, 16, HEAD_DIM)}, "beyond 2 blocks"),
        ({"kv_pool_B2KPD": torch.zeros(3, 2, 1, 32, HEAD_DIM)}, "a pool of shape"),
        ({"kv_pool_B2KPD": torch.zeros(2, 2, 1, 16, HEAD_DIM + 4, dtype=torch.int8)}, "beyond 2 blocks"),
        ({"heads_TXD": torch.randn(5, 4, HEAD_DIM)}, "tokens without a slot"),
        ({"heads_TXD": torch.randn(4, 4, HEAD_DIM, dtype=torch.bfloat16)}, "beside a pool of"),
    ],
)
def test_what_does_not_fit_is_refused(cpu_backend: Backend, changes: dict[str, Any], told: str) -> None:
    placed(cpu_backend)
    placed(cpu_backend, norms=None)
    placed(cpu_backend, kv_pool_B2KPD=torch.zeros(3, 2, 1, 16, HEAD_DIM + 4, dtype=torch.int8))
    with pytest.raises(ValueError, match=told):
        placed(cpu_backend, **changes)


def test_a_quantised_pool_has_room_for_scales_and_is_one_piece() -> None:
    narrow = torch.zeros(3, 2, 1, 16, HEAD_DIM, dtype=torch.int8)
    apart = torch.zeros(3, 2, 1, 16, 2 * (HEAD_DIM + 4), dtype=torch.int8)[..., ::2]
    for pool, told in ((narrow, "a pool of shape"), (apart, "not one piece")):
        with pytest.raises(ValueError, match=told):
            check_pool(pool, torch.zeros(4, 1, HEAD_DIM), plan())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda sound: {"block_table_RB": sound.block_table_RB + 1},
        lambda sound: {"block_table_RB": sound.block_table_RB - 1},
        lambda sound: {"block_table_RB": sound.block_table_RB.long()},
        lambda sound: {"context_lens_R": sound.context_lens_R[:1]},
        lambda sound: {"positions_T": sound.positions_T - 10},
        lambda sound: {"slot_mapping_T": sound.slot_mapping_T[:2], "positions_T": sound.positions_T[:2]},
    ],
)
def test_attention_goes_nowhere_with_a_plan_that_points_elsewhere(
    cpu_backend: Backend, spoil: Callable[[AttentionPlan], dict[str, Any]]
) -> None:
    q_TND, pool = torch.randn(4, 2, HEAD_DIM), torch.zeros(3, 2, 1, 16, HEAD_DIM)

    def attend(used: AttentionPlan) -> None:
        cpu_backend.attention(q_TND, pool, used, scale=1.0, out_TND=torch.zeros_like(q_TND))

    attend(plan())
    with pytest.raises(ValueError, match=r"a plan|a block|a slot|a position"):
        attend(replace(plan(), **spoil(plan())))
    attend(plan())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"weights_FV": torch.full((2, 8), 0.125).double()}, "weights"),
        ({"weights_FV": torch.full((2, 16), 0.125)[:, ::2]}, "weights"),
        ({"weights_FV": torch.zeros(2, 0)}, "weights"),
        ({"weights_FV": torch.zeros(2)}, "weights"),
        ({"top_k_F": torch.tensor([8, 8], dtype=torch.int32)}, "a vector of"),
        ({"top_k_F": torch.tensor([8, 0])}, "a top-k of less than 1"),
        ({"top_p_F": torch.ones(2)}, "a vector of"),
        ({"pending_F": torch.ones(1, dtype=torch.bool)}, "a vector of"),
        ({"threshold_F": torch.zeros(4)[::2]}, "a vector of"),
    ],
)
def test_nuclei_that_do_not_fit_are_refused(cpu_backend: Backend, changes: dict[str, Any], told: str) -> None:
    sound = {
        "weights_FV": torch.full((2, 8), 0.125),
        "top_k_F": torch.tensor([8, 8]),
        "top_p_F": torch.full((2,), 0.5, dtype=torch.float64),
        "pending_F": torch.ones(2, dtype=torch.bool),
        "threshold_F": torch.zeros(2),
    }
    cpu_backend.top_k_top_p_thresholds(**sound)
    assert sound["threshold_F"].tolist() == [0.125, 0.125]
    with pytest.raises(ValueError, match=told):
        cpu_backend.top_k_top_p_thresholds(**sound | changes)
