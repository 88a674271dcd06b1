"""What /proc/cpuinfo says of a CPU."""

import logging

import pytest
from blockyard.kernels.cpu_extension import ExtensionUnavailable, load_extension
from blockyard.kernels.cpu_library import CpuLibrary
from blockyard.worker import loading, runner
from blockyard.worker.config import EngineConfig
from blockyard.worker.cpu_features import has_bfloat16

from .checkpoints import shared_checkpoint


@pytest.mark.parametrize(
    ("cpuinfo", "is_there"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_vnni\nbugs\t: none\n", False),
        ("flags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags\t\t: amx_tile amx_bf16\n", True),
        ("processor : 0\nFeatures : fp asimd bf16 i8mm\n", True),
        ("processor : 0\nFeatures : fp asimd\n", False),
        ("a machine that lists no flags\n", True),
    ],
)
def test_bfloat16_is_there_where_a_flag_names_it(cpuinfo: str, is_there: bool) -> None:
    assert has_bfloat16(cpuinfo) is is_there


@pytest.mark.parametrize(("is_there", "is_widened"), [(True, False), (False, True), (False, False)])
def test_slow_bfloat16_is_warned_of(
    is_there: bool, is_widened: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the CPU has no instructions for it, and no kernel of ours widens it."""
    if is_widened:
        try:
            load_extension()
        except ExtensionUnavailable as error:
            pytest.skip(str(error))
    monkeypatch.setattr(runner, "has_bfloat16", lambda: is_there)
    monkeypatch.setattr(CpuLibrary, "has_linear", lambda _, is_bf16: is_widened)
    config = EngineConfig(
        model=str(shared_checkpoint("LlamaForCausalLM")),
        dtype="bfloat16",
        device="cpu",
        kv_cache_memory=2**22,
    )
    with caplog.at_level(logging.WARNING):
        loading.load_engine(config)
    assert ("bfloat16 is slow here" in caplog.text) is not (is_there or is_widened)
