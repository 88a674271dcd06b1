"""Text, tables and floors of bench/index/__main__.py's report. Pure."""

from collections.abc import Mapping
from typing import Any

from bench.reporting import Floor

MAX_LOOKUP_MS = 0.2
MAX_BYTES_A_BLOCK = 40.0
MIN_ENTRIES_PER_SECOND = 200_000.0
Figures = Mapping[str, Any]

DIFFERENCES = """Differences. Ours stores a worker as two bytes, and keeps 4,096 hashes of many blocks in Redis. One
script answers a look-up by bisection, and returns live workers only. llm-d (`pkg/kvcache/kvblock/redis.go` of
llm-d/llm-d-kv-cache at 02bff241) has one HASH per block (key: a 64-bit hash in decimal, field: `pod@tier`, value:
empty). Older versions stored a time stamp; no version that we found stored JSON. It also has one STRING per block, from
the engine's hash to that key. Its look-up is a pipeline with one HKEYS for each block, 75 of which no worker holds
here. Its entry names the tier; ours uses a second number per worker for it (see *host tier* below). It has no leases: a
dead pod's entries stay. Ours has no journal: a purge walks the buckets. So the bytes below are all that the index
stores. The client of llm-d is in Go. redis-py parses replies in Python, so *client waits* favours us. Compare the CPU
time of Redis.
"""


def floors(figures: Figures) -> list[Floor]:
    first = next(iter(figures["sharing"]))
    return [
        *(
            Floor(
                name=f"look-up, 450 blocks of which 375 shared by {sharers}: ms in Redis, median",
                value=round(case["blockyard"]["server_us"] / 1000, 4),
                floor=MAX_LOOKUP_MS,
                better="lower",
            )
            for sharers, case in figures["sharing"].items()
        ),
        Floor(
            name="look-up among all entries of the load: ms in Redis, median",
            value=round(figures["writes"]["lookup"]["server_us"] / 1000, 4),
            floor=MAX_LOOKUP_MS,
            better="lower",
        ),
        Floor(
            name=f"bytes a block at r={first}, after churn and purge, all counted",
            value=figures["sharing"][first]["blockyard_bytes_a_block"],
            floor=MAX_BYTES_A_BLOCK,
            better="lower",
        ),
        Floor(
            name="entries applied a second",
            value=figures["writes"]["blockyard"]["entries_per_second"],
            floor=MIN_ENTRIES_PER_SECOND,
            better="higher",
        ),
    ]


def report_text(figures: Figures, *, picture: str) -> str:
    load = figures["machine_load"]
    foreign = "unknown" if load["foreign_cpus"] is None else f"{load['foreign_cpus']:.2f} processors"
    return "\n".join(
        [
            f"{load['seconds']} s, {figures['repeats']} turns, a private Redis "
            f"{figures['redis']} without persistence on the same machine. Load average "
            f"{load['load_average_before']} before and {load['load_average_after']} after; other programs "
            f"used {foreign}.",
            "",
            DIFFERENCES,
            f"![bytes and look-up time over sharing workers]({picture})",
            "",
            *_sharing(figures["sharing"]),
            *_variations(figures["variations"]),
            *_writes(figures["writes"]),
            *_others(figures["effect_on_others"]),
            *_rebuild(figures["rebuild"]),
        ]
    )


