"""The C++ kernels read and write raw addresses, so arguments that do not fit are refused before the call."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from blockyard.kernels.attention.plan import AttentionPlan, plan_attention
from blockyard.kernels.cpu.checks import check_pool
from blockyard.kernels.interface import Backend, HeadNorms

HEAD_DIM = 32


def plan() -> AttentionPlan:
    return plan_attention(
        query_lens=[1, 3],
        context_lens=[5, 20],
        block_tables=[[0], [1, 2]],
        block_size=16,
        device="cpu",
        num_kv_heads=1,
    )


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


def test_what_fits_is_taken(cpu_backend: Backend) -> None:
    placed(cpu_backend)
    placed(cpu_backend, norms=None)
    placed(cpu_backend, kv_pool_B2KPD=torch.zeros(3, 2, 1, 16, HEAD_DIM + 4, dtype=torch.int8))


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
    with pytest.raises(ValueError, match=told):
        placed(cpu_backend, **changes)


@pytest.mark.parametrize(
    ("pool", "told"),
    [
        (torch.zeros(3, 2, 1, 16, HEAD_DIM, dtype=torch.int8), "a pool of shape"),
        (torch.zeros(3, 2, 1, 16, 2 * (HEAD_DIM + 4), dtype=torch.int8)[..., ::2], "not one piece"),
    ],
)
def test_a_quantised_pool_has_room_for_scales_and_is_one_piece(pool: torch.Tensor, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_pool(pool, torch.zeros(4, 1, HEAD_DIM), plan())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda sound: replace(sound, block_table_RB=sound.block_table_RB + 1),
        lambda sound: replace(sound, block_table_RB=sound.block_table_RB - 1),
        lambda sound: replace(sound, block_table_RB=sound.block_table_RB.long()),
        lambda sound: replace(sound, context_lens_R=sound.context_lens_R[:1]),
        lambda sound: replace(sound, positions_T=sound.positions_T - 10),
        lambda sound: replace(
            sound, slot_mapping_T=sound.slot_mapping_T[:2], positions_T=sound.positions_T[:2]
        ),
    ],
)
def test_attention_goes_nowhere_with_a_plan_that_points_elsewhere(
    cpu_backend: Backend, spoil: Callable[[AttentionPlan], AttentionPlan]
) -> None:
    q_TND, pool = torch.randn(4, 2, HEAD_DIM), torch.zeros(3, 2, 1, 16, HEAD_DIM)
    for used, sound in ((plan(), True), (spoil(plan()), False), (plan(), True)):
        out = torch.zeros_like(q_TND)
        if sound:
            cpu_backend.attention(q_TND, pool, used, scale=1.0, out_TND=out)
        else:
            with pytest.raises(ValueError, match=r"a plan|a block|a slot|a position"):
                cpu_backend.attention(q_TND, pool, used, scale=1.0, out_TND=out)


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
