"""Facts of a compiled Triton kernel: what its machine code needs, and whether its loop loads ahead.

Reads the machine code with the programs that triton brings. Owns no kernel: compile_for_cuda.py compiles and prints.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from triton import knobs

# Of one multiprocessor, by compute capability. Each program takes 1 KB of the shared memory for itself.
REGISTERS, REGISTER_UNIT, PROGRAM_SHARED_BYTES = 64 << 10, 256, 1 << 10
SHARED_BYTES = {80: 164 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}
WARPS = {80: 64, 89: 48, 90: 64, 100: 64, 120: 48}

MATRIX = re.compile(r"(?:[A-Z]G?|UTC[A-Z])MMA\b")

COLUMNS = (
    "kernel, data type",
    "shared memory, KB",
    "tiles in flight",
    "bits a load",
    "matrix instruction",
    "registers",
    "spilled bytes",
    "programs",
    "instructions",
    "barriers",
)
HEADS = f"| {' | '.join(COLUMNS)} |"
LINEAR_HEADS = HEADS.replace(COLUMNS[0], "linear, tokens, data type")
"""Heads of the table of compile_linears.py."""
NUM_STEADY_COLUMNS = 5
"""The first columns do not change with the version of triton."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of one kernel. Those of its loop are of the first loop that multiplies matrices, for a warp and a turn."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    programs: int
    """Programs that fit one multiprocessor."""
    tiles_in_flight: int | None
    """Tiles that load while a tile is computed: of keys and values, or of a weight and inputs. None without loads into
    shared memory."""

    load_bits: int
    """The widest load of a thread in the loop, or in a kernel without one."""
    matrix: str
    loop: tuple[str, ...]

    @property
    def loop_spills(self) -> int:
        return self.count(r"(LDL|STL)\b")

    def row(self, name: str) -> str:
        """Return the facts as a row of the table whose heads are `COLUMNS`."""
        cells = (
            name,
            f"{self.shared_bytes / 1024:.1f}",
            "-" if self.tiles_in_flight is None else self.tiles_in_flight,
            self.load_bits,
            self.matrix,
            self.registers,
            self.spilled_bytes,
            self.programs,
            len(self.loop),
            self.count(r"BAR\."),
        )
        return f"| {' | '.join(map(str, cells))} |"

    def count(self, instruction: str) -> int:
        return sum(re.match(instruction, line) is not None for line in self.loop)


def facts_of(kernel: Any) -> Facts:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (_read(option, file.name) for option in ("-res-usage", "-sass"))
    used = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert used is not None, usage
    registers, spilled = int(used[1]), int(used[2])
    capability, warps, shared = (
        kernel.metadata.target.arch,
        kernel.metadata.num_warps,
        kernel.metadata.shared,
    )
    of_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    lines = _instructions(code)
    loop = _matrix_loop(lines)
    matrix = next((line.split()[0] for line in loop if MATRIX.match(line)), "none")
    loads = [
        int(bits)
        for line in loop or [text for _, text in lines]
        for bits in re.findall(r"^(?:LDGSTS|LDG)\.E(?:\.\w+)*?\.(64|128)\b", line)
    ]
    return Facts(
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=shared,
        programs=min(
            REGISTERS // (of_warp * warps),
            SHARED_BYTES[capability] // (shared + PROGRAM_SHARED_BYTES),
            WARPS[capability] // warps,
        ),
        tiles_in_flight=_tiles_in_flight(kernel.asm["ttgir"]),
        load_bits=max(loads, default=32),
        matrix=".".join(matrix.split(".")[:2]),
        loop=loop,
    )


def _read(option: str, path: str) -> str:
    command = [knobs.nvidia.cuobjdump.path, option, path]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def _instructions(code: str) -> list[tuple[int, str]]:
    """Return the addresses and instructions of machine code, without predicates."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@\S+ )?(.*?) ?;", code, re.MULTILINE)
    return [(int(address, 16), text) for address, text in lines]


def _matrix_loop(lines: list[tuple[int, str]]) -> tuple[str, ...]:
    """Return the first loop that multiplies matrices."""
    places = {address: place for place, (address, _) in enumerate(lines)}
    for place, (address, line) in enumerate(lines):
        jump = re.match(r"BRA\b.*(0x[0-9a-f]+)", line)
        if jump and int(jump[1], 16) < address:
            loop = tuple(text for _, text in lines[places[int(jump[1], 16)] : place + 1])
            if any(map(MATRIX.match, loop)):
                return loop
    return ()


def _tiles_in_flight(ttgir: str) -> int | None:
    """Return the tiles whose loads the first loop with a product leaves running while it waits for a tile."""
    heads = [match.start() for match in re.finditer(r"scf\.for ", ttgir)]
    for start, end in pairwise([*heads, len(ttgir)]):
        body = ttgir[start:end].split("scf.yield")[0]
        waits = [int(number) for number in re.findall(r"async_wait .*?num = (\d+)", body)]
        if waits and re.search(r"tt\.dot|warp_group_dot |tc_gen5_mma ", body):
            return max(waits) // body.count("async_commit_group")
    return None
