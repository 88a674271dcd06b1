"""The C++ kernels for vector units of other machines: the sources compile for them.

The part that this machine can run computes the right result.
"""

import ctypes
import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blockyard.kernels.cpu import extension as cpu_extension
from blockyard.kernels.cpu.backend import CpuBackend, to_native
from blockyard.kernels.cpu.library import CpuLibrary
from blockyard.kernels.cpu.panel_linear import lay_out
from blockyard.kernels.quantised import dequantised
from blockyard.kernels.torch.backend import TorchBackend

from tests.unit.kernels.rig import CPU, KV_DTYPES, assert_near, make_step
from tests.unit.kernels.weights import int4_weight, int8_weight

SECONDS = 120.0
NEEDED: dict[str, set[str]] = {
    "x86-64": set(),
    "haswell": {"avx2", "fma"},
    "skylake-avx512": {"avx512f", "avx512bw"},
    "icelake-server": {"avx512f", "avx512_vnni"},
    "cooperlake": {"avx512f", "avx512_vnni", "avx512_bf16"},
}
"""Kinds of CPU, as g++ calls them, and flags without which nothing that is compiled for them runs."""
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=NEEDED)
def library_file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """Compiled, which it must be on any x86, in little time."""
    if platform.machine() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("no x86, or no g++ here")
    library = tmp_path_factory.mktemp("units") / "kernels.so"
    sources = [str(path) for path in cpu_extension.SOURCES.glob("*.cpp")]
    command = ["g++", *cpu_extension.FLAGS, f"-march={request.param}", "-O0", *sources, "-o", str(library)]
    built = subprocess.run(command, timeout=SECONDS, capture_output=True, text=True, check=False)
    assert not built.returncode, built.stderr
    return request.param, library


@pytest.fixture(scope="module")
def backend(library_file: tuple[str, Path]) -> CpuBackend:
    kind, file = library_file
    flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    if not NEEDED[kind] <= set(flags):
        pytest.skip(f"this CPU is no {kind}")
    return CpuBackend(CpuLibrary(ctypes.CDLL(str(file))), linears="int8")


def test_which_linears_there_are(library_file: tuple[str, Path], backend: CpuBackend) -> None:
    has_any = library_file[0] != "x86-64"
    has_tiles = "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    assert backend.library.has_linear(is_bf16=False) is has_any
    assert backend.library.has_linear(is_bf16=True) is (has_any and not has_tiles)
    assert backend.library.has_int8 is has_any


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_grouped_linears_are_the_same_on_every_unit(backend: CpuBackend, rows: int, bits: int) -> None:
    if not backend.library.has_int8:
        pytest.skip("PyTorch's are taken")
    make = int4_weight if bits == 4 else int8_weight
    weight = make(112, 120, 40, torch.float32, has_zeros=True, has_order=True)
    x_TI = torch.randn(rows, 120)
    expected = x_TI @ dequantised(weight).t()
    full = CpuBackend(backend.library)
    actual = full.linear(x_TI, full.pack_linear(weight))
    torch.testing.assert_close(actual, expected, atol=2e-3, rtol=2e-3)
    x_TI = torch.randint(-127, 128, (rows, 120)).float()
    order_I = weight.order_I
    assert order_I is not None
    x_TI[:, order_I[::40].long()] = 127  # so that inputs in 8 bits are not rounded
    in_8_bits = backend.linear(x_TI, backend.pack_linear(weight))
    torch.testing.assert_close(in_8_bits, x_TI @ dequantised(weight).t(), atol=1e-2, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 7, 13, 97])
def test_linears_are_exact_in_whole_numbers(backend: CpuBackend, rows: int, dtype: torch.dtype) -> None:
    if not backend.library.has_int8:
        pytest.skip("PyTorch's are taken")
    x_TI, weight_OI = torch.randint(-8, 9, (rows, 300)).to(dtype), torch.randint(-8, 9, (144, 300)).to(dtype)
    x_TI[:, 7], weight_OI[:, 5] = 127, 127  # scales of 1
    bias_O = torch.randint(-100, 101, (144,)).to(dtype)
    expected = (x_TI.float() @ weight_OI.float().t() + bias_O.float()).to(dtype)
    assert torch.equal(backend.linear(x_TI, lay_out(weight_OI), bias_O), expected)
    assert torch.equal(backend.linear(x_TI, backend.pack_linear(weight_OI), bias_O), expected)


@pytest.mark.parametrize("kv_dtype", [None, *KV_DTYPES.values()])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_the_fall_backs(
    backend: CpuBackend, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    options = {"num_heads": 8, "head_dim": 64, "dtype": dtype, "kv_dtype": kv_dtype, "on": CPU}
    step = make_step([1, 1, 5, 40], [1, 130, 70, 40], **options)
    native = replace(step, kv_pool_B2KPD=to_native(step.kv_pool_B2KPD, dtype))
    assert_near(native.attend(backend), step.attend(TorchBackend()))
