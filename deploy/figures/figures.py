"""`blockyard figures`: our values of the numbers that textbooks of paged attention give, beside theirs.

Owns the list of figures, the textbooks' numbers, and the notes on differences. Our values come from memory.py and
sharing.py, and plots.py draws them. Only the textbooks' numbers are constants.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from blockyard.deploy.figures.memory import (
    ArrivalFigures,
    FragmentationFigures,
    MemoryFigures,
    arrival_figures,
    fragmentation_figures,
    memory_figures,
)
from blockyard.deploy.figures.sharing import (
    BLOCK_SIZES,
    BlockSizeFigures,
    CopyOnWriteFigures,
    SlotFigures,
    block_size_figures,
    copy_on_write_figures,
    slot_figures,
)
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Unit = Literal["%", "x", "blocks", "tokens", "steps", "sequences", ""]
_BULKY = (list, tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One number of ours, beside `textbook`, the number printed in textbooks, if there is one."""

    group: str
    name: str
    value: float
    unit: Unit
    textbook: float | None = None
    note: str = ""

    @property
    def agrees(self) -> bool | None:
        """Whether both numbers look the same when formatted. None without a textbook number."""
        if self.textbook is None:
            return None
        return format_value(self.value, self.unit) == format_value(self.textbook, self.unit)

    @property
    def difference(self) -> str:
        """Direction in which ours differs from the textbook's, in words. "" if both agree, or without a textbook's."""
        if self.textbook is None or self.agrees:
            return ""
        return f"differs: {'above' if self.value > self.textbook else 'below'} the textbook"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    slots: SlotFigures
    memory: MemoryFigures
    fragmentation: FragmentationFigures
    arrivals: ArrivalFigures
    copy_on_write: CopyOnWriteFigures
    block_sizes: tuple[BlockSizeFigures, ...]

    @property
    def comparisons(self) -> list[Comparison]:
        return [
            *_slots(self.slots),
            *_memory(self.memory),
            *_fragmentation(self.fragmentation),
            *_arrivals(self.arrivals),
            *_copy_on_write(self.copy_on_write),
            *(comparison for size in self.block_sizes for comparison in _block_size(size)),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return a document for JSON, without the series and maps that only drawings need."""
        return {
            "slots": _numbers(self.slots),
            "memory": _numbers(self.memory),
            "fragmentation": _numbers(self.fragmentation),
            "arrivals": _numbers(self.arrivals)
            | {
                key: dict(zip(("contiguous", "paged"), pair, strict=True))
                for key, pair in {
                    "mean_running": self.arrivals.mean_running,
                    "peak_running": self.arrivals.peak_running,
                    "utilisation": self.arrivals.utilisation,
                    "mean_wait_steps": self.arrivals.mean_wait_steps,
                    "steps": (len(self.arrivals.contiguous), len(self.arrivals.paged)),
                }.items()
            },
            "copy_on_write": _numbers(self.copy_on_write)
            | {"fork_saved": self.copy_on_write.fork_saved, "beams_saved": self.copy_on_write.beams_saved},
            "block_sizes": [_numbers(size) for size in self.block_sizes],
            "comparisons": [
                _numbers(comparison) | {"agrees": comparison.agrees} for comparison in self.comparisons
            ],
        }


def compute_figures() -> Figures:
    """Compute all figures. Runs the real scheduler and pool for a few seconds."""
    return Figures(
        slots=slot_figures(),
        memory=memory_figures(),
        fragmentation=fragmentation_figures(),
        arrivals=arrival_figures(),
        copy_on_write=copy_on_write_figures(),
        block_sizes=tuple(block_size_figures(size) for size in BLOCK_SIZES),
    )


def _numbers(figures: Any) -> dict[str, Any]:
    values = {field.name: getattr(figures, field.name) for field in fields(figures)}
    return {name: value for name, value in values.items() if not isinstance(value, _BULKY)}


def _slots(f: SlotFigures) -> Iterable[Comparison]:
    group = f"{f.num_requests} requests over {f.slots} slots"
    yield Comparison(
        group=group, name="static batching, slots in use", value=f.static, unit="%", textbook=0.469
    )
    yield Comparison(
        group=group,
        name="continuous batching, slots in use",
        value=f.continuous,
        unit="%",
        note=f"{f.continuous_steps:,} steps instead of {f.static_steps:,}",
    )


def _memory(f: MemoryFigures) -> Iterable[Comparison]:
    group = f"{f.num_sequences} sequences of {f.mean_tokens:.0f} tokens, 2048 the longest"
    yield Comparison(
        group=group, name="contiguous memory in use", value=f.contiguous_utilisation, unit="%", textbook=0.126
    )
    yield Comparison(
        group=group,
        name="paged memory in use",
        value=f.paged_utilisation,
        unit="%",
        textbook=0.970,
        note="depends on the lengths: on average, half a block per sequence is empty",
    )
    yield Comparison(
        group=group, name="sequences in the same memory", value=f.times_the_sequences, unit="x", textbook=7.7
    )
    yield Comparison(
        group=group,
        name="the same, as the scheduler admits them",
        value=f.times_the_sequences_run,
        unit="x",
        textbook=7.7,
        note="it keeps one block free for the next token of each sequence",
    )


def _fragmentation(f: FragmentationFigures) -> Iterable[Comparison]:
    group = f"fragmentation: {f.num_requests} requests, {f.memory:,} tokens, lengths known ahead"
    yield Comparison(
        group=group,
        name="steps with a request refused by fragmentation",
        value=f.refused_for_pieces,
        unit="steps",
        note=f"of {f.steps:,}; all free memory together would have been enough",
    )
    yield Comparison(
        group=group, name=f"free at step {f.worst_step}, contiguous", value=f.worst_free, unit="tokens"
    )
    yield Comparison(
        group=group,
        name="its largest piece",
        value=f.worst_largest_piece,
        unit="tokens",
        note=f"{f.worst_wanted} requested and refused",
    )
    yield Comparison(
        group=group,
        name="paged sequences that lie in several pieces",
        value=f.paged_in_pieces,
        unit="%",
        note=f"at the same step, {f.paged_free} tokens free, and every sequence can use any free block",
    )
    yield Comparison(
        group=group,
        name="steps for the whole stream, paged",
        value=f.paged_steps,
        unit="steps",
        note=f"contiguous {f.steps:,}",
    )


def _arrivals(f: ArrivalFigures) -> Iterable[Comparison]:
    group = f"{f.num_requests} arrivals on {f.memory:,} tokens, 2048 reserved for each or paged"
    for name, unit, (contiguous, paged) in (
        ("running at once, mean", "sequences", f.mean_running),
        ("running at once, maximum", "sequences", f.peak_running),
        ("share of taken slots that hold a token", "%", f.utilisation),
        ("waiting time of a request, mean", "steps", f.mean_wait_steps),
        ("steps for all requests", "steps", (len(f.contiguous), len(f.paged))),
    ):
        yield Comparison(
            group=group,
            name=name,
            value=paged,
            unit=unit,  # type: ignore[arg-type]
            note=f"contiguous {format_value(contiguous, unit)}",  # type: ignore[arg-type]
        )


def _copy_on_write(f: CopyOnWriteFigures) -> Iterable[Comparison]:
    group = "copy-on-write: 16 outputs on 200 tokens, 4 beams on 48 + 16"
    rows: list[tuple[str, float, Unit, float, str]] = [
        ("fork of 16, before its first write", f.fork_before_write, "blocks", 13, ""),
        ("fork of 16, after it", f.fork_after_write, "blocks", 28, ""),
        ("16 chats on the same prompt", f.chats, "blocks", 28, ""),
        ("16 without sharing", f.unshared, "blocks", 208, ""),
        ("4 beams", f.beams, "blocks", 7, f"{f.beams_most} at most; depends on where the beams diverge"),
        ("4 beams without sharing", f.beams_unshared, "blocks", 16, ""),
        ("saved by the beams' sharing", f.beams_saved, "%", 0.56, ""),
    ]
    for name, value, unit, textbook, note in rows:
        yield Comparison(group=group, name=name, value=value, unit=unit, textbook=textbook, note=note)


def _block_size(f: BlockSizeFigures) -> Iterable[Comparison]:
    group = f"blocks of {f.block_size} tokens"
    yield Comparison(
        group=group, name="memory of used blocks without a token, mixed load", value=f.empty_share, unit="%"
    )
    yield Comparison(
        group=group,
        name="prompt tokens found in the cache, shared system prompts",
        value=f.reuse,
        unit="%",
        note=f"of {f.possible_reuse:.1%} that an earlier prompt had; {f.names} blocks to publish",
    )


def format_value(value: float, unit: Unit) -> str:
    match unit:
        case "%":
            return f"{value:.1%}"
        case "x":
            return f"{value:.1f} x"
        case _:
            number = f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
            return f"{number} {unit}".strip()


def figures_table(figures: Figures) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2))
    for name in ("figure", "ours", "textbook", "note"):
        table.add_column(name, justify="right" if name in ("ours", "textbook") else "left")
    group = None
    for row in figures.comparisons:
        if row.group != group:
            table.add_row(Text(row.group, style="cyan"), "", "", "")
            group = row.group
        known = "" if row.textbook is None else format_value(row.textbook, row.unit)
        note = "; ".join(filter(None, [row.difference, row.note]))
        table.add_row(f"  {row.name}", format_value(row.value, row.unit), known, note)
    footer = Text("Ours: computed now by the real scheduler and pool. Textbook: as printed in textbooks.")
    return Group(table, footer)
