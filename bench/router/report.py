"""The router benchmark's report as text, and its writing. Owns the words; the figures are from figures.py."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from bench.reporting import write_report
from bench.router.figures import Figures, Results, Setting, figures_of, floors_of
from bench.router.placement import GROUP_TOKENS, HOLDERS, NUM_WORKERS, PROMPT_TOKENS

TITLE = "The router by itself, and beside sglang-router"


def text_of(figures: Figures, setting: Setting) -> str:
    sections: list[Callable[[Figures, Setting], str]] = [
        _placement_text,
        _one_stream_text,
        _streams_text,
        _tls_text,
        _differences_text,
        _processes_text,
        _stalls_text,
        _flame_text,
    ]
    return "\n\n".join(text for section in sections if (text := section(figures, setting)))


def _placement_text(figures: Figures, setting: Setting) -> str:
    placement, tokenizing = figures["placement_ms"], figures["tokenizing_ms"]
    timed = {name: row for name, row in placement.items() if isinstance(row, dict)}
    timed |= {f"tokeniser's process: {name}": row for name, row in tokenizing.items()}
    rows = [
        f"| {name} | {row['p50']:.2f} | {row['p99']:.2f} | {row['p50_lowest']:.2f}-{row['p50_highest']:.2f} |"
        for name, row in timed.items()
    ]
    return _section(
        "From token ids to a worker",
        f"{PROMPT_TOKENS:,} tokens, {GROUP_TOKENS:,} of them cached by {HOLDERS} of {NUM_WORKERS} workers; "
        f"a real private Redis; {placement['calls']:,} calls in {setting.repeats} repeats. "
        f"{placement['hits']:.1%} went to "
        "a worker that holds the prefix. The parts are calls of their own; `whole` has the waiting line and "
        "the booking too. Apart from it: the hop to the tokeniser's process and back with "
        f"{figures['tokenizing_tokens']:,} tokens, names included. {_foreign_text(figures, 'placement')}",
        "| part | p50 ms | p99 ms | p50 of the repeats |",
        rows,
    )


def _foreign_text(figures: Figures, part: str) -> str:
    row = figures["foreign_cores"][part]
    return (
        f"Other programs kept {row['median']:.2f} cores busy meanwhile "
        f"({row['lowest']:.2f}-{row['highest']:.2f})."
    )


def _section(title: str, text: str, head: str, rows: Sequence[str]) -> str:
    ruler = "|---" * (head.count("|") - 1) + "|"
    return "\n".join((f"## {title}", "", text, "", head, ruler, *rows))


def _one_stream_text(figures: Figures, setting: Setting) -> str:
    rows = [
        f"| {name} | {_cells(row['first'])} | {_cells(row['later'])} |"
        for name, row in figures["one_stream_ms"].items()
    ]
    return _section(
        "One stream at a time",
        f"Scripted workers emit a token each {1000 * setting.step_seconds:.0f} ms and write down when, so "
        f"that their own time is not in these figures. A prompt of {setting.prompt_tokens} tokens. `First` "
        "is from the client to the worker and from the worker's first token back; `later` is from worker to "
        f"client. What a router adds is its row less the direct one: {_added(figures)}. "
        f"{_foreign_text(figures, 'one stream')}",
        "| way | first p50 ms | p99 | p50 of the repeats | later p50 ms | p99 | p50 of the repeats |",
        rows,
    )


def _added(figures: Figures) -> str:
    return "; ".join(
        f"{name} {row['first_p50']:.2f} ms to the first token (p99 {row['first_p99']:.2f}), {row['later_p50']:.2f} ms "
        f"to each later one (p99 {row['later_p99']:.2f})"
        for name, row in figures["added_ms"].items()
    )


def _cells(row: Figures) -> str:
    return f"{row['p50']:.2f} | {row['p99']:.2f} | {row['p50_lowest']:.2f}-{row['p50_highest']:.2f}"


LOAD_HEAD = (
    "tokens/s | tokens/s a core of the router | lowest-highest | cores it took | tokens a message | first p50 / p99 ms "
    "| later p50 / p99 ms | foreign cores |"
)


def _load_cells(row: Figures) -> str:
    core, first, later = row["tokens_per_cpu_second"], row["first"], row["later"]
    cells = (
        f"{row['tokens_per_second']['median']:,.0f}",
        f"{core['median']:,.0f}",
        f"{core['lowest']:,.0f}-{core['highest']:,.0f}",
        f"{row['cores']['median']:.2f}",
        f"{row['tokens_per_message']['median']:.2f}",
        f"{first['p50']:.0f} / {first['p99']:.0f}",
        f"{later['p50']:.1f} / {later['p99']:.1f}",
        f"{row['foreign_cores']['median']:.2f}",
    )
    return " | ".join(cells)


def _streams_text(figures: Figures, setting: Setting) -> str:
    rows = [
        f"| {streams} | {name} | {_load_cells(row)} |"
        for streams, systems in figures["streams"].items()
        for name, row in systems.items()
    ]
    return _section(
        "Many streams",
        "All requests come in one moment (`first`); once all stream, tokens and the CPU time of the "
        "router's process, its children among it, are counted. Client, workers and router share this "
        "machine's cores.",
        f"| streams | router | {LOAD_HEAD}",
        rows,
    )


def _tls_text(figures: Figures, setting: Setting) -> str:
    rows = [
        f"| {streams} | {other} | {_share_cells(row['tokens_per_second'])} "
        f"| {_share_cells(row['tokens_per_cpu_second'])} |"
        for streams, others in figures["throughput_share"].items()
        for other, row in others.items()
    ]
    return _section(
        "What TLS between router and workers costs",
        "Ours with mutual TLS, divided by ours without it, pair by pair: the systems take turns, in the other order "
        "each second time. A share of tokens/s says what clients lose; a share of tokens/s a core says what the "
        "router computes more.",
        "| streams | compared with | tokens/s, median | quartiles | tokens/s a core, median | quartiles |",
        rows,
    )


def _share_cells(row: Figures) -> str:
    low, high = row["quartiles"]
    return f"{row['median']:.3f} | {low:.3f}-{high:.3f}"


def _differences_text(figures: Figures, setting: Setting) -> str:
    if setting.sglang_version is None:
        return "sglang-router was not measured (`--sglang-python`)."
    return (
        f"What differs: sglang-router {setting.sglang_version} is Rust, ours is Python. It speaks HTTP, with a stream "
        "of its own to the worker for each request, and passes the worker's bytes on: in this mode it neither "
        "tokenises nor detokenises. It places by its own tree of the texts it has seen (`cache_aware`). Ours "
        "tokenises and names the prompt in a process of its own (its CPU time is counted), asks Redis, takes each "
        "worker's step as one message, makes text of the tokens, looks for stop strings, counts offsets, and keeps "
        "what it takes to go on at another worker. Its clients are gRPC's, sglang-router's are aiohttp's; both are "
        "Python and share these cores."
    )


def _processes_text(figures: Figures, setting: Setting) -> str:
    rows = [f"| {number} | {_load_cells(row)} |" for number, row in figures["router_processes"].items()]
    if not rows:
        return ""
    return _section(
        "Several processes on one port",
        f"{setting.many_streams} streams over connections that the kernel deals out. Client and workers take "
        "their part of the same cores, so the machine bounds tokens/s; tokens/s a core says whether more "
        "processes cost more.",
        f"| processes | {LOAD_HEAD}",
        rows,
    )


def _stalls_text(figures: Figures, setting: Setting) -> str:
    rows = [
        f"| {streams} | {phase} | {_middle_cells(stall['late'])} | {_middle_cells(stall['computing'])} |"
        for streams, stalls in figures["longest_stall_ms"].items()
        for phase, stall in stalls.items()
    ]
    return _section(
        "Stalls of the event loop",
        "The longest of each trial as the router's watch saw it: while all requests came in one moment, while all "
        "streamed, and while all were cancelled in one moment. "
        "`Late` is the longest pause from one tick of 1 ms to the next, for lack of a core too; `computing` is what "
        "of it the loop's own thread computed.",
        "| streams | when | late, median ms | lowest-highest | computing, median ms | lowest-highest |",
        rows,
    )


def _middle_cells(row: Figures) -> str:
    return f"{row['median']:.1f} | {row['lowest']:.1f}-{row['highest']:.1f}"


def _flame_text(figures: Figures, setting: Setting) -> str:
    if not figures["flame_own_share"]:
        return ""
    own, total = _shares(figures["flame_own_share"]), _shares(figures["flame_total_share"])
    return (
        "## Where the time goes\n\n"
        f"The flame graph beside this file (.svg) is of our router under {setting.many_streams} streams, by py-spy: "
        "Python's frames, where C code counts for its caller, and a thread that waits is not always told from one "
        "that works.\n\n"
        f"- In functions themselves: {own}.\n"
        f"- With what they call, of our own files: {total}."
    )


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"`{frame}` {share:.0%}" for frame, share in shares.items())


def write(results: Results, setting: Setting, folder: Path) -> Path:
    figures = figures_of(results, setting)
    packages = {name: version(name) for name in ("grpcio", "protobuf", "redis", "aiohttp")}
    if setting.sglang_version is not None:
        packages["sglang-router"] = setting.sglang_version
    return write_report(
        "router",
        title=TITLE,
        text=text_of(figures, setting),
        figures=figures,
        floors=floors_of(figures),
        versions=packages,
        folder=folder,
    )
