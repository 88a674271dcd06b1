"""Roofline for the time of a step, for given hardware and model. A file can give its values.

    step = overhead + (max(weights / bandwidth, 2 P T / matmul) / efficiency)
                    + KV read by decodes / (bandwidth * efficiency) + attention FLOPs of prompts / attention rate

P parameters, T tokens in the step. Owns the arithmetic, and the runner that spends this time in virtual time.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from blockyard.worker.sequences.step_plan import NO_TOKEN, ScheduledRow, StepPlan, StepTokens

from simulation.engine_thread import StepClock

BLOCK_SIZES = (16, 32, 64, 128)
FRACTIONS = ("efficiency", "memory_utilization")
LARGEST = 1e30
"""Upper bound of every quantity in its unit; its inverse is the lower bound. Products of several stay finite."""
MAX_BLOCKS = 4_000_000
"""Maximum blocks of a pool: more than any machine holds, and about the most that a simulation can afford."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One GPU with one model. Defaults: H200 and Qwen3-8B in bf16. Raises ValueError for invalid values."""

    name: str = "H200, Qwen3-8B"
    parameters: float = 7.57e9
    """Parameters that a token passes through, without the embedding table."""
    parameter_bytes: float = 2.0
    num_layers: int = 36
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    kv_element_bytes: float = 2.0
    bandwidth_bytes_per_second: float = 4.3e12
    """Measured bandwidth of a copy."""
    matmul_flops_per_second: float = 788e12
    """Measured rate in bf16."""
    attention_flops_per_second: float = 400e12
    """Rate of causal attention over prompts."""
    efficiency: float = 0.8
    """Share of the bandwidth and matmul limits that a good engine reaches."""
    step_overhead_seconds: float = 0.001
    """Time for planning, launching and sampling."""
    memory_bytes: float = 141e9
    memory_utilization: float = 0.9
    resident_bytes: float = 18e9
    """Weights with the embedding table, and workspaces."""
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131_072
    host_cache_bytes: float = 1.0
    """Host memory for blocks that the GPU's pool has evicted, or that come from other workers. 1: none."""
    host_bytes_per_second: float = 50e9
    """Rate of copies between host memory and the GPU."""
    link_bytes_per_second: float = 4e9
    """Rate of a worker's link to the others: TCP over a fast network."""
    link_setup_seconds: float = 0.0005
    """Time until another worker hears of a pull, and until its answer is back."""
    adapter_load_seconds: float = 0.1
    """Time to load a LoRA adapter into a slot of the GPU. Steps wait for it."""
    mixed_step_seconds: float | None = 0.1
    """Maximum time of prompts in a step that also decodes. None means that only the token budget limits them."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            _check_field(setting.name, setting.type, getattr(self, setting.name))
        for name in FRACTIONS:
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be at most 1, not {getattr(self, name)}")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {BLOCK_SIZES}, not {self.block_size}")
        if not self.max_model_len <= self.num_blocks * self.block_size <= MAX_BLOCKS * self.block_size:
            raise ValueError(
                f"a pool of {self.num_blocks} blocks of {self.block_size} tokens must hold max_model_len "
                f"{self.max_model_len} tokens and have at most {MAX_BLOCKS} blocks. Its size follows from memory_bytes "
                f"{self.memory_bytes:g} * memory_utilization {self.memory_utilization:g} - resident_bytes "
                f"{self.resident_bytes:g}, and {self.kv_bytes_per_token:g} bytes per token (num_layers, num_kv_heads, "
                "head_dim, kv_element_bytes)"
            )

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a JSON object of fields. Missing fields keep their defaults. Raise ValueError and OSError."""
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path.name}: not JSON ({error})") from None
        if not isinstance(given, dict):
            raise ValueError(f"{path.name}: not an object")
        if unknown := given.keys() - {setting.name for setting in fields(cls)}:
            raise ValueError(f"{path.name}: unknown fields: {', '.join(sorted(unknown))}")
        try:
            return cls(**given)
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_element_bytes

    @property
    def num_blocks(self) -> int:
        room = self.memory_bytes * self.memory_utilization - self.resident_bytes
        return max(int(room / (self.kv_bytes_per_token * self.block_size)), 0)

    @property
    def block_bytes(self) -> int:
        return int(self.kv_bytes_per_token * self.block_size)

    @property
    def host_cache_blocks(self) -> int:
        return int(self.host_cache_bytes / self.block_bytes)

    def load_seconds(self, num_blocks: int) -> float:
        """Return the seconds to load this many blocks from host memory."""
        return num_blocks * self.block_bytes / self.host_bytes_per_second

    def step_seconds(self, plan: StepPlan) -> float:
        read_tokens = attended_pairs = 0
        for row in plan.rows:
            if row.num_tokens == 1:
                read_tokens += row.end
            else:
                attended_pairs += row.num_tokens * (2 * row.start + row.num_tokens) // 2
        weights = self.parameters * self.parameter_bytes / self.bandwidth_bytes_per_second
        matmul = 2 * self.parameters * plan.num_tokens / self.matmul_flops_per_second
        attention_flops = 4.0 * self.num_layers * self.num_heads * self.head_dim * attended_pairs
        kv_seconds = read_tokens * self.kv_bytes_per_token / self.bandwidth_bytes_per_second
        return (
            self.step_overhead_seconds
            + (max(weights, matmul) + kv_seconds) / self.efficiency
            + attention_flops / self.attention_flops_per_second
        )

    def prefill_seconds(self, tokens: int) -> float:
        """Return the seconds that a prompt of `tokens` tokens takes alone, for comparison."""
        pairs = tokens * tokens / 2
        flops = 4.0 * self.num_layers * self.num_heads * self.head_dim * pairs
        matmul = 2 * self.parameters * tokens / self.matmul_flops_per_second
        return matmul / self.efficiency + flops / self.attention_flops_per_second

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "num_blocks": self.num_blocks}


