"""The Triton kernels compile for a GPU that may be absent: the interpreter accepts code that the compiler refuses.

bench/reports/compiled-kernels.md has facts of the code of attention and of quantised linears: they must be today's.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from .compiled_code import COLUMNS, HEADS, LINEAR_HEADS, NUM_STEADY_COLUMNS

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize(
    ("program", "heads"), [("compile_for_cuda", HEADS), ("compile_linears", LINEAR_HEADS)]
)
def test_every_kernel_compiles_to_the_machine_code_in_the_docs(
    tmp_path: Path, program: str, heads: str, is_quick: bool
) -> None:
    """Another version of triton than the docs name may take other registers and instructions."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.nightly.kernels.{program}", *(["--quick"] if is_quick else [])],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)
    rows = {row[0]: row for row in map(cells_of, done.stdout.splitlines())}
    shown = {name for name, row in rows.items() if row[2] != "-" and name.endswith(", bf16")}
    text = (ROOT / "bench" / "reports" / "compiled-kernels.md").read_text()
    table = text.split(heads)[1].split("\n\n")[0]
    documented = {row[0]: row for row in map(cells_of, table.splitlines()[2:])}
    assert shown <= documented.keys() if is_quick else shown == documented.keys()
    columns = len(COLUMNS) if f"(triton {triton.__version__})" in text else NUM_STEADY_COLUMNS
    for name in shown:
        assert rows[name][:columns] == documented[name][:columns]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]
