"""Accuracy and size of the demo model in every quantised format.

    python -m bench.quantise [--keep FOLDER]

Weights are rounded to the nearest, in groups of 32 columns and blocks of 32 by 32, because the demo model's matrices
have no multiples of 128. Texts are modules on which the model was not trained, in rows of 512 tokens. The model
computes in bfloat16, and errors are those beside the model in full precision in float32. The embedding, which is also
the head, is a third of the demo model and stays as it is.
"""

import argparse
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from blockyard.deploy.demo_model.corpus import HELD_OUT_MODULES
from blockyard.deploy.settings.options import model_path
from blockyard.kernels.attention.plan import plan_attention
from blockyard.kernels.selection import choose_backend
from blockyard.worker.model.config import load_config
from blockyard.worker.model.decoder import Decoder
from blockyard.worker.model.shards import weights_bytes
from blockyard.worker.model.weights import load_weights
from torch.nn.functional import cross_entropy

from bench.kv_accuracy import BLOCK_SIZE, held_out_rows
from bench.proof import prove
from bench.quantise.recipes import quantise_checkpoint, recipes
from bench.reporting import REPORTS, Floor, write_report

GROUP = BLOCK = 32
MAX_PERPLEXITY_RATIO = {4: 1.10, 8: 1.01}
"""Maximum ratio to the perplexity in full precision, by bits. Round-to-nearest in 4 bits harms so small a model."""
PROOF = (
    "tests/kernels/test_grouped_linear.py",
    "tests/kernels/test_quantised.py",
    "tests/worker/test_quantised_checkpoints.py",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    perplexity: float
    mean_logit_error: float
    same_first_choice: float
    """Share of positions with the same most probable token as the exact model."""
    memory_bytes: int
    """Bytes of the weights in a worker on a CPU."""
    file_bytes: int


def logits_of(folder: Path, rows: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return logits of shape [tokens of a row, vocabulary] in fp32, row by row."""
    device, num_tokens = torch.device("cpu"), rows.shape[1]
    config = load_config(folder)
    decoder = Decoder(
        config, load_weights(folder, config, dtype=dtype, device=device), choose_backend(device)
    )
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    shape = (num_blocks, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    pools = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_layers)]
    results = []
    for row in rows:
        plan = plan_attention(
            query_lens=[num_tokens],
            context_lens=[num_tokens],
            block_tables=[list(range(num_blocks))],
            block_size=BLOCK_SIZE,
            device=device,
            num_kv_heads=config.num_kv_heads,
        )
        with torch.inference_mode():
            results.append(decoder.forward(row, pools, plan, torch.arange(num_tokens)).float())
    return results


def accuracy_of(folder: Path, rows: torch.Tensor, exact: list[torch.Tensor]) -> Accuracy:
    """Measure a checkpoint in bfloat16. `exact` has the logits of the model in full precision, row by row."""
    losses, errors, same = [], [], []
    for row, wanted, logits in zip(rows, exact, logits_of(folder, rows, torch.bfloat16), strict=True):
        losses.append(float(cross_entropy(logits[:-1], row[1:])))
        errors.append(float((logits - wanted).abs().mean()))
        same.append(float((logits.argmax(dim=-1) == wanted.argmax(dim=-1)).float().mean()))
    return Accuracy(
        perplexity=math.exp(sum(losses) / len(rows)),
        mean_logit_error=sum(errors) / len(rows),
        same_first_choice=sum(same) / len(rows),
        memory_bytes=weights_bytes(load_config(folder), 2, on_cpu=True),
        file_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
    )


def measure(rows: torch.Tensor, folder: Path) -> dict[str, Accuracy]:
    """Quantise the demo model to each format under `folder`, and measure each beside full precision."""
    source = Path(model_path("demo"))
    exact = logits_of(source, rows, torch.float32)
    measured = {"bfloat16": accuracy_of(source, rows, exact)}
    for name, recipe in recipes(GROUP, BLOCK).items():
        if recipe.also_head:
            continue  # the demo model's head is its embedding
        quantise_checkpoint(source, recipe, folder / name)
        measured[name] = accuracy_of(folder / name, rows, exact)
    return measured


def text_of(measured: dict[str, Accuracy], rows: torch.Tensor, proven: str) -> str:
    assert __doc__ is not None
    meaning = __doc__.rpartition("\n\n")[2].strip()
    lines = [
        f"{meaning} {rows.numel():,} tokens of {', '.join(HELD_OUT_MODULES)}. {proven}.",
        "",
        "| format | perplexity | mean logit error | same top token | weights in memory | file |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {one.perplexity:.3f} | {one.mean_logit_error:.4f} | {one.same_first_choice:.2%} "
            f"| {one.memory_bytes / 1e6:.2f} MB | {one.file_bytes / 1e6:.2f} MB |"
            for name, one in measured.items()
        ),
        "",
        "On a CPU, FP8 becomes bfloat16 when it is loaded. Published checkpoints are calibrated, and their models are",
        "larger: both lose less than this.",
    ]
    return "\n".join(lines)


def floors_of(measured: dict[str, Accuracy]) -> list[Floor]:
    full = measured["bfloat16"].perplexity
    return [
        Floor(
            name=f"perplexity, {name} / bfloat16",
            value=measured[name].perplexity / full,
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
        figures={
            name: {field: getattr(one, field) for field in Accuracy.__slots__}
            for name, one in measured.items()
        },
        floors=floors_of(measured),
        versions={"torch": torch.__version__},
        folder=arguments.output,
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
