"""What /proc/cpuinfo says of a CPU."""

import logging

import pytest
from blockyard.worker import loading
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


@pytest.mark.parametrize("is_there", [True, False])
def test_bfloat16_on_a_cpu_without_it_is_warned_of(
    is_there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "has_bfloat16", lambda: is_there)
    config = EngineConfig(
        model=str(shared_checkpoint("LlamaForCausalLM")),
        dtype="bfloat16",
        device="cpu",
        kv_cache_memory=2**22,
    )
    with caplog.at_level(logging.WARNING):
        loading.load_engine(config)
    assert ("no instructions for bfloat16" in caplog.text) is not is_there
