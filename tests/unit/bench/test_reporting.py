"""Reports say what ran and where: the command without local paths, CPUs that share a name, and the GPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.bench.machine import cpu, machine

from bench import reporting
from bench.reporting import Floor, command_line, machine_text, write_report

ZEN_3 = """processor\t: 0
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC
stepping\t: 1
flags\t\t: fpu fma sse4_2 avx2

processor\t: 1
model\t\t: 99
"""
ZEN_4 = """cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
stepping\t: 1
flags\t\t: fma avx2 avx512f avx512_vnni avx512_bf16
"""
H200 = {"name": "NVIDIA H200", "count": 1, "cuda": "12.8", "triton": "3.6.0"}


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("/tmp/venv/bin/python", ".../python"),
        ("--vllm-python=/home/me/bin/python", "--vllm-python=.../python"),
        ("/a/b/,/c/d", ".../b,.../d"),
        ("tests/unit/worker/test_engine.py", "tests/unit/worker/test_engine.py"),
        ("float32,bfloat16", "float32,bfloat16"),
        ("two words", "'two words'"),
    ],
)
def test_a_command_is_told_without_the_machines_own_paths(word: str, told: str) -> None:
    assert command_line(["-m", "bench.engine"], ["-x", word]) == f"python -m bench.engine -x {told}"


def test_cpus_of_one_name_are_told_apart() -> None:
    zen_3, zen_4 = cpu(ZEN_3), cpu(ZEN_4)
    assert zen_3 == {
        "cpu": "AMD EPYC",
        "cpu_numbers": {"cpu family": 25, "model": 1, "stepping": 1},
        "vector_units": ["avx2", "fma"],
    }
    assert (zen_4["cpu"], zen_4["cpu_numbers"]["model"]) == ("AMD EPYC", 17)
    assert zen_4["vector_units"] == ["avx2", "avx512_bf16", "avx512_vnni", "avx512f", "fma"]
    texts = [machine_text({**known, "cores": 2, "gpu": None}) for known in (zen_3, zen_4)]
    assert texts[0] == "AMD EPYC (cpu family 25, model 1, stepping 1; avx2, fma), 2 cores"
    assert texts[0] != texts[1]


@pytest.mark.parametrize("cpuinfo", [None, "", "processor\t: 0\nBogoMIPS\t: 50.00\n"])
def test_a_cpu_that_says_nothing_of_itself_is_no_error(cpuinfo: str | None) -> None:
    known = cpu(cpuinfo)
    assert (known["cpu_numbers"], known["vector_units"]) == ({}, [])
    assert machine_text({**known, "cores": 4, "gpu": None}) == f"{known['cpu']}, 4 cores"


def test_a_report_names_its_command_and_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["whatever", "--output", str(tmp_path)])
    monkeypatch.setattr(reporting, "gpu", lambda: H200)
    floor = Floor(name="f", value=1.0, floor=1.0, better="higher")
    path = write_report("x", title="X", text="Y", figures={}, floors=[floor], versions={}, folder=tmp_path)
    text, twin = path.read_text(encoding="utf-8"), json.loads(path.with_suffix(".json").read_text())
    assert twin["command"].endswith(f" --output .../{tmp_path.name}")
    assert f"```bash\n{twin['command']}\n```" in text
    assert str(tmp_path) not in text + json.dumps(twin)
    assert "1 x NVIDIA H200 (CUDA 12.8, triton 3.6.0)" in text
    assert twin["gpu"] == H200
    assert twin.keys() >= machine().keys()


def test_an_unproven_report_says_so_first_and_replaces_no_other(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"title": "X", "text": "Y", "figures": {}, "floors": [], "versions": {}}
    proven = write_report("x", folder=tmp_path, **settings)
    unproven = write_report("x", folder=tmp_path, **settings, unproven="2 failed", is_cut_short=True)
    assert unproven.name == proven.name.replace("x.md", "x-cut-short-unproven.md")
    assert unproven.read_text(encoding="utf-8").startswith("# X\n\n**UNPROVEN: 2 failed.**\n")
    assert "UNPROVEN" not in proven.read_text(encoding="utf-8")
    of_each = [json.loads(path.with_suffix(".json").read_text())["unproven"] for path in (proven, unproven)]
    assert of_each == [None, "2 failed"]


def test_a_gpu_is_none_where_torch_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert reporting.gpu() is None
