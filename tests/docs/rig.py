"""Helpers of other test folders that this folder shares, and the paths of the documents."""

from pathlib import Path

from ..cluster.harness import eventually as eventually  # noqa: TID252
from ..faults.processes import processes as processes  # noqa: TID252

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("proto/*.md"),
    )
)
