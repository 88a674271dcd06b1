"""Blocks saved to host memory and loaded into other blocks: the bytes stay equal, and no other block changes."""

import pytest
import torch
from blockyard.worker.memory import host_blocks
from blockyard.worker.memory.host_blocks import HostBlockCorrupted, HostBlocks
from blockyard.worker.sequences.identifiers import BlockId, HostSlot

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BLOCKS = 12
NUM_LAYERS = 3
SHAPE_B2KPD = (NUM_BLOCKS, 2, 3, 16, 8)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=DTYPES, ids=str)
def kv_pools(request: pytest.FixtureRequest) -> list[torch.Tensor]:
    """Every layer and block has values of its own; some are NaN, as unwritten slots are."""
    generator = torch.Generator().manual_seed(3)
    shape_N2KPD = (NUM_LAYERS * NUM_BLOCKS, *SHAPE_B2KPD[1:])
    blocks_N2KPD = torch.randn(shape_N2KPD, generator=generator).to(DEVICE, request.param)
    blocks_N2KPD[:, :, :, 13:] = float("nan")
    return list(blocks_N2KPD.split(NUM_BLOCKS))


def host_blocks_of(kv_pools: list[torch.Tensor], num_slots: int, *, verify: bool = False) -> HostBlocks:
    whole = kv_pools[0]._base
    assert whole is not None
    return HostBlocks(whole, NUM_LAYERS, num_slots, verify=verify)


def save_pairs(pairs: dict[int, int]) -> list[tuple[BlockId, HostSlot]]:
    return [(BlockId(block), HostSlot(slot)) for block, slot in pairs.items()]


def load_pairs(pairs: dict[int, int]) -> list[tuple[HostSlot, BlockId]]:
    return [(HostSlot(slot), BlockId(block)) for slot, block in pairs.items()]


def assert_same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("slots_a_chunk", "staged"), [(100, 100), (2, 2), (1, 3)])
def test_a_block_comes_back_with_its_bytes_and_no_other_block_changes(
    kv_pools: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    verify: bool,
    slots_a_chunk: int,
    staged: int,
) -> None:
    slot_bytes = sum(pool[0].nbytes for pool in kv_pools)
    monkeypatch.setattr(host_blocks, "CHUNK_BYTES", slots_a_chunk * slot_bytes)
    monkeypatch.setattr(host_blocks, "STAGING_BYTES", staged * slot_bytes)
    before = [pool.clone() for pool in kv_pools]
    host = host_blocks_of(kv_pools, 5, verify=verify)
    assert host.slot_bytes == slot_bytes
    host.save(save_pairs({7: 4, 0: 0, 3: 2, 11: 1}))
    # Whoever reuses the blocks writes over them at once.
    for pool in kv_pools:
        pool[[0, 3, 7]] = float("nan")
    host.load(load_pairs({0: 9, 4: 3, 2: 0}))
    for pool, original in zip(kv_pools, before, strict=True):
        expected = original.clone()
        expected[7] = float("nan")
        expected[9], expected[3], expected[0] = original[0], original[7], original[3]
        assert_same_bytes(pool, expected)


def test_a_slot_keeps_its_block_until_it_is_saved_over(kv_pools: list[torch.Tensor]) -> None:
    before = [pool.clone() for pool in kv_pools]
    host = host_blocks_of(kv_pools, 2, verify=True)
    host.save(save_pairs({1: 0, 2: 1}))
    host.save([])
    host.load(load_pairs({0: 5, 1: 6}))
    host.load([])
    host.load(load_pairs({0: 8}))
    host.save(save_pairs({4: 0}))
    host.load(load_pairs({0: 9}))
    moved = [0, 1, 2, 3, 4, 1, 2, 7, 1, 4, 10, 11]
    for pool, original in zip(kv_pools, before, strict=True):
        assert_same_bytes(pool, original[moved])


def test_a_corrupted_slot_is_found_before_any_block_changes(kv_pools: list[torch.Tensor]) -> None:
    host = host_blocks_of(kv_pools, 3, verify=True)
    host.save(save_pairs({0: 0, 1: 1, 2: 2}))
    before = [pool.clone() for pool in kv_pools]
    host._place(HostSlot(1)).view(torch.uint8)[2, 1, 2, 15, 3] ^= 1
    with pytest.raises(HostBlockCorrupted, match=r"host slots \[1\]") as caught:
        host.load(load_pairs({0: 8, 1: 9}))
    assert caught.value.slots == {1}
    for pool, original in zip(kv_pools, before, strict=True):
        assert_same_bytes(pool, original)
    host.load(load_pairs({0: 8, 2: 9}))


def test_measuring_leaves_every_block_as_it_was_and_no_slot_is_refused(kv_pools: list[torch.Tensor]) -> None:
    before = [pool.clone() for pool in kv_pools]
    for num_slots in (1, 100):
        assert host_blocks_of(kv_pools, num_slots).measure() > 0
    with pytest.raises(ValueError, match="at least 1, not 0"):
        host_blocks_of(kv_pools, 0)
    for pool, original in zip(kv_pools, before, strict=True):
        assert_same_bytes(pool, original)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA")
def test_host_slots_are_pinned_where_cuda_is(kv_pools: list[torch.Tensor]) -> None:
    assert host_blocks_of(kv_pools, 3)._place(HostSlot(2)).is_pinned()
