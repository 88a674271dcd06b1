"""The choice of the data type, and the reading of a CPU's features from /proc/cpuinfo."""

import logging
from typing import Any

import pytest
from blockyard.deploy.lifecycle import preflight
from blockyard.deploy.settings.options import model_path
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.kernels.cpu.extension import ExtensionUnavailable, load_extension
from blockyard.kernels.cpu.library import CpuLibrary
from blockyard.worker.config import EngineConfig
from blockyard.worker.execution import part_runner
from blockyard.worker.model import data_type
from blockyard.worker.model.config import DataTypeName
from blockyard.worker.model.data_type import choose_dtype, cpu_has_bfloat16
from blockyard.worker.startup import loading

from .checkpoints import shared_checkpoint


@pytest.mark.parametrize(
    ("cpuinfo", "is_there"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_vnni\nbugs\t: none\n", False),
        ("flags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags\t\t: amx_tile amx_bf16\n", True),
        ("processor : 0\nFeatures : fp asimd bf16 i8mm\n", True),
        ("processor : 0\nFeatures : fp asimd\n", False),
        ("a machine that lists no flags\n", False),
    ],
)
def test_bfloat16_is_there_where_a_flag_names_it(cpuinfo: str, is_there: bool) -> None:
    assert cpu_has_bfloat16(cpuinfo) is is_there


@pytest.mark.parametrize(
    ("checkpoint", "on_cpu", "has_bfloat16", "chosen"),
    [
        ("bfloat16", True, True, "bfloat16: the checkpoint's, and this CPU has instructions for it"),
        ("bfloat16", True, False, "float32: this CPU has no bfloat16 instructions"),
        ("float16", True, True, "float32: this CPU has no float16 instructions"),
        ("float32", True, True, "float32: the checkpoint's"),
        ("bfloat16", False, False, "bfloat16: the checkpoint's"),
        ("float16", False, False, "float16: the checkpoint's"),
    ],
)
def test_auto_is_the_checkpoints_type_where_the_device_multiplies_it(
    checkpoint: DataTypeName, on_cpu: bool, has_bfloat16: bool, chosen: str
) -> None:
    assert str(choose_dtype("auto", checkpoint, on_cpu=on_cpu, has_bfloat16=has_bfloat16)) == chosen


def test_what_is_named_is_taken_and_what_needs_float32_has_it() -> None:
    for has_bfloat16 in (True, False):
        named = choose_dtype("float16", "bfloat16", on_cpu=True, has_bfloat16=has_bfloat16)
        assert str(named) == "float16: as --dtype says"
        for setting in ("deterministic", "simulated"):
            special: dict[str, Any] = {"on_cpu": True, "has_bfloat16": has_bfloat16, setting: True}
            assert choose_dtype("auto", "bfloat16", **special).name == "float32"
    with pytest.raises(ValueError, match="float32 only, not bfloat16"):
        choose_dtype("bfloat16", "bfloat16", on_cpu=True, has_bfloat16=True, deterministic=True)


@pytest.mark.parametrize(("has_it", "bytes_a_number"), [(True, 2), (False, 4)])
def test_a_worker_says_what_it_computes_in_and_its_pool_is_of_that(
    has_it: bool, bytes_a_number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And what commands reckon of this machine does not differ from it."""
    monkeypatch.setattr(data_type, "cpu_has_bfloat16", lambda: has_it)
    monkeypatch.setattr(part_runner, "cpu_has_bfloat16", lambda: has_it)
    engine = EngineConfig(model=model_path("demo"), device="cpu", kv_cache_memory=2**24)
    with caplog.at_level(logging.INFO):
        loaded = loading.load_engine(engine)
    assert f"computes in {loaded.dtype}" in caplog.text
    assert (loaded.dtype.name == "bfloat16") is has_it
    assert loaded.kv_size.block_bytes == 2 * 6 * 2 * 16 * 32 * bytes_a_number
    reckoned = preflight.pool_of(UpOptions(engine=engine), loaded.model, has_gpu=False)
    assert reckoned == loaded.kv_size


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
    monkeypatch.setattr(part_runner, "cpu_has_bfloat16", lambda: is_there)
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
