"""The words and tables of bench/index/__main__.py's report, from its figures. Pure."""

from collections.abc import Mapping
from typing import Any

from bench.reporting import Floor

MAX_LOOKUP_MS = 0.2
MAX_BYTES_A_BLOCK = 40.0
MIN_ENTRIES_PER_SECOND = 200_000.0
Figures = Mapping[str, Any]

DIFFERENCES = """What differs. Ours names a worker by two bytes and puts 4,096 hashes of many blocks each in Redis;
one script answers a look-up by bisection, and sees live workers only. llm-d (`pkg/kvcache/kvblock/redis.go` of
llm-d/llm-d-kv-cache at 02bff241) has one HASH a block (key: a 64-bit hash in decimal, field: `pod@tier`, value: empty;
older versions stored a time stamp, none that we found stored JSON) and one STRING a block that leads from the engine's
hash to that key. Its look-up is a pipeline of one HKEYS for each block, 75 of which nobody holds here. Its entry names
the tier; ours does so by a second number a worker (see *host tier* below). It has no leases: a dead pod's entries stay.
Ours has no journal: a purge walks the buckets, so the bytes below are all that the index stores. llm-d's own client is
in Go; redis-py parses replies in Python, so what *the client waits* flatters us. Compare the CPU time of Redis.
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
            f"took {foreign}.",
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
        "450 blocks of which the first 375 are held by r workers. Bytes are the growth of Redis's "
        f"used_memory over distinct blocks, {sharing_blocks:,} of ours; keys of buckets, leases and "
        "records are in it. *In Redis* is what it says its commands took, *CPU* all that its process did "
        "for a look-up; ratios are llm-d's / ours by turn, with the lowest and highest. Times in us.",
        "",
        "| r | bytes a block | llm-d's (without engine keys) | in Redis, p99 | llm-d's | ratio | CPU | "
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
        "raised_value_bound": "as above, compact values up to 512 bytes (what registration sets)",
        "default_value_bound": "hash-max-listpack-value 64 (Redis's default)",
        "stride": "index stride 4: every fourth name, bytes by block of the cache",
        "host_tier": "each worker with a host tier that holds the same: two numbers a worker",
        "uneven_depths": "every worker with another depth, from 1 to 375: the worst case of the bisection",
    }
    lines = [
        f"For information, at r={variations['sharers']}, without churn and with a quarter of the blocks:",
        "",
        "| case | bytes a block | in Redis us | p99 us |",
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
        f"{writes['entries']:,} entries, all of different names, in batches of 512, all workers at once "
        "from one process:",
        "",
        "| | entries/s | by second of Redis's CPU | by second of the client's CPU |",
        "|---|---|---|---|",
        f"| Blockyard | {ours['entries_per_second']:,} ({spread['lowest']:,}-{spread['highest']:,}) "
        f"| {ours['entries_per_server_cpu_second']:,} | {ours['entries_per_client_cpu_second']:,} |",
        f"| llm-d's schema, a smaller load | {theirs['entries_per_second']:,} "
        f"| {theirs['entries_per_server_cpu_second']:,} | {theirs['entries_per_client_cpu_second']:,} |",
        "",
        f"Ours / llm-d's by the clock: {ratio:.1f}. The CPU columns say which side is the limit: Redis "
        "for ours, the client for llm-d's. For one entry llm-d's schema sets two keys and reads nothing; "
        "ours reads, merges, and checks sequence and epoch. One batch of ours held Redis for "
        f"{ours['batch_p50_us']:,} us (p99 {ours['batch_p99_us']:,}, most {ours['batch_max_us']:,}). "
        f"Full, the index takes {writes['bytes_a_block']} bytes a block, and a look-up "
        f"{writes['lookup']['server_us']} us in Redis (p99 {writes['lookup']['server_p99_us']}).",
        "",
        f"Removal of what workers evict: {gone['removed_entries_per_second']:,} entries/s (llm-d's, block "
        f"after block from one pod: {theirs['evictions_per_second']:,}). Purge of dead workers' "
        f"{gone['purged_entries']:,} entries: {gone['purge_seconds']} s, "
        f"{gone['purged_entries_per_second']:,} entries/s, in {gone['purge_slices']:,} slices without a "
        f"pause, of which one held Redis for {gone['purge_slice_max_us']:,} us at most (p99 "
        f"{gone['purge_slice_p99_us']:,}); workers pause 50 ms between slices.",
        "",
    ]


def _others(cases: Figures) -> list[str]:
    titles = {
        "calm": "nobody writes",
        "flat_out": "all workers write flat out",
        "resting": "all write, each rests 8 times as long as its batch took",
    }
    lines = [
        "## What others notice of it",
        "",
        "PING and a look-up of 450 blocks in turns from another process, on the same processors. Each "
        "writer has one batch on its way, so flat out a look-up queues behind all of theirs; the router "
        "waits 40 ms and then places without it.",
        "",
        "| | load lasts s | PING p50 / p99 / most ms | look-up p50 / p99 / most ms |",
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
        f"{seconds} s, of which up to {rebuild['of_which_until_noticed_at_most_seconds']:.1f} s pass "
        "until a renewal notices, and up to 0.25 s of jitter. Checked chain by chain. All publishers "
        "share one process here.",
    ]
