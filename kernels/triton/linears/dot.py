"""The product of two tiles in fp32, for experts and adapters."""

# Triton ships no types, and its kernels' arguments have none that Python knows.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, WIDEN: tl.constexpr):
    """Return acc + a @ b in fp32. WIDEN converts bf16 to fp32 first, because the interpreter would multiply its bit
    patterns."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
