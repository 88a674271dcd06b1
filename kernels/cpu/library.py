"""The C interface of the CPU kernels: the structs and functions of native/ as Python sees them.

Owns that fields and arguments agree with the C++ sources. The caller checks addresses.
"""

import ctypes
import hashlib
from collections.abc import Callable
from typing import Any, ClassVar

HASH_DIGITS = 12
_Address, _Int = ctypes.c_void_p, ctypes.c_int64


class Attention(ctypes.Structure):
    """`Attention` of native/attention.cpp."""

    _fields_: ClassVar[Any] = [
        *((name, _Address) for name in ("q", "out", "pool", "query_starts", "context_lens", "table")),
        *((name, _Int) for name in ("q_stride", "out_stride")),
        *((name, _Int) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size")),
        *((name, _Int) for name in ("num_rows", "table_stride", "window", "stored")),
        ("scale", ctypes.c_float),
    ]


class Placement(ctypes.Structure):
    """`Placement` of native/rows.cpp."""

    _fields_: ClassVar[Any] = [
        *((name, _Address) for name in ("q", "k", "v", "pool", "cos_sin", "positions", "slots")),
        *((name, _Address) for name in ("q_norm", "k_norm")),
        *((name, _Int) for name in ("q_stride", "k_stride", "v_stride", "num_tokens")),
        *((name, _Int) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "stored")),
        ("norm_is_fp32", _Int),
        ("eps", ctypes.c_float),
    ]


class Norm(ctypes.Structure):
    """`Norm` of native/rows.cpp."""

    _fields_: ClassVar[Any] = [
        *((name, _Address) for name in ("x", "residual", "weight", "out")),
        *((name, _Int) for name in ("x_stride", "residual_stride", "out_stride", "num_rows", "hidden")),
        *((name, _Int) for name in ("weight_is_fp32", "adds_after")),
        ("eps", ctypes.c_float),
    ]


class SiluMul(ctypes.Structure):
    """`SiluMul` of native/lanes.h."""

    _fields_: ClassVar[Any] = [
        *((name, _Address) for name in ("gate_up", "out")),
        *((name, _Int) for name in ("gate_up_stride", "out_stride", "num_rows", "width", "is_gelu")),
    ]


class Scaling(ctypes.Structure):
    """`Scaling` of native/rows.cpp."""

    _fields_: ClassVar[Any] = [
        ("x", _Address),
        *((name, _Int) for name in ("stride", "num_rows", "width")),
        ("factor", ctypes.c_float),
    ]


class Linear(ctypes.Structure):
    """`Linear` of native/lanes.h."""

    _fields_: ClassVar[Any] = [
        *((name, _Address) for name in ("x", "weight", "bias", "out")),
        *((name, _Int) for name in ("x_stride", "out_stride", "num_rows", "num_inputs", "num_outputs")),
    ]


class GroupedLinear(ctypes.Structure):
    """`GroupedLinear` of native/lanes.h."""

    _fields_: ClassVar[Any] = [
        ("linear", Linear),
        ("order", _Address),
        *((name, _Int) for name in ("bits", "depth", "input_bits")),
    ]


class ExpertMatrix(ctypes.Structure):
    """`ExpertMatrix` of native/experts.cpp."""

    _fields_: ClassVar[Any] = [
        *((name, _Address) for name in ("weight", "order")),
        *((name, _Int) for name in ("bytes", "bits", "depth")),
    ]


class Experts(ctypes.Structure):
    """`Experts` of native/experts.cpp."""

    _fields_: ClassVar[Any] = [
        *((name, _Address) for name in ("x", "logits")),
        *((name, ExpertMatrix) for name in ("gate_up", "down")),
        *((name, _Address) for name in ("out", "pairs", "weights")),
        *((name, _Address) for name in ("rows", "gate_up_rows", "inner", "expert_out", "sums")),
        *((name, _Int) for name in ("x_stride", "logits_stride")),
        *((name, _Int) for name in ("num_tokens", "num_experts", "top_k", "hidden", "width", "most_rows")),
        ("normalizes", _Int),
    ]


class GreedyTokens(ctypes.Structure):
    """`GreedyTokens` of native/rows.cpp."""

    _fields_: ClassVar[Any] = [
        *((name, _Address) for name in ("logits", "tokens", "is_finite")),
        *((name, _Int) for name in ("stride", "num_rows", "vocab_size")),
    ]


class Lora(ctypes.Structure):
    """`Lora` of native/lora.cpp."""

    _fields_: ClassVar[Any] = [
        *(
            (name, _Address)
            for name in ("x", "out", "a", "b", "ranks", "starts", "tokens", "items", "between")
        ),
        *((name, _Int) for name in ("x_stride", "out_stride", "num_rows", "num_tokens", "num_items")),
        *((name, _Int) for name in ("num_slots", "num_parts", "max_rank", "num_inputs", "num_outputs")),
    ]


class Nuclei(ctypes.Structure):
    """`Nuclei` of native/nucleus.cpp."""

    _fields_: ClassVar[Any] = [
        *((name, _Address) for name in ("weights", "top_k", "top_p", "pending", "threshold", "members")),
        *((name, _Int) for name in ("stride", "num_rows", "vocab_size")),
    ]


