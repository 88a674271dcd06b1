"""Report of the router benchmark: its text, and writing it. figures.py computes the figures."""

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
        _requests_text,
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
    timed |= {f"tokenizer process: {name}": row for name, row in tokenizing.items()}
    rows = [
        f"| {name} | {row['p50']:.2f} | {row['p99']:.2f} | {row['p50_lowest']:.2f}-{row['p50_highest']:.2f} |"
        for name, row in timed.items()
    ]
    return _section(
        "From token ids to a worker",
        f"{PROMPT_TOKENS:,} tokens, of which {HOLDERS} of {NUM_WORKERS} workers cache {GROUP_TOKENS:,}; "
        f"a real private Redis; {placement['calls']:,} calls in {setting.repeats} repeats. "
        f"{placement['hits']:.1%} went to a worker that holds the prefix. "
        "The parts are measured in separate calls; `whole` also includes the waiting line and the booking. "
        "Not included is the hop to the tokenizer process and back, here with "
        f"{figures['tokenizing_tokens']:,} tokens and their names. {_foreign_text(figures, 'placement')}",
        "| part | p50 ms | p99 ms | p50 of the repeats |",
        rows,
    )


def _foreign_text(figures: Figures, part: str) -> str:
    row = figures["foreign_cores"][part]
    return (
        f"Other programs used {row['median']:.2f} cores meanwhile ({row['lowest']:.2f}-{row['highest']:.2f})."
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
        f"Scripted workers emit a token every {1000 * setting.step_seconds:.0f} ms and record the time, so "
        f"these figures exclude their own time. The prompt has {setting.prompt_tokens} tokens. `First` "
        "is the way from the client to the worker, and of the first token back. `Later` is the way from the worker to "
        f"the client. A router adds the difference between its row and the direct one: {_added(figures)}. "
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
    "tokens/s | tokens/s per router core | lowest-highest | router cores | tokens per message | first p50 / p99 ms "
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
        "All requests arrive at once (`first`). Once all of them stream, tokens and the CPU time of the "
        "router's process and its children are counted. Client, workers and router share this "
        "machine's cores.",
        f"| streams | router | {LOAD_HEAD}",
        rows,
    )


def _requests_text(figures: Figures, setting: Setting) -> str:
    rows = [
        f"| {name} | {' | '.join(_middle_cells(row[part]) for part in ('router', 'tokenizer', 'whole'))} |"
        for name, row in figures["request_cpu_ms"].items()
    ]
    prompt_tokens, num_tokens = setting.request_tokens
    return _section(
        "CPU time of a request",
        f"Milliseconds for each streamed request of {prompt_tokens} prompt and {num_tokens} generated tokens. "
        "Many run at once, and the time that an idle router takes is not counted.",
        "| way | router, median | lowest-highest | tokenizer | lowest-highest | both | lowest-highest |",
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
        "Cost of TLS between router and workers",
        "Ours with mutual TLS divided by ours without it, pair by pair. The systems run in turns, and every second "
        "repeat reverses the order. The share of tokens/s shows the loss of clients. The share of tokens/s per core "
        "shows the additional computing of the router.",
        "| streams | compared with | tokens/s, median | quartiles | tokens/s per core, median | quartiles |",
        rows,
    )


def _share_cells(row: Figures) -> str:
    low, high = row["quartiles"]
    return f"{row['median']:.3f} | {low:.3f}-{high:.3f}"


def _differences_text(figures: Figures, setting: Setting) -> str:
    if setting.sglang_version is None:
        return "sglang-router was not measured (`--sglang-python`)."
    return (
        f"Differences: sglang-router {setting.sglang_version} is Rust, ours is Python. It speaks HTTP, with one stream "
        "to the worker for each request, and forwards the worker's bytes. In this mode it neither "
        "tokenizes nor detokenizes. It places by its own tree of the texts that it has seen (`cache_aware`). Ours "
        "tokenizes and names the prompt in another process, whose CPU time is counted. It queries Redis, and receives "
        "each worker's step as one message. It detokenizes, searches for stop strings, counts offsets, and keeps "
        "the state to continue on another worker. Its clients use gRPC, those of sglang-router use aiohttp; both are "
        "Python and share these cores."
    )


def _processes_text(figures: Figures, setting: Setting) -> str:
    rows = [f"| {number} | {_load_cells(row)} |" for number, row in figures["router_processes"].items()]
    if not rows:
        return ""
    return _section(
        "Several processes on one port",
        f"{setting.many_streams} streams over connections that the kernel distributes. Client and workers use "
        "the same cores, so the machine limits tokens/s. Tokens/s per core shows whether more "
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
        "The longest stall of each trial, as the router's loop monitor saw it. The phases are: all requests arrive at "
        "once, all stream, and all are cancelled at once. "
        "`Late` is the longest pause from one tick of 1 ms to the next, including waits for a core. `Computing` is the "
        "part of it in which the loop's own thread computed.",
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
        "## Profile\n\n"
        f"The flame graph beside this file (.svg) shows our router under {setting.many_streams} streams, by py-spy. It "
        "has Python's frames, and C code counts for its caller. py-spy does not always distinguish a waiting thread "
        "from a working one.\n\n"
        f"- Time in functions themselves: {own}.\n"
        f"- Time including called functions, for our own files: {total}."
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
