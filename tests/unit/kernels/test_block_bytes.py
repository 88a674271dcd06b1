"""The bytes of a KV block in each backend, as stored here: workers of other versions take blocks as they are.

Never change a line of `STORED`. Where the bytes of a backend change, its `kv_layout` gets another version, and a new
line is added here.
"""

import hashlib

import pytest
import torch
from blockyard.kernels.cpu.backend import CpuBackend
from blockyard.kernels.interface import Backend
from blockyard.kernels.kv_pool import LARGEST, movable, pool_shape
from blockyard.kernels.selection import choose_backend
from blockyard.kernels.torch.deterministic import DeterministicTorchBackend

from .rig import CPU, DEVICE, small_plan, with_threads

STORED: dict[tuple[str, torch.dtype], str] = {
    ("plain/1", torch.float32): "f53dcee27b331ca8",
    ("plain/1", torch.bfloat16): "f820e4fb83046e39",
    ("plain/1", torch.int8): "2e2ec4ea510ae481",
    ("plain/1", torch.float8_e4m3fn): "963335edaed0b120",
    ("cpu-16/1", torch.float32): "701e0cd31d0a9dd6",
    ("cpu-16/1", torch.bfloat16): "cf9343db5f4d958e",
    ("cpu-16/1", torch.int8): "3d1cc4325afe6777",
    ("cpu-16/1", torch.float8_e4m3fn): "53655c194ea8feb5",
}
"""Hash of a block with the heads below, by the name of its layout and the type of its numbers."""
KV_HEADS, BLOCK_SIZE, HEAD_DIM = 2, 32, 32


def backend_named(name: str, request: pytest.FixtureRequest) -> Backend:
    """Return a backend that writes pools as workers have them, which is not position by position on a CPU."""
    if name == "cpu":
        return CpuBackend(request.getfixturevalue("cpu_backend").library)
    return choose_backend(
        DEVICE if name == "triton" else CPU, requested="torch" if name == "torch" else "triton"
    )


def heads(kind: int, peak: float, dtype: torch.dtype) -> torch.Tensor:
    """Numbers that every type holds, with a largest magnitude that quantises each of them to itself."""
    numbers = torch.arange(BLOCK_SIZE * KV_HEADS * HEAD_DIM).view(BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    result = ((7 + 4 * kind) * numbers % 31 - 15).to(dtype)
    result[..., kind] = peak
    return result


def written(backend: Backend, dtype: torch.dtype, stored: torch.dtype, by: str) -> torch.Tensor:
    device = DEVICE if backend.name == "triton" else CPU
    pool = torch.zeros(pool_shape(3, KV_HEADS, BLOCK_SIZE, HEAD_DIM, stored), dtype=stored, device=device)
    sizes = {"block_size": BLOCK_SIZE, "num_kv_heads": KV_HEADS, "device": device}
    plan = small_plan([BLOCK_SIZE], [BLOCK_SIZE], [[1]], **sizes)
    k_TKD, v_TKD = (heads(kind, LARGEST.get(stored, 127.0), dtype).to(device) for kind in (0, 1))
    if by == "write_kv":
        backend.write_kv(k_TKD, v_TKD, pool, plan)
    else:
        no_turn = torch.cat(
            (torch.ones(BLOCK_SIZE, HEAD_DIM // 2), torch.zeros(BLOCK_SIZE, HEAD_DIM // 2)), dim=1
        )
        both = torch.cat((torch.zeros_like(k_TKD), k_TKD, v_TKD), dim=1)
        backend.qk_norm_rope_write(both, None, no_turn.to(device), pool, plan)
    assert not movable(pool)[[0, 2]].any(), "another block was written"
    return movable(pool)[1].cpu()


@pytest.mark.parametrize("name", ["torch", "deterministic", "cpu", "triton"])
def test_a_block_has_the_bytes_that_its_layout_promises(request: pytest.FixtureRequest, name: str) -> None:
    """Triton's interpreter needs most of a second for each way to write: it tries one of each type."""
    backend = DeterministicTorchBackend() if name == "deterministic" else backend_named(name, request)
    found, promised = {}, {}
    for stored in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        dtype = torch.bfloat16 if stored == torch.bfloat16 else torch.float32
        shape = pool_shape(1, KV_HEADS, BLOCK_SIZE, HEAD_DIM, stored)
        layout = backend.kv_layout(torch.zeros(shape, dtype=stored), dtype)
        for by in ("write_kv", "qk_norm_rope_write"):
            if name == "triton" and DEVICE == CPU and (by == "write_kv") != (stored == dtype):
                continue
            block = written(backend, dtype, stored, by)
            content = block.contiguous().view(torch.uint8).numpy().tobytes()
            found[layout, stored, by] = hashlib.sha256(content).hexdigest()[:16]
            promised[layout, stored, by] = STORED.get((layout, stored))
    assert found == promised


def test_a_pool_that_pytorch_serves_in_the_cpu_backend_is_named_by_what_it_is(
    request: pytest.FixtureRequest,
) -> None:
    backend = backend_named("cpu", request)
    native = torch.zeros(pool_shape(1, 2, 16, 32, torch.float32))
    odd_head = torch.zeros(pool_shape(1, 2, 16, 24, torch.float32))
    half = torch.zeros(pool_shape(1, 2, 16, 32, torch.float16), dtype=torch.float16)
    assert backend.kv_layout(native, torch.float32) != "plain/1"
    assert backend.kv_layout(odd_head, torch.float32) == backend.kv_layout(half, torch.float16) == "plain/1"
    in_8_bits = torch.zeros(pool_shape(1, 2, 16, 32, torch.int8), dtype=torch.int8)
    assert backend.kv_layout(in_8_bits, torch.float16) == "plain/1"
    assert backend.kv_layout(in_8_bits, torch.float32) == backend.kv_layout(native, torch.float32)


def test_the_cpu_kernels_give_equal_bits_with_any_number_of_threads(request: pytest.FixtureRequest) -> None:
    """So the number is no word of theirs, and workers with other shares of a machine exchange blocks."""
    backend = backend_named("cpu", request)
    packed, x_TI, gate_up = (
        backend.pack_linear(torch.randn(512, 320)),
        torch.randn(77, 320),
        torch.randn(77, 666),
    )

    def compute() -> torch.Tensor:
        out_TI = torch.empty(77, 333)
        backend.silu_mul(gate_up, out_TI=out_TI)
        return torch.cat((backend.linear(x_TI, packed).flatten(), out_TI.flatten()))

    results = [with_threads(threads, compute) for threads in (1, 2, 5)]
    assert all(torch.equal(results[0], result) for result in results)
    words = backend.arithmetic(torch.zeros(pool_shape(1, 2, 16, 32, torch.float32)), torch.float32)
    assert not any(word.startswith("threads=") for word in words)