def _sharing(sharing: Figures) -> list[str]:
    sharing_blocks = next(iter(sharing.values()))["blocks"]
    lines = [
        "## Memory and look-up",
        "",
        "A look-up has 450 blocks, of which r workers hold the first 375. Bytes are the growth of Redis's "
        f"used_memory per distinct block ({sharing_blocks:,} of ours), including keys of buckets, leases and "
        "records. *In Redis* is the time of commands as Redis reports it, and *CPU* is the CPU time of its process "
        "for a look-up. Ratios are llm-d's / ours by turn, with the lowest and highest. Times are in us.",
        "",
        "| r | bytes per block | llm-d's (without engine keys) | in Redis, p99 | llm-d's | ratio | CPU | "
        "llm-d's | ratio | client waits p50, p99 | llm-d's p50 | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for sharers, case in sharing.items():
        ours, theirs = case["blockyard"], case["llmd"]
        lines.append(
            f"| {sharers} | {case['blockyard_bytes_a_block']} | {case['llmd_bytes_a_block']} "
            f"({case['llmd_bytes_a_block_without_engine_keys']}) | {ours['server_us']}, "
            f"{ours['server_p99_us']} | {theirs['server_us']} | {_ratio(case['ratio_server'])} | "
            f"{ours['server_cpu_us']} | {theirs['server_cpu_us']} | {_ratio(case['ratio_server_cpu'])} | "
            f"{ours['wall_p50_us']}, {ours['wall_p99_us']} | {theirs['wall_p50_us']} | "
            f"{_ratio(case['ratio_wall'])} |"
        )
    return [*lines, ""]


def _ratio(ratio: Figures) -> str:
    return f"{ratio['median']} ({ratio['lowest']}-{ratio['highest']})"


def _variations(variations: Figures) -> list[str]:
    titles = {
        "raised_value_bound": "as above, compact values up to 512 bytes (set by registration)",
        "default_value_bound": "hash-max-listpack-value 64 (Redis's default)",
        "stride": "index stride 4: every fourth name, bytes per block of the cache",
        "host_tier": "each worker with a host tier that holds the same: two numbers per worker",
        "uneven_depths": "each worker with another depth, from 1 to 375: the worst case of the bisection",
    }
    lines = [
        f"For information, at r={variations['sharers']}, without churn and with a quarter of the blocks:",
        "",
        "| case | bytes per block | in Redis us | p99 us |",
        "|---|---|---|---|",
    ]
    for name, title in titles.items():
        case = variations[name]
        lines.append(f"| {title} | {case['bytes_a_block']} | {case['server_us']} | {case['server_p99_us']} |")
    return [*lines, ""]


def _writes(writes: Figures) -> list[str]:
    ours, theirs, gone = writes["blockyard"], writes["llmd"], writes["removal_and_purge"]
    spread = ours["entries_per_second_spread"]
    ratio = ours["entries_per_second"] / theirs["entries_per_second"]
    return [
        "## Writes",
        "",
        f"{writes['entries']:,} entries with distinct names, in batches of 512, from all workers at once "
        "in one process:",
        "",
        "| | entries/s | per second of Redis's CPU | per second of the client's CPU |",
        "|---|---|---|---|",
        f"| Blockyard | {ours['entries_per_second']:,} ({spread['lowest']:,}-{spread['highest']:,}) "
        f"| {ours['entries_per_server_cpu_second']:,} | {ours['entries_per_client_cpu_second']:,} |",
        f"| llm-d's schema, a smaller load | {theirs['entries_per_second']:,} "
        f"| {theirs['entries_per_server_cpu_second']:,} | {theirs['entries_per_client_cpu_second']:,} |",
        "",
        f"Ours / llm-d's by wall clock: {ratio:.1f}. The CPU columns show which side is the limit: Redis "
        "for ours, the client for llm-d's. For one entry, llm-d's schema sets two keys and reads nothing; "
        "ours reads, merges, and checks sequence and epoch. One batch of ours occupied Redis for "
        f"{ours['batch_p50_us']:,} us (p99 {ours['batch_p99_us']:,}, max {ours['batch_max_us']:,}). "
        f"The full index takes {writes['bytes_a_block']} bytes per block, and a look-up "
        f"{writes['lookup']['server_us']} us in Redis (p99 {writes['lookup']['server_p99_us']}).",
        "",
        f"Removal of evicted blocks: {gone['removed_entries_per_second']:,} entries/s (llm-d's, block "
        f"after block from one pod: {theirs['evictions_per_second']:,}). Purge of dead workers' "
        f"{gone['purged_entries']:,} entries: {gone['purge_seconds']} s, "
        f"{gone['purged_entries_per_second']:,} entries/s, in {gone['purge_slices']:,} slices without a "
        f"pause. One slice occupied Redis for at most {gone['purge_slice_max_us']:,} us (p99 "
        f"{gone['purge_slice_p99_us']:,}); workers pause 50 ms between slices.",
        "",
    ]


def _others(cases: Figures) -> list[str]:
    titles = {
        "calm": "no writes",
        "flat_out": "all workers write without pauses",
        "resting": "all workers write, with pauses of 8 times each batch's duration",
    }
    lines = [
        "## Effect on other clients",
        "",
        "PING and a look-up of 450 blocks, in turns, from another process on the same processors. Each "
        "writer has one batch in flight, so without pauses a look-up queues behind all of these batches. The router "
        "waits 40 ms and then places without the index.",
        "",
        "| | load lasts s | PING p50 / p99 / max ms | look-up p50 / p99 / max ms |",
        "|---|---|---|---|",
    ]
    for name, title in titles.items():
        case = cases[name]
        times = [
            " / ".join(f"{case[f'{what}_{share}_us'] / 1000:.2f}" for share in ("p50", "p99", "max"))
            for what in ("ping", "lookup")
        ]
        lines.append(f"| {title} | {case['seconds']} | {times[0]} | {times[1]} |")
    return [*lines, ""]


def _rebuild(rebuild: Figures) -> list[str]:
    seconds = ", ".join(f"{value}" for value in rebuild["seconds_until_exact"])
    return [
        "## Rebuild",
        "",
        f"FLUSHALL beside the product's own publishers, {rebuild['entries']:,} entries: exact again after "
        f"{seconds} s. This includes up to {rebuild['of_which_until_noticed_at_most_seconds']:.1f} s "
        "until a renewal notices the loss, and up to 0.25 s of jitter. Checked chain by chain. All publishers "
        "share one process here.",
    ]
