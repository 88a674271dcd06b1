"""A computation of C++ kernels that is recorded while it runs, and called again without Python between its calls.

Owns the memory of what it makes: a call remembers addresses, so nothing that it reads or writes may move or be given
to somebody else. Outputs come from an arena, where memory is used again as soon as the last view of it is gone, which
the calls, repeated in their order, do alike. Only the library's calls are recorded: whatever PyTorch itself would
compute ends the recording, because nobody would compute it again. Must never import triton.
"""

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from blockyard.kernels.cpu.library import FUNCTIONS, Call, CpuLibrary
from torch.utils._python_dispatch import TorchDispatchMode

_EMPTY = torch.ops.aten.empty.memory_format
_NEW_EMPTY = torch.ops.aten.new_empty.default
_EMPTY_LIKE = torch.ops.aten.empty_like.default


class NotRecordable(RuntimeError):
    """Some of it is not the library's to compute."""


class Arena:
    """Memory of recordings of which one at a time is called. Never gives any back."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.num_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Its memory is free again when the last view of it is gone."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        size = 1 << max(6, (num_bytes - 1).bit_length())
        if not self._free[size]:
            self._free[size].append(torch.empty(size, dtype=torch.uint8))
            self.num_bytes += size
        memory = self._free[size].pop()
        lent = memory.numpy()  # PyTorch holds this array for as long as any tensor lies in it
        weakref.finalize(lent, self._free[size].append, memory).atexit = False
        return torch.from_numpy(lent)[:num_bytes].view(dtype).view(*shape)


class RecordingLibrary(CpuLibrary):
    """Runs and notes each call."""

    def __init__(self, library: CpuLibrary) -> None:
        super().__init__(library.loaded)
        self.calls: list[tuple[int, bool, ctypes.Structure]] = []
        for name in FUNCTIONS:
            setattr(self, name, self._noting(getattr(self, name)))

    def _noting(self, function: Callable[..., None]) -> Callable[..., None]:
        address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
        assert address is not None

        def call(is_bf16: bool, threads: int, work: ctypes.Structure) -> None:
            self.calls.append((address, is_bf16, work))
            function(is_bf16, threads, work)

        return call


class Allocations(TorchDispatchMode):
    """What is computed within may allocate, in the arena, and look at tensors another way; nothing else.

    Raises NotRecordable.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch's own switch. Where it is on, the first call imports torch._dynamo: 1.4 s and 190 MB of each worker,
        which compiles nothing by it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype = kwargs.get("dtype")
        if func is _EMPTY:
            return self._arena.empty(args[0], dtype or torch.get_default_dtype())
        if func is _NEW_EMPTY:
            return self._arena.empty(args[1], dtype or args[0].dtype)
        if func is _EMPTY_LIKE:
            return self._arena.empty(args[0].shape, dtype or args[0].dtype)
        # By its schema reshape is a view even where it copies.
        result = func(*args, **kwargs) if func.is_view else None
        results = result if isinstance(result, list | tuple) else [result]
        memory = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        if all(
            isinstance(part, torch.Tensor) and part.untyped_storage().data_ptr() in memory for part in results
        ):
            return result
        raise NotRecordable(f"{func} is PyTorch's")


class RecordedCalls:
    """What a recording was, to be called again; its result is where it was."""

    def __init__(self, library: RecordingLibrary, arena: Arena, result: torch.Tensor) -> None:
        self.result = result
        self._library = library  # with its calls: `_calls` points to their works
        self._arena = arena
        self._calls = (Call * len(library.calls))(
            *(
                Call(function=address, is_bf16=is_bf16, work=ctypes.addressof(work))
                for address, is_bf16, work in library.calls
            )
        )

    def replay(self) -> None:
        self._library.replay(torch.get_num_threads(), self._calls)
