"""Report of the kernels benchmark: its text and its floors. Pure.

Does not own the figures (__main__.py) or the plot (plot.py).
"""

from statistics import median
from typing import Any

from bench.kernels.attention_cases import CASCADE, ONE_BY_ONE
from bench.kernels.linear_cases import INT4
from bench.reporting import Floor

ABOUT = """On a GPU, the cases have the shapes of Llama-3.1-8B and Qwen3-0.6B/8B/14B. They are 1 to 256 sequences of 128
to 32k tokens, and prefills of 128 to 32k. On a CPU, there are fewer cases. Cases that need more than --memory-gib are
skipped and counted. Triton's interpreter is rejected, because its times mean nothing. `Roofline` is the minimum time
over the measured time. The minimum is bytes at the copy bandwidth or FLOPs at the matmul rate, whichever is slower. On
a GPU, a call is replayed from a CUDA graph, and the last-level cache holds other data before it."""
LARGE_READ_BYTES = 64 << 20
DECODE_FLOOR = 0.85
LONE_DECODE_FLOOR = 0.75
LONE_CONTEXT = "decode 1 x 32768"
PREFILL_FLOOR_FLOPS = 400e12
PREFILL_SHAPE = "prefill 8192"
DECODE, PREFILL = "decode attention", "prefill attention"
"""Names of the kernels over pools in the model's data type, not in 8 bits."""
CASCADE_FLOOR = 5.0
CASCADE_SHAPE = "decode 64 x (8192 shared + 256)"
INT4_FLOOR = 0.8
INT4_GAIN = 2.0
"""Minimum of the time of a linear in the model's data type over that with a weight in 4 bits, for one token."""
CLIFF = 1.5
"""Maximum ratio of the time per sequence with 16 sequences to that with 8."""
OTHERS_OVER_IT = "others_over_it"
"""Key in a row: times of the other kernels measured in turns with it, each divided by its own time."""
CUT_SHORT = " **Cut short: later cases are missing, and floors are for the measured cases.**"
Row = dict[str, Any]
"""Description of a case, its time, and its shares of the limits."""


def floors_of(rows: list[Row], device: str) -> list[Floor]:
    """Return the floors, which are goals for a large GPU. A CPU has none."""
    if device != "cuda":
        return []
    llama = [row for row in rows if row["model"] == "llama-3.1-8b"]
    plain = [row for row in llama if row["kernel"] == DECODE]
    decodes = [row for row in plain if row["shape"] != LONE_CONTEXT]
    large = [row["of_copy"] for row in decodes if row["bytes"] >= LARGE_READ_BYTES]
    lone = [row["of_copy"] for row in plain if row["shape"] == LONE_CONTEXT]
    prefills = [row for row in llama if (row["kernel"], row["shape"]) == (PREFILL, PREFILL_SHAPE)]
    prefill = [row["flops"] / row["us"] * 1e6 / 1e12 for row in prefills]
    cliffs = _cliffs(decodes)
    lone_int4 = [row for row, _ in _quantised_linears(llama) if is_int4_of_one_token(row)]
    gains = [ratio for row, ratio in _quantised_linears(llama) if is_int4_of_one_token(row)]
    cascades = [ratio for row, ratio in _cascades(llama) if row["shape"] == CASCADE_SHAPE]
    known = (
        ("decode attention, launches that read 64 MB or more, least % of copy", large, DECODE_FLOOR, min),
        ("decode attention, one sequence of 32k, of copy", lone, LONE_DECODE_FLOOR, min),
        ("prefill attention, 8k causal, TFLOP/s", prefill, PREFILL_FLOOR_FLOPS / 1e12, min),
        (
            "cascade, 64 sequences of 8k shared and 256 own tokens, time without over with",
            cascades,
            CASCADE_FLOOR,
            min,
        ),
        (
            "linears with a weight in 4 bits, one token, least % of roofline",
            [row["of_roofline"] for row in lone_int4],
            INT4_FLOOR,
            min,
        ),
        ("the same, time of full precision over theirs", gains, INT4_GAIN, min),
    )
    floors = [
        Floor(name=name, value=worst(values), floor=floor, better="higher")
        for name, values, floor, worst in known
        if values
    ]
    if cliffs:
        floors.append(
            Floor(
                name="decode, time of 16 sequences over 8, twice",
                value=max(cliffs),
                floor=CLIFF,
                better="lower",
            )
        )
    return floors


