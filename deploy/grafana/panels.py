"""Panels of the Grafana dashboard as a table: rows of panels, each with its Prometheus queries.

Pure data. The dashboard's variables select the cluster and the models of every series. Does not own the conversion to
Grafana's JSON (dashboard.py). A test checks that the names are those of proto/metrics/table.py.
"""

import re
from dataclasses import dataclass

from blockyard.proto.metrics.table import WORKER_METRICS

CHOSEN = 'cluster="$cluster",model_name=~"$model"'
"""Label matchers of every query: one cluster, so that two are never summed, and some of its models."""
_WORKERS_SERIES = frozenset(name for metric in WORKER_METRICS for name in metric.series)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    description: str
    unit: str
    """One of Grafana's units."""
    questions: tuple[tuple[str, str], ...]
    """Pairs of a Prometheus expression, without label matchers, and its legend."""
    is_stacked: bool = False

    @property
    def queries(self) -> tuple[tuple[str, str], ...]:
        """Return pairs of an expression, with the label matchers of the chosen series, and its legend."""
        return tuple((re.sub(r"\bblockyard_\w+", _chosen, asked), legend) for asked, legend in self.questions)


def _chosen(series: re.Match[str]) -> str:
    side = "worker" if series[0] in _WORKERS_SERIES else "router"
    return f'{series[0]}{{{CHOSEN},{side}=~"${side}"}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket[$__rate_interval])))", legend)
        for share, legend in ((0.5, "half"), (0.95, "95 %"), (0.99, "99 %"))
    )


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}_total[$__rate_interval]))"


def _whole_rate(metric: str) -> str:
    return f"sum(rate({metric}_total[$__rate_interval]))"


CLIENTS = Row(
    title="Latency and throughput",
    panels=(
        Panel(
            title="Requests by outcome",
            description="Requests that end each second. Outcomes other than OK, CANCELLED and ABORTED are failures.",
            unit="reqps",
            questions=((f"{_rate('blockyard_requests', 'outcome')} > 0", "{{outcome}}"),),
            is_stacked=True,
        ),
        Panel(
            title="Time to the first token",
            description="From a request's arrival at its router.",
            unit="s",
            questions=_quantiles("blockyard_time_to_first_token_seconds"),
        ),
        Panel(
            title="Time between tokens",
            description="Between two tokens of one output, with pauses of a replay.",
            unit="s",
            questions=_quantiles("blockyard_inter_token_latency_seconds"),
        ),
        Panel(
            title="Request duration",
            description="From arrival to the end of the answer, for requests that ended OK.",
            unit="s",
            questions=_quantiles("blockyard_request_seconds"),
        ),
        Panel(
            title="Queue time",
            description="From arrival until the router sent the request to a worker.",
            unit="s",
            questions=_quantiles("blockyard_queue_seconds"),
        ),
        Panel(
            title="Tokens per second",
            description="Tokens sent to clients, prompt tokens, and the prompt tokens that were reused from the cache.",
            unit="short",
            questions=(
                (_whole_rate("blockyard_router_generated_tokens"), "generated"),
                (_whole_rate("blockyard_router_prompt_tokens"), "prompt"),
                (_whole_rate("blockyard_router_cached_tokens"), "prompt, reused"),
            ),
        ),
        Panel(
            title="Prefill",
            description="From sending a request to its worker until its first token, with the worker's queue.",
            unit="s",
            questions=_quantiles("blockyard_prefill_seconds"),
        ),
        Panel(
            title="Decode",
            description="From a request's first token to its last.",
            unit="s",
            questions=_quantiles("blockyard_decode_seconds"),
        ),
        Panel(
            title="Tokens per request",
            description="Median and 95th percentile of the lengths of prompts and answers.",
            unit="short",
            questions=tuple(
                (expression, f"{kind}, {legend}")
                for kind in ("prompt", "generated")
                for expression, legend in _quantiles(f"blockyard_request_{kind}_tokens")[:2]
            ),
        ),
    ),
)

