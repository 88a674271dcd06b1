"""Accuracy and capacity of a KV cache in 8 bits, and accuracy of linears in 8 bits, for the demo model.

    python -m bench.kv_accuracy

The texts are modules on which the model was not trained, in rows of 512 tokens. Each row is computed as one prompt
whose attention reads keys and values back from the pool. Errors are differences of logits from the same model and cache
in float32. Linears in int8 are those of the cpu backend. They have one scale per output of a weight, and one per token
of its input.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blockyard.deploy.demo_model.corpus import HELD_OUT_MODULES, read_corpus
from blockyard.deploy.demo_model.tokens import encode_documents
from blockyard.deploy.settings.options import model_path
from blockyard.kernels.attention.plan import plan_attention
from blockyard.kernels.cpu.extension import load_extension
from blockyard.kernels.interface import BackendName, LinearsName
from blockyard.kernels.kv_pool import QUANTISED_DTYPES, pool_shape
from blockyard.kernels.selection import choose_backend
from blockyard.worker.memory.kv_size import KVCacheDtype, bytes_per_block, stored_dtype
from blockyard.worker.model.config import load_config
from blockyard.worker.model.decoder import Decoder
from blockyard.worker.model.weights import load_weights
from torch.nn.functional import cross_entropy

from bench.proof import prove
from bench.reporting import REPORTS, Floor, write_report

ROW_TOKENS = 512
BLOCK_SIZE = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_PERPLEXITY_RATIO = 1.01
MIN_CAPACITY = 1.88
"""Minimum ratio of tokens that fit the same memory in 8 and in 16 bits, at head size 64.