def _cliffs(decodes: list[Row]) -> list[float]:
    """Return the time of 16 sequences over twice that of 8, for each long context."""
    times = {row["shape"]: row["us"] for row in decodes}
    return [
        times[f"decode 16 x {context}"] / (2 * times[f"decode 8 x {context}"])
        for context in (8192, 32768)
        if f"decode 16 x {context}" in times and f"decode 8 x {context}" in times
    ]


def _cascades(rows: list[Row]) -> list[tuple[Row, float]]:
    """Return the rows of the cascade, with the ratio of the same decodes' time without cascade to it."""
    return [
        (row, row[OTHERS_OVER_IT][ONE_BY_ONE])
        for row in rows
        if row["kernel"] == CASCADE and ONE_BY_ONE in row.get(OTHERS_OVER_IT, {})
    ]


def _quantised_linears(rows: list[Row]) -> list[tuple[Row, float]]:
    """Return the rows with quantised weights, with the ratio of the same linear's time in full precision to theirs."""
    return [
        (row, row[OTHERS_OVER_IT][row["kernel"].split(",")[0]])
        for row in rows
        if row["kernel"].startswith("linear ") and row["kernel"].split(",")[0] in row.get(OTHERS_OVER_IT, {})
    ]


def is_int4_of_one_token(row: Row) -> bool:
    return bool(row["kernel"].endswith(f", {INT4}") and row["shape"] == "1 tokens")


def text_of(figures: dict[str, Any]) -> str:
    machine = figures["machine"]
    kernels = dict.fromkeys((row["model"], row["kernel"]) for row in figures["rows"])
    return "\n\n".join(
        [
            ABOUT,
            f"Kernel backend {figures['backend']}, {figures['dtype']}, on {figures['device_name']}. Copy "
            f"{machine['copy_gb_per_second']:,.0f} GB/s, matmul {machine['matmul_tflops_per_second']:.3g} TFLOP/s. "
            f"{len(figures['rows'])} cases, {figures['skipped']} skipped for lack of memory. "
            f"Proven before: {figures['proven']}.{CUT_SHORT if figures['cut_short'] else ''}",
            *_cascade_table(figures["rows"]),
            *_linears_table(figures["rows"]),
            *(_table(model, kernel, figures["rows"]) for model, kernel in kernels),
        ]
    )


def _cascade_table(rows: list[Row]) -> list[str]:
    lines = [f"| {row['model']} | {row['shape']} | {ratio:.2f} |" for row, ratio in _cascades(rows)]
    if not lines:
        return []
    about = (
        "The same decodes with and without cascade, in turns; the ratio is that of the median turn. The torch backend "
        "has no cascade. A CPU with many threads does not cascade few decodes."
    )
    head = "| model | decodes | time without / with cascade |\n|---|---|---|"
    return ["\n".join(["## Gain of the cascade", "", about, "", head, *lines])]


def _linears_table(rows: list[Row]) -> list[str]:
    lines = [
        f"| {row['kernel']} | {row['shape']} | {row['us']:,.1f} | {row['of_roofline']:.0%} | {ratio:.2f} |"
        for row, ratio in _quantised_linears(rows)
    ]
    if not lines:
        return []
    about = (
        "Linears with weights of 4 and 8 bits beside the same linear in the model's data type (cuBLAS), in turns. With "
        "`and inputs` the inputs are rounded to 8 bits too; the roofline counts them and its FLOPs in full precision."
    )
    head = "| linear | tokens | us | of roofline | time of full precision / its own |\n|---|---|---|---|---|"
    return ["\n".join(["## Linears with quantised weights", "", about, "", head, *lines])]


def _table(model: str, kernel: str, rows: list[Row]) -> str:
    own = [row for row in rows if (row["model"], row["kernel"]) == (model, kernel)]
    lines = [
        f"| {row['shape']} | {row['us']:,.1f} | {row['bytes'] / 1e6:,.2f} | {row['flops'] / 1e9:,.3f} "
        f"| {row['of_copy']:.0%} | {row['of_matmul']:.0%} | {row['of_roofline']:.0%} |"
        for row in own
    ]
    head = "| shape | us | MB | GFLOP | of copy | of matmul | of roofline |\n|---|---|---|---|---|---|---|"
    middle = median(row["of_roofline"] for row in own)
    return "\n".join([f"## {kernel}, {model}", "", f"Median {middle:.0%} of the roofline.", "", head, *lines])
