"""Helpers of other test folders that this folder shares, and the paths of the documents."""

from pathlib import Path

from tests.system.harness import eventually as eventually
from tests.system.processes import processes as processes

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("proto/*.md"),
    )
)
