"""The Triton kernels compile for a GPU that may be absent: the interpreter accepts code that the compiler refuses.

Facts of the code of attention stand in docs/performance.md, and must be those of today's code.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from tests.kernels.compiled_code import COLUMNS, HEADS, NUM_STEADY_COLUMNS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "num_kernels"), [(["--quick"], 32), pytest.param([], 77, marks=pytest.mark.slow)]
)
def test_every_kernel_compiles_to_machine_code(
    tmp_path: Path, arguments: list[str], num_kernels: int
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_cuda", *arguments],
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
    assert len(rows) == num_kernels
    compare_with_docs(rows)


def compare_with_docs(rows: dict[str, list[str]]) -> None:
    """Compare the rows that the docs have too. Another version of triton may take other registers and instructions."""
    text = (ROOT / "docs" / "performance.md").read_text()
    is_same_triton = f"(triton {triton.__version__})" in text
    table = text.split(HEADS)[1].split("\n\n")[0]
    documented = [cells_of(line) for line in table.splitlines()[2:]]
    compared = [row for row in documented if row[0] in rows]
    assert len(compared) >= 9
    for row in compared:
        columns = len(COLUMNS) if is_same_triton else NUM_STEADY_COLUMNS
        assert rows[row[0]][:columns] == row[:columns]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]
