"""Latency of interactive requests beside a full batch, on one worker.

    python -m bench.batch

The real scheduler runs in virtual time, with the roofline of bench/placement/simulation for the time of each step and
one step planned ahead, as the engine does. The same interactive requests arrive alone, beside a batch of the lowest
priority, and beside a batch of the usual one, for comparison. The batch always has `--in-flight` requests on the
worker, as many as a router's lane lets in. Does not include routers and their waiting lines.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from blockyard.proto.limits import MAX_PRIORITY
from blockyard.worker.scheduling.mixed_steps import MixedStepController
from blockyard.worker.scheduling.scheduler import Scheduler, SchedulerConfig
from blockyard.worker.sequences.identifiers import RequestId, SequenceId, TenantId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence, token_array
from blockyard.worker.sequences.step_plan import NO_TOKEN, StepPlan, StepTokens

from bench.placement.simulation.profile import HardwareProfile
from bench.reporting import Floor, percentile, write_report

AGEING_SECONDS = 10.0
MOST_GROWTH = 0.05
H200 = HardwareProfile()
CPU = HardwareProfile(
    name="16 cores, Qwen3-0.6B",
    parameters=0.44e9,
    num_layers=28,
    num_heads=16,
    bandwidth_bytes_per_second=100e9,
    matmul_flops_per_second=2e12,
    attention_flops_per_second=1e12,
    memory_bytes=16e9,
    resident_bytes=2e9,
    max_model_len=32_768,
    max_num_batched_tokens=2048,
    mixed_step_seconds=0.2,
)


@dataclass(slots=True)
class Arrival:
    at: float
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Record:
    """One interactive request."""

    arrival: float
    tokens_at: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Figures:
    """Latencies of the interactive requests in seconds, and the rates of the whole worker."""

    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    batch_tokens_per_second: float = 0.0
    preemptions: int = 0


def interactive(rng: random.Random, *, per_second: float, seconds: float) -> list[Arrival]:
    """Return arrivals at random, with lengths of a chat."""
    arrivals, at = [], rng.expovariate(per_second)
    while at < seconds:
        prompt = min(int(rng.lognormvariate(6.0, 0.8)) + 16, 4000)
        output = min(int(rng.lognormvariate(4.6, 0.7)) + 4, 800)
        arrivals.append(Arrival(at, prompt, output))
        at += rng.expovariate(per_second)
    return arrivals


class Worker:
    """One engine in virtual time."""

    def __init__(self, profile: HardwareProfile, seed: int) -> None:
        self._profile = profile
        self.steps = MixedStepController(
            target_seconds=profile.mixed_step_seconds, max_batched_tokens=profile.max_num_batched_tokens
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                block_size=profile.block_size,
                max_num_seqs=profile.max_num_seqs,
                max_num_batched_tokens=profile.max_num_batched_tokens,
                max_model_len=profile.max_model_len,
            ),
            num_blocks=profile.num_blocks,
            mixed_steps=self.steps,
        )
        self._rng = random.Random(seed)
        self._next_id = 0

    def submit(self, arrival: Arrival, now: float, *, priority: int) -> SequenceId:
        number, self._next_id = self._next_id, self._next_id + 1
        sequence = Sequence(
            sequence_id=SequenceId(number),
            tokens=token_array([number % 50_000] * arrival.prompt_tokens),
            prompt_length=arrival.prompt_tokens,
            sampling=SamplingParams(max_tokens=arrival.output_tokens),
            names=[
                self._rng.randbytes(16) for _ in range(arrival.prompt_tokens // self._profile.block_size + 1)
            ],  # type: ignore[misc]
            arrival=now,
            rank=now + priority * AGEING_SECONDS,
            priority=priority,
            tenant=TenantId(0),
            request_id=RequestId(number),
            num_outputs=1,
        )
        self.scheduler.submit(sequence)
        return sequence.sequence_id

    def seconds(self, plan: StepPlan) -> float:
        return self._profile.step_seconds(plan) if plan.rows else 0.0

    def commit(self, plan: StepPlan, seconds: float) -> list[Sequence]:
        """Commit a step, and return the sequences that got a token."""
        tokens = StepTokens(tokens=[7 if row.samples else NO_TOKEN for row in plan.rows])
        updates = self.scheduler.commit(plan, tokens)
        self.steps.observe(plan, seconds)
        return [update.sequence for update in updates]


def run(
    profile: HardwareProfile,
    arrivals: Items[Arrival],
    *,
    batch_priority: int | None,
    in_flight: int,
    seed: int,
) -> Figures:
    """Run until all interactive requests have ended. Without `batch_priority` there is no batch."""
    worker, figures = Worker(profile, seed), Figures()
    rng = random.Random(seed)
    records: dict[SequenceId, Record] = {}
    upcoming = list(reversed(arrivals))
    num_batch = batch_tokens = ended = 0
    now = 0.0
    flying: tuple[StepPlan, float] | None = None
    while ended < len(arrivals):
        while upcoming and upcoming[-1].at <= now:
            arrival = upcoming.pop()
            records[worker.submit(arrival, arrival.at, priority=0)] = Record(arrival.at)
        while batch_priority is not None and num_batch < in_flight:
            line = Arrival(now, rng.randrange(100, 1000), rng.randrange(50, 350))
            worker.submit(line, now, priority=batch_priority)
            num_batch += 1
        plan = worker.scheduler.plan() if worker.scheduler.has_work else None
        if flying is not None:
            # The next step is planned while this one runs.
            landed, end = flying
            seconds, now = end - now, end
            for sequence in worker.commit(landed, seconds):
                record = records.get(sequence.sequence_id)
                if record is not None:
                    record.tokens_at.append(now)
                    ended += sequence.is_over
                else:
                    batch_tokens += 1
                    num_batch -= sequence.is_over
        flying = (plan, now + worker.seconds(plan)) if plan is not None and plan.has_work else None
        if flying is None and upcoming and not worker.scheduler.has_work:
            now = max(now, upcoming[-1].at)
    for record in records.values():
        figures.first_tokens.append(record.tokens_at[0] - record.arrival)
        figures.totals.append(record.tokens_at[-1] - record.arrival)
        figures.gaps += [
            later - earlier for earlier, later in zip(record.tokens_at, record.tokens_at[1:], strict=False)
        ]
    figures.batch_tokens_per_second = batch_tokens / now
    figures.preemptions = worker.scheduler.num_preemptions
    return figures


def table(
    profile: HardwareProfile, *, per_second: float, seconds: float, in_flight: int, seeds: int
) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Return the lines and the figures of one profile: the medians over all seeds."""
    lines = [
        f"### {profile.name}, {per_second:g} requests per second",
        "",
        "| batch | first token p99 ms | between tokens p99 ms | whole answer p99 s | batch tokens/s | preemptions |",
        "|---|---|---|---|---|---|",
    ]
    found: dict[str, dict[str, float]] = {}
    for name, priority in (("none", None), ("lowest priority", MAX_PRIORITY), ("usual priority", 0)):
        runs = [
            run(
                profile,
                interactive(random.Random(seed), per_second=per_second, seconds=seconds),
                batch_priority=priority,
                in_flight=in_flight,
                seed=seed,
            )
            for seed in range(seeds)
        ]
        found[name] = {
            "first_token_p99_seconds": statistics.median(percentile(one.first_tokens, 0.99) for one in runs),
            "gap_p99_seconds": statistics.median(percentile(one.gaps, 0.99) for one in runs),
            "total_p99_seconds": statistics.median(percentile(one.totals, 0.99) for one in runs),
            "first_token_p50_seconds": statistics.median(percentile(one.first_tokens, 0.5) for one in runs),
            "gap_p50_seconds": statistics.median(percentile(one.gaps, 0.5) for one in runs),
            "batch_tokens_per_second": statistics.median(one.batch_tokens_per_second for one in runs),
            "preemptions": statistics.median(one.preemptions for one in runs),
        }
        row = found[name]
        lines.append(
            f"| {name} | {1000 * row['first_token_p99_seconds']:.1f} | {1000 * row['gap_p99_seconds']:.2f} "
            f"| {row['total_p99_seconds']:.2f} | {row['batch_tokens_per_second']:.0f} | {row['preemptions']:.0f} |"
        )
    return [*lines, ""], found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.batch", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="Virtual time of arrivals in each run.")
    parser.add_argument("--in-flight", type=int, default=128, help="Requests of the batch on the worker.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--report", action="store_true", help="Write a dated report.")
    arguments = parser.parse_args()
    lines: list[str] = []
    figures: dict[str, dict[str, dict[str, float]]] = {}
    floors: list[Floor] = []
    for profile, rates in ((H200, (1.0, 10.0)), (CPU, (0.05, 0.2))):
        for per_second in rates:
            seconds = arguments.seconds * (1 if profile is H200 else 20)
            more, found = table(
                profile,
                per_second=per_second,
                seconds=seconds,
                in_flight=arguments.in_flight,
                seeds=arguments.seeds,
            )
            lines += more
            name = f"{profile.name}, {per_second:g}/s"
            figures[name] = found
            alone, beside = found["none"], found["lowest priority"]
            for kind in ("first_token_p99_seconds", "gap_p99_seconds", "total_p99_seconds"):
                growth = beside[kind] / alone[kind] - 1
                lines.append(f"- {kind}: {100 * growth:+.1f} %")
                floors.append(
                    Floor(name=f"{name}: growth of {kind}", value=growth, floor=MOST_GROWTH, better="lower")
                )
            lines.append("")
            print("\n".join(lines[-len(more) - 4 :]), flush=True)
    if arguments.report:
        write_report(
            "batch",
            title="Interactive requests beside a batch",
            text="\n".join(lines),
            figures=figures,
            floors=floors,
            versions={},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
