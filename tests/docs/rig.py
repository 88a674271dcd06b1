"""The rigs of other folders, for the tests of this one too; and where the documents are."""

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
