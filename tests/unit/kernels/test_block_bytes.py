"""The bytes of a KV block in each backend, as stored here: workers of other versions take blocks as they are.

Never change a line of `STORED`. Where the bytes of a backend change, its `kv_layout` gets another version, and a new
line is added here.
"""

import hashlib
import os
import subprocess
import sys

import pytest
import torch
from blockyard.kernels.attention.plan import plan_attention
from blockyard.kernels.cpu.backend import CpuBackend
from blockyard.kernels.cpu.extension import ExtensionUnavailable, load_extension
from blockyard.kernels.interface import Backend
from blockyard.kernels.kv_pool import LARGEST, movable, pool_shape
from blockyard.kernels.selection import choose_backend
from blockyard.kernels.torch.deterministic import DeterministicTorchBackend

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
NAMES = ("torch", "deterministic", "cpu")


def backend_of(name: str, device: torch.device) -> Backend:
    if name == "deterministic":
        return DeterministicTorchBackend()
    if name != "cpu":
        return choose_backend(device, requested="torch" if name == "torch" else "triton")
    try:
        return CpuBackend(load_extension())
    except ExtensionUnavailable as error:
        pytest.skip(str(error))


def heads(kind: int, peak: float, dtype: torch.dtype) -> torch.Tensor:
    """Numbers that every type holds, with a largest magnitude that quantises each of them to itself."""
    numbers = torch.arange(BLOCK_SIZE * KV_HEADS * HEAD_DIM).view(BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    result = ((7 + 4 * kind) * numbers % 31 - 15).to(dtype)
    result[..., kind] = peak
    return result


def written(
    backend: Backend, dtype: torch.dtype, stored: torch.dtype, device: torch.device, by: str
) -> torch.Tensor:
    pool = torch.zeros(pool_shape(3, KV_HEADS, BLOCK_SIZE, HEAD_DIM, stored), dtype=stored, device=device)
    plan = plan_attention(
        query_lens=[BLOCK_SIZE],
        context_lens=[BLOCK_SIZE],
        block_tables=[[1]],
        block_size=BLOCK_SIZE,
        device=device,
        num_kv_heads=KV_HEADS,
    )
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


@pytest.mark.parametrize("name", [*NAMES, pytest.param("triton", marks=pytest.mark.ci)])
def test_a_block_has_the_bytes_that_its_layout_promises(name: str, device: torch.device) -> None:
    if device.type != "cpu" and name in ("cpu", "deterministic"):
        pytest.skip("it computes on a CPU alone")
    backend, found, promised = backend_of(name, device), {}, {}
    for stored in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        dtype = torch.bfloat16 if stored == torch.bfloat16 else torch.float32
        shape = pool_shape(1, KV_HEADS, BLOCK_SIZE, HEAD_DIM, stored)
        layout = backend.kv_layout(torch.zeros(shape, dtype=stored, device=device), dtype)
        for by in ("write_kv", "qk_norm_rope_write"):
            block = written(backend, dtype, stored, device, by)
            content = block.contiguous().view(torch.uint8).numpy().tobytes()
            found[layout, stored, by] = hashlib.sha256(content).hexdigest()[:16]
            promised[layout, stored, by] = STORED.get((layout, stored))
    assert found == promised


def test_a_pool_that_pytorch_serves_in_the_cpu_backend_is_named_by_what_it_is(device: torch.device) -> None:
    backend = backend_of("cpu", torch.device("cpu"))
    native = torch.zeros(pool_shape(1, 2, 16, 32, torch.float32))
    odd_head = torch.zeros(pool_shape(1, 2, 16, 24, torch.float32))
    half = torch.zeros(pool_shape(1, 2, 16, 32, torch.float16), dtype=torch.float16)
    assert backend.kv_layout(native, torch.float32) != "plain/1"
    assert backend.kv_layout(odd_head, torch.float32) == backend.kv_layout(half, torch.float16) == "plain/1"
    in_8_bits = torch.zeros(pool_shape(1, 2, 16, 32, torch.int8), dtype=torch.int8)
    assert backend.kv_layout(in_8_bits, torch.float16) == "plain/1"
    assert backend.kv_layout(in_8_bits, torch.float32) == backend.kv_layout(native, torch.float32)


def words_in_a_process(**environment: str) -> list[str]:
    code = (
        "import torch; from blockyard.kernels.torch.backend import TorchBackend;"
        "print(*TorchBackend().arithmetic(torch.zeros(1, 2, 2, 16, 32), torch.float32))"
    )
    command, variables = [sys.executable, "-c", code], os.environ | environment
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()


@pytest.mark.ci
def test_what_makes_pytorch_round_otherwise_changes_its_words() -> None:
    plain = words_in_a_process()
    for changes in (
        {"ATEN_CPU_CAPABILITY": "default"},
        {"ONEDNN_MAX_CPU_ISA": "SSE41"},
        {"OMP_NUM_THREADS": "1"},
    ):
        assert words_in_a_process(**changes) != plain, changes


def test_the_cpu_kernels_give_equal_bits_with_any_number_of_threads(device: torch.device) -> None:
    """So the number is no word of theirs, and workers with other shares of a machine exchange blocks."""
    backend = backend_of("cpu", torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    weight, x_TI = (torch.randn(shape, generator=generator) for shape in ((512, 320), (77, 320)))
    packed, before, results = backend.pack_linear(weight), torch.get_num_threads(), []
    gate_up = torch.randn(77, 2 * 333, generator=generator)
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out_TI = torch.empty(77, 333)
            backend.silu_mul(gate_up, out_TI=out_TI)
            results.append(torch.cat((backend.linear(x_TI, packed).flatten(), out_TI.flatten())))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results)
    words = backend.arithmetic(torch.zeros(pool_shape(1, 2, 16, 32, torch.float32)), torch.float32)
    assert not any(word.startswith("threads=") for word in words)