def _check_field(name: str, kind: object, value: Any) -> None:
    """Raise ValueError unless a value from a file has its field's type. Numbers must be above 0 and at most LARGEST."""
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a string, not {value!r}")
        return
    if value is None and kind == float | None:
        return
    if kind is int and type(value) is not int:
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    if type(value) not in (int, float):
        raise ValueError(f"{name} must be a number, not {value!r}")
    if not 1 / LARGEST <= value <= LARGEST:
        raise ValueError(f"{name} must be above 0 and at most {LARGEST:g}, not {value}")


class RooflineRunner:
    """Runner that computes nothing, and spends the roofline's time of each step in virtual time.

    An output's tokens count up from its request's seed. So the next request of a conversation can contain them without
    reading the output.
    """

    def __init__(self, clock: StepClock, *, profile: HardwareProfile, slowness: float = 1.0) -> None:
        """`slowness` stretches every step."""
        self._slowness = slowness
        self._step_seconds: Callable[[StepPlan], float] = profile.step_seconds
        self._load_seconds: Callable[[int], float] = profile.load_seconds
        self._adapter_seconds = profile.adapter_load_seconds
        self._slots: dict[int, str] = {}
        """Fingerprint of the adapter in each slot."""
        self._clock = clock

    def warm_up(self) -> None:
        """Do nothing: a simulated model compiles nothing."""

    def execute(self, plan: StepPlan) -> StepTokens:
        seconds = self._load_seconds(len(plan.from_host)) if plan.from_host else 0.0
        loads = self._load(plan)
        seconds += sum(loads.values())
        self._clock.spend(seconds + (self._slowness * self._step_seconds(plan) if plan.rows else 0.0))
        tokens = [_next_token(row) if row.samples else NO_TOKEN for row in plan.rows]
        return StepTokens(tokens=tokens, adapter_seconds=loads)

    def _load(self, plan: StepPlan) -> dict[str, float]:
        """Put adapters into their slots, and return the seconds of each that was not there."""
        new = {slot: adapter.fingerprint for slot, adapter in plan.adapters}
        loads = {key: self._adapter_seconds for slot, key in new.items() if self._slots.get(slot) != key}
        self._slots |= new
        return loads


def _next_token(row: ScheduledRow) -> int:
    sequence = row.sequence
    return sequence.sampling.seed + row.end - sequence.prompt_length