Larger heads give a higher ratio."""
HEAD_SIZES = (32, 64, 128)
PROOF = (
    "tests/unit/kernels/test_cache_ops.py",
    "tests/unit/kernels/test_cpu_linears.py",
    "tests/unit/bench/test_figures.py",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    dtype: str
    kv_cache_dtype: KVCacheDtype
    linears: LinearsName = "full"

    @property
    def name(self) -> str:
        linears = "" if self.linears == "full" else f", linears in {self.linears}"
        return f"{self.dtype}, KV in {stored_dtype(self.kv_cache_dtype, self.dtype)}{linears}"


EXACT = Case(dtype="float32", kv_cache_dtype="auto")
KV_CACHE_DTYPES: tuple[KVCacheDtype, ...] = ("auto", "int8", "fp8")
CASES = (
    *(Case(dtype=dtype, kv_cache_dtype=kv) for dtype in DTYPES for kv in KV_CACHE_DTYPES),
    *(Case(dtype=dtype, kv_cache_dtype="auto", linears="int8") for dtype in DTYPES),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    perplexity: float
    mean_logit_error: float
    max_logit_error: float
    same_first_choice: float
    """Share of positions with the same most probable token as the exact model."""


def held_out_rows() -> torch.Tensor:
    """Return the texts on which the model was not trained, as token ids of shape [rows, ROW_TOKENS]."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path("demo"))
    ids = encode_documents(tokenizer, (read_corpus().held_out,)).long()
    return ids[: len(ids) // ROW_TOKENS * ROW_TOKENS].view(-1, ROW_TOKENS)


def logits_of(
    case: Case, rows: torch.Tensor, backend: BackendName = "auto", folder: Path | None = None
) -> Iterator[torch.Tensor]:
    """Yield logits of shape [tokens of a row, vocabulary] in fp32, row by row. `folder` has a checkpoint other than the
    demo model."""
    folder, device, dtype = folder or Path(model_path("demo")), torch.device("cpu"), DTYPES[case.dtype]
    config = load_config(folder)
    weights = load_weights(folder, config, dtype=dtype, device=device)
    decoder = Decoder(config, weights, choose_backend(device, requested=backend, linears=case.linears))
    num_tokens = rows.shape[1]
    stored = dtype if case.kv_cache_dtype == "auto" else QUANTISED_DTYPES[case.kv_cache_dtype]
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    shape = pool_shape(num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim, stored)
    pools = [torch.zeros(shape, dtype=stored) for _ in range(config.num_layers)]
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
            yield decoder.forward(row, pools, plan, torch.arange(num_tokens)).float()


def accuracy_of(
    case: Case, rows: torch.Tensor, exact: list[torch.Tensor], folder: Path | None = None
) -> Accuracy:
    """Measure a case on `rows` of token ids. `exact` has the logits of EXACT, row by row. `folder`: see `logits_of`."""
    losses, errors, largest, same = [], [], 0.0, []
    for row, wanted, logits in zip(rows, exact, logits_of(case, rows, folder=folder), strict=True):
        difference = (logits - wanted).abs()
        losses.append(float(cross_entropy(logits[:-1], row[1:])))
        errors.append(float(difference.mean()))
        largest = max(largest, float(difference.max()))
        same.append(float((logits.argmax(dim=-1) == wanted.argmax(dim=-1)).float().mean()))
    num_rows = len(rows)
    return Accuracy(
        perplexity=math.exp(sum(losses) / num_rows),
        mean_logit_error=sum(errors) / num_rows,
        max_logit_error=largest,
        same_first_choice=sum(same) / num_rows,
    )


def capacity_of(kv_dtype: str, head_dim: int) -> float:
    """Return how many times as many tokens as in 16 bits fit the same memory in `kv_dtype`."""
    sizes = [
        bytes_per_block(num_layers=1, num_kv_heads=1, head_dim=head_dim, block_size=16, kv_dtype=dtype)
        for dtype in ("bfloat16", kv_dtype)
    ]
    return sizes[0] / sizes[1]


def cases_here() -> tuple[Case, ...]:
    """Return the cases, without int8 linears if the CPU has no instructions for them.

    Raise ExtensionUnavailable without a compiler.
    """
    return CASES if load_extension().has_int8 else tuple(case for case in CASES if case.linears == "full")


def measure(rows: torch.Tensor) -> dict[Case, Accuracy]:
    exact = list(logits_of(EXACT, rows))
    return {case: accuracy_of(case, rows, exact) for case in cases_here()}


def floors_of(measured: dict[Case, Accuracy]) -> list[Floor]:
    floors = [
        Floor(
            name=f"perplexity, {case.name} / {EXACT.name}",
            value=accuracy.perplexity / measured[EXACT].perplexity,
            floor=MAX_PERPLEXITY_RATIO,
            better="lower",
        )
        for case, accuracy in measured.items()
        if case != EXACT
    ]
    return floors + [
        Floor(
            name=f"tokens in the same memory, {kv} / bfloat16, head size 64",
            value=capacity_of(kv, 64),
            floor=MIN_CAPACITY,
            better="higher",
        )
        for kv in ("int8", "fp8")
    ]


def text_of(measured: dict[Case, Accuracy], rows: torch.Tensor, proven: str) -> str:
    assert __doc__ is not None
    meaning = __doc__.rpartition("\n\n")[2].strip()
    lines = [
        f"{meaning} {rows.numel():,} tokens of {', '.join(HELD_OUT_MODULES)}. {proven}.",
        "",
        "| model, cache, linears | perplexity | mean logit error | largest logit error | same top token |",
        "|---|---|---|---|---|",
        *(
            f"| {case.name} | {accuracy.perplexity:.3f} | {accuracy.mean_logit_error:.4f} "
            f"| {accuracy.max_logit_error:.3f} | {accuracy.same_first_choice:.2%} |"
            for case, accuracy in measured.items()
        ),
        *(
            f"\n{case.name}: not measured, because this CPU has neither AVX-512 VNNI nor AVX2."
            for case in CASES
            if case not in measured
        ),
        "",
        f"| tokens in the same memory, beside 16 bits | {' | '.join(f'head size {size}' for size in HEAD_SIZES)} |",
        "|---|" + "---|" * len(HEAD_SIZES),
        *(
            f"| {kv} | " + " | ".join(f"{capacity_of(kv, size):.3f}" for size in HEAD_SIZES) + " |"
            for kv in ("int8", "fp8")
        ),
        "",
        "The demo model's head size is 32, so its scales take a larger share than a larger model's. A small model and",
        "rows of 512 tokens say little about long contexts, or about models whose keys have outliers.",
    ]
    return "\n".join(lines)


def figures_of(measured: dict[Case, Accuracy], rows: torch.Tensor) -> dict[str, Any]:
    return {
        "tokens": rows.numel(),
        "cases": {
            case.name: {
                "perplexity": accuracy.perplexity,
                "mean_logit_error": accuracy.mean_logit_error,
                "max_logit_error": accuracy.max_logit_error,
                "same_first_choice": accuracy.same_first_choice,
            }
            for case, accuracy in measured.items()
        },
        "capacity": {kv: {str(size): capacity_of(kv, size) for size in HEAD_SIZES} for kv in ("int8", "fp8")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=REPORTS, help="folder of the report")
    arguments = parser.parse_args()
    proven = prove(PROOF)
    rows = held_out_rows()
    measured = measure(rows)
    path = write_report(
        "kv-accuracy",
        title="KV cache and linears in 8 bits: accuracy and capacity",
        text=text_of(measured, rows, proven),
        figures=figures_of(measured, rows),
        floors=floors_of(measured),
        versions={"torch": torch.__version__},
        folder=arguments.output,
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
