"""Generates the Python code of proto/v1/*.proto: `python -m proto.generate [--check]` from the project root.

`--check` generates into a temporary folder and fails where the committed code differs, or where it is not of PROTOS.
"""

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
PROTOS = ("inference.proto", "cluster.proto", "admin.proto", "session.proto")


def generate(target: Path) -> None:
    """Write `blockyard/proto/v1/*_pb2*` below `target`. Raises RuntimeError if protoc fails."""
    run_protoc(f"--python_out={target}", f"--pyi_out={target}", f"--grpc_python_out={target}")


def run_protoc(*outputs: str) -> None:
    """Run protoc on all .proto files. `outputs` are the options that say what it writes. Raises RuntimeError if it
    fails."""
    include = Path(protoc.__file__).parent / "_proto"
    paths = [f"blockyard/proto/v1/{name}" for name in PROTOS]
    code = protoc.main(["protoc", f"-Iblockyard/proto={ROOT}", f"-I{include}", *outputs, *paths])
    if code:
        raise RuntimeError(f"protoc failed with exit code {code}")


def main() -> int:
    check = "--check" in sys.argv[1:]
    # A file that is not in PROTOS, and code whose .proto file has gone.
    stale = sorted({path.name for path in (ROOT / "v1").glob("*.proto")} ^ set(PROTOS))
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        generated = sorted((Path(folder) / "blockyard/proto/v1").iterdir())
        stale += sorted(
            {path.name for path in (ROOT / "v1").glob("*_pb2*")} - {made.name for made in generated}
        )
        for made in generated:
            committed = ROOT / "v1" / made.name
            if check and (not committed.exists() or committed.read_text() != made.read_text()):
                stale.append(made.name)
            elif not check:
                committed.write_text(made.read_text())
    if stale:
        print(f"out of date or not of PROTOS, run `make proto`: {', '.join(stale)}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
