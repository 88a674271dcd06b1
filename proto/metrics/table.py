"""Every metric of the cluster: its name, kind, unit, labels, meaning, and vLLM's names for it.

Pure, and the only list. Workers and routers read the metrics that stand here, and both exporters make their series of
it. Tests compare the table in docs/operating.md, the dashboard and the alerts with it. Does not own how anything is
measured (worker/metrics.py, router/generation/metrics.py).
"""

from blockyard.proto.metrics.readings import Kind, Metric

OUTCOMES = (
    "OK",
    "CANCELLED",
    "ABORTED",
    "AUTH_UNAVAILABLE",
    "CONTEXT_LENGTH_EXCEEDED",
    "DEADLINE_EXCEEDED",
    "DEADLINE_UNREACHABLE",
    "ENGINE_FAILED",
    "INTERNAL",
    "INVALID_REQUEST",
    "LAST_WORKER",
    "MALFORMED_MESSAGE",
    "MODEL_NOT_FOUND",
    "NOT_FOUND",
    "NO_WORKERS",
    "OVERLOADED",
    "PERMISSION_DENIED",
    "POISON_REQUEST",
    "PULL_FAILED",
    "PULL_IMPOSSIBLE",
    "RATE_LIMITED",
    "REQUEST_ALREADY_RUNS",
    "REQUEST_NOT_FOUND",
    "REQUEST_TOO_LARGE",
    "RESPONSE_NOT_FOUND",
    "ROUTER_DRAINING",
    "SLOW_READER",
    "STORE_UNAVAILABLE",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "UNSUPPORTED",
    "WORKER_LOST",
    "WORKER_NOT_FOUND",
    "WORKER_UNREACHABLE",
)
"""How a request ends: in success, by its client's disconnect, or by the reason of an error (router/errors.py)."""
PULL_ENDS = (
    "whole",
    "fewer",
    "refused",
    "unreachable",
    "cut",
    "corrupt",
    "late",
    "cancelled",
    "avoided",
)
"""How a pull ends: PullEnd of proto/v1/session.proto."""
CALL_REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED", "AUTH_UNAVAILABLE")
"""Why a call is refused before it is read: reasons of errors (router/errors.py)."""
MOST_TENANTS = 32
"""Most values of the label `tenant`: 31 names and OTHER_TENANTS."""
OTHER_TENANTS = "other"
"""The value of the label `tenant` for all further tenants, and for calls that name none."""
WORKER_STATES = ("connecting", "ready", "draining", "suspect", "refused", "lost")

_FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_REQUEST_TOKENS = (
    1.0,
    8.0,
    32.0,
    128.0,
    512.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16384.0,
    32768.0,
    65536.0,
    131072.0,
)
_LAG_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


def _counter(name: str, unit: str, meaning: str, *vllm: str) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, unit=unit, meaning=meaning, vllm=vllm)


def _gauge(name: str, unit: str, meaning: str, *vllm: str) -> Metric:
    return Metric(name=name, kind=Kind.GAUGE, unit=unit, meaning=meaning, vllm=vllm)


def _histogram(
    name: str, buckets: tuple[float, ...], meaning: str, *vllm: str, unit: str = "seconds"
) -> Metric:
    return Metric(name=name, kind=Kind.HISTOGRAM, unit=unit, meaning=meaning, vllm=vllm, buckets=buckets)


def _by_tenant(name: str, unit: str, meaning: str) -> Metric:
    return Metric(
        name=name, kind=Kind.COUNTER, unit=unit, meaning=meaning, label="tenant", most_values=MOST_TENANTS
    )