class Gather(ctypes.Structure):
    """`Gather` of native/replay.cpp."""

    _fields_: ClassVar[Any] = [
        *((name, _Address) for name in ("table", "rows", "out")),
        *((name, _Int) for name in ("table_rows", "num_rows", "row_bytes")),
    ]


class Group(ctypes.Structure):
    """`Group` of native/group.cpp: one rank's view of the memory that the ranks of a model share."""

    _fields_: ClassVar[Any] = [
        ("shared", _Address),
        *(
            (name, _Int)
            for name in ("rank", "size", "depth", "piece_bytes", "deadline_ns", "round", "status", "first")
        ),
    ]


class AllReduce(ctypes.Structure):
    """`AllReduce` of native/group.cpp."""

    _fields_: ClassVar[Any] = [("group", ctypes.POINTER(Group)), ("x", _Address), ("count", _Int)]


class Concatenation(ctypes.Structure):
    """`Concatenation` of native/group.cpp."""

    _fields_: ClassVar[Any] = [
        ("group", ctypes.POINTER(Group)),
        *((name, _Address) for name in ("x", "out")),
        *((name, _Int) for name in ("num_rows", "row_bytes")),
    ]


class Broadcast(ctypes.Structure):
    """`Broadcast` of native/group.cpp."""

    _fields_: ClassVar[Any] = [("group", ctypes.POINTER(Group)), ("x", _Address), ("bytes", _Int)]


class Call(ctypes.Structure):
    """`Call` of native/replay.cpp."""

    _fields_: ClassVar[Any] = [("function", _Address), ("is_bf16", _Int), ("work", _Address)]


FUNCTIONS: dict[str, tuple[str, type[ctypes.Structure]]] = {
    "attend": ("by_attend", Attention),
    "place": ("by_place", Placement),
    "normalise": ("by_norm", Norm),
    "silu_mul": ("by_silu_mul", SiluMul),
    "add_lora": ("by_add_lora", Lora),
    "scale": ("by_scale", Scaling),
    "greedy_tokens": ("by_greedy_tokens", GreedyTokens),
    "top_k_top_p_thresholds": ("by_top_k_top_p_thresholds", Nuclei),
    "linear": ("by_linear", Linear),
    "int8_linear": ("by_int8_linear", Linear),
    "grouped_linear": ("by_grouped_linear", GroupedLinear),
    "experts": ("by_experts", Experts),
    "gather": ("by_gather", Gather),
    "all_reduce": ("by_all_reduce", AllReduce),
    "concatenate": ("by_concatenate", Concatenation),
    "broadcast": ("by_broadcast", Broadcast),
}
"""Functions of the library by their names here, with the struct that each works on."""


class CpuLibrary:
    """The functions of a loaded library. Each takes whether the elements are bf16 instead of fp32, the number of
    threads, and its struct."""

    attend: Callable[..., None]
    place: Callable[..., None]
    normalise: Callable[..., None]
    silu_mul: Callable[..., None]
    add_lora: Callable[..., None]
    scale: Callable[..., None]
    greedy_tokens: Callable[..., None]
    top_k_top_p_thresholds: Callable[..., None]
    linear: Callable[..., None]
    int8_linear: Callable[..., None]
    grouped_linear: Callable[..., None]
    experts: Callable[..., None]
    gather: Callable[..., None]
    all_reduce: Callable[..., None]
    concatenate: Callable[..., None]
    broadcast: Callable[..., None]

    def __init__(self, library: ctypes.CDLL) -> None:
        self.loaded = library
        for name, (function, work) in FUNCTIONS.items():
            setattr(self, name, _function(library, function, ctypes.POINTER(work)))
        self.has_int8 = bool(library.by_has_int8())
        self._has_linear = library.by_has_linear
        group = ctypes.POINTER(Group)
        self.group_bytes: Callable[[int, int, int], int] = _plain(
            library, "by_group_bytes", _Int, *[_Int] * 3
        )
        """Bytes of shared memory for a number of ranks, a depth and a piece of so many bytes."""
        self.send: Callable[..., None] = _plain(library, "by_send", None, group, _Address, _Int)
        self.receive: Callable[..., int] = _plain(
            library, "by_receive", _Int, group, ctypes.POINTER(_Address)
        )
        self.enter: Callable[..., None] = _plain(library, "by_enter", None, group, _Int)
        self.fail: Callable[..., None] = _plain(library, "by_fail", None, group)
        self.abort: Callable[..., None] = _plain(library, "by_abort", None, group)

    def has_linear(self, *, is_bf16: bool) -> bool:
        """Return whether `linear` exists and is the fastest on this CPU."""
        return bool(self._has_linear(int(is_bf16)))

    def file_hash(self) -> str:
        """Return a hash of the library's code. Like machines build the same one."""
        with open(self.loaded._name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:HASH_DIGITS]

    def replay(self, threads: int, calls: "ctypes.Array[Call]") -> None:
        """Run recorded calls one after the other."""
        self.loaded.by_replay(ctypes.c_int(threads), calls, ctypes.c_int64(len(calls)))


def _function(library: ctypes.CDLL, name: str, work: Any) -> Callable[..., None]:
    function = library[name]
    function.restype = None
    function.argtypes = [ctypes.c_int, ctypes.c_int, work]
    return function


def _plain(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    function = library[name]
    function.restype, function.argtypes = result, arguments
    return function