MODELS = Row(
    title="Models",
    panels=(
        Panel(
            title="Requests by model",
            description="Requests that run on a worker, and requests that wait for one, on all routers.",
            unit="short",
            questions=(
                ("sum by (model_name) (blockyard_router_running)", "{{model_name}} running"),
                ("sum by (model_name) (blockyard_router_waiting)", "{{model_name}} waiting"),
            ),
        ),
        Panel(
            title="Tokens per second by model",
            description="Tokens sent to clients.",
            unit="short",
            questions=((_rate("blockyard_router_generated_tokens", "model_name"), "{{model_name}}"),),
            is_stacked=True,
        ),
        Panel(
            title="Time to the first token by model",
            description="95th percentile, from a request's arrival at its router.",
            unit="s",
            questions=(
                (
                    "histogram_quantile(0.95, sum by (model_name, le) "
                    "(rate(blockyard_time_to_first_token_seconds_bucket[$__rate_interval])))",
                    "{{model_name}}",
                ),
            ),
        ),
        Panel(
            title="KV blocks in use by model",
            description="Share of the pools of a model's workers that running sequences use.",
            unit="percentunit",
            questions=(
                (
                    "sum by (model_name) (blockyard_blocks_used) / (sum by (model_name) (blockyard_blocks_used) + "
                    "sum by (model_name) (blockyard_blocks_cached) + sum by (model_name) (blockyard_blocks_free))",
                    "{{model_name}}",
                ),
            ),
        ),
        Panel(
            title="Hit rate by model",
            description="Share of prompt tokens that were reused.",
            unit="percentunit",
            questions=(
                (
                    f"{_rate('blockyard_router_cached_tokens', 'model_name')} / "
                    f"{_rate('blockyard_router_prompt_tokens', 'model_name')}",
                    "{{model_name}}",
                ),
            ),
        ),
        Panel(
            title="Workers by model and state",
            description="As the routers see them.",
            unit="short",
            questions=(("max by (model_name, state) (blockyard_workers) > 0", "{{model_name}} {{state}}"),),
        ),
    ),
)

TENANTS = Row(
    title="Tenants",
    panels=(
        Panel(
            title="Requests by tenant",
            description="Requests that end each second. `other` is all further tenants, and requests without one.",
            unit="reqps",
            questions=((_rate("blockyard_tenant_requests", "tenant"), "{{tenant}}"),),
            is_stacked=True,
        ),
        Panel(
            title="Tokens by tenant",
            description="Prompt and generated tokens each second.",
            unit="short",
            questions=(
                (_rate("blockyard_tenant_prompt_tokens", "tenant"), "{{tenant}} prompt"),
                (_rate("blockyard_tenant_generated_tokens", "tenant"), "{{tenant}} generated"),
            ),
        ),
        Panel(
            title="Refusals by tenant",
            description="Requests each second that a limit refused: the tenant's share of a router, or its rate limit.",
            unit="reqps",
            questions=((_rate("blockyard_tenant_refusals", "tenant"), "{{tenant}}"),),
            is_stacked=True,
        ),
    ),
)

WORKERS = Row(
    title="Workers",
    panels=(
        Panel(
            title="KV blocks in use",
            description="Share of each worker's pool that running sequences use.",
            unit="percentunit",
            questions=(("blockyard_kv_usage_ratio", "{{worker}}"),),
        ),
        Panel(
            title="Blocks of all pools",
            description="Cached blocks are evicted as soon as a sequence needs one.",
            unit="short",
            questions=(
                ("sum(blockyard_blocks_used)", "used"),
                ("sum(blockyard_blocks_cached)", "cached"),
                ("sum(blockyard_blocks_free)", "free"),
            ),
            is_stacked=True,
        ),
        Panel(
            title="Sequences",
            description="Running, and waiting in the workers' own short queues.",
            unit="short",
            questions=(
                ("blockyard_running", "{{worker}} running"),
                ("blockyard_waiting", "{{worker}} waiting"),
            ),
        ),
        Panel(
            title="Preemptions and evictions",
            description="Sequences that lost their blocks, and cached blocks that were evicted, each second.",
            unit="short",
            questions=(
                (_rate("blockyard_preemptions", "worker"), "{{worker}} preempted"),
                (_rate("blockyard_evictions", "worker"), "{{worker}} evicted"),
            ),
        ),
        Panel(
            title="Generated tokens per second",
            description="By worker. Tokens that a replay generates again count again.",
            unit="short",
            questions=((_rate("blockyard_generated_tokens", "worker"), "{{worker}}"),),
            is_stacked=True,
        ),
        Panel(
            title="Current step",
            description="Time since the current step began. A worker that hangs shows as a rising line.",
            unit="s",
            questions=(("blockyard_stalled_seconds", "{{worker}}"),),
        ),
    ),
)