WORKER_METRICS = (
    _gauge("running", "sequences", "Sequences in the running batch."),
    _gauge("waiting", "sequences", "Sequences in the worker's own queue."),
    _gauge(
        "kv_usage_ratio",
        "0 to 1",
        "Share of the KV blocks that running sequences hold.",
        "vllm:kv_cache_usage_perc",
    ),
    _gauge("blocks_free", "blocks", "KV blocks that hold nothing."),
    _gauge("blocks_cached", "blocks", "KV blocks that no sequence holds, kept for the prefix in them."),
    _gauge("blocks_used", "blocks", "KV blocks that running sequences hold."),
    _gauge("host_cached_blocks", "blocks", "Evicted blocks that host memory keeps."),
    _counter(
        "prompt_tokens",
        "tokens",
        "Prompt tokens of requests that had their first token from this worker. A replay after it adds none.",
    ),
    _counter("cached_tokens", "tokens", "Prompt tokens of those that were reused from the prefix cache."),
    _counter("generated_tokens", "tokens", "Tokens generated, whether or not a client received them."),
    _counter(
        "preemptions",
        "sequences",
        "Sequences that were preempted and gave up their blocks.",
        "vllm:num_preemptions",
    ),
    _counter("swaps", "sequences", "Preemptions that moved blocks to host memory."),
    _counter("moves", "sequences", "Preemptions that moved sequences to another worker."),
    _counter(
        "drafted_tokens",
        "tokens",
        "Guessed tokens that steps have verified (`--speculation`, `--draft-model`).",
    ),
    _counter("accepted_tokens", "tokens", "Guessed tokens that were right, and so gave a token."),
    _counter("evictions", "blocks", "Cached blocks that were evicted because a sequence needed a block."),
    _counter("pulled_blocks", "blocks", "Blocks that came from other workers instead of being computed."),
    _counter("lent_blocks", "blocks", "Blocks that were sent to other workers."),
    _counter("failed_pulls", "pulls", "Pulls that brought fewer blocks than they should have."),
    _gauge("pulling_bytes", "bytes", "Bytes still to arrive from other workers."),
    _gauge("lending_bytes", "bytes", "Bytes still to be sent to other workers."),
    _gauge(
        "pull_setup_seconds", "seconds", "Time of a pull without that of its bytes, averaged. 0 is unknown."
    ),
    _gauge(
        "pull_bytes_per_second",
        "bytes per second",
        "Rate at which blocks come from other workers, averaged over the last pulls. 0 is unknown.",
    ),
    _gauge("stalled_seconds", "seconds", "How long the current step has run."),
    _gauge("draining", "0 or 1", "1 while the worker takes no new requests."),
    _gauge(
        "index_state",
        "state",
        "What the index knows of this worker: 1 there is no index, 2 exact, 3 degraded.",
    ),
    _gauge("index_lag_seconds", "seconds", "Age of the oldest change that the index has not confirmed."),
    _gauge("index_entries", "names", "Names that the index should hold of this worker."),
    _counter("index_errors", "calls", "Calls of the index that failed."),
    _counter("index_resyncs", "resyncs", "How often all blocks were republished."),
    _counter("index_damages", "damages", "How often the index contradicted what was published."),
)

