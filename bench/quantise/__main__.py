"""Accuracy and size of the demo model in every quantised format.

    python -m bench.quantise [--keep FOLDER]

Weights are rounded to the nearest, in groups of 32 columns and blocks of 32 by 32, because the demo model's matrices
have no multiples of 128. Texts are modules on which the model was not trained, in rows of 512 tokens. The model
computes in bfloat16, and errors are those beside the model in full precision in float32. The embedding, which is also
the head, is a quarter of the demo model and stays as it is.
"""

import argparse
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from blockyard.deploy.demo_model.corpus import HELD_OUT_MODULES
from blockyard.deploy.settings.options import model_path
from blockyard.worker.model.config import load_config
from blockyard.worker.model.shards import weights_bytes

from bench.kv_accuracy import EXACT, Accuracy, Case, accuracy_of, held_out_rows, logits_of
from bench.proof import prove
from bench.quantise.recipes import quantise_checkpoint, recipes
from bench.reporting import REPORTS, Floor, write_report

GROUP = BLOCK = 32
MAX_PERPLEXITY_RATIO = {4: 1.10, 8: 1.01}
"""Maximum ratio to the perplexity in full precision, by bits. Round-to-nearest in 4 bits harms so small a model."""
PROOF = (
    "tests/unit/kernels/test_cpu_linears.py",
    "tests/unit/kernels/test_quantised.py",
    "tests/unit/worker/test_quantised_checkpoints.py",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """A checkpoint, measured in bfloat16."""

    accuracy: Accuracy
    memory_bytes: int
    """Bytes of the weights in a worker on a CPU."""
    file_bytes: int


def measured_of(folder: Path, rows: torch.Tensor, exact: list[torch.Tensor]) -> Quantised:
    """Measure a checkpoint. `exact` has the logits of the model in full precision, row by row."""
    return Quantised(
        accuracy=accuracy_of(Case(dtype="bfloat16", kv_cache_dtype="auto"), rows, exact, folder),
        memory_bytes=weights_bytes(load_config(folder), 2, on_cpu=True),
        file_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
    )


def measure(rows: torch.Tensor, folder: Path) -> dict[str, Quantised]:
    """Quantise the demo model to each format under `folder`, and measure each beside full precision."""
    source = Path(model_path("demo"))
    exact = list(logits_of(EXACT, rows))
    measured = {"bfloat16": measured_of(source, rows, exact)}
    for name, recipe in recipes(GROUP, BLOCK).items():
        if recipe.also_head:
            continue  # the demo model's head is its embedding
        quantise_checkpoint(source, recipe, folder / name)
        measured[name] = measured_of(folder / name, rows, exact)
    return measured


def text_of(measured: dict[str, Quantised], rows: torch.Tensor, proven: str) -> str:
    assert __doc__ is not None
    meaning = __doc__.rpartition("\n\n")[2].strip()
    lines = [
        f"{meaning} {rows.numel():,} tokens of {', '.join(HELD_OUT_MODULES)}. {proven}.",
        "",
        "| format | perplexity | mean logit error | same top token | weights in memory | file |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {one.accuracy.perplexity:.3f} | {one.accuracy.mean_logit_error:.4f} "
            f"| {one.accuracy.same_first_choice:.2%} "
            f"| {one.memory_bytes / 1e6:.2f} MB | {one.file_bytes / 1e6:.2f} MB |"
            for name, one in measured.items()
        ),
        "",
        "On a CPU, FP8 becomes bfloat16 when it is loaded. Published checkpoints are calibrated, and these are not.",
    ]
    return "\n".join(lines)


def floors_of(measured: dict[str, Quantised]) -> list[Floor]:
    full = measured["bfloat16"].accuracy.perplexity
    return [
        Floor(
            name=f"perplexity, {name} / bfloat16",
            value=measured[name].accuracy.perplexity / full,
            floor=MAX_PERPLEXITY_RATIO[4 if "4" in name or name == "awq" else 8],
            better="lower",
        )
        for name in measured
        if name != "bfloat16"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=REPORTS, help="folder of the report")
    parser.add_argument("--rows", type=int, default=16, help="rows of 512 tokens")
    parser.add_argument("--keep", type=Path, help="folder to keep the quantised checkpoints in")
    arguments = parser.parse_args()
    proven = prove(PROOF)
    rows = held_out_rows()[: arguments.rows]
    with tempfile.TemporaryDirectory() as temporary:
        measured = measure(rows, arguments.keep or Path(temporary))
    path = write_report(
        "quantised-accuracy",
        title="Quantised checkpoints: accuracy and size",
        text=text_of(measured, rows, proven),
        figures={name: asdict(one) for name, one in measured.items()},
        floors=floors_of(measured),
        versions={"torch": torch.__version__},
        folder=arguments.output,
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