CACHE = Row(
    title="Prefix cache and index",
    panels=(
        Panel(
            title="Hit rate",
            description="Share of prompt tokens that were reused: of all, as reported to clients, and by worker.",
            unit="percentunit",
            questions=(
                (
                    f"{_whole_rate('blockyard_router_cached_tokens')} / "
                    f"{_whole_rate('blockyard_router_prompt_tokens')}",
                    "all",
                ),
                (
                    f"{_rate('blockyard_cached_tokens', 'worker')} / {_rate('blockyard_prompt_tokens', 'worker')}",
                    "{{worker}}",
                ),
            ),
        ),
        Panel(
            title="Predicted and actual hits",
            description="Blocks each second that the index predicted, that were reused, and that were missing.",
            unit="short",
            questions=(
                (_whole_rate("blockyard_promised_blocks"), "predicted"),
                (_whole_rate("blockyard_reused_blocks"), "reused"),
                (_whole_rate("blockyard_stale_blocks"), "missing"),
            ),
        ),
        Panel(
            title="Index: lag and state",
            description="Lag of each worker's part in seconds, and each router's state: 1 absent, 2 exact, 3 degraded.",
            unit="short",
            questions=(
                ("blockyard_index_lag_seconds", "{{worker}} lag"),
                ("blockyard_router_index_state", "{{router}} state"),
            ),
        ),
        Panel(
            title="Blocks between workers",
            description="Blocks that workers fetched from one another instead of computing them, each second.",
            unit="short",
            questions=(
                (_rate("blockyard_pulled_blocks", "worker"), "{{worker}} fetched"),
                (_rate("blockyard_lent_blocks", "worker"), "{{worker}} sent"),
            ),
        ),
    ),
)

PULLS = Row(
    title="Pulls between workers",
    panels=(
        Panel(
            title="Pulls by end",
            description="Pulls that end each second. All but whole ones bring fewer blocks, and the rest is computed.",
            unit="ops",
            questions=((f"{_rate('blockyard_router_pulls', 'end')} > 0", "{{end}}"),),
            is_stacked=True,
        ),
        Panel(
            title="Bytes pulled",
            description="KV that workers fetch from one another, each second.",
            unit="Bps",
            questions=((_whole_rate("blockyard_router_pulled_bytes"), "all"),),
        ),
        Panel(
            title="Time of a pull",
            description="Mean time until the source answers, and from there to the last byte.",
            unit="s",
            questions=tuple(
                (
                    f"{_whole_rate(f'blockyard_router_pull_{part}_seconds')} / {_whole_rate('blockyard_router_pulls')}",
                    part,
                )
                for part in ("setup", "transfer")
            ),
        ),
        Panel(
            title="Time saved by pulls",
            description="Seconds of cost saved each second, by placement's estimate.",
            unit="s",
            questions=((_whole_rate("blockyard_router_pull_saved_seconds"), "saved"),),
        ),
    ),
)

ROUTERS = Row(
    title="Routers",
    panels=(
        Panel(
            title="Requests held",
            description="Requests that run on a worker, requests that wait for one, and the admission limit.",
            unit="short",
            questions=(
                ("blockyard_router_running", "{{router}} running"),
                ("blockyard_router_waiting", "{{router}} waiting"),
                ("blockyard_requests_limit", "{{router}} limit"),
            ),
        ),
        Panel(
            title="Event loop lag",
            description="99th percentile of how late the event loop runs. It delays every token.",
            unit="s",
            questions=(
                (
                    "histogram_quantile(0.99, sum by (router, le) "
                    "(rate(blockyard_loop_lag_seconds_bucket[$__rate_interval])))",
                    "{{router}}",
                ),
            ),
        ),
        Panel(
            title="Workers by state",
            description="Workers as the routers see them, and requests that lost their worker each second.",
            unit="short",
            questions=(
                ("max by (state) (blockyard_workers) > 0", "{{state}}"),
                (_whole_rate("blockyard_migrations"), "migrations"),
            ),
        ),
    ),
)

ROWS = (CLIENTS, MODELS, TENANTS, WORKERS, CACHE, PULLS, ROUTERS)