ROUTER_METRICS = (
    _histogram(
        "time_to_first_token_seconds",
        _FIRST_TOKEN_SECONDS,
        "From a request's arrival to its first token.",
        "vllm:time_to_first_token_seconds",
    ),
    _histogram(
        "inter_token_latency_seconds",
        _GAP_SECONDS,
        "Between two pieces of one output, mostly of one token each. Includes the pause of a replay.",
        "vllm:inter_token_latency_seconds",
    ),
    _histogram(
        "request_seconds",
        _REQUEST_SECONDS,
        "From a request's arrival to the end of its answer, for requests that ended OK.",
        "vllm:e2e_request_latency_seconds",
    ),
    _histogram(
        "queue_seconds",
        _QUEUE_SECONDS,
        "From a request's arrival until it was sent to a worker, with tokenising. Requests with a first token only.",
        "vllm:request_queue_time_seconds",
    ),
    _histogram(
        "prefill_seconds",
        _REQUEST_SECONDS,
        "From sending a request to its first worker until its first token, including the worker's own queue.",
        "vllm:request_prefill_time_seconds",
    ),
    _histogram(
        "decode_seconds",
        _REQUEST_SECONDS,
        "From a request's first token to the last of its outputs, however it ended.",
        "vllm:request_decode_time_seconds",
    ),
    _histogram(
        "request_prompt_tokens",
        _REQUEST_TOKENS,
        "Prompt tokens of a request with a first token.",
        "vllm:request_prompt_tokens",
        unit="tokens",
    ),
    _histogram(
        "request_generated_tokens",
        _REQUEST_TOKENS,
        "Tokens sent to a request's client, of all outputs together, however it ended.",
        "vllm:request_generation_tokens",
        unit="tokens",
    ),
    Metric(
        name="requests",
        kind=Kind.COUNTER,
        unit="requests",
        meaning="Requests for generation that ended, by outcome.",
        label="outcome",
        values=OUTCOMES,
    ),
    Metric(
        name="outputs",
        kind=Kind.COUNTER,
        unit="outputs",
        meaning="Outputs that ended by themselves, by finish reason. A request has `n` of them.",
        vllm=("vllm:request_success",),
        vllm_label="finished_reason",
        label="reason",
        values=("stop", "length"),
    ),
    _counter(
        "router_prompt_tokens",
        "tokens",
        "Prompt tokens of requests with a first token, each counted once.",
        "vllm:prompt_tokens",
        "vllm:prefix_cache_queries",
    ),
    _counter(
        "router_cached_tokens",
        "tokens",
        "Prompt tokens of those that were reused, as clients see them.",
        "vllm:prefix_cache_hits",
    ),
    _counter(
        "router_generated_tokens",
        "tokens",
        "Tokens sent to clients, each counted once.",
        "vllm:generation_tokens",
    ),
    _by_tenant("tenant_requests", "requests", "Requests of a tenant that ended, in any way."),
    _by_tenant(
        "tenant_refusals", "requests", "Requests of a tenant that ended as OVERLOADED or RATE_LIMITED."
    ),
    _by_tenant("tenant_prompt_tokens", "tokens", "Prompt tokens of a tenant's requests with a first token."),
    _by_tenant("tenant_generated_tokens", "tokens", "Tokens sent to a tenant's clients."),
    _gauge("router_running", "requests", "Requests that a worker has.", "vllm:num_requests_running"),
    _gauge(
        "router_waiting",
        "requests",
        "Requests that no worker has yet, or has lost.",
        "vllm:num_requests_waiting",
    ),
    _gauge("requests_admitted", "outputs", "What counts against `max_requests`."),
    _gauge("requests_limit", "outputs", "`max_requests`."),
    _gauge("prompt_tokens_admitted", "tokens", "What counts against `max_tokens_admitted`."),
    _gauge("prompt_tokens_limit", "tokens", "`max_tokens_admitted`."),
    _counter("migrations", "requests", "Requests that moved to another worker because theirs failed."),
    _counter(
        "router_splits",
        "requests",
        "Requests that one worker began and gave back for another one to continue, as placement had planned.",
    ),
    _counter("promised_blocks", "blocks", "Blocks that the chosen workers had cached, by the index."),
    _counter("stale_blocks", "blocks", "Promised blocks that were not reused."),
    _counter("reused_blocks", "blocks", "Blocks that the same requests reused, promised or not."),
    Metric(
        name="router_pulls",
        kind=Kind.COUNTER,
        unit="pulls",
        meaning="Pulls of this router's requests that ended, by the way they ended.",
        label="end",
        values=PULL_ENDS,
    ),
    _counter("router_pulled_blocks", "blocks", "Blocks that these pulls brought from other workers."),
    _counter("router_pulled_bytes", "bytes", "Bytes of those."),
    _counter(
        "router_pull_saved_seconds",
        "seconds",
        "Time to the first token that whole pulls saved, by placement's estimate: without the pull less with it.",
    ),
    _counter(
        "router_pull_setup_seconds",
        "seconds",
        "From the begin of each pull to its source's answer, added up.",
    ),
    _counter(
        "router_pull_transfer_seconds", "seconds", "From there to the last byte of each pull, added up."
    ),
    Metric(
        name="workers",
        kind=Kind.GAUGE,
        unit="workers",
        meaning="Workers as this router sees them, by state.",
        label="state",
        values=WORKER_STATES,
    ),
    _gauge("router_index_state", "state", "The whole index: 1 there is no index, 2 exact, 3 degraded."),
    _counter("index_lookups", "look-ups", "Look-ups of placement."),
    _counter("index_failed_lookups", "look-ups", "Look-ups of placement that failed or took too long."),
    _counter("index_skipped_lookups", "requests", "Requests placed without a look-up after several failed."),
    _counter(
        "guarded_prompts",
        "prompts",
        "Prompts in which a client's text has a control token, which was encoded as plain text.",
    ),
    _counter("spliced_tokens", "tokens", "Prompt tokens taken from kept answers of their sessions."),
    _counter(
        "answer_store_failures",
        "calls",
        "Calls to Redis for answers of sessions that failed or were not tried.",
    ),
    _histogram("loop_lag_seconds", _LAG_SECONDS, "How late the event loop's watch woke up."),
    _gauge("router_draining", "0 or 1", "1 while the router takes no new requests."),
    Metric(
        name="refused_calls",
        kind=Kind.COUNTER,
        unit="calls",
        meaning="Calls of any method that were refused for their token, its role, or a bad auth file.",
        label="reason",
        values=CALL_REFUSALS,
    ),
    _gauge("auth_file_valid", "0 or 1", "1 while the auth file can be used, or there is none."),
    _gauge(
        "tls_files_valid",
        "0 or 1",
        "1 while the router's TLS files can be used, or there are none. At 0 those read before stay in use.",
    ),
)

METRICS = WORKER_METRICS + ROUTER_METRICS
