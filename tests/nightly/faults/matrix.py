"""The fault matrix: what is done to the cluster, and what must come of it.

Data alone. The tests carry a row's number as `@pytest.mark.fault(number)`; report.py joins both.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    number: int
    fault: str
    expected: str


def _fault(number: int, fault: str, expected: str) -> Fault:
    return Fault(number=number, fault=fault, expected=expected)


MATRIX = (
    _fault(1, "client cancels in decode", "CANCELLED; its blocks are free within a step"),
    _fault(2, "client cancels while queued", "never scheduled; its place and charge are given back"),
    _fault(
        3,
        "client cancels within a chunked prefill",
        "its blocks are free; whole prefix blocks may stay cached",
    ),
    _fault(4, "client cancels in the step that finishes", "one terminal state, nothing freed twice"),
    _fault(5, "client SIGKILL", "as 1"),
    _fault(6, "client vanishes without a word", "freed within the keepalive's 15 s"),
    _fault(7, "deadline passes in decode", "DEADLINE_EXCEEDED; the worker stops"),
    _fault(8, "deadline hopeless in the queue", "shed before its deadline; no prefill is spent on it"),
    _fault(
        9, "client stops reading", "cut off with RESOURCE_EXHAUSTED; nobody else waits, memory is bounded"
    ),
    _fault(
        10,
        "a burst of ten times the limit",
        "exactly the limit is let in; the rest hears at once when to retry",
    ),
    _fault(
        11,
        "a flood of long prompts",
        "the limit on tokens refuses them; short requests keep their first token",
    ),
    _fault(12, "one tenant floods", "the other tenant's time to first token stays"),
    _fault(13, "pool exhausted", "preempted and computed again: all finish with the reference's tokens"),
    _fault(14, "request larger than the pool", "FAILED_PRECONDITION at once; it holds nobody up"),
    _fault(15, "worker SIGKILL before the first token", "retried elsewhere, the client sees latency alone"),
    _fault(16, "worker SIGKILL in decode", "goes on elsewhere with the tokens so far, each exactly once"),
    _fault(17, "workers die until the budget is used", "UNAVAILABLE WORKER_LOST with tokens_emitted"),
    _fault(
        18,
        "as 16 with grammar, seed, n, logprobs, beams",
        "valid outputs, contiguous offsets, the same tokens",
    ),
    _fault(19, "all workers die", "NOT_SERVING; requests wait, or end with NO_WORKERS; recovers by itself"),
    _fault(
        20, "worker SIGSTOP, then SIGCONT", "suspect, then lost: its streams move; the zombie changes nothing"
    ),
    _fault(21, "router and worker cut apart", "as 20; the worker frees what it ran"),
    _fault(22, "one way lost; a link that flaps", "each token exactly once; no storm of reconnects"),
    _fault(23, "a slow, lossy link", "slower, nothing fails, nobody is taken for dead"),
    _fault(24, "a straggler among the workers", "traffic moves away; it is not taken for dead"),
    _fault(25, "a step raises for one request", "that request ends INTERNAL; others get their tokens"),
    _fault(
        26,
        "a request kills its workers",
        "INTERNAL POISON_REQUEST after two; the third lives, others migrate",
    ),
    _fault(27, "logits that are not finite", "that request ends INTERNAL; nothing of it is cached"),
    _fault(28, "worker out of memory", "the process dies, then as 16"),
    _fault(29, "worker cannot start", "bounded restarts with backoff, a clear reason; the others serve on"),
    _fault(30, "a worker is drained", "nothing new; what runs finishes or moves; 0 failed"),
    _fault(31, "rolling restart under load", "0 failed"),
    _fault(32, "a worker joins under load", "used within 2 s, without a herd"),
    _fault(33, "a Ray node dies", "as 16 for all that ran there"),
    _fault(34, "the Ray head dies", "running streams go on; the state is clear"),
    _fault(35, "Redis SIGKILL, back empty", "0 failed; the index is right again within 5 s"),
    _fault(36, "Redis hangs", "placement takes at most 50 ms more"),
    _fault(37, "Redis cut off", "as 36, silently or with a reset"),
    _fault(38, "FLUSHALL", "noticed, told anew"),
    _fault(39, "failover to a stale replica", "writes lost or refused are made good"),
    _fault(40, "Redis denies, password changed", "counted, said; serving goes on"),
    _fault(41, "20 ms to Redis", "one round trip a request"),
    _fault(42, "the index lies", "costs recomputing, no token"),
    _fault(43, "news lost, doubled, reordered", "a gap is told anew; equal to the workers' truth"),
    _fault(44, "router SIGKILL", "UNAVAILABLE; workers free the orphans; a new router serves at once"),
    _fault(45, "one of two routers dies", "the other is untouched; clients go over to it"),
    _fault(46, "router SIGTERM under load", "NOT_SERVING, streams finish, exit 0"),
    _fault(47, "one request id twice", "one router: ALREADY_EXISTS; two routers: each its own tokens"),
    _fault(48, "wall clocks jump by an hour", "nothing expires early, nobody is taken for dead"),
    _fault(
        49, "no descriptors, disk full, log folder gone", "refused with a status; no request fails for a log"
    ),
    _fault(
        50, "half an hour of random faults", "the invariants hold; memory, descriptors and keys stay flat"
    ),
    _fault(51, "Redis taken over", "rogue workers and forged records get no connection; 0 failed"),
    _fault(52, "worker SIGSTOP for good", "as 20; `status` tells within 5 s; killed and started again"),
    _fault(53, "one of two routers of a port SIGSTOP", "every request of new clients succeeds; replaced"),
    _fault(54, "supervisor SIGSTOP", "serving goes on; `status` says so; killed and started again"),
    _fault(55, "Ray's dashboard SIGKILL", "started again, on its port"),
    _fault(56, "raylet SIGKILL", "all is started again and serves where it did; `status` says so at once"),
    _fault(57, "Redis at maxmemory", "said within a second; placed by hashing; no lease is lost"),
    _fault(
        58, "Redis in Cluster mode", "refused before anything starts; who starts by hand says so and serves"
    ),
    _fault(59, "fail-over by Sentinel", "0 failed; the index is right again on the new primary"),
    _fault(60, "source of a pull SIGKILL at any byte", "complete blocks are used, the rest is computed"),
    _fault(61, "source of a pull SIGSTOP at any byte", "as 60; no wait beyond the estimate"),
    _fault(
        62,
        "bytes of a pull cut, flipped, missing, doubled; answers that are none",
        "no wrong block is used; the source is avoided for a minute",
    ),
    _fault(
        63,
        "source evicts or is flushed before or during a pull",
        "it sends fewer; lent blocks stay; nothing unfinished is lent",
    ),
    _fault(64, "source of a pull restarts on its port", "refused: its incarnation differs"),
    _fault(
        65,
        "request with a pull cancelled, expired, preempted; a pull that hangs",
        "its reader stops first, then its slots are free; the tokens are right",
    ),
    _fault(66, "destination of a pull SIGKILL", "its loans end at once"),
    _fault(67, "source with another model, data type, block size or secret", "refused, in words"),
    _fault(68, "many pulls from one source, or a slow one", "four at once; others wait a part of their time"),
    _fault(
        69,
        "two requests want one prefix; two workers pull from each other",
        "one pull, both wait; nobody waits in a circle",
    ),
    _fault(70, "two tenants pull one prefix", "it stays on the account of the first"),
    _fault(71, "one of two Redis servers dies", "0 failed; its prefixes alone are dark; `index` names it"),
    _fault(
        72, "a rank of a worker SIGKILL in prefill, decode or swap", "the worker ends at once, then as 16"
    ),
    _fault(73, "a rank of a worker SIGSTOP", "the worker ends within 3 s, then as 16; no rank stays"),
    _fault(74, "a rank SIGKILL while it loads", "the worker ends and says so; the others serve on"),
    _fault(75, "rank 0 SIGKILL", "as 16; its other ranks end"),
    _fault(
        76, "prefill worker SIGKILL after the first token, before the pull", "its blocks are computed again"
    ),
    _fault(77, "prefill worker SIGSTOP there", "as 76, once the pull is late"),
    _fault(78, "prefill worker restarts there, on its port", "as 76: its incarnation differs"),
    _fault(79, "decode worker SIGKILL", "as 16; a prefill worker that is alone goes on with the request"),
    _fault(80, "worker dies before the sequences that it moved are fetched", "the rest is computed; as 16"),
    _fault(81, "worker dies to which a sequence has moved", "as 16, wherever it came from"),
    _fault(82, "all workers are full", "nothing wanders: a request moves at most four times, then stays"),
    _fault(83, "router SIGKILL within a batch", "started again, it goes on: each line is answered once"),
    _fault(84, "as 83, with another router of its folder", "the other one goes on within seconds"),
    _fault(85, "router SIGSTOP for seconds, then SIGCONT", "its streams go on where they were; none moves"),
    _fault(
        86,
        "the control service of a joined Ray dies",
        "as 34, and the time is its nodes' own; `down --forget`, `ray start` and `up` bring all back",
    ),
    _fault(87, "the supervisor's host is cut off, and comes back", "no stream fails; it ends nobody"),
    _fault(88, "the head's host is cut off, and comes back", "as 87, as far as Ray ends no node"),
    _fault(89, "a worker's host is cut off, and comes back", "as 87"),
    _fault(90, "a router's host is cut off, and comes back", "as 87 at the other router; `status` names it"),
)
